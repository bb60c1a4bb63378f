"""Detections in COCO's result format, and the official COCO score where the data set comes with annotations.

Numbers in the result file. With annotations, an image has the id of the entry in `images` whose file_name it has, with
the folders in it, and a class the id of the category of its name, or of its place: see coco_annotations. Without them,
stock's numbers: the file stem, as a number if it is one (or more of the path, if stems are not unique), and the class
id, which for COCO itself becomes one of the 91 category numbers.
"""

import contextlib
import io
import json
import logging
import math
from typing import NamedTuple

from utils.metrics.coco_annotations import (
    as_id,
    find_annotations,
    match_categories,
    match_images,
    order_of,
    read_annotations,
    why_other_size,
)
from utils.metrics.names import image_names
from utils.ops.boxes import xyxy2xywh
from utils.system.files import atomic_write, below, folded, printable

logger = logging.getLogger(__name__)

# the numbers of COCO's 80 classes among its 91 categories; the others were never annotated
COCO_CATEGORY_IDS = [number for number in range(1, 91) if number not in {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}]


class CocoScores(NamedTuple):
    """COCO's twelve figures: average precision and recall; NaN where there is nothing to find."""

    ap: float  # IoU .50:.95
    ap50: float
    ap75: float
    ap_small: float  # below 32 x 32 pixels
    ap_medium: float
    ap_large: float  # above 96 x 96 pixels
    ar1: float  # with one detection an image
    ar10: float
    ar100: float
    ar_small: float
    ar_medium: float
    ar_large: float


def open_results(data, split, names, image_files):
    """`CocoResults` for the images `image_files` of a split of a data set.

    `data` has the paths of its splits (each a path or a list of paths), `annotations` (of val, or None) and `is_coco`;
    `names` are the classes of the detector. Logs which annotations are used, or where they were looked for.
    """
    numbers = {path: _number(name) for path, name in image_names(image_files, key=_number).items()}
    plain = CocoResults(numbers, COCO_CATEGORY_IDS if data.is_coco else list(range(len(names))))
    path, places = find_annotations(getattr(data, split), split, data.annotations if split == "val" else None)
    if path is None:
        where = ", ".join(printable(below(place, ".")) for place in places)
        logger.warning("no official COCO score, for lack of annotations; looked for %s", where)
        return plain
    try:
        content = read_annotations(path)
        image_ids = match_images(image_files, content["images"], path)
        category_ids = match_categories(names, content["categories"], path)
    except ValueError as reason:
        logger.warning("no official COCO score: %s", reason)
        plain.problem = str(reason)
        return plain
    logger.info("official COCO score with the annotations %s", printable(below(path, ".")))
    return CocoResults(image_ids, category_ids, content, path)


class CocoResults:
    """Collects detections, writes them as a COCO result file, and has them scored.

    `image_ids` {path: id} and `category_ids` [class id -> category id] give COCO's numbers; `annotations` is the
    content of the annotation file `source`, if there is one.
    """

    def __init__(self, image_ids, category_ids, annotations=None, source=None):
        self.image_ids, self.category_ids, self.annotations = image_ids, category_ids, annotations
        images = annotations["images"] if annotations else ()
        self.source, self.entries = source, {entry["id"]: (number, entry) for number, entry in enumerate(images)}
        self.problem = ""  # why annotations that exist cannot be used
        self.rows, self.added = [], set()

    def add(self, path, detections, image_shape=None):
        """Add `detections` [k x 6: x1, y1, x2, y2, confidence, class] in pixels of the original image `path`."""
        image_id = self.image_ids.get(str(path))
        if image_id is None or image_id in self.added:  # not in the annotations, or the same file by another path
            return
        self.added.add(image_id)
        self.rows += detection_rows(detections, image_id, self.category_ids)
        if image_id in self.entries and image_shape and not self.problem:
            number, entry = self.entries[image_id]
            self.problem = why_other_size(f"{printable(self.source)}: images[{number}]", entry, image_shape, path)

    def write(self, path):
        """Write all rows as one json file."""
        with atomic_write(path, "w") as file:
            json.dump(self.rows, file)

    def score(self):
        """`CocoScores` over all images, or None without annotations; ValueError if the annotations are of no use."""
        if self.problem:
            raise ValueError(self.problem)
        if self.annotations is None:
            return None
        return official_scores(self.annotations, self.rows, set(self.image_ids.values()), set(self.category_ids))


