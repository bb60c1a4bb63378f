"""Augmentations of one training picture and its labels: letterbox, warp, colours, copy-paste, mixup.

Pictures are uint8 [H x W x 3] BGR. Labels are float32 [n x 5: class, x1, y1, x2, y2] in pixels. Segments are one
polygon [m x 2] in pixels for each label; a label that is only a box has an empty one [0 x 2].

Every function that draws uses Python's global generator, except the colour gains and the mixup ratio, which come
from NumPy's. Which calls are made in which order is part of the contract: equal seeds give stock YOLOv7's batches.
"""

import math
import random
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import cv2
import numpy as np

from utils.ops.boxes import bbox_ioa, resample_segments
from utils.ops.polygons import MAX_VERTICES, Polygons, outline_boxes

GREY = 114  # what lies outside the picture
MAX_OVERLAP = 0.30  # share of a label that something pasted may cover
LEVELS = np.arange(256.0)  # values of a pixel


@lru_cache(maxsize=16)
def reused(purpose, *shape):
    """A uint8 array to be overwritten; fresh memory costs more than most of what is written into it."""
    return np.empty(shape, np.uint8)


def letterbox(img, new_shape=(640, 640), color=(GREY, GREY, GREY), auto=True, scaleFill=False, scaleup=True, stride=32):
    """Resize `img` into `new_shape` (side or (height, width)) keeping its aspect ratio, and fill up with borders.

    `auto` pads only to the next multiple of `stride`, `scaleFill` stretches instead, without `scaleup` a small picture
    keeps its size. Returns (picture, (ratio x, ratio y), (pad x, pad y)), where the pads are one side's, perhaps x.5.
    """
    height, width = img.shape[:2]
    target_height, target_width = (new_shape, new_shape) if isinstance(new_shape, int) else new_shape

    gain = min(target_height / height, target_width / width)
    if not scaleup:
        gain = min(gain, 1.0)
    ratio = gain, gain
    inner_width, inner_height = max(round(width * gain), 1), max(round(height * gain), 1)
    pad_x, pad_y = target_width - inner_width, target_height - inner_height
    if auto:
        pad_x, pad_y = pad_x % stride, pad_y % stride
    elif scaleFill:
        pad_x, pad_y = 0.0, 0.0
        inner_width, inner_height = target_width, target_height
        ratio = target_width / width, target_height / height
    pad_x, pad_y = pad_x / 2, pad_y / 2

    if (inner_height, inner_width) != (height, width):
        img = cv2.resize(img, (int(inner_width), int(inner_height)), interpolation=cv2.INTER_LINEAR)
    top, bottom = round(pad_y - 0.1), round(pad_y + 0.1)
    left, right = round(pad_x - 0.1), round(pad_x + 0.1)
    img = cv2.copyMakeBorder(img, top, bottom, left, right, cv2.BORDER_CONSTANT, value=color)
    return img, ratio, (pad_x, pad_y)


