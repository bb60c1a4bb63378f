"""Objects cut out along their polygons and pasted in: copy-paste mirrors them in their own image, paste-in scales
those of other mosaics into free places.

The objects of paste-in are samples that only know where they are; images are decoded for the few that get used.
"""

import random
from typing import Any, NamedTuple

import cv2
import numpy as np

from utils.ops.boxes import bbox_ioa
from utils.ops.polygons import Polygons

MAX_OVERLAP = 0.30  # share of a label that something pasted may cover
# largest side of the place, as a share of the image, for each of the 20 attempts
PLACE_SCALES = 2 * [0.75] + 4 * [0.5] + 4 * [0.25] + 4 * [0.125] + 6 * [0.0625]


class Sample(NamedTuple):
    """An object on a canvas (anything with a shape and two-dimensional slicing, such as an image).

    `box` is (x1, y1, x2, y2) in whole pixels, ends excluded; `outline` [m x 2] int32.
    """

    category: float
    box: tuple
    outline: np.ndarray
    canvas: Any

    @property
    def size(self):
        """(width, height) of the box."""
        x1, y1, x2, y2 = self.box
        return x2 - x1, y2 - y1

    def cut_out(self):
        """Pixels of the box [h x w x 3], black outside of the outline.

        stock behaviour: channel values of 0 inside the outline become 255.
        """
        x1, y1, x2, y2 = self.box
        pixels = self.canvas[y1:y2, x1:x2].copy()  # in one piece: what follows takes half the time
        pixels -= (pixels == 0).view(np.uint8)  # 0 - 1 is 255
        return cv2.bitwise_and(pixels, cv2.cvtColor(self._mask(), cv2.COLOR_GRAY2BGR), dst=pixels)

    def _mask(self):
        """255 inside the outline, 0 outside [h x w of the box].

        It is drawn on the smallest part of the canvas that holds outline and box: the edge of a smaller area would cut
        the outline, which moves the pixels of its lines.
        """
        x1, y1, x2, y2 = self.box
        height, width = self.canvas.shape[:2]
        x, y, w, h = cv2.boundingRect(self.outline)
        left, top = max(min(x, x1), 0), max(min(y, y1), 0)
        right, bottom = min(max(x + w, x2), width), min(max(y + h, y2), height)
        mask = np.zeros((bottom - top, right - left), np.uint8)
        cv2.drawContours(mask, [self.outline], -1, 255, cv2.FILLED, offset=(-left, -top))
        return mask[y1 - top : y2 - top, x1 - left : x2 - left]


def sample_segments(canvas, labels, segments, probability=0.5):
    """Draw that share of the objects with a polygon; a list of Sample.

    `labels` [n x 5: class, x1, y1, x2, y2] and `segments` (n polygons, empty for mere boxes) in pixels of `canvas`.
    Objects without area in whole pixels are left out.
    """
    polygons = Polygons.of(segments)
    rows = np.flatnonzero(polygons.counts)
    if not len(rows):
        return []
    height, width = canvas.shape[:2]
    chosen = rows[random.sample(range(len(rows)), k=round(probability * len(rows)))]
    picked, ends = labels.take(chosen, 0), polygons.counts.cumsum().take(chosen)
    corners, points = picked[:, 1:5].astype(np.int64), polygons.points.astype(np.int32)
    np.minimum(np.maximum(corners, 0, out=corners), (width - 1, height - 1) * 2, out=corners)
    columns = picked[:, 0], corners, ends - polygons.counts.take(chosen), ends
    return [
        Sample(category, (x1, y1, x2, y2), points[start:end], canvas)
        for category, (x1, y1, x2, y2), start, end in zip(*(column.tolist() for column in columns), strict=True)
        if x2 > x1 and y2 > y1
    ]


def copy_paste(img, labels, segments, probability):
    """Paste mirror images of some objects at the mirrored place, where they hide little; `img` is changed in place.

    Returns (img, labels, segments) with the new objects at the end. Draws one sample() among the polygons, and
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


def paste_visible(img, pixels, x, y):
    """Copy what is not 0 of `pixels` [h x w x 3] into `img`, in place, with the corner at (x, y)."""
    height, width = pixels.shape[:2]
    np.copyto(img[y : y + height, x : x + width], pixels, where=pixels > 0)


def pastein(img, labels, samples, paste=paste_visible):
    """Try 20 times to `paste` one of `samples` into `img`, in place, where it hides little; returns the labels.

    Makes its draws even without samples.
    """
    height, width = img.shape[:2]
    boxes, pasted = _with_areas(labels[:, 1:5]), []
    for scale in PLACE_SCALES:
        if random.random() < 0.2:
            continue
        place = _draw_place(height, width, scale)
        x1, y1, x2, y2 = place
        if not samples or x2 - x1 <= 20 or y2 - y1 <= 20 or _hides_one(place, boxes):
            continue
        sample = samples[random.randint(0, len(samples) - 1)]
        box = _paste(img, sample, place, paste)
        if box is not None:
            x1, y1, x2, y2 = box
            area = labels.dtype.type((x2 - x1) * (y2 - y1))  # rounded as that of a label
            boxes.append((*box, float(area)))
            pasted.append((sample.category, *box))
    return np.concatenate((labels, np.array(pasted, labels.dtype))) if pasted else labels


def _with_areas(boxes_xyxy):
    """`boxes_xyxy` [n x 4] as a list of (x1, y1, x2, y2, area): there are few, and NumPy would take longer."""
    width, height = (boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).T
    return [(*box, area) for box, area in zip(boxes_xyxy.tolist(), (width * height + 1e-16).tolist(), strict=True)]


def _hides_one(place, boxes):
    """Whether `place` (x1, y1, x2, y2) covers MAX_OVERLAP of one of `boxes` (see `_with_areas`); as by `bbox_ioa`."""
    x1, y1, x2, y2 = place
    for left, top, right, bottom, area in boxes:
        if left < x2 and right > x1 and top < y2 and bottom > y1:
            common = (min(right, x2) - max(left, x1)) * (min(bottom, y2) - max(top, y1))
            if common / area >= MAX_OVERLAP:
                return True
    return False


def _draw_place(height, width, scale):
    """A random box (x1, y1, x2, y2) with sides of at most `scale` times the image's."""
    place_height = random.randint(1, max(int(height * scale), 1))
    place_width = random.randint(1, max(int(width * scale), 1))
    x1 = max(0, random.randint(0, width) - place_width // 2)
    y1 = max(0, random.randint(0, height) - place_height // 2)
    return x1, y1, min(width, x1 + place_width), min(height, y1 + place_height)


def _paste(img, sample, place, paste):
    """Scale `sample` into the corner of `place` and copy it; its box (x1, y1, x2, y2), or None if too small."""
    x1, y1, x2, y2 = place
    sample_width, sample_height = sample.size
    gain = min((y2 - y1) / sample_height, (x2 - x1) / sample_width)
    width, height = int(sample_width * gain), int(sample_height * gain)
    if width <= 10 or height <= 10:
        return None
    pixels = cv2.resize(sample.cut_out(), (width, height))
    if cv2.countNonZero(pixels.reshape(height, -1)) <= 60:  # stock behaviour: counts channel values, not pixels
        return None
    paste(img, pixels, x1, y1)
    return x1, y1, x1 + width, y1 + height
