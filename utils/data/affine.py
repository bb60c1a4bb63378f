"""The geometric transform of a training image and its labels: rotate, scale, shear, shift, perspective.

Images are uint8 [h x w x 3] BGR, labels float32 [n x 5: class, x1, y1, x2, y2] in pixels, segments one polygon [m x 2]
in pixels a label, empty [0 x 2] for a label that is only a box. All draws are from Python's global generator.
"""

import math
import random
from dataclasses import dataclass
from functools import cached_property

import cv2
import numpy as np

from utils.data.pixel_ops import reused
from utils.ops.boxes import resample_segments
from utils.ops.polygons import MAX_VERTICES, Polygons, outline_boxes

GREY = 114  # what lies outside the image


@dataclass(frozen=True)
class Affine:
    """A drawn transform: `matrix` [3 x 3] takes source pixels to pixels of the `width` x `height` output.

    `scale` is what it enlarges by. With `has_perspective` it is a homography, otherwise affine.
    """

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
        """(scale x, scale y) and (shift x, shift y) of a transform that does nothing else."""
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
        """The output image [h x w x 3] of `img` [h x w x 3, or 4 with a last one to ignore], in `out` if given.

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
        """Box (x1, y1, x2, y2) outside of which no source pixel is read; infinite if the horizon is in the image."""
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

    def rows(self, xy, edges=None):
        """`points` with x and y as rows [2 x k], on whichever `edges`."""
        if self.is_axis_aligned:
            scaling, shift = self._scaling_and_shift
            return xy * scaling[:, None] + shift[:, None]
        return self.points(xy.T).T

    def boxes(self, boxes_xyxy):
        """Boxes around the moved corners of `boxes_xyxy` [n x 4], clipped to the output [n x 4, float64]."""
        columns = [0, 1, 2, 3] if self.is_axis_aligned else [0, 1, 2, 3, 0, 3, 2, 1]
        corners = self.points(boxes_xyxy[:, columns].reshape(-1, 2)).reshape(-1, len(columns) // 2, 2)
        moved = np.concatenate((corners.min(1), corners.max(1)), axis=1)
        return moved.clip(0, (self.width, self.height) * 2, out=moved)

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


class DrawnAffine(Affine):
    """An Affine whose matrix is made when it is first used, or before, with those of others, by `make_matrices`.

    `numbers` are the draws: (tilt x, tilt y, angle in degrees, gain, slant x, slant y, shift x, shift y). `source` is
    (height, width) of the source image, whose middle goes to the shift.
    """

    def __init__(self, numbers, source, width, height, has_perspective):
        vars(self).update(
            numbers=numbers, source=source, scale=numbers[3], width=width, height=height,
            has_perspective=has_perspective,
        )  # fmt: skip

    @cached_property
    def matrix(self):
        return _matrices([self])[0]


def make_matrices(affines):
    """Make the matrices of all DrawnAffines among `affines` at once, which takes less time than one by one."""
    drawn = [affine for affine in affines if "matrix" not in vars(affine)]
    for affine, matrix in zip(drawn, _matrices(drawn) if drawn else (), strict=True):
        vars(affine)["matrix"] = matrix


def _matrices(affines):
    """The matrices [n x 3 x 3] of DrawnAffines."""
    tilt_x, tilt_y, angles, gains, slant_x, slant_y, shift_x, shift_y = zip(*[a.numbers for a in affines], strict=True)
    height, width = np.array([a.source for a in affines]).T
    steps = np.zeros((5, len(affines), 3, 3))
    steps[:] = np.eye(3)
    to_origin, tilt, rotation, slant, to_place = steps
    to_origin[:, 0, 2], to_origin[:, 1, 2] = -width / 2, -height / 2
    tilt[:, 2, 0], tilt[:, 2, 1] = tilt_x, tilt_y
    rotation[:, :2] = [cv2.getRotationMatrix2D((0, 0), *turn) for turn in zip(angles, gains, strict=True)]
    slant[:, 0, 1], slant[:, 1, 0] = slant_x, slant_y
    to_place[:, 0, 2], to_place[:, 1, 2] = shift_x, shift_y
    return to_place @ slant @ rotation @ tilt @ to_origin


def draw_affine(height, width, degrees=10, translate=0.1, scale=0.1, shear=10, perspective=0.0, border=(0, 0)):
    """Draw (8 x uniform) an Affine for a `height` x `width` image; `border` is added to each side of the output."""
    uniform, out_height, out_width = random.uniform, height + 2 * border[0], width + 2 * border[1]
    numbers = (
        uniform(-perspective, perspective),
        uniform(-perspective, perspective),
        uniform(-degrees, degrees),
        uniform(1 - scale, 1.1 + scale),  # stock behaviour: 1.1, so images grow on average
        math.tan(uniform(-shear, shear) * math.pi / 180),
        math.tan(uniform(-shear, shear) * math.pi / 180),
        uniform(0.5 - translate, 0.5 + translate) * out_width,
        uniform(0.5 - translate, 0.5 + translate) * out_height,
    )
    return DrawnAffine(numbers, (height, width), out_width, out_height, has_perspective=bool(perspective))


def warp_labels(labels, segments, affine):
    """The labels [n x 5] that are still worth learning after `affine`, with their new boxes.

    A label with a polygon gets the box of its visible outline and may shrink to 1 % of its area; a mere box is moved
    by its corners and must keep 10 %. `segments` is empty or has one entry for each label.
    """
    if len(labels) == 0:
        return labels
    assert len(segments) in (0, len(labels)), "one segment for each label"
    polygons = Polygons.of(segments)
    # stock behaviour: polygons whose every coordinate is zero count as boxes
    if not polygons.points.any():
        boxes, least_share = affine.boxes(labels[:, 1:5]), 0.10
    else:
        boxes = affine.polygon_boxes(polygons)
        is_box = polygons.counts == 0
        if is_box.any():
            boxes[is_box] = affine.boxes(labels[is_box, 1:5])
        least_share = np.where(is_box, 0.10, 0.01)
    keep = box_candidates(labels[:, 1:5].T * affine.scale, boxes.T, area_thr=least_share)
    kept = labels[keep]
    kept[:, 1:5] = boxes[keep]
    return kept


def random_perspective(
    img, targets=(), segments=(), degrees=10, translate=0.1, scale=0.1, shear=10, perspective=0.0, border=(0, 0)
):
    """Draw an Affine and apply it to the image, `targets` [n x 5] and `segments`; returns (image, targets)."""
    affine = draw_affine(*img.shape[:2], degrees, translate, scale, shear, perspective, border)
    return affine.image(img), warp_labels(targets, segments, affine)


def box_candidates(box1, box2, wh_thr=2, ar_thr=20, area_thr=0.1, eps=1e-16):
    """Whether boxes [4 x n: x1, y1, x2, y2] may become `box2` [4 x n]: not tiny, too thin or mostly gone; [n] bool."""
    width1, height1 = box1[2] - box1[0], box1[3] - box1[1]
    width2, height2 = box2[2] - box2[0], box2[3] - box2[1]
    big_enough = (width2 > wh_thr) & (height2 > wh_thr)
    kept_share = width2 * height2 / (width1 * height1 + eps)
    elongation = np.maximum(width2 / (height2 + eps), height2 / (width2 + eps))
    return big_enough & (kept_share > area_thr) & (elongation < ar_thr)
