"""The last steps of a training sample: warp, colours, flips, and pixels into the order that a network reads.

The data set makes them in the worker that made the sample, as stock YOLOv7 does it. `Later` leaves them to the GPU, for
a whole batch: the worker writes the picture as it is and a recipe of what is left to do.

Both give the same bytes, for rows of a length that `agrees_with_table`. The way to HSV is integer arithmetic; the way
back is looked up in a table that OpenCV itself has filled. The picture of a sample that gets objects pasted in needs
its colours before that, so it has them at once; when the warp can wait is said in deferred.py.
"""

import logging
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import cv2
import numpy as np
import torch

from utils.data.fast.deferred import ROOM, Unwarped, made_up_warp, warp_with_grid, way_of_warping, whole
from utils.data.fast.recipe import MIRRORED, RECIPE, RECOLOURED, TABLES, UNWARPED, UPSIDE_DOWN, recipe_bytes
from utils.data.pixel_ops import apply_tables

logger = logging.getLogger(__name__)

HUES = 180


class Later:
    """Writes the steps down in `recipe` [bytes], which has to be set for each sample.

    Where it has no more than RECIPE bytes, the worker warps.
    """

    recipe = None
    new_image = staticmethod(np.empty)

    def begin(self, recipe):
        self.recipe = recipe
        recipe[TABLES:RECIPE] = 0

    def warped(self, mosaic, warp):
        """An Unwarped."""
        return Unwarped(mosaic, warp)

    def recolour(self, img, colours, now):
        if now:
            img = whole(img)
            colours.apply(img)
        else:
            self.recipe[:TABLES] = colours.tables().ravel()
            self.recipe[RECOLOURED] = 1
        return img

    def flip(self, img, axis):
        self.recipe[MIRRORED if axis else UPSIDE_DOWN] = 1
        return img

    def pixels(self, img):
        """The picture [h x w x 3: BGR] itself, or the part of a mosaic that the GPU has to warp.

        Where there is a choice, the picture is the upper part of [ROOM * h x w x 3].
        """
        height, width, _ = img.shape
        may_wait = len(self.recipe) > RECIPE
        place = self.new_image((ROOM * height if may_wait else height, width, 3), np.uint8)
        if not isinstance(img, Unwarped):
            place[:height] = img
        elif may_wait and img.write(place, self.recipe[RECIPE:].view(np.int32)):
            self.recipe[UNWARPED] = 1
        else:
            img.whole(out=place[:height])
        return place


class Unfinished(NamedTuple):
    """A batch of pictures with what is left to do: pixels uint8 [b x rows x w x 3: BGR], recipes uint8 [b x bytes].

    There are h rows, or ROOM times as many where recipes tell of warps.
    """

    pixels: torch.Tensor
    recipes: torch.Tensor

    def __len__(self):
        return len(self.pixels)

    @property
    def image_shape(self):
        """(b, h, w, 3)."""
        batch, rows, width, channels = self.pixels.shape
        return batch, rows // ROOM if self.recipes.shape[1] > RECIPE else rows, width, channels

    def finished(self, out=None):
        """The images [b x 3 x h x w: RGB] in channels-last order, on the device where the pixels are.

        `out` [b x h x w x 3] takes their bytes. On a GPU the work is queued on the current stream.
        """
        out = self.pixels.new_empty(self.image_shape) if out is None else out
        if self.pixels.is_cuda:
            from utils.data.fast.device_augment_triton import finish

            tables = conversion_tables(self.pixels.device)
            finish(self.pixels, self.recipes, tables, way_of_warping(out.shape[2]), out)
        else:
            for picture, recipe, place in zip(self.pixels.numpy(), self.recipes.numpy(), out.numpy(), strict=True):
                _finish(picture, recipe, place)
        return out.permute(0, 3, 1, 2)


def _finish(picture, recipe, place):
    """One picture, on the host."""
    if recipe[UNWARPED]:
        img = warp_with_grid(picture, recipe[RECIPE:].view(np.int32), way_of_warping(picture.shape[1]))
    else:
        img = picture[: len(place)].copy()
    if recipe[RECOLOURED]:
        apply_tables(img, recipe[:TABLES].reshape(3, 256))
    for is_wanted, axis in ((recipe[UPSIDE_DOWN], 0), (recipe[MIRRORED], 1)):
        if is_wanted:
            img = cv2.flip(img, axis)
    cv2.cvtColor(img, cv2.COLOR_BGR2RGB, dst=place)


