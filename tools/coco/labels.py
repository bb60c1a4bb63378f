"""From the annotations of a COCO json to the text of a label file, for an image that is resized on the way."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from utils.system.files import shown

DIGITS = 6  # behind the point, as in the label files that stock is given


class Placement(NamedTuple):
    """Where an image goes: `resized`, with its upper left `corner` on a `canvas`; all (x, y) in pixels."""

    resized: tuple[int, int]
    corner: tuple[int, int]
    canvas: tuple[int, int]

    @classmethod
    def of(cls, size, side, fit):
        """Of an image of `size` (width, height) for the longer side `side`; `fit` is longer, stretch or pad."""
        width, height = (side, side) if fit == "stretch" else (max(round(s * side / max(size)), 1) for s in size)
        if fit != "pad":
            return cls((width, height), (0, 0), (width, height))
        return cls((width, height), ((side - width) // 2, (side - height) // 2), (side, side))


def rings_of(annotation):
    """The polygons of an annotation, arrays [m x 2] in pixels; none where it has only a mask or a box."""
    polygons = annotation.get("segmentation")
    if not isinstance(polygons, list):
        return []
    try:
        rings = [np.array(polygon, np.float64).reshape(-1, 2) for polygon in polygons]
        if not all(np.isfinite(ring).all() for ring in rings):
            raise ValueError
    except (TypeError, ValueError) as error:
        name = shown(annotation.get("id"))
        raise ValueError(f"the segmentation of annotation {name} is no list of polygons x1, y1, x2, y2, ...") from error
    return [ring for ring in rings if len(ring) > 2]


def joined(rings):
    """One ring [m x 2] of several: each time the nearest is joined, by a line that is walked there and back.

    All turn the same way, so the areas of the parts add up.
    """
    ring, *others = [ring if signed_area(ring) >= 0 else ring[::-1] for ring in rings]
    while others:
        near = []
        for number, other in enumerate(others):
            distances = ((ring[:, None] - other) ** 2).sum(2)
            i, j = np.unravel_index(distances.argmin(), distances.shape)
            near.append((distances[i, j], number, i, j))
        _, number, i, j = min(near)
        other = np.roll(others.pop(number), -j, axis=0)
        ring = np.concatenate((ring[: i + 1], other, other[:1], ring[i:]))
    return ring


def signed_area(ring):
    x, y = ring.T
    return (x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


def label_text(objects, size, placement):
    """(text of a label file, Counter of what was left out and why) for [(class id, annotation)] of an image."""
    rows, left_out = {}, Counter()
    for class_id, annotation in objects:
        if annotation.get("iscrowd"):
            left_out["crowd"] += 1
            continue
        rings = rings_of(annotation)
        x, y, w, h = annotation["bbox"]
        points = joined(rings) if rings else np.array([[x, y], [x + w, y + h]], np.float64)
        points = ((points / size).clip(0, 1) * placement.resized + placement.corner) / placement.canvas
        points = points.round(DIGITS)
        low, high = points.min(0), points.max(0)
        key = (class_id, *low.tolist(), *high.tolist())
        if (high <= low).any() or key in rows:
            left_out["repeated" if key in rows else "without area"] += 1
            continue
        if not rings:
            points = np.stack(((low + high) / 2, high - low))
        elif len(points) == 3:
            points = points[[0, 1, 2, 0]]  # stock reads no triangles
        rows[key] = " ".join([str(class_id), *(f"{number:.{DIGITS}f}" for number in points.ravel().tolist())])
    return "".join(f"{row}\n" for row in rows.values()), left_out


def scaled_annotations(content, tasks, side, fit):
    """The json for the official score: sizes, boxes and areas in pixels of the new images, without outlines.

    `content` is that of the old json, `tasks` [Task] belong to its images.
    """
    images, annotations = [], []
    for image, task in zip(content["images"], tasks, strict=True):
        placement = Placement.of(task.size, side, fit)
        images.append(image | {"file_name": task.name} | dict(zip(("width", "height"), placement.canvas, strict=True)))
        annotations += [_scaled(annotation, task.size, placement) for _, annotation in task.objects]
    return content | {"images": images, "annotations": annotations}


def _scaled(annotation, size, placement):
    x_gain, y_gain = placement.resized[0] / size[0], placement.resized[1] / size[1]
    x, y, w, h = annotation["bbox"]
    box = x * x_gain + placement.corner[0], y * y_gain + placement.corner[1], w * x_gain, h * y_gain
    area = (w * h if annotation.get("area") is None else annotation["area"]) * x_gain * y_gain
    rest = {key: value for key, value in annotation.items() if key != "segmentation"}
    return rest | {"bbox": [round(value, 3) for value in box], "area": round(area, 3)}
