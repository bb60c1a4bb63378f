"""The warp of a mosaic, made where its colours are: on the GPU, from the part of the mosaic that is seen.

It can wait if it only scales and shifts and the part seen has no more than ROOM times the pixels of the output, so that
it has room where the output would be: all pictures that grow, and those that shrink a little. The bytes have to be
those of OpenCV, and its versions have two ways of making them, which `way_of_warping` tells apart:

    FIXED     OpenCV 4: positions have FRACTION bits behind the point, sums are whole numbers, halves are rounded up
    FLOATING  OpenCV 5: float32, each of the three interpolations with a single rounding, halves are rounded to even

A grid tells what is read: int32 [width and height of the part; for every column and row of the output the first of the
two pixels of the part that it lies between; for every column and row its distance from that pixel]. A distance counts
in steps of 1 / 2**FRACTION, or is the bits of a float32.
"""

from functools import lru_cache

import cv2
import numpy as np

from utils.data.affine import GREY, Affine

FIXED, FLOATING = "fixed point", "floating point"
FRACTION = 5  # bits of a distance
PRECISION = 10  # bits behind the point of the sums that are rounded to positions
ROOM = 2  # a place in a batch is for so many times the pixels of an output; copies to the GPU take so much longer
HEADER = 2  # numbers of a grid in front of the positions
OUTSIDE = GREY  # what lies beside the mosaic
LEAST_GAIN = 0.5  # below it four times as many pixels are read as written


class Unwarped:
    """A picture [h x w x 3] that `warp` will make of `mosaic`."""

    def __init__(self, mosaic, warp):
        self.mosaic, self.warp = mosaic, warp
        self.shape = warp.height, warp.width, 3

    def whole(self, out=None):
        """The picture [h x w x 3: BGR], in `out` if given."""
        return self.warp.image(self.mosaic.painted(self.warp.source_area()), out)

    def __array__(self, dtype=None, copy=None):
        return self.whole()

    def write(self, place, grid, way=None):
        """Paint the part that is seen into `place` [any x w x 3] and describe it in `grid`; False if it cannot wait."""
        way = way or way_of_warping(self.warp.width)
        found = way and seen_part(self.warp, *self.mosaic.shape[:2], place.size // 3, way)
        if not found:
            return False
        (x1, y1, x2, y2), (columns, from_columns), (rows, from_rows) = found
        part = place.reshape(-1)[: 3 * (x2 - x1) * (y2 - y1)].reshape(y2 - y1, x2 - x1, 3)
        self.mosaic.paint(part, x1, y1)
        grid[:HEADER] = x2 - x1, y2 - y1
        parts = columns - x1, rows - y1, from_columns.view(np.int32), from_rows.view(np.int32)
        np.concatenate(parts, out=grid[HEADER:])
        return True


def whole(img):
    """`img` as pixels [h x w x 3], whether it is warped already or not."""
    return img.whole() if isinstance(img, Unwarped) else img


def grid_bytes(size):
    """Bytes of the grid for an output of `size` x `size` pixels."""
    return 4 * (HEADER + 4 * size)


def seen_part(warp, height, width, room, way):
    """What `warp` reads of a `height` x `width` source: box (x1, y1, x2, y2), and columns and rows as a grid has them.

    None if it does not only scale and shift, sees nothing, or sees more than `room` pixels.
    """
    if not warp.is_axis_aligned or min(warp.matrix[0, 0], warp.matrix[1, 1]) < LEAST_GAIN:
        return None
    positions = _fixed_positions if way == FIXED else _floating_positions
    columns, rows = positions(cv2.invertAffineTransform(warp.matrix[:2]), warp.width, warp.height)
    x1, x2 = max(int(columns[0][0]), 0), min(int(columns[0][-1]) + 2, width)
    y1, y2 = max(int(rows[0][0]), 0), min(int(rows[0][-1]) + 2, height)
    if x1 >= x2 or y1 >= y2 or (x2 - x1) * (y2 - y1) > room:
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


def warp_with_grid(picture, grid, way):
    """The output [h x w x 3] of the part of a mosaic that lies in `picture` [ROOM * h x w x 3], on the host."""
    height, width = picture.shape[0] // ROOM, picture.shape[1]
    part_width, part_height = grid[:HEADER].tolist()
    columns, rows, from_columns, from_rows = np.split(grid[HEADER:], np.cumsum([width, height, width]))
    framed = np.full((part_height + 2, part_width + 2, 3), OUTSIDE, np.int32 if way == FIXED else np.float32)
    framed[1:-1, 1:-1] = picture.reshape(-1)[: 3 * part_height * part_width].reshape(part_height, part_width, 3)
    if way == FIXED:
        mix, finish = _fixed_mix, lambda mixed: (mixed + (1 << 2 * FRACTION - 1)) >> 2 * FRACTION
    else:
        mix, finish = _floating_mix, np.rint
        from_columns, from_rows = from_columns.view(np.float32), from_rows.view(np.float32)
    mixed = mix(*_neighbours(framed.swapaxes(0, 1), columns), from_columns[:, None, None]).swapaxes(0, 1)
    mixed = mix(*_neighbours(mixed, rows), from_rows[:, None, None])
    return finish(mixed).astype(np.uint8, order="C")


def _neighbours(lines, first):
    """Of `lines`, with a frame, those at `first` [n] and behind, beside the frame its own ones."""
    return (lines[np.clip(k, 0, len(lines) - 1)] for k in (first + 1, first + 2))


def _fixed_mix(one, other, distance):
    return one * ((1 << FRACTION) - distance) + other * distance


def _floating_mix(one, other, distance):
    return ((other - one).astype(float) * distance + one).astype(np.float32)


@lru_cache(maxsize=4)
def way_of_warping(width):
    """How OpenCV makes outputs of `width` pixels: FIXED, FLOATING, or None of them; a few rows of some are compared."""
    rows = 32
    place, grid = np.empty((ROOM * rows, width, 3), np.uint8), np.empty(HEADER + 2 * (width + rows), np.int32)
    for way in (FIXED, FLOATING):
        rng = np.random.default_rng(0)
        warps = [made_up_warp(rng, width, rows, gain) for gain in (0.8, 0.93, 1.02, 1.27, 1.93)]
        if all(
            w.write(place, grid, way) and np.array_equal(warp_with_grid(place, grid, way), w.whole()) for w in warps
        ):
            return way
    return None


def made_up_warp(rng, width, rows, gain):
    """An Unwarped picture [rows x width x 3] of noise, enlarged by `gain`."""
    canvas = rng.integers(0, 256, (3 * rows, 2 * width, 3)).astype(np.uint8)
    shift = rng.uniform(0.3, 0.7) * width - gain * width, rng.uniform(-20, 5)
    matrix = np.array([[gain, 0, shift[0]], [0, gain, shift[1]], [0, 0, 1]])
    return Unwarped(Canvas(canvas), Affine(matrix, gain, width, rows, False))


class Canvas:
    """A picture [h x w x 3] in the role of a mosaic."""

    def __init__(self, img):
        self.img, self.shape = img, img.shape

    def paint(self, part, left, top):
        part[...] = self.img[top : top + part.shape[0], left : left + part.shape[1]]

    def painted(self, visible_area):
        return self.img
