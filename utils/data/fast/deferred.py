"""Samples whose last steps, affine, colours and flips, are deferred to the GPU, which makes them for a whole batch.

The worker writes an image as it is, and its steps as bytes: lookup tables of hue, saturation and value [TABLES], four
flags, each 0 or 1, at RECOLOURED, UPSIDE_DOWN, MIRRORED and AFFINE, and a grid from STEPS on, where affines may be
deferred.

An affine can be deferred if it only scales and shifts, and the visible part of the mosaic has no more than CAPACITY
times the pixels of the output, so that there is room for it: all images that grow, and those that shrink a little. The
bytes have to be those of OpenCV, whose versions round in two ways (`rounding_mode`):

    FIXED     OpenCV 4: positions have FRACTION bits behind the point, sums are whole numbers, halves are rounded up
    FLOATING  OpenCV 5: float32, each of the three interpolations with a single rounding, halves are rounded to even

A grid is int32 [width and height of the visible part; for every column and row of the output the first of the two
pixels of the part that it lies between; for every column and row its distance from that pixel]. A distance counts in
steps of 1 / 2**FRACTION, or is the bits of a float32.
"""

from functools import lru_cache

import cv2
import numpy as np

from utils.data.affine import GREY, Affine
from utils.data.dataset import LoadImagesAndLabels

TABLES = 3 * 256
RECOLOURED, UPSIDE_DOWN, MIRRORED, AFFINE = range(TABLES, TABLES + 4)  # places of the flags
STEPS = TABLES + 4  # bytes without a grid, which begins here
FIXED, FLOATING = "fixed point", "floating point"
FRACTION = 5  # bits of a distance
PRECISION = 10  # bits behind the point of the sums that are rounded to positions
CAPACITY = 2  # so many outputs fit in the place of an image in a batch; its copy to the GPU takes as many times longer
HEADER = 2  # numbers of a grid in front of the positions
OUTSIDE = GREY  # what lies beside the mosaic
LEAST_GAIN = 0.5  # below it four times as many pixels are read as written


def steps_bytes(size, with_affine):
    """Bytes that the steps of an image of `size` x `size` pixels need."""
    return STEPS + (4 * (HEADER + 4 * size) if with_affine else 0)


class DeferredDataset(LoadImagesAndLabels):
    """`dataset`, but the last steps of its samples are written to `steps` [bytes], which `begin` sets for each one."""

    def __init__(self, dataset):
        vars(self).update(vars(dataset))  # the same lists and cache; nothing is read again
        self.steps = None

    def begin(self, steps):
        """The next sample writes to `steps`; without room for a grid, affines are not deferred."""
        self.steps = steps
        steps[TABLES:STEPS] = 0

    def warped(self, mosaic, affine):
        """A DeferredAffine."""
        return DeferredAffine(mosaic, affine)

    def recolour(self, img, colours, now):
        """`img`; its colours are changed only if objects are pasted in next, which have colours of their own."""
        if now:
            return super().recolour(np.asarray(img), colours, now)
        self.steps[:TABLES] = colours.tables().ravel()
        self.steps[RECOLOURED] = 1
        return img

    def flip(self, img, axis):
        self.steps[MIRRORED if axis else UPSIDE_DOWN] = 1
        return img

    def pixels(self, img):
        """The image [h x w x 3: BGR] itself, or the visible part of a mosaic.

        Where affines may be deferred, it is the upper part of [CAPACITY * h x w x 3].
        """
        height, width, _ = img.shape
        has_grid = len(self.steps) > STEPS
        place = self.new_image((CAPACITY * height if has_grid else height, width, 3), np.uint8)
        if not isinstance(img, DeferredAffine):
            place[:height] = img
        elif has_grid and img.write(place, self.steps[STEPS:].view(np.int32)):
            self.steps[AFFINE] = 1
        else:
            img.image(out=place[:height])
        return place


