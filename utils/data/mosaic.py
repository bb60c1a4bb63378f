"""Mosaics of images at the training size.

A mosaic is drawn first and painted later: `Mosaic` knows from the sizes alone where each image lies, and reads only
those of which something shows. Draws never depend on pixels, so this changes no random stream.
"""

import random
from functools import cached_property
from typing import NamedTuple

import cv2
import numpy as np

from utils.data.affine import GREY, draw_affine, warp_labels
from utils.data.paste import copy_paste, sample_segments
from utils.data.pixel_ops import reused
from utils.data.training_size import load_scanned, resized_shape
from utils.ops.polygons import Polygons

NO_POLYGON = np.zeros((0, 2), np.float32)


class Tile(NamedTuple):
    """Image number `image` of the data set, `width` x `height`, with its top left corner at (x, y), perhaps outside."""

    image: int
    x: int
    y: int
    width: int
    height: int


class Mosaic:
    """A square canvas of twice the training size with images on it, painted when it is sliced like an image."""

    def __init__(self, dataset, tiles, window=None):
        """`window` (x, y): where the canvas begins in the coordinates of the `tiles`; None is (0, 0)."""
        self.dataset = dataset
        self.tiles = tiles
        self.window = window
        self.side = 2 * dataset.img_size
        self.shape = self.side, self.side, 3

    @cached_property
    def places(self):
        """What each label is scaled by and shifted by [2 x n x 2: width, height; x, y of its tile, float32]."""
        places = [[(tile.width, tile.height) for tile in self.tiles], [(tile.x, tile.y) for tile in self.tiles]]
        return np.array(places, np.float32).repeat([len(self.dataset.labels[tile.image]) for tile in self.tiles], 1)

    def labels(self):
        """Labels of all images [n x 5: class, x1, y1, x2, y2] in pixels, clipped to the canvas."""
        labels = np.concatenate([self.dataset.labels[tile.image] for tile in self.tiles])
        centre, half, (size, shift) = labels[:, 1:3], labels[:, 3:] / 2, self.places
        high = size * (centre + half) + shift
        labels[:, 1:3], labels[:, 3:] = size * (centre - half) + shift, high
        boxes = labels[:, 1:]
        if self.window is not None:
            boxes -= np.array(self.window * 2, np.float32)
        boxes.clip(0, self.side, out=boxes)
        return labels

    def segments(self, chosen=None):
        """The polygon [m x 2] of each label in pixels, clipped to the canvas, as Polygons; none for mere boxes.

        Only those of the labels where `chosen` [n] is true, or of all.
        """
        parts = [self.polygons(tile) for tile in self.tiles]
        points, counts = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        places = self.places
        if chosen is not None:
            points, counts, places = points[chosen.repeat(counts)], counts[chosen], places[:, chosen]
        size, shift = places.repeat(counts, 1)
        points *= size
        points += shift
        if self.window is not None:
            points = points - np.array(self.window)  # in float64 from here on, as in stock
        points.clip(0, self.side, out=points)
        return Polygons(points, counts)

    def polygons(self, tile):
        """The polygons of an image as they are in its label file: (points [k x 2], counts [n])."""
        polygons = self.dataset.segments[tile.image]
        if len(polygons):
            polygons = Polygons.of(polygons)
            return polygons.points, polygons.counts
        return NO_POLYGON, np.zeros(len(self.dataset.labels[tile.image]), np.int64)

    def __getitem__(self, slices):
        """Pixels of `mosaic[y1:y2, x1:x2]` [h x w x 3], read-only; reads only the images that show there."""
        rows, columns = slices
        (y1, y2, _), (x1, x2, _) = rows.indices(self.side), columns.indices(self.side)
        left, top = self.window or (0, 0)
        for tile in self.tiles:
            x, y = tile.x - left, tile.y - top
            if x <= x1 and y <= y1 and x + tile.width >= x2 and y + tile.height >= y2:  # in one image: no copy
                img = load_scanned(self.dataset, tile.image, (tile.height, tile.width))
                return img[y1 - y : y2 - y, x1 - x : x2 - x]
        part = np.empty((y2 - y1, x2 - x1, 3), np.uint8)
        self.paint(part, x1, y1)
        return part

    def painted(self, visible_area):
        """A canvas [side x side x 4, the last channel without meaning], painted inside `visible_area` (x1, y1, x2, y2).

        Images outside of the area are not read. It is valid until the next mosaic is painted.
        """
        x1, y1, x2, y2 = (int(min(max(value, 0), self.side)) for value in visible_area)
        canvas = reused("mosaic", self.side, self.side, 4)
        self.paint(canvas[y1 : y2 + 1, x1 : x2 + 1], x1, y1)
        return canvas

    def paint(self, part, left, top):
        """Paint `part` [h x w x 3 or 4] of the canvas, which begins at (left, top); reads the images that show."""
        height, width = part.shape[:2]
        origin_x, origin_y = self.window or (0, 0)
        shown, area = [], 0  # tiles that show, where they begin, and the box of `part` that they cover
        for tile in self.tiles:
            x, y = tile.x - origin_x - left, tile.y - origin_y - top
            x1, y1, x2, y2 = max(x, 0), max(y, 0), min(x + tile.width, width), min(y + tile.height, height)
            if x1 < x2 and y1 < y2:
                shown.append((tile, x, y, (x1, y1, x2, y2)))
                area += (x2 - x1) * (y2 - y1)
        if area < height * width:  # tiles do not overlap
            part[...] = GREY
        for tile, x, y, (x1, y1, x2, y2) in shown:
            img = load_scanned(self.dataset, tile.image, (tile.height, tile.width))
            source, target = img[y1 - y : y2 - y, x1 - x : x2 - x], part[y1:y2, x1:x2]
            if part.shape[2] == 3:
                target[...] = source
            else:
                cv2.cvtColor(source, cv2.COLOR_BGR2BGRA, dst=target)


