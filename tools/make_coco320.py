"""Make the folder that data/coco320.yaml names out of a COCO download: small images, label files, lists.

    python tools/make_coco320.py --coco DIR --size 320 \\
        [--out coco320] [--fit longer]

DIR/annotations holds instances_NAME.json, and DIR/NAME or DIR/images/NAME the images, for train2017, val2017, or any
names of another set in COCO's format. Only files below --out are written. A run that was interrupted goes on with the
same command: finished images stay. In --out are images/NAME, labels/NAME (a polygon a row; parts of one object joined
into one, crowds left out), NAME.txt (a list of the images), data.yaml, and annotations/instances_NAME.json with boxes
in the new pixels, for the official COCO score.
"""

import argparse
import json
import shutil
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import cv2
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.coco.download import find_splits, tasks_of
from tools.coco.labels import Placement, label_text, scaled_annotations
from utils.data.affine import GREY
from utils.data.images.reading import read_image, verify_image
from utils.metrics.coco_annotations import in_order, listing, read_annotations
from utils.run import entry
from utils.system import folder_lock
from utils.system.children import enter_child, forked_pool
from utils.system.cores import usable_cores
from utils.system.files import atomic_write, cause_of, counted, folded, printable, read_json, remove_leftovers, shown
from utils.system.memory import check_memory, describe_bytes
from utils.system.progress import progress

FITS = {
    "longer": "the longer side becomes --size; labels are those of stock",
    "stretch": "both sides become --size; labels are those of stock, objects change their shape",
    "pad": "the longer side becomes --size, grey borders make a square; labels are NOT those of stock",
}
STAMP = "make_coco.json"
JPEG_QUALITY = 95
BYTES_PER_PIXEL = 0.6  # of a finished JPEG, for the check of the disk
MEMORY_PER_BYTE = 8  # of a json while it is read; 6.3 measured
CHUNK = 16  # images handed to a worker at once


# Images -------------------------------------------------------------------------------------------------------------


def make_image(task, side, fit):
    """Write what is missing of a task's two files; returns (what is wrong with the source, Counter of label_text)."""
    try:
        placement = Placement.of(task.size, side, fit)
        text, left_out = label_text(task.objects, task.size, placement)
        if not (task.label.is_file() and task.label.read_text() == text):
            with atomic_write(task.label, "w") as file:
                file.write(text)
        if not task.image.is_file():  # the last to be written: with it the image is finished
            data = resized_file(task.source, task.size, placement)
            with atomic_write(task.image) as file:
                file.write(data)
    except ValueError as error:
        return f"{printable(task.source)}: {str(error).removeprefix(f'{printable(task.source)}: ')}", Counter()
    return "", left_out


