"""The warp of a mosaic, made where its colours are: on the GPU, from the part of the mosaic that is seen.

It can wait if it only scales and shifts and the part seen has no more than ROOM times the pixels of the output, so that
it has room where the output would be: all pictures that grow, and those that shrink a little. OpenCV 4 interpolates in
fixed point: a position has FRACTION bits behind the point, so the bytes can be made anywhere. OpenCV 5 computes in
floating point and is told apart by `warps_in_fixed_point`; there the workers warp.

A grid tells what is read: int32 [width and height of the part, x of each column, y of each row of the output], the
positions in the part, as fixed-point numbers.
"""

from functools import lru_cache

import cv2
import numpy as np

from utils.augment import GREY, Warp

FRACTION = 5  # bits of a position in front of which is the pixel, and of which the weights are made
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

    def write(self, place, grid):
        """Paint the part that is seen into `place` [any x w x 3] and describe it in `grid`; False if it cannot wait."""
        found = seen_part(self.warp, *self.mosaic.shape[:2], room=place.size // 3)
        if found is None:
            return False
        (x1, y1, x2, y2), x, y = found
        part = place.reshape(-1)[: 3 * (x2 - x1) * (y2 - y1)].reshape(y2 - y1, x2 - x1, 3)
        self.mosaic.paint(part, x1, y1)
        grid[:HEADER] = x2 - x1, y2 - y1
        np.subtract(x, x1 << FRACTION, out=grid[HEADER : HEADER + len(x)])
        np.subtract(y, y1 << FRACTION, out=grid[HEADER + len(x) : HEADER + len(x) + len(y)])
        return True


def whole(img):
    """`img` as pixels [h x w x 3], whether it is warped already or not."""
    return img.whole() if isinstance(img, Unwarped) else img


def grid_bytes(size):
    """Bytes of the grid for an output of `size` x `size` pixels."""
    return 4 * (HEADER + 2 * size)


def seen_part(warp, height, width, room):
    """What `warp` reads of a `height` x `width` source: (box (x1, y1, x2, y2), x of columns, y of rows), or None.

    None if it does not only scale and shift, sees nothing, or sees more than `room` pixels.
    """
    if not warp.is_axis_aligned or min(warp.matrix[0, 0], warp.matrix[1, 1]) < LEAST_GAIN:
        return None
    x, y = _positions(cv2.invertAffineTransform(warp.matrix[:2]), warp.width, warp.height)
    x1, x2 = max(int(x[0]) >> FRACTION, 0), min((int(x[-1]) >> FRACTION) + 2, width)
    y1, y2 = max(int(y[0]) >> FRACTION, 0), min((int(y[-1]) >> FRACTION) + 2, height)
    if x1 >= x2 or y1 >= y2 or (x2 - x1) * (y2 - y1) > room:
        return None
    return (x1, y1, x2, y2), x, y


def _positions(inverse, width, height):
    """Where columns [width] and rows [height] of the output lie in the source, with FRACTION bits, as OpenCV rounds."""
    scale, half = 1 << PRECISION, 1 << (PRECISION - FRACTION - 1)
    columns = np.rint(inverse[0, 0] * np.arange(width) * scale) + np.rint(inverse[0, 2] * scale)
    rows = np.rint((inverse[1, 1] * np.arange(height) + inverse[1, 2]) * scale)
    return ((numbers.astype(np.int32) + half) >> (PRECISION - FRACTION) for numbers in (columns, rows))


def warp_with_grid(picture, grid):
    """The output [h x w x 3] of the part of a mosaic that lies in `picture` [ROOM * h x w x 3], on the host."""
    height, width = picture.shape[0] // ROOM, picture.shape[1]
    part_width, part_height = grid[:HEADER].tolist()
    x, y = grid[HEADER : HEADER + width], grid[HEADER + width : HEADER + width + height]
    framed = np.full((part_height + 2, part_width + 2, 3), OUTSIDE, np.int32)
    framed[1:-1, 1:-1] = picture.reshape(-1)[: 3 * part_height * part_width].reshape(part_height, part_width, 3)
    mixed = _mixed(_mixed(framed, y, part_height).swapaxes(0, 1), x, part_width).swapaxes(0, 1)
    return ((mixed + (1 << 2 * FRACTION - 1)) >> 2 * FRACTION).astype(np.uint8, order="C")


def _mixed(lines, positions, length):
    """Weighted sums of two neighbours of `lines` [length + 2, with a frame] at each of `positions` [n]."""
    first = (positions >> FRACTION) + 1
    share = (positions & ((1 << FRACTION) - 1))[:, None, None]
    one, other = (lines[np.clip(k, 0, length + 1)] for k in (first, first + 1))
    return one * ((1 << FRACTION) - share) + other * share


@lru_cache(maxsize=4)
def warps_in_fixed_point(width):
    """Whether OpenCV makes outputs of `width` pixels as `warp_with_grid` does; a few rows of some are compared."""
    rng, rows = np.random.default_rng(0), 32
    place, grid = np.empty((ROOM * rows, width, 3), np.uint8), np.empty(HEADER + width + rows, np.int32)
    for gain in (0.8, 0.93, 1.02, 1.27, 1.93):
        made_up = made_up_warp(rng, width, rows, gain)
        if not made_up.write(place, grid) or not np.array_equal(warp_with_grid(place, grid), made_up.whole()):
            return False
    return True


def made_up_warp(rng, width, rows, gain):
    """An Unwarped picture [rows x width x 3] of noise, enlarged by `gain`."""
    canvas = rng.integers(0, 256, (3 * rows, 2 * width, 3)).astype(np.uint8)
    shift = rng.uniform(0.3, 0.7) * width - gain * width, rng.uniform(-20, 5)
    matrix = np.array([[gain, 0, shift[0]], [0, gain, shift[1]], [0, 0, 1]])
    return Unwarped(_Canvas(canvas), Warp(matrix, gain, width, rows, False))


class _Canvas:
    """A picture in the role of a mosaic."""

    def __init__(self, img):
        self.img, self.shape = img, img.shape

    def paint(self, part, left, top):
        part[...] = self.img[top : top + part.shape[0], left : left + part.shape[1]]

    def painted(self, visible_area):
        return self.img