def _shapes(dataset, indices):
    """(height, width) at the training size of each of these images."""
    sizes = dataset.shapes.take(indices, 0).tolist()
    return [resized_shape(height, width, dataset.img_size) for width, height in sizes]


def draw_mosaic4(dataset, index):
    """Image `index` and three others round a random centre: top left, top right, bottom left, bottom right."""
    size = dataset.img_size
    centre_y, centre_x = (int(random.uniform(-border, 2 * size + border)) for border in dataset.mosaic_border)
    indices = [index, *random.choices(dataset.indices, k=3)]
    tiles = []
    corners = (0, 0), (1, 0), (0, 1), (1, 1)
    for i, (height, width), (is_right, is_below) in zip(indices, _shapes(dataset, indices), corners, strict=True):
        x = centre_x if is_right else centre_x - width
        y = centre_y if is_below else centre_y - height
        tiles.append(Tile(i, x, y, width, height))
    return Mosaic(dataset, tiles)


def draw_mosaic9(dataset, index):
    """Image `index` with eight others clockwise round it, seen through a window at a random place."""
    size = dataset.img_size
    indices = [index, *random.choices(dataset.indices, k=8)]
    shapes = _shapes(dataset, indices)
    h, w = zip(*shapes, strict=True)
    left, top, right, bottom = size, size, size + w[0], size + h[0]  # edges of the image in the middle
    corners = (
        (left, top),
        (left, top - h[1]),
        (left + w[1], top - h[2]),
        (right, top),
        (right, top + h[3]),
        (right - w[5], bottom),
        (right - w[5] - w[6], bottom),
        (left - w[7], bottom - h[7]),
        (left - w[8], bottom - h[7] - h[8]),
    )
    tiles = [Tile(i, *corner, w, h) for i, corner, (h, w) in zip(indices, corners, shapes, strict=True)]
    window_y, window_x = (int(random.uniform(0, size)) for _ in range(2))
    return Mosaic(dataset, tiles, window=(window_x, window_y))


def load_mosaic(dataset, index):
    """A warped mosaic of four: (image [s x s x 3], labels [n x 5: class, x1, y1, x2, y2])."""
    return _warped(draw_mosaic4(dataset, index), dataset.affine_ranges, dataset.hyp["copy_paste"])


def load_mosaic9(dataset, index):
    """A warped mosaic of nine: (image [s x s x 3], labels [n x 5: class, x1, y1, x2, y2])."""
    return _warped(draw_mosaic9(dataset, index), dataset.affine_ranges, dataset.hyp["copy_paste"])


def load_samples(dataset, index):
    """Draw a mosaic of four and half of its objects with polygons, for paste-in: a list of Sample."""
    mosaic = draw_mosaic4(dataset, index)
    return sample_segments(mosaic, mosaic.labels(), mosaic.segments(), probability=0.5)


def _warped(mosaic, affine_ranges, copy_paste_share):
    """The mosaic as the network sees it: (image, labels). `affine_ranges` as `draw_affine` takes them."""
    dataset, labels = mosaic.dataset, mosaic.labels()
    # The order of draws is stock's: tiles, then the window of nine, then copy-paste, then the transform.
    if copy_paste_share:
        canvas, labels, segments = copy_paste(mosaic[:, :], labels, mosaic.segments(), copy_paste_share)
        affine = draw_affine(mosaic.side, mosaic.side, **affine_ranges, border=dataset.mosaic_border)
        return affine.image(canvas), warp_labels(labels, segments, affine)
    affine = draw_affine(mosaic.side, mosaic.side, **affine_ranges, border=dataset.mosaic_border)
    near = affine.may_show(labels[:, 1:])  # the others would be dropped in the end
    labels = warp_labels(labels[near], mosaic.segments(near), affine)
    return dataset.warped(mosaic, affine), labels