@dataclass(frozen=True)
class Warp:
    """A drawn geometric transform: `matrix` [3 x 3] takes source pixels to pixels of the `width` x `height` output."""

    matrix: np.ndarray
    scale: float
    width: int
    height: int
    has_perspective: bool

    @cached_property
    def is_axis_aligned(self):
        """Whether it only scales and shifts, as the shipped hyper-parameters have it."""
        return not self.has_perspective and self.matrix[0, 1] == self.matrix[1, 0] == 0

    @cached_property
    def _scaling_and_shift(self):
        """(scale x, scale y) and (shift x, shift y) of a warp that does nothing else."""
        return self.matrix.diagonal()[:2].copy(), self.matrix[:2, 2].copy()

    def points(self, points):
        """Source points [k x 2] in pixels of the output [k x 2, float64]."""
        if self.is_axis_aligned:  # the same sums without the terms that are zero
            scaling, shift = self._scaling_and_shift
            return points * scaling + shift
        homogeneous = np.ones((len(points), 3))
        homogeneous[:, :2] = points
        moved = homogeneous @ self.matrix.T
        return moved[:, :2] / moved[:, 2:] if self.has_perspective else moved[:, :2]

    def image(self, img, out=None):
        """The output picture [h x w x 3] of `img` [h x w x 3, or 4 with a last one to ignore], in `out` if given.

        It is `img` itself, of three channels, if nothing would change.
        """
        size, border = (self.width, self.height), (GREY, GREY, GREY, GREY)
        if img.shape[2] == 3:
            if img.shape[:2] == (self.height, self.width) and (self.matrix == np.eye(3)).all():
                return img
            img = cv2.cvtColor(img, cv2.COLOR_BGR2BGRA)  # OpenCV warps four channels in less time than three
        warped = reused("warped", self.height, self.width, 4)
        if self.has_perspective:
            cv2.warpPerspective(img, self.matrix, dsize=size, dst=warped, borderValue=border)
        else:
            cv2.warpAffine(img, self.matrix[:2], dsize=size, dst=warped, borderValue=border)
        return cv2.cvtColor(warped, cv2.COLOR_BGRA2BGR, dst=out)

    def source_area(self):
        """Box (x1, y1, x2, y2) outside of which no source pixel is read; infinite if the horizon is in the picture."""
        margin = 2  # interpolation reads the neighbours
        if not self.has_perspective:
            bounds = [
                (shift + min(0, per_x * self.width) + min(0, per_y * self.height) - margin,
                 shift + max(0, per_x * self.width) + max(0, per_y * self.height) + margin)
                for per_x, per_y, shift in cv2.invertAffineTransform(self.matrix[:2]).tolist()
            ]  # fmt: skip
            (x1, x2), (y1, y2) = bounds
            return x1, y1, x2, y2
        corners = [[0, self.width, 0, self.width], [0, 0, self.height, self.height], [1, 1, 1, 1]]
        x, y, depth = np.linalg.inv(self.matrix) @ corners
        if (depth <= 0).any():
            return -math.inf, -math.inf, math.inf, math.inf
        x, y = x / depth, y / depth
        return x.min() - margin, y.min() - margin, x.max() + margin, y.max() + margin

    def may_show(self, boxes_xyxy):
        """False for boxes [n x 4] in the source of which nothing can be in the output [n]."""
        x1, y1, x2, y2 = self.source_area()
        left, top, right, bottom = boxes_xyxy.T
        return (left <= x2) & (top <= y2) & (right >= x1) & (bottom >= y1)

    def rows(self, xy):
        """`points` with x and y as rows [2 x k]."""
        if self.is_axis_aligned:
            scaling, shift = self._scaling_and_shift
            return xy * scaling[:, None] + shift[:, None]
        return self.points(xy.T).T

    def boxes(self, boxes_xyxy):
        """Boxes around the moved corners of `boxes_xyxy` [n x 4], clipped to the output [n x 4, float64]."""
        columns = [0, 1, 2, 3] if self.is_axis_aligned else [0, 1, 2, 3, 0, 3, 2, 1]
        corners = self.points(boxes_xyxy[:, columns].reshape(-1, 2)).reshape(-1, len(columns) // 2, 2)
        moved = np.concatenate((corners.min(1), corners.max(1)), axis=1)
        return np.minimum(np.maximum(moved, 0, out=moved), (self.width, self.height) * 2, out=moved)

    def polygon_boxes(self, polygons):
        """Boxes around the parts of `polygons` (list of [m x 2]) inside the output; zeros for none [n x 4, float64]."""
        polygons = Polygons.of(polygons)
        boxes = np.zeros((len(polygons), 4))
        rows = np.flatnonzero(polygons.counts)
        if len(rows):
            found = self._boxes_of(polygons if len(rows) == len(polygons) else polygons.chosen(polygons.counts > 0))
            seen = found[2] > 0  # stock behaviour: an outline that shows only at x = 0 does not count
            boxes[rows[seen]] = found.T[seen]
        return boxes

    def _boxes_of(self, polygons):
        """Boxes of outlines [4 x n], infinite ones for those outside."""
        if not self.has_perspective and polygons.counts.max() <= MAX_VERTICES:
            return outline_boxes(polygons, self.rows, self.width, self.height)
        x, y = self.points(resample_segments(polygons).reshape(-1, 2)).T.reshape(2, len(polygons), -1)
        inside = (x >= 0) & (y >= 0) & (x <= self.width) & (y <= self.height)
        low = [np.where(inside, values, np.inf).min(1) for values in (x, y)]
        high = [np.where(inside, values, -np.inf).max(1) for values in (x, y)]
        return np.stack((*low, *high))


def draw_warp(height, width, degrees=10, translate=0.1, scale=0.1, shear=10, perspective=0.0, border=(0, 0)):
    """Draw (8 x uniform) a Warp for a `height` x `width` picture; `border` is added to each side of the output."""
    out_height, out_width = height + 2 * border[0], width + 2 * border[1]

    to_origin = np.array([[1, 0, -width / 2], [0, 1, -height / 2], [0, 0, 1]])

    tilt_x, tilt_y = (random.uniform(-perspective, perspective) for _ in range(2))
    tilt = np.array([[1, 0, 0], [0, 1, 0], [tilt_x, tilt_y, 1]])

    angle = random.uniform(-degrees, degrees)
    gain = random.uniform(1 - scale, 1.1 + scale)  # stock behaviour: 1.1, so pictures grow on average
    rotation = np.eye(3)
    rotation[:2] = cv2.getRotationMatrix2D(center=(0, 0), angle=angle, scale=gain)

    slant_x, slant_y = (math.tan(random.uniform(-shear, shear) * math.pi / 180) for _ in range(2))
    slant = np.array([[1, slant_x, 0], [slant_y, 1, 0], [0, 0, 1]])

    place_x, place_y = (random.uniform(0.5 - translate, 0.5 + translate) * side for side in (out_width, out_height))
    to_place = np.array([[1, 0, place_x], [0, 1, place_y], [0, 0, 1]])

    matrix = to_place @ slant @ rotation @ tilt @ to_origin
    return Warp(matrix, gain, out_width, out_height, has_perspective=bool(perspective))


def warp_labels(labels, segments, warp):
    """The labels [n x 5] that are still worth learning after `warp`, with their new boxes.

    A label with a polygon gets the box of its visible outline and may shrink to 1 % of its area; a mere box is moved
    by its corners and must keep 10 %. `segments` is empty or has one entry for each label.
    """
    if len(labels) == 0:
        return labels
    assert len(segments) in (0, len(labels)), "one segment for each label"
    polygons = Polygons.of(segments)
    # stock behaviour: polygons whose every coordinate is zero count as boxes
    if not polygons.points.any():
        boxes, least_share = warp.boxes(labels[:, 1:5]), 0.10
    else:
        boxes = warp.polygon_boxes(polygons)
        is_box = polygons.counts == 0
        if is_box.any():
            boxes[is_box] = warp.boxes(labels[is_box, 1:5])
        least_share = np.where(is_box, 0.10, 0.01)
    keep = box_candidates(labels[:, 1:5].T * warp.scale, boxes.T, area_thr=least_share)
    kept = labels[keep]
    kept[:, 1:5] = boxes[keep]
    return kept


def random_perspective(
    img, targets=(), segments=(), degrees=10, translate=0.1, scale=0.1, shear=10, perspective=0.0, border=(0, 0)
):
    """Draw a warp and apply it to picture, `targets` [n x 5] and `segments`; returns (picture, targets)."""
    warp = draw_warp(*img.shape[:2], degrees, translate, scale, shear, perspective, border)
    return warp.image(img), warp_labels(targets, segments, warp)


def box_candidates(box1, box2, wh_thr=2, ar_thr=20, area_thr=0.1, eps=1e-16):
    """Whether boxes [4 x n: x1, y1, x2, y2] may become `box2` [4 x n]: not tiny, too thin or mostly gone; [n] bool."""
    width1, height1 = box1[2] - box1[0], box1[3] - box1[1]
    width2, height2 = box2[2] - box2[0], box2[3] - box2[1]
    big_enough = (width2 > wh_thr) & (height2 > wh_thr)
    kept_share = width2 * height2 / (width1 * height1 + eps)
    elongation = np.maximum(width2 / (height2 + eps), height2 / (width2 + eps))
    return big_enough & (kept_share > area_thr) & (elongation < ar_thr)


class Colours(NamedTuple):
    """Factors for hue, saturation and value."""

    hue: float
    saturation: float
    value: float

    def tables(self):
        """The new hue, saturation and value for each old one [3 x 256 uint8]."""
        scaled = LEVELS * np.array(self)[:, None]
        np.remainder(scaled[0], 180, out=scaled[0])
        return np.minimum(np.maximum(scaled, 0, out=scaled), 255, out=scaled).astype(np.uint8)

    def apply(self, img):
        """Change `img` [h x w x 3: BGR], in place.

        stock behaviour: the (lossy) way to HSV and back is taken even if all gains are 0.
        """
        apply_tables(img, self.tables(), self)


def draw_colours(hgain, sgain, vgain):
    """Colours with factors from 1 - gain to 1 + gain."""
    return Colours(*(np.random.uniform(-1, 1, 3) * [hgain, sgain, vgain] + 1))


def augment_hsv(img, hgain=0.5, sgain=0.5, vgain=0.5):
    """Scale hue, saturation and value of `img`, in place, by factors drawn from 1 - gain to 1 + gain."""
    draw_colours(hgain, sgain, vgain).apply(img)


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


def mixup(img1, labels1, img2, labels2):
    """Blend two pictures of equal size by a ratio drawn from Beta(8, 8); the labels of both are kept."""
    return blended(img1, img2, np.random.beta(8.0, 8.0)), np.concatenate((labels1, labels2))


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


def copy_paste(img, labels, segments, probability):
    """Paste mirror images of some objects at the mirrored place, where they hide little; `img` is changed in place.

    Returns (picture, labels, segments) with the new objects at the end. Draws one sample() among the polygons, and
    nothing if there are none or `probability` is 0. Source: Ghiasi et al. 2020 (arXiv 2012.07177), simplified.
    """
    polygon_rows = [row for row, points in enumerate(segments) if len(points)] if probability else []
    if not polygon_rows:
        return img, labels, segments
    width = img.shape[1]
    segments = list(segments)
    chosen = []
    for j in random.sample(range(len(polygon_rows)), k=round(probability * len(polygon_rows))):
        row = polygon_rows[j]
        category, x1, y1, x2, y2 = labels[row]
        mirrored = np.array([category, width - x2, y1, width - x1, y2], labels.dtype)
        if (bbox_ioa(mirrored[1:], labels[:, 1:5]) < MAX_OVERLAP).all():
            labels = np.concatenate((labels, mirrored[None]))
            points = segments[row]
            segments.append(np.stack((width - points[:, 0], points[:, 1]), axis=1))
            chosen.append(points.astype(np.int32))
    if chosen:
        objects = np.zeros_like(img)
        for outline in chosen:
            cv2.drawContours(objects, [outline], -1, (255, 255, 255), cv2.FILLED)
        objects = cv2.flip(objects & img, 1)
        np.copyto(img, objects, where=objects > 0)  # stock behaviour: channel values of 0 are not copied
    return img, labels, segments