def resized_file(source, size, placement):
    """The bytes of the new image file, of the kind of the old one; ValueError if that is damaged or of another size."""
    found = verify_image(source)
    if found != size:
        raise ValueError(f"it has {found[0]} x {found[1]} pixels, the json says {size[0]} x {size[1]}")
    if placement.resized == placement.canvas == size:
        return source.read_bytes()
    method = cv2.INTER_AREA if max(placement.resized) < max(size) else cv2.INTER_LINEAR
    pixels = cv2.resize(read_image(source), placement.resized, interpolation=method)
    (left, top), (width, height) = placement.corner, placement.canvas
    right, bottom = width - left - pixels.shape[1], height - top - pixels.shape[0]
    pixels = cv2.copyMakeBorder(pixels, top, bottom, left, right, cv2.BORDER_CONSTANT, value=(GREY,) * 3)
    try:
        return cv2.imencode(source.suffix, pixels, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes()
    except cv2.error as error:
        raise ValueError(f"OpenCV writes no {source.suffix} files; convert it to jpg or png") from error


def _enter_worker(parent):
    enter_child(parent)
    cv2.setNumThreads(1)


# A data set ---------------------------------------------------------------------------------------------------------


def open_folder(out, coco, side, fit):
    """Make --out, or take up the one that an earlier run has begun with the same options; ValueError else."""
    here, there = out.resolve(), coco.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ValueError(f"--out {printable(out)} and --coco {printable(coco)} are one in the other: name a folder "
                         "beside it with --out, so that the download stays as it is")  # fmt: skip
    wanted = {"size": side, "fit": fit}
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        out.mkdir(parents=True, exist_ok=True)
        with atomic_write(out / STAMP, "w") as file:
            json.dump(wanted, file)
    if not (out / STAMP).is_file():
        raise ValueError(f"{printable(out)} was not made by this tool: name another folder with --out")
    if (found := read_json(out / STAMP)) != wanted:
        raise ValueError(f"{printable(out)} was made with {shown(found)}, now {shown(wanted)} is asked for: "
                         "name another folder with --out, or delete it")  # fmt: skip
    folder_lock.own(out, "name another folder with --out")


def check_sources(split, tasks, side, out):
    """Raise ValueError if image files are not there, or the disk has no room for what is still to be made."""
    lost = [task.source.name for task in tasks if not task.source.is_file()]
    if lost:
        raise ValueError(f"{printable(split.images)} lacks {len(lost)} of the {counted(len(tasks), 'image')} of its "
                         f"json ({listing(lost)}): unpack {split.name}.zip again")  # fmt: skip
    needed = sum(not task.image.is_file() for task in tasks) * side**2 * BYTES_PER_PIXEL
    if needed > (free := shutil.disk_usage(out).free):
        raise ValueError(f"{split.name} needs about {describe_bytes(needed)}, and {describe_bytes(free)} are free "
                         f"where {printable(out)} is: make room, then give the same command again")  # fmt: skip


def make_split(split, content, out, side, fit, workers):
    """Make images, labels, list and json of a split; returns [what is wrong with a source]."""
    tasks = tasks_of(split, content, out)
    check_sources(split, tasks, side, out)
    for folder in {place.parent for task in tasks for place in (task.image, task.label)}:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
    begun = sum(task.image.is_file() for task in tasks)
    with forked_pool(workers, _enter_worker) as pool:
        results = pool.map(partial(make_image, side=side, fit=fit), tasks, chunksize=CHUNK)
        try:
            results = list(progress(results, desc=split.name, total=len(tasks), unit="img"))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    problems = [problem for problem, _ in results if problem]
    made = [task for task, (problem, _) in zip(tasks, results, strict=True) if not problem]
    left_out = sum((found for _, found in results), Counter())
    num_objects = sum(len(task.objects) for task in made) - left_out.total()
    with atomic_write(out / f"{split.name}.txt", "w") as file:
        file.writelines(f"./{task.image.relative_to(out).as_posix()}\n" for task in made)
    (out / "annotations").mkdir(exist_ok=True)
    with atomic_write(out / "annotations" / split.annotations.name, "w") as file:
        json.dump(scaled_annotations(content, tasks, side, fit), file)
    check_counts(out, split, made, num_objects)
    reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.items()) or "none"
    print(folded(f"{split.name}: {counted(len(made), 'image')} ({begun} were there), {num_objects} objects of "
                 f"{len(content['annotations'])} annotations; left out: {reasons}"))  # fmt: skip
    return problems


def check_counts(out, split, made, num_objects):
    """Raise ValueError unless the images on the disk are those of `made`, with `num_objects` rows in their labels."""
    files = {place for place in (out / "images" / split.name).rglob("*") if place.is_file()}
    strangers = sorted(files - {task.image for task in made})
    if strangers or len(files) < len(made):
        which = f"; not of the json: {listing(strangers)}, delete what should not be there" if strangers else ""
        raise ValueError(f"{printable(out / 'images' / split.name)} has {len(files)} files for "
                         f"{counted(len(made), 'image')}{which}")  # fmt: skip
    rows = sum(task.label.read_text().count("\n") for task in made)
    if rows != num_objects:
        raise ValueError(f"{printable(out / 'labels' / split.name)} has {rows} rows for {num_objects} objects of the "
                         "json: does another program write there? Give the same command again")  # fmt: skip


