"""Operations on all pixels of an image: the same bytes as the plain formula, in less time."""

from functools import lru_cache

import cv2
import numpy as np

LEVELS = np.arange(256.0)  # values of a pixel


@lru_cache(maxsize=16)
def reused(purpose, *shape):
    """A uint8 array to be overwritten; fresh memory costs more than most of what is written into it."""
    return np.empty(shape, np.uint8)


def apply_tables(img, tables, gains=None):
    """Look up hue, saturation and value of `img` [h x w x 3: BGR] in `tables` [3 x 256], in place.

    `gains` are the factors that the tables come from, if they are known: multiplying takes half the time of looking up.
    """
    hsv, planes = reused("hsv", *img.shape), reused("hsv planes", 3, *img.shape[:2])
    cv2.cvtColor(img, cv2.COLOR_BGR2HSV, dst=hsv)
    cv2.split(hsv, planes)
    cv2.LUT(planes[0], tables[0], dst=planes[0])
    for k in (1, 2):
        if gains is None or not _scaled_truncated(planes[k], gains[k], tables[k]):
            cv2.LUT(planes[k], tables[k], dst=planes[k])
    cv2.cvtColor(cv2.merge(planes, hsv), cv2.COLOR_HSV2BGR, dst=img)


def _scaled_truncated(plane, gain, table):
    """Multiply `plane` [h x w, uint8] by `gain`, in place, if that does what `table` [256] says; whether it does."""
    arithmetic = {"alpha": gain, "beta": -0.4999}  # rounds to nearest, so this cuts off unless a fraction is tiny
    if not np.array_equal(cv2.convertScaleAbs(np.arange(256, dtype=np.uint8), **arithmetic).ravel(), table):
        return False
    cv2.convertScaleAbs(plane, dst=plane, **arithmetic)
    return True


def blended(img1, img2, ratio):
    """`ratio` of `img1` and the rest of `img2`, both uint8 of equal shape; stock behaviour: truncated."""
    table = (LEVELS[:, None] * ratio + LEVELS * (1 - ratio)).astype(np.uint8)
    pairs = _all_pairs()
    # two offsets: with room to spare, so that no other order of the same sums matters
    if all(np.array_equal(_weighted(*pairs, ratio, offset), table) for offset in (0.5e-4, 1.5e-4)):
        return _weighted(img1, img2, ratio, 1e-4)
    pairs = (img1.astype(np.uint16) << 8) + img2  # positions in the flattened table
    return table.take(pairs)


@lru_cache(maxsize=1)
def _all_pairs():
    """Every pair of levels [2 x 256 x 256, uint8]."""
    return np.indices((256, 256)).astype(np.uint8)


def _weighted(img1, img2, ratio, offset):
    """The weighted sum plus `offset`, cut off; with most ratios the same as `blended`, in a tenth of the time."""
    return cv2.addWeighted(img1, ratio, img2, 1 - ratio, offset - 0.5)
