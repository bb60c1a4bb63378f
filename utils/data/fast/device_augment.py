"""The deferred steps of a whole batch (deferred.py): on the GPU where the images are wanted, or on the host.

Both give the bytes that the data set itself would make in the worker, for rows of a length that `agrees_with_table`.
The conversion to HSV is integer arithmetic; the one back is looked up in a table that OpenCV itself has filled.
"""

import logging
from functools import lru_cache
from threading import Lock, Thread
from typing import NamedTuple

import cv2
import numpy as np
import torch

from utils.data.fast.deferred import (
    AFFINE,
    CAPACITY,
    MIRRORED,
    RECOLOURED,
    STEPS,
    TABLES,
    UPSIDE_DOWN,
    rounding_mode,
    steps_bytes,
    synthetic_affine,
    warp_with_grid,
)
from utils.data.pixel_ops import apply_tables
from utils.system.compilers import why_no_kernels

logger = logging.getLogger(__name__)

HUES = 180
_ASKING = Lock()


class DeferredBatch(NamedTuple):
    """Images with deferred steps: pixels uint8 [b x rows x w x 3: BGR], steps uint8 [b x bytes].

    There are h rows, or CAPACITY times as many where affines may be deferred.
    """

    pixels: torch.Tensor
    steps: torch.Tensor

    def __len__(self):
        return len(self.pixels)

    @property
    def image_shape(self):
        """(b, h, w, 3)."""
        batch, rows, width, channels = self.pixels.shape
        return batch, rows // CAPACITY if self.steps.shape[1] > STEPS else rows, width, channels

    def on_device(self, room):
        """`augmented` on the device where `room(number, shape)` gives the buffer of that number, a uint8 tensor."""
        there = DeferredBatch(*(room(k, part.shape).copy_(part, non_blocking=True) for k, part in enumerate(self)))
        return there.augmented(out=room(2, there.image_shape))

    def augmented(self, out=None):
        """The images [b x 3 x h x w: RGB] in channels-last order, on the device where the pixels are.

        They are written to `out` [b x h x w x 3], if given. On a GPU the work is queued on the current stream.
        """
        out = self.pixels.new_empty(self.image_shape) if out is None else out
        if self.pixels.is_cuda:
            from utils.data.fast.device_augment_triton import augment

            tables = conversion_tables(self.pixels.device)
            augment(self.pixels, self.steps, tables, rounding_mode(out.shape[2]), out)
        else:
            for image, steps, place in zip(self.pixels.numpy(), self.steps.numpy(), out.numpy(), strict=True):
                _augment(image, steps, place)
        return out.permute(0, 3, 1, 2)


def _augment(image, steps, place):
    """One image, on the host."""
    if steps[AFFINE]:
        img = warp_with_grid(image, steps[STEPS:].view(np.int32), rounding_mode(image.shape[1]))
    else:
        img = image[: len(place)].copy()
    if steps[RECOLOURED]:
        apply_tables(img, steps[:TABLES].reshape(3, 256))
    for is_wanted, axis in ((steps[UPSIDE_DOWN], 0), (steps[MIRRORED], 1)):
        if is_wanted:
            img = cv2.flip(img, axis)
    cv2.cvtColor(img, cv2.COLOR_BGR2RGB, dst=place)


def agrees_with_table(width):
    """Whether OpenCV converts rows of `width` pixels as the table (`colours_of_hsv`) does.

    It takes several pixels at a time, and rounds differently where a few are left at the end of a row; the rows of the
    table have none left, as those of one repeated colour here.
    """
    hsv = np.random.default_rng(0).integers(0, 256, (64, width, 3)).astype(np.uint8)
    hsv[..., 0] %= HUES
    repeated = cv2.cvtColor(np.repeat(hsv.reshape(-1, 1, 3), 64, 1), cv2.COLOR_HSV2RGB)
    return np.array_equal(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB).reshape(-1, 3), repeated[:, 0])


def ask_ahead(size, device):
    """Let a thread call `gpu_agrees` for `size` pixels before its answer is needed: it has to compile kernels."""

    def ask():
        if torch.cuda.is_available():
            torch.cuda.set_device(device)  # a new thread uses the first GPU
        if agrees_with_table(size):
            gpu_agrees(size, rounding_mode(size) is not None)

    # No daemon: Python ends such threads wherever they are, which inside a library of C++ aborts the process.
    Thread(target=ask, name="asking the GPU").start()


def gpu_agrees(size, with_affine):
    """Whether the GPU, if there is one, augments synthetic images of `size` x `size` pixels as the host does."""
    with _ASKING:
        return _gpu_agrees(size, with_affine)


@lru_cache(maxsize=8)
def _gpu_agrees(size, with_affine):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if why_no_kernels(device):
        return True
    host = synthetic_batch(size, with_affine)
    try:
        on_gpu = DeferredBatch(*(part.to(device) for part in host)).augmented()
        if torch.equal(on_gpu.cpu(), host.augmented()):
            return True
        reason = "it makes other pixels than the host"
    except Exception as error:  # compilers and drivers raise anything; the host can do the work
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    steps = "warp, colours and flips" if with_affine else "colours and flips"
    logger.warning("%s of a batch stay with the loader's workers; on this GPU, %s", steps, reason)
    return False


def synthetic_batch(size, with_affine):
    """A DeferredBatch of noise: four images with every step that may be deferred."""
    rng, count = np.random.default_rng(0), 4
    pixels = rng.integers(0, 256, (count, CAPACITY * size if with_affine else size, size, 3)).astype(np.uint8)
    steps = np.zeros((count, steps_bytes(size, with_affine)), np.uint8)
    for number, (image, row) in enumerate(zip(pixels, steps, strict=True)):
        row[:TABLES] = rng.integers(0, 256, TABLES)
        row[:256] %= HUES
        row[[RECOLOURED, UPSIDE_DOWN, MIRRORED]] = number < 3, number & 1, number >> 1
        if with_affine and number:
            affine = synthetic_affine(rng, size, size, (0.9, 1.1, 1.7)[number - 1])
            row[AFFINE] = affine.write(image, row[STEPS:].view(np.int32))
    return DeferredBatch(torch.from_numpy(pixels), torch.from_numpy(steps))


class ConversionTables(NamedTuple):
    """What the GPU looks up, int32: the divisions of the way to HSV [2 x 256], and RGB of every HSV [HUES * 65536].

    `has_formula`: the latter can be computed instead, with the same bytes.
    """

    divisions: torch.Tensor
    colours: torch.Tensor
    has_formula: bool


@lru_cache(maxsize=2)
def conversion_tables(device):
    """The ConversionTables on `device`; 47 MB."""
    from utils.data.fast.device_augment_triton import has_formula

    of_division, of_colour = (torch.from_numpy(table).to(device) for table in (divisions(), colours_of_hsv()))
    return ConversionTables(of_division, of_colour, has_formula(of_colour))


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
