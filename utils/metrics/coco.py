"""Detections in COCO's result format, and the official COCO score where the data set comes with annotations.

Numbers in the result file. With annotations, an image has the id of the entry in `images` whose file_name it has (the
folders decide between equal names), and a class the id of the category of its name, or of its place: see
`match_categories`. Without them, stock's numbers: the file stem, as a number if it is one, and the class id, which for
COCO itself becomes one of the 91 category numbers.
"""

import contextlib
import io
import json
import logging
import os
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from utils.ops.boxes import xyxy2xywh
from utils.system.files import atomic_write

logger = logging.getLogger(__name__)

# the numbers of COCO's 80 classes among its 91 categories; the others were never annotated
COCO_CATEGORY_IDS = [number for number in range(1, 91) if number not in {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}]


class CocoScores(NamedTuple):
    """COCO's twelve figures: average precision and recall; -1 where there is nothing to find."""

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
    plain = CocoResults(
        {str(path): _number_of(path) for path in image_files},
        COCO_CATEGORY_IDS if data.is_coco else list(range(len(names))),
    )
    path, places = find_annotations(getattr(data, split), split, data.annotations if split == "val" else None)
    if path is None:
        logger.warning("no official COCO score, for lack of annotations; looked for %s", ", ".join(map(str, places)))
        return plain
    try:
        content = read_annotations(path)
        image_ids = match_images(image_files, content["images"], path)
        category_ids = match_categories(names, content["categories"], path)
    except ValueError as reason:
        logger.warning("no official COCO score: %s", reason)
        plain.problem = str(reason)
        return plain
    logger.info("official COCO score with the annotations %s", path)
    return CocoResults(image_ids, category_ids, content)


class CocoResults:
    """Collects detections, writes them as a COCO result file, and has them scored.

    `image_ids` {path: id} and `category_ids` [class id -> category id] give COCO's numbers; `annotations` is the
    content of the annotation file, if there is one.
    """

    def __init__(self, image_ids, category_ids, annotations=None):
        self.image_ids, self.category_ids, self.annotations = image_ids, category_ids, annotations
        self.problem = ""  # why annotations that exist cannot be used
        self.rows = []

    def add(self, path, detections, image_shape=None):
        """Add `detections` [k x 6: x1, y1, x2, y2, confidence, class] in pixels of the original image `path`."""
        image_id = self.image_ids.get(str(path))
        if image_id is not None:  # the annotations do not know the others, and were reported
            self.rows += detection_rows(detections, image_id, self.category_ids)

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


def _number_of(path):
    stem = Path(path).stem
    return int(stem) if stem.isdecimal() else stem


# Annotations --------------------------------------------------------------------------------------------------------


def find_annotations(entries, split="val", named=None):
    """(the annotation file of a split, or None; all places that were looked at).

    That is the file which the data yaml has `named`; else instances_<split>2017.json or instances_<split>.json in a
    folder `annotations` two levels above or beside one of `entries` (the split's folders or list files).
    """
    places = [Path(named)] if named else []
    for entry in () if named else entries if isinstance(entries, list) else [entries]:
        two_up = os.path.join(entry, "..", "..", "annotations")  # noqa: PTH118 (a link is followed before going up)
        for folder in (two_up, os.path.normpath(two_up), Path(entry).parent / "annotations"):
            places += [Path(folder) / f"instances_{split}{year}.json" for year in ("2017", "")]
    places = list(dict.fromkeys(places))
    return next((place.resolve() for place in places if place.is_file()), None), places


def read_annotations(path):
    """The content of an annotation file, made fit for the scorers. Raises ValueError if it is not one."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        missing = [key for key in ("images", "annotations", "categories") if key not in content]
        if missing:
            raise ValueError(f"it has no {' and no '.join(missing)}")
        for number, annotation in enumerate(content["annotations"], 1):
            annotation["id"] = number  # the scorers take an object with the id 0 for unmatched
            annotation.setdefault("iscrowd", 0)
            annotation.setdefault("area", annotation["bbox"][2] * annotation["bbox"][3])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path} is no usable COCO annotation file: {error!r}") from error
    content.setdefault("info", {})
    return content


def match_images(image_files, images, source):
    """{path: image id} of those `image_files` that the entries `images` of the file `source` name.

    Raises ValueError if there is none; logs how many are missing.
    """
    entries = defaultdict(list)
    for entry in images:
        name = entry["file_name"].replace("\\", "/")
        entries[Path(name).name].append((name, entry["id"]))
    matched = {}
    for path in map(str, image_files):
        candidates = entries[Path(path).name]
        if len(candidates) > 1:
            candidates = [entry for entry in candidates if Path(path).as_posix().endswith(f"/{entry[0]}")]
        if len(candidates) == 1:
            matched[path] = candidates[0][1]
    if not matched:
        raise ValueError(f"{source} names none of the {len(image_files)} images")
    if len(matched) < len(image_files):
        missing = len(image_files) - len(matched)
        logger.warning("%s does not name %d of the %d images: they are left out of the json and of the COCO score",
                       source, missing, len(image_files))  # fmt: skip
    return matched


def match_categories(names, categories, source):
    """Category ids [nc] for the class `names`, from the `categories` of the file `source`.

    By name (capitals do not matter) if every class is found. Otherwise by place, categories in the order of their ids,
    if there are as many as classes and no name that is found says otherwise. Else ValueError.
    """
    categories = sorted(categories, key=lambda category: category["id"])
    ids = [category["id"] for category in categories]
    known = [category["name"].strip().casefold() for category in categories]
    wanted = [name.strip().casefold() for name in names]
    if len(set(known)) == len(known) and set(wanted) <= set(known):
        return [ids[known.index(name)] for name in wanted]

    strangers = [name for name, key in zip(names, wanted, strict=True) if key not in known]
    in_place = all(a == b for a, b in zip(wanted, known, strict=False) if a in known)
    if len(known) != len(wanted) or not in_place:
        raise ValueError(f"the categories of {source} are not the {len(names)} classes; not found: {strangers[:5]}")
    logger.warning("%s has no categories called %s: classes are matched by their order", source, strangers[:5])
    return ids


# Scoring ------------------------------------------------------------------------------------------------------------


def official_scores(annotations, rows, image_ids, category_ids):
    """`CocoScores` of result `rows`, by faster-coco-eval if installed, else by pycocotools.

    Only the images `image_ids` and the categories `category_ids` count. `annotations` is what `read_annotations`
    returned. Raises ValueError if there is no row or no library.
    """
    if not rows:
        raise ValueError("there is no detection to score")
    coco_class, evaluator_class = _scorer()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):  # pycocotools prints its progress
        truth = coco_class()
        truth.dataset = annotations
        truth.createIndex()
        evaluator = evaluator_class(truth, truth.loadRes([dict(row) for row in rows]), "bbox")
        evaluator.params.imgIds, evaluator.params.catIds = sorted(image_ids), sorted(category_ids)
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    scores = CocoScores(*map(float, evaluator.stats[:12]))
    logger.info("COCO: %s", ", ".join(f"{name} {value:.3f}" for name, value in scores._asdict().items()))
    return scores


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