def make_coco(coco, out, side=320, fit="longer", names=(), workers=0):
    """Make the data set `out` from the COCO download in the folder `coco`; both are Paths.

    `side` of the new images in pixels, `fit` a key of FITS, `names` of splits (default: all), `workers` 0: one a core.
    Raises ValueError about wrong input, and in the end about images that could not be made.
    """
    splits = find_splits(coco, names)
    open_folder(out, coco, side, fit)
    classes, problems = None, []
    for split in splits:
        check_memory(split.annotations.stat().st_size * MEMORY_PER_BYTE,
                     f"{printable(split.annotations)} takes about {{}} to read", "end other programs")  # fmt: skip
        content = read_annotations(split.annotations)
        found = [str(category["name"]) for category in in_order(content["categories"])]
        if classes not in (None, found):
            raise ValueError(f"{printable(split.annotations)} has other categories than {splits[0].annotations.name}")
        classes = found
        problems += make_split(split, content, out, side, fit, workers or usable_cores())
    hint = write_data_yaml(out, classes)
    if problems:
        raise ValueError(f"{counted(len(problems), 'image')} could not be made (not in the lists): "
                         f"{listing(problems, '; ')}. Get them again, then the same command goes on")  # fmt: skip
    print(f"{printable(out)} is complete. {hint}Train with --data {printable(out / 'data.yaml')} --img {side}")
    print(folded(f"--fit {fit}: {FITS[fit]}"))


def write_data_yaml(out, classes):
    """The data yaml of the folder; its splits are called train, val, test by how the names of their folders begin.

    Returns what a person has to do about it.
    """
    folders = sorted(place.name for place in (out / "images").iterdir())
    paths = {kind: f"images/{name}" for kind in ("train", "val", "test") for name in folders if name.startswith(kind)}
    with atomic_write(out / "data.yaml", "w") as file:
        yaml.safe_dump(paths | {"nc": len(classes), "names": classes}, file, sort_keys=False, allow_unicode=True)
    unused = [f"images/{name}" for name in folders if f"images/{name}" not in paths.values()]
    missing = [kind for kind in ("train", "val") if kind not in paths]
    parts = [f"has no {' and no '.join(missing)}"] * bool(missing)
    parts += [f"does not use {', '.join(map(printable, unused))}"] * bool(unused)
    return f"Its data.yaml {', and '.join(parts)}: write there what is to be used. " if parts else ""


GO_ON = "the same command goes on, finished images stay"


def main(opt):
    if opt.size < 32 or opt.workers < 0:
        raise ValueError(f"--size {opt.size} --workers {opt.workers}: at least 32 pixels, and no negative number")
    try:
        make_coco(opt.coco, opt.out or Path(f"coco{opt.size}"), opt.size, opt.fit, opt.splits, opt.workers)
    except OSError as error:
        raise ValueError(f"{cause_of(error, with_file=True)}; mend that, then the same command goes on") from error


def parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    parser.add_argument("--coco", type=Path, required=True, help="folder of the download; it is only read")
    parser.add_argument("--size", type=int, default=320, help="longer side of the new images in pixels (default: 320)")
    parser.add_argument("--out", type=Path, help="folder to make (default: coco and the size, so coco320)")
    parser.add_argument("--fit", choices=FITS, default="longer",
                        help="; ".join(f"{name}: {meaning}" for name, meaning in FITS.items()))  # fmt: skip
    parser.add_argument("--splits", nargs="+", default=(), help="such as train2017 val2017 (default: all with a json)")
    parser.add_argument("--workers", type=int, default=0, help="processes (default: 0, one for each core)")
    return parser


if __name__ == "__main__":
    entry.run(main, parser().parse_args(), GO_ON)
