"""A COCO download: which splits it has, and for each image of a json the files, the size and the objects."""

import posixpath
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from utils.metrics.coco_annotations import LONGEST_SIDE, as_id, in_order
from utils.system.files import printable, shown


class Split(NamedTuple):
    name: str
    images: Path
    annotations: Path


class Task(NamedTuple):
    """One image: its file, the two files to make, (width, height) in the json, [(class id, annotation)], its name."""

    source: Path
    image: Path
    label: Path
    size: tuple[int, int]
    objects: list
    name: str


def find_splits(coco, names=()):
    """The splits below the folder `coco`, small ones first; ValueError if a json or a folder of images is not there."""
    jsons = sorted((coco / "annotations").glob("instances_*.json"), key=lambda file: file.stat().st_size)
    known = {file.stem.removeprefix("instances_"): file for file in jsons}
    missing = [name for name in names if name not in known]
    if missing or not known:
        wanted = missing[0] if missing else "NAME"
        raise ValueError(f"{printable(coco / 'annotations' / f'instances_{wanted}.json')} does not exist: "
                         "unpack annotations_trainval2017.zip in the folder that --coco names")  # fmt: skip
    splits = []
    for name, file in known.items():
        if names and name not in names:
            continue
        images = next((place for place in (coco / name, coco / "images" / name) if place.is_dir()), None)
        if images is None:
            raise ValueError(f"{printable(file)} has no images: neither {printable(coco / name)} nor "
                             f"{printable(coco / 'images' / name)} is a folder; unpack {name}.zip there, or name the "
                             "splits that you want with --splits")  # fmt: skip
        splits.append(Split(name, images, file))
    return splits


def name_in(split, file_name):
    """What a json calls an image, below the folder of the split: some tools write where it lies, or Windows' `\\`."""
    plain = posixpath.normpath(file_name)
    ways = dict.fromkeys((plain, posixpath.normpath(file_name.replace("\\", "/"))))
    names = [way.removeprefix(start) for way in ways for start in ("", f"{split.name}/", f"images/{split.name}/")]
    return next((name for name in names if (split.images / name).is_file()), plain)


def _whole(value):
    """`value` if it is a whole number of pixels, 640.0 as well; else 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return int(value) if is_number and 0 < value <= LONGEST_SIDE and value == value // 1 else 0


def tasks_of(split, content, out):
    """[Task] for every image of a json; ValueError if one has no size, no file, or no label file of its own."""
    class_of = {as_id(category["id"]): number for number, category in enumerate(in_order(content["categories"]))}
    objects = defaultdict(list)
    for number, annotation in enumerate(content["annotations"]):
        class_id = class_of.get(as_id(annotation["category_id"]))
        if class_id is None:
            raise ValueError(f"{printable(split.annotations)}: annotations[{number}].category_id is "
                             f"{shown(annotation['category_id'])}, which is none of the categories")  # fmt: skip
        objects[as_id(annotation["image_id"])].append((class_id, annotation))
    if not content["images"]:
        raise ValueError(f"{printable(split.annotations)} lists no images; leave it out with --splits")
    tasks = {}
    for number, image in enumerate(content["images"]):
        place, name = f"{printable(split.annotations)}: images[{number}]", name_in(split, image["file_name"])
        size = _whole(image.get("width")), _whole(image.get("height"))
        if min(size) < 1:
            raise ValueError(f"{place} has no width and height in pixels, but {shown(image.get('width'))} and "
                             f"{shown(image.get('height'))}")  # fmt: skip
        if name.startswith(("/", "../")):
            raise ValueError(f"{place}.file_name {shown(name)} leads out of the folder of images")
        label = out / "labels" / split.name / Path(name).with_suffix(".txt")
        if label in tasks:
            raise ValueError(f"{place}.file_name {shown(name)} would share its label file with another image")
        tasks[label] = Task(split.images / name, out / "images" / split.name / name, label, size,
                            objects.pop(as_id(image["id"]), []), name)  # fmt: skip
    if objects:
        raise ValueError(f"{printable(split.annotations)} has annotations of images that it does not list, for "
                         f"instance of image {shown(next(iter(objects)))}")  # fmt: skip
    return list(tasks.values())