def has_triton(device):
    """Whether `device` is a GPU and Triton, which makes our kernels, is there."""
    return device.type == "cuda" and find_spec("triton") is not None


def agrees_with_table(width):
    """Whether OpenCV converts rows of `width` pixels as the table (`colours_of_hsv`) does.

    It takes several pixels at a time, and rounds differently where a few are left at the end of a row; the rows of the
    table have none left, as those of one repeated colour here.
    """
    hsv = np.random.default_rng(0).integers(0, 256, (64, width, 3)).astype(np.uint8)
    hsv[..., 0] %= HUES
    repeated = cv2.cvtColor(np.repeat(hsv.reshape(-1, 1, 3), 64, 1), cv2.COLOR_HSV2RGB)
    return np.array_equal(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB).reshape(-1, 3), repeated[:, 0])


@lru_cache(maxsize=8)
def gpu_agrees(size, warp_later):
    """Whether the GPU, if there is one, finishes made-up pictures of `size` x `size` pixels as the host does."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not has_triton(device):
        return True
    host = made_up_batch(size, warp_later)
    try:
        there = Unfinished(*(part.to(device) for part in host)).finished()
        if torch.equal(there.cpu(), host.finished()):
            return True
        reason = "it makes other pixels than the host"
    except Exception as error:  # whatever a compiler or driver has to say: the host can do it
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    steps = "warp, colours and flips" if warp_later else "colours and flips"
    logger.warning("%s of a batch stay with the loader's workers; on this GPU, %s", steps, reason)
    return False


def made_up_batch(size, warp_later):
    """Unfinished noise: four pictures with every step that may be left."""
    rng, count = np.random.default_rng(0), 4
    pixels = rng.integers(0, 256, (count, ROOM * size if warp_later else size, size, 3)).astype(np.uint8)
    recipes = np.zeros((count, recipe_bytes(size, warp_later)), np.uint8)
    for number, (picture, recipe) in enumerate(zip(pixels, recipes, strict=True)):
        recipe[:TABLES] = rng.integers(0, 256, TABLES)
        recipe[:256] %= HUES
        recipe[[RECOLOURED, UPSIDE_DOWN, MIRRORED]] = number < 3, number & 1, number >> 1
        if warp_later and number:
            made_up = made_up_warp(rng, size, size, (0.9, 1.1, 1.7)[number - 1])
            recipe[UNWARPED] = made_up.write(picture, recipe[RECIPE:].view(np.int32))
    return Unfinished(torch.from_numpy(pixels), torch.from_numpy(recipes))


class ConversionTables(NamedTuple):
    """What the GPU looks up, int32: the divisions of the way to HSV [2 x 256], and RGB of every HSV [HUES * 65536]."""

    divisions: torch.Tensor
    colours: torch.Tensor


@lru_cache(maxsize=2)
def conversion_tables(device):
    """The ConversionTables on `device`; 47 MB."""
    return ConversionTables(*(torch.from_numpy(table).to(device) for table in (divisions(), colours_of_hsv())))


def divisions():
    """OpenCV's fixed-point divisions (12 bits): saturation per difference at each maximum, hue per difference."""
    numbers = np.arange(1, 256)
    table = np.zeros((2, 256), np.int32)
    table[:, 1:] = np.rint((255 << 12) / numbers), np.rint((HUES << 12) / (6.0 * numbers))
    return table


@lru_cache(maxsize=1)
def colours_of_hsv():
    """red + 256 * green + 65536 * blue of every (hue, saturation, value) in a row, as OpenCV converts them."""
    axes = np.meshgrid(*(np.arange(n, dtype=np.uint8) for n in (HUES, 256, 256)), indexing="ij", copy=False)
    rgb = cv2.cvtColor(np.stack(axes, -1).reshape(HUES * 256, 256, 3), cv2.COLOR_HSV2RGB)
    packed = cv2.cvtColor(rgb, cv2.COLOR_RGB2RGBA).view("<i4").ravel()
    return np.bitwise_and(packed, 0xFFFFFF, out=packed)