class DeferredAffine:
    """The image [h x w x 3] that `affine` will make of `mosaic`; NumPy makes the image when it reads this."""

    def __init__(self, mosaic, affine):
        self.mosaic, self.affine = mosaic, affine
        self.shape = affine.height, affine.width, 3

    def image(self, out=None):
        """The image [h x w x 3: BGR], in `out` if given."""
        return self.affine.image(self.mosaic.painted(self.affine.source_area()), out)

    def __array__(self, dtype=None, copy=None):
        return self.image()

    def write(self, place, grid, mode=None):
        """Paint the visible part into `place` [any x w x 3], with a `grid`; False if it cannot be deferred."""
        mode = mode or rounding_mode(self.affine.width)
        found = mode and visible_part(self.affine, *self.mosaic.shape[:2], place.size // 3, mode)
        if not found:
            return False
        (x1, y1, x2, y2), (columns, from_columns), (rows, from_rows) = found
        part = place.reshape(-1)[: 3 * (x2 - x1) * (y2 - y1)].reshape(y2 - y1, x2 - x1, 3)
        self.mosaic.paint(part, x1, y1)
        grid[:HEADER] = x2 - x1, y2 - y1
        parts = columns - x1, rows - y1, from_columns.view(np.int32), from_rows.view(np.int32)
        np.concatenate(parts, out=grid[HEADER:])
        return True


def visible_part(affine, height, width, capacity, mode):
    """What `affine` reads of a `height` x `width` source: (x1, y1, x2, y2), and columns and rows as a grid has them.

    None if it does not only scale and shift, reads nothing, or reads more than `capacity` pixels.
    """
    if not affine.is_axis_aligned or min(affine.matrix[0, 0], affine.matrix[1, 1]) < LEAST_GAIN:
        return None
    positions = _fixed_positions if mode == FIXED else _floating_positions
    columns, rows = positions(cv2.invertAffineTransform(affine.matrix[:2]), affine.width, affine.height)
    x1, x2 = max(int(columns[0][0]), 0), min(int(columns[0][-1]) + 2, width)
    y1, y2 = max(int(rows[0][0]), 0), min(int(rows[0][-1]) + 2, height)
    if x1 >= x2 or y1 >= y2 or (x2 - x1) * (y2 - y1) > capacity:
        return None
    return (x1, y1, x2, y2), columns, rows


def _fixed_positions(inverse, width, height):
    """Pixel and distance [n] of columns and of rows, int32, as OpenCV 4 rounds."""
    scale, half = 1 << PRECISION, 1 << (PRECISION - FRACTION - 1)
    columns = np.rint(inverse[0, 0] * np.arange(width) * scale) + np.rint(inverse[0, 2] * scale)
    rows = np.rint((inverse[1, 1] * np.arange(height) + inverse[1, 2]) * scale)
    whole = ((numbers.astype(np.int32) + half) >> (PRECISION - FRACTION) for numbers in (columns, rows))
    return [(numbers >> FRACTION, numbers & ((1 << FRACTION) - 1)) for numbers in whole]


def _floating_positions(inverse, width, height):
    """Pixel, int32, and distance, float32, [n] of columns and of rows, as OpenCV 5 rounds: columns once, rows twice."""
    inverse = inverse.astype(np.float32)
    columns = np.arange(width) * inverse[0, 0].astype(float) + inverse[0, 2].astype(float)
    rows = np.arange(height, dtype=np.float32) * inverse[1, 1] + inverse[1, 2]
    firsts = [(numbers, np.floor(numbers)) for numbers in (columns.astype(np.float32), rows)]
    return [(first.astype(np.int32), numbers - first) for numbers, first in firsts]


def warp_with_grid(part, grid, mode):
    """The output [h x w x 3] of the visible part of a mosaic in `part` [CAPACITY * h x w x 3], on the host."""
    height, width = part.shape[0] // CAPACITY, part.shape[1]
    part_width, part_height = grid[:HEADER].tolist()
    columns, rows, from_columns, from_rows = np.split(grid[HEADER:], np.cumsum([width, height, width]))
    framed = np.full((part_height + 2, part_width + 2, 3), OUTSIDE, np.int32 if mode == FIXED else np.float32)
    framed[1:-1, 1:-1] = part.reshape(-1)[: 3 * part_height * part_width].reshape(part_height, part_width, 3)
    if mode == FIXED:
        mix, to_integers = _fixed_mix, lambda mixed: (mixed + (1 << 2 * FRACTION - 1)) >> 2 * FRACTION
    else:
        mix, to_integers = _floating_mix, np.rint
        from_columns, from_rows = from_columns.view(np.float32), from_rows.view(np.float32)
    mixed = mix(*_neighbours(framed.swapaxes(0, 1), columns), from_columns[:, None, None]).swapaxes(0, 1)
    mixed = mix(*_neighbours(mixed, rows), from_rows[:, None, None])
    return to_integers(mixed).astype(np.uint8, order="C")


def _neighbours(lines, first):
    """The lines at `first` [n], and the next ones, of `lines` with a frame; outside they are those of the frame."""
    return (lines[np.clip(k, 0, len(lines) - 1)] for k in (first + 1, first + 2))


def _fixed_mix(one, other, distance):
    return one * ((1 << FRACTION) - distance) + other * distance


def _floating_mix(one, other, distance):
    return ((other - one).astype(float) * distance + one).astype(np.float32)


@lru_cache(maxsize=64)
def rounding_mode(width):
    """How this OpenCV rounds outputs of `width` pixels, tried on a few rows: FIXED, FLOATING, or None: otherwise."""
    rows = 32
    place, grid = np.empty((CAPACITY * rows, width, 3), np.uint8), np.empty(HEADER + 2 * (width + rows), np.int32)
    for mode in (FIXED, FLOATING):
        rng = np.random.default_rng(0)
        affines = [synthetic_affine(rng, width, rows, gain) for gain in (0.8, 0.93, 1.02, 1.27, 1.93)]
        if all(a.write(place, grid, mode) and np.array_equal(warp_with_grid(place, grid, mode), a) for a in affines):
            return mode
    return None


def synthetic_affine(rng, width, rows, gain):
    """A DeferredAffine [rows x width x 3] of noise, enlarged by `gain`."""
    noise = rng.integers(0, 256, (3 * rows, 2 * width, 3)).astype(np.uint8)
    shift = rng.uniform(0.3, 0.7) * width - gain * width, rng.uniform(-20, 5)
    matrix = np.array([[gain, 0, shift[0]], [0, gain, shift[1]], [0, 0, 1]])
    return DeferredAffine(SyntheticMosaic(noise), Affine(matrix, gain, width, rows, False))


class SyntheticMosaic:
    """An image [h x w x 3] in the role of a mosaic."""

    def __init__(self, img):
        self.img, self.shape = img, img.shape

    def paint(self, part, left, top):
        part[...] = self.img[top : top + part.shape[0], left : left + part.shape[1]]

    def painted(self, visible_area):
        return self.img
