"""The targets of many drawn samples at once: for each what the reference computes, in a few calls for all of them.

The steps are those of `load_mosaic`, `warp_labels` and `LoadImagesAndLabels.__getitem__`. Each number comes from the
same operations in the same precision, so the targets are equal to the bit. Transforms here only scale and shift.

Coordinates are rows of the arrays here, labels and points are columns: NumPy is quickest along long rows.
"""

from itertools import chain, compress

import numpy as np

from utils.data.affine import box_candidates, make_matrices
from utils.data.mosaic import NO_POLYGON
from utils.ops.boxes import xyxy2xywh
from utils.ops.polygons import MAX_VERTICES, Polygons, outline_boxes

LEAST_SIDE = 1  # pixels: boxes of which less shows are dropped at once; `box_candidates` would drop them later


def targets_of(samples, first=0):
    """The targets [n x 6: number, class, x, y, w, h normalised] of DrawnSamples with labels, numbered from `first`."""
    labels = [sample.labels for sample in samples]
    counts = list(map(len, labels))
    targets = np.empty((sum(counts), 6), np.float32)
    targets[:, 0] = np.arange(first, first + len(samples)).repeat(counts)
    np.concatenate(labels, out=targets[:, 1:])
    targets[:, 2:] = xyxy2xywh(targets[:, 2:])
    targets[:, 2:] /= np.array([sample.image.shape[1::-1] * 2 for sample in samples], np.float32).repeat(counts, 0)
    for axis, column in enumerate((3, 2)):
        rows = np.array([sample.flips[axis] for sample in samples]).repeat(counts)
        targets[rows, column] = 1 - targets[rows, column]
    return targets


def warped_labels(layers):
    """For each of `layers` [(Mosaic, Affine)] the labels [n x 5: class, x1, y1, x2, y2] that `load_mosaic` makes."""
    if not layers:
        return []
    canvases, affines = zip(*layers, strict=True)
    tiles, width, height = ManyTiles(canvases), affines[0].width, affines[0].height
    make_matrices(affines)
    matrices = np.array([affine.matrix for affine in affines])
    scaling, shift = matrices[:, [0, 1], [0, 1]].T, matrices[:, :2, 2].T

    boxes, layer = tiles.boxes(), tiles.layer
    moved = boxes.reshape(2, 2, -1) * scaling.take(layer, 1) + shift.take(layer, 1)
    moved = np.concatenate((moved.min(0), moved.max(0)))
    moved.clip(0, [[width], [height]] * 2, out=moved)
    near = (moved[2:] - moved[:2] > LEAST_SIDE).all(0)  # the others would be dropped in the end
    boxes, moved, layer = boxes.compress(near, 1), moved.compress(near, 1), layer.compress(near)

    polygons = tiles.segments(near)
    has_outline = polygons.counts > 0
    if has_outline.any():
        polygons = Polygons(polygons.points, polygons.counts[has_outline])
        moved[:, has_outline] = outlines(polygons, layer[has_outline], affines, scaling, shift)
    gains = np.array([affine.scale for affine in affines], np.float32).take(layer)
    keep = box_candidates(boxes * gains, moved, area_thr=np.where(has_outline, 0.01, 0.10))
    kept = tiles.labels.compress(near, 0).compress(keep, 0)
    kept[:, 1:] = moved.compress(keep, 1).T
    ends = layer[keep].searchsorted(range(len(layers) + 1)).tolist()
    return [kept[start:end] for start, end in zip(ends, ends[1:], strict=False)]


class ManyTiles:
    """The tiles of all `canvases`, one after the other, with their labels."""

    def __init__(self, canvases):
        dataset, self.side = canvases[0].dataset, canvases[0].side
        layer, (images, *places) = tile_numbers(canvases)
        images = images.tolist()
        rows = [dataset.labels[image] for image in images]
        counts = list(map(len, rows))
        self.labels = np.concatenate(rows)
        self.images, self.all_segments = list(zip(images, counts, strict=True)), dataset.segments
        self.tile = np.arange(len(rows)).repeat(counts)  # of each label
        self.places = np.array(places, np.float32).repeat(counts, 1)  # x, y, width, height of a label's tile
        self.layer = layer.repeat(counts)
        self.windows = np.array([canvas.window or (0, 0) for canvas in canvases], float).T.take(self.layer, 1)

    def boxes(self):
        """Corners [4 x n: x1, y1, x2, y2] of the labels in pixels, clipped to their canvases."""
        rows, shift, size = self.labels.T, self.places[:2], self.places[2:]
        centre, half = rows[1:3], rows[3:] / 2
        boxes = np.concatenate((size * (centre - half) + shift, size * (centre + half) + shift))
        boxes.reshape(2, 2, -1)[:] -= self.windows.astype(np.float32)
        return boxes.clip(0, self.side, out=boxes)

    def segments(self, chosen):
        """The Polygons of the labels where `chosen` [n] is true, in pixels, clipped to their canvases."""
        is_near = np.zeros(len(self.images), bool)  # the other tiles stay unread
        is_near[self.tile.compress(chosen)] = True
        near = [(self.all_segments[k], number) for k, number in compress(self.images, is_near.tolist())]
        points = np.concatenate([NO_POLYGON, *(polygons.points for polygons, _ in near)])
        counts = [polygons.counts if polygons.counts.size else np.zeros(number, np.int64) for polygons, number in near]
        counts = np.concatenate([np.zeros(0, np.int64), *counts])
        inside = chosen.compress(is_near.take(self.tile))
        points, counts = points.compress(inside.repeat(counts), 0), counts.compress(inside)
        shift, size = self.places.compress(chosen, 1).repeat(counts, 1).reshape(2, 2, -1)
        points = points.T * size
        points += shift
        points = points - self.windows.compress(chosen, 1).repeat(counts, 1)  # in float64 from here on
        return Polygons(points.clip(0, self.side, out=points).T, counts)


def tile_numbers(canvases):
    """The number of its canvas for each tile of `canvases` [n], and image, x, y, width and height [5 x n]."""
    tiles = np.fromiter(chain.from_iterable(chain.from_iterable(canvas.tiles for canvas in canvases)), np.int64)
    counts = [len(canvas.tiles) for canvas in canvases]
    return np.arange(len(canvases)).repeat(counts), tiles.reshape(-1, 5).T


def outlines(polygons, layer, affines, scaling, shift):
    """Boxes [4 x n] round what `affines` show of `polygons`, none of them empty; `layer` [n] is the number of each.

    `scaling` and `shift` [2 x layers] are those of the affines. Zeros for an outline that is not seen.
    """
    counts = polygons.counts
    if counts.max() > MAX_VERTICES:  # there are few: one by one
        boxes, short = np.empty((4, len(counts))), counts <= MAX_VERTICES
        if short.any():
            boxes[:, short] = outlines(polygons.chosen(short), layer[short], affines, scaling, shift)
        for k in np.flatnonzero(~short).tolist():
            boxes[:, k] = affines[layer[k]].polygon_boxes([polygons[k]])
        return boxes
    gain, step = (rows.take(layer, 1).repeat(counts, 1) for rows in (scaling, shift))

    def move(xy, edges):
        xy *= gain if edges is None else gain.take(edges, 1)
        xy += step if edges is None else step.take(edges, 1)
        return xy

    boxes = outline_boxes(polygons, move, affines[0].width, affines[0].height)
    boxes[:, ~(boxes[2] > 0)] = 0  # stock behaviour: an outline that shows only at x = 0 does not count
    return boxes