def detection_rows(detections, image_id, category_ids):
    """The detections [k x 6: x1, y1, x2, y2, confidence, class] of one image as rows of a COCO result file."""
    boxes = xyxy2xywh(detections[:, :4])
    boxes[:, :2] = detections[:, :2]  # COCO wants the upper left corner with the size
    return [
        {
            "image_id": image_id,
            "category_id": category_ids[int(class_id)],
            "bbox": [round(value, 3) for value in box],
            "score": round(score, 5),
        }
        for box, (score, class_id) in zip(boxes.tolist(), detections[:, 4:6].tolist(), strict=True)
    ]


def _number(name):
    return int(name) if name.isdecimal() else name


# Scoring ------------------------------------------------------------------------------------------------------------


def official_scores(annotations, rows, image_ids, category_ids):
    """`CocoScores` of result `rows`, by faster-coco-eval if installed, else by pycocotools.

    Only the images `image_ids` and the categories `category_ids` count. `annotations` is what `read_annotations`
    returned. Raises ValueError if there is no row, no object to find, or no library.
    """
    if not rows:
        raise ValueError("there is no detection to score")
    images, categories = _numbered(annotations["images"]), _numbered(annotations["categories"])
    objects = _objects(annotations["annotations"], images, categories)
    tested = {own: images[as_id(own)] for own in image_ids}
    wanted = {own: categories[as_id(own)] for own in category_ids}
    on, of = set(tested.values()), set(wanted.values())
    if not any(row["image_id"] in on and row["category_id"] in of and not row["iscrowd"] for row in objects):
        raise ValueError("the annotations have no object of these classes on these images, or crowds only")
    found = [row | {"image_id": tested[row["image_id"]], "category_id": wanted[row["category_id"]]} for row in rows]
    coco_class, evaluator_class = _scorer()
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        truth = coco_class()
        truth.dataset = {
            "info": {}, "annotations": objects, "images": [{"id": number} for number in images.values()],
            "categories": [{"id": number} for number in categories.values()],
        }  # fmt: skip
        truth.createIndex()
        evaluator = evaluator_class(truth, truth.loadRes(found), "bbox")
        evaluator.params.imgIds, evaluator.params.catIds = sorted(on), sorted(of)
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    scores = CocoScores(*(float(value) if value >= 0 else math.nan for value in evaluator.stats[:12]))
    words = [f"{name} {'none' if math.isnan(value) else f'{value:.3f}'}" for name, value in scores._asdict().items()]
    logger.info("%s", folded(f"COCO: {', '.join(words)}"))
    return scores


def _numbered(entries):
    """{id: number} of images or categories in the order of their ids, for scorers that want small numbers as ids."""
    ids = sorted((entry["id"] for entry in entries), key=order_of)
    return {as_id(own): number for number, own in enumerate(ids, 1)}


def _objects(annotations, images, categories):
    """The annotations as the scorers want them, with the numbers {id: number} of their images and categories.

    Those of an image or a category that the file does not list are left out, and counted in the log.
    """
    objects, strangers = [], 0
    for annotation in annotations:
        image, category = images.get(as_id(annotation["image_id"])), categories.get(as_id(annotation["category_id"]))
        if image is None or category is None:
            strangers += 1
            continue
        box, area = annotation["bbox"], annotation.get("area")
        objects.append({
            "id": len(objects) + 1,  # the scorers take an object with the id 0 for unmatched
            "image_id": image, "category_id": category, "bbox": box, "iscrowd": int(annotation.get("iscrowd") or 0),
            "area": box[2] * box[3] if area is None else area,
        })  # fmt: skip
    if strangers:
        logger.warning("%d of %d annotations do not count: their image or category is not listed in the file",
                       strangers, len(annotations))  # fmt: skip
    return objects


def _scorer():
    """The classes COCO and COCOeval of the library that is installed."""
    try:
        from faster_coco_eval import COCO, COCOeval_faster

        return COCO, COCOeval_faster
    except ImportError:
        pass
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise ValueError("no library for COCO scores: pip install pycocotools (or faster-coco-eval)") from error
    return COCO, COCOeval
