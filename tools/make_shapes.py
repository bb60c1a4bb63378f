"""Draw the embedded data set: textured shapes on textured backgrounds, with labels that are exact by construction.

    python tools/make_shapes.py --out shapes --train 240 --val 60 --size 160 --seed 0

writes images/, labels/ (YOLO rows: polygons, or boxes with --boxes) and annotations/instances_val.json (COCO format,
`category_id` is the class index). The same arguments give the same files, bit for bit, on one machine. Every image has
its own random generator, so image 7 is the same whether ten or ten thousand are drawn.
"""

import argparse
import hashlib
import json
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils.run import entry
from utils.system import folder_lock
from utils.system.files import counted, link_to_nowhere, printable, read_json
from utils.system.progress import progress

STAMP = "make_shapes.json"
FOLDERS = ("images", "labels", "annotations")
ANNOTATIONS = "annotations/instances_val.json"
OTHER_FOLDER = "name another folder with --out"
SPLITS = ("train", "val")
EMPTY_SHARE = 0.06  # images without any object
MAX_OBJECTS = 5
DIAMETERS = (0.2, 0.7)  # of an object, as a share of the image's shorter side
MAX_HIDDEN = 0.35  # share of an object that later ones may cover
HUES = {"circle": 0, "square": 35, "triangle": 75, "star": 125}  # OpenCV's 0..179; a class varies around its own hue
HUE_SPREAD = 14
BACKGROUND_SATURATION = 0.3  # backgrounds are muted, so that a few minutes of training find the objects
MIN_CONTRAST = 60  # distance in BGR that an object's colour tries to keep from the mean of what lies behind it
FINENESS = 4  # masks are drawn this much finer, then averaged
SUBPIXEL_BITS = 4  # fixed-point digits of the corners that OpenCV draws


# ---- outlines: [m x 2] points on or in the unit circle -------------------------------------------------------------


def _regular_polygon(corners):
    angles = 2 * np.pi * np.arange(corners) / corners
    return np.stack((np.cos(angles), np.sin(angles)), axis=1)


def _star(points, inner_radius):
    outline = _regular_polygon(2 * points)
    outline[1::2] *= inner_radius
    return outline


OUTLINES = {
    "circle": _regular_polygon(40),
    "square": _regular_polygon(4),
    "triangle": _regular_polygon(3),
    "star": _star(5, inner_radius=0.45),
}
NAMES = tuple(OUTLINES)


@dataclass
class Thing:
    """One drawn object: class index and outline [m x 2, pixels]."""

    label: int
    outline: np.ndarray

    def box_xyxy(self):
        return (*self.outline.min(axis=0), *self.outline.max(axis=0))

    def area(self):
        x, y = self.outline.T
        return abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) / 2

    def mask(self, height, width):
        """Coverage of every pixel, 0..1 [height x width x 1, float32]."""
        fine = np.zeros((height * FINENESS, width * FINENESS), np.uint8)
        # OpenCV counts from pixel centres, labels from pixel corners: half a pixel apart
        corners = np.round((self.outline * FINENESS - 0.5) * 2**SUBPIXEL_BITS).astype(np.int32)
        cv2.fillPoly(fine, [corners], 255, shift=SUBPIXEL_BITS)
        coarse = cv2.resize(fine, (width, height), interpolation=cv2.INTER_AREA)
        return coarse[..., None].astype(np.float32) / 255


# ---- textures: [height x width x 3, float32, BGR 0..255] -----------------------------------------------------------


def _ramp(rng, height, width):
    """A plane 0..1 [height x width x 1] that rises in a random direction."""
    angle = rng.uniform(0, 2 * np.pi)
    rows, columns = np.mgrid[:height, :width]
    plane = np.cos(angle) * columns + np.sin(angle) * rows
    return ((plane - plane.min()) / np.ptp(plane))[..., None]


def _noise(rng, height, width):
    """Smooth random spots 0..1 [height x width x 1]."""
    cells = int(rng.integers(4, 14))
    coarse = rng.random((cells, cells), dtype=np.float32)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).clip(0, 1)[..., None]


def _stripes(rng, height, width):
    """Parallel bands 0..1 [height x width x 1] with soft edges."""
    bands = rng.uniform(4, 14)
    return 0.5 + 0.5 * np.tanh(3 * np.sin(2 * np.pi * bands * _ramp(rng, height, width)))


def _plain(rng, height, width):
    return np.zeros((height, width, 1))


def texture(rng, height, width, colour, strength):
    """`colour` [3], mixed with a second one (`strength` 0..255 away) by a random pattern."""
    pattern = (_plain, _ramp, _noise, _stripes)[rng.integers(4)](rng, height, width)
    second = (colour + rng.uniform(-strength, strength, 3)).clip(0, 255)
    return (colour + pattern * (second - colour)).astype(np.float32)


# ---- one image -----------------------------------------------------------------------------------------------------


def place_thing(rng, height, width):
    """A random object that lies inside the image."""
    label = int(rng.integers(len(NAMES)))
    low, high = np.log(DIAMETERS)
    radius = np.exp(rng.uniform(low, high)) * min(height, width) / 2
    stretch = np.array([1.0, rng.uniform(0.75, 1.0)])
    angle = rng.uniform(0, 2 * np.pi)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    outline = radius * stretch * (OUTLINES[NAMES[label]] @ turn.T)
    low_corner, high_corner = outline.min(axis=0), outline.max(axis=0)
    shift = rng.uniform(1 - low_corner, np.array([width, height]) - 1 - high_corner)
    return Thing(label, outline + shift)


def place_things(rng, height, width):
    """A random list of objects, from back to front, none hidden by more than MAX_HIDDEN."""
    if rng.random() < EMPTY_SHARE:
        return []
    things, visible = [], []
    for _ in range(rng.integers(1, MAX_OBJECTS + 1)):
        thing = place_thing(rng, height, width)
        mask = thing.mask(height, width)
        remaining = [earlier * (1 - mask) for earlier in visible]
        full = [earlier.mask(height, width).sum() for earlier in things]
        if all(part.sum() >= (1 - MAX_HIDDEN) * whole for part, whole in zip(remaining, full, strict=True)):
            things.append(thing)
            visible = [*remaining, mask]
    return things


def _object_colour(rng, name, behind):
    """A vivid colour [3, BGR] of the class's hue; the first of 20 draws that stands out from `behind` [n x 3]."""
    for _ in range(20):
        hue = (HUES[name] + rng.integers(-HUE_SPREAD, HUE_SPREAD + 1)) % 180
        hsv = np.array([[[hue, rng.integers(140, 256), rng.integers(120, 256)]]], np.uint8)
        colour = cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)[0, 0].astype(np.float64)
        if np.linalg.norm(colour - behind.mean(axis=0)) >= MIN_CONTRAST:
            break
    return colour


def _muted_colour(rng):
    """A colour [3, BGR] near grey."""
    colour = rng.uniform(20, 235, 3)
    return colour.mean() + BACKGROUND_SATURATION * (colour - colour.mean())


def draw_image(rng, size):
    """One image [height x width x 3, uint8, BGR; longer side `size`] and its things."""
    shorter = int(round(size * 0.75))
    height, width = ((size, size), (shorter, size), (size, shorter))[rng.integers(3)]
    things = place_things(rng, height, width)
    image = texture(rng, height, width, _muted_colour(rng), strength=40)
    for thing in things:
        mask = thing.mask(height, width)
        colour = _object_colour(rng, NAMES[thing.label], image[mask[..., 0] > 0.5])
        image += mask * (texture(rng, height, width, colour, strength=45) - image)
    image += rng.normal(0, rng.uniform(1, 7), image.shape)
    return image.round().clip(0, 255).astype(np.uint8), things


# ---- files ---------------------------------------------------------------------------------------------------------


def label_row(thing, height, width, boxes):
    """One YOLO row: `class x y w h` or `class x1 y1 x2 y2 ...`, normalised."""
    if boxes:
        x1, y1, x2, y2 = thing.box_xyxy()
        numbers = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
    else:
        numbers = (thing.outline / (width, height)).ravel()
    return " ".join([str(thing.label), *(f"{number:.6f}" for number in numbers)])


def coco_annotation(thing, image_id, annotation_id):
    x1, y1, x2, y2 = thing.box_xyxy()
    return {
        "id": annotation_id,
        "image_id": image_id,
        "category_id": thing.label,
        "bbox": [round(float(value), 3) for value in (x1, y1, x2 - x1, y2 - y1)],
        "area": round(float(thing.area()), 3),
        "segmentation": [[round(float(value), 3) for value in thing.outline.ravel()]],
        "iscrowd": 0,
    }


def write_split(out, split, count, size, seed, boxes):
    """Write images and labels of one split; return its COCO dictionary and the objects of each class."""
    image_folder, label_folder = out / "images" / split, out / "labels" / split
    image_folder.mkdir(parents=True)
    label_folder.mkdir(parents=True)
    categories = [{"id": index, "name": name} for index, name in enumerate(NAMES)]
    coco = {"info": {"description": "shapes"}, "images": [], "annotations": [], "categories": categories}
    totals = np.zeros(len(NAMES), int)
    for index in progress(range(count), desc=f"drawing {split}", unit="img"):
        rng = np.random.default_rng([seed, SPLITS.index(split), index])
        image, things = draw_image(rng, size)
        height, width = image.shape[:2]
        file = image_folder / f"{index + 1:06d}.jpg"
        file.write_bytes(cv2.imencode(file.suffix, image, [cv2.IMWRITE_JPEG_QUALITY, 92])[1].tobytes())
        rows = [label_row(thing, height, width, boxes) for thing in things]
        (label_folder / f"{file.stem}.txt").write_text("".join(row + "\n" for row in rows))

        coco["images"].append({"id": index + 1, "file_name": file.name, "width": width, "height": height})
        for thing in things:
            coco["annotations"].append(coco_annotation(thing, index + 1, len(coco["annotations"]) + 1))
            totals[thing.label] += 1
    return coco, totals


def _read_stamp(out):
    """What an earlier run wrote about itself; None where nothing is. Raises ValueError on somebody else's folder."""
    if not out.exists():
        if link := link_to_nowhere(out):
            raise ValueError(f"--out {printable(out)}: the link {printable(link)} leads nowhere; name another folder")
        return None
    if not out.is_dir():
        raise ValueError(f"{printable(out)} is a file: name a folder with --out")
    if not any(out.iterdir()):
        return None
    stamp = None
    with suppress(ValueError):
        stamp = read_json(out / STAMP)
    if not isinstance(stamp, dict) or not all(isinstance(stamp.get(split), int) for split in SPLITS):
        raise ValueError(f"{printable(out)} was not made by this tool (it holds no readable {STAMP}): {OTHER_FOLDER}")
    return stamp


def _is_complete(out, stamp):
    """Whether all that is drawn is there; images without a byte do not count."""
    names = [(split, f"{number:06d}") for split in SPLITS for number in range(1, stamp[split] + 1)]
    files = [file for split, name in names if (file := out / "images" / split / f"{name}.jpg").is_file()]
    return (
        bool(stamp.get("complete"))
        and (out / ANNOTATIONS).is_file()
        and len(files) == len(names)
        and all(file.stat().st_size for file in files)
        and all((out / "labels" / split / f"{name}.txt").is_file() for split, name in names)
    )


def _remove_drawn(out):
    """Delete what an earlier run drew, and caches of trainings; ValueError where there are files of somebody else."""
    own = re.compile(rf"(images|labels)/({'|'.join(SPLITS)})/\d{{6,}}\.(jpg|txt)|{ANNOTATIONS}|.*\.cache|(.*/)?\.[^/]*")
    files = [file for folder in FOLDERS for file in sorted((out / folder).rglob("*")) if not file.is_dir()]
    others = [file for file in files if not own.fullmatch(file.relative_to(out).as_posix())]
    if others:
        raise ValueError(f"{printable(out)} is drawn anew, and {counted(len(others), 'file')} in it would be lost "
                         f"({printable(others[0])}): move them away, or {OTHER_FOLDER}")  # fmt: skip
    if links := [out / folder for folder in FOLDERS if (out / folder).is_symlink()]:
        raise ValueError(f"{printable(links[0])} is a link, and would be drawn anew: delete it, or {OTHER_FOLDER}")
    for folder in FOLDERS:
        shutil.rmtree(out / folder, ignore_errors=True)


def make_shapes(out, train=240, val=60, size=160, seed=0, boxes=False):
    """Write the data set to the folder `out` unless it is there already; True if anything was drawn.

    `size` is the longer side in pixels; `boxes` writes box rows instead of polygons. Raises ValueError if `out` is
    somebody else's folder or a number makes no sense.
    """
    if min(train, val) < 1 or size < 32 or seed < 0:
        raise ValueError(f"--train {train} --val {val} --size {size} --seed {seed}: needs 1 image, 32 pixels, seed 0")
    out = Path(out)
    drawing_code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    wanted = {"train": train, "val": val, "size": size, "seed": seed, "boxes": boxes, "code": drawing_code}
    stamp = _read_stamp(out)
    if stamp is not None:
        if {key: stamp.get(key) for key in wanted} == wanted and _is_complete(out, stamp):
            print(f"{printable(out)} is up to date: {train} + {val} images of {size} px, seed {seed}")
            return False
        folder_lock.check_free(out, OTHER_FOLDER)
        _remove_drawn(out)

    out.mkdir(parents=True, exist_ok=True)
    (out / STAMP).write_text(json.dumps({**wanted, "complete": False}))
    folder_lock.own(out, OTHER_FOLDER)
    for split, count in zip(SPLITS, (train, val), strict=True):
        coco, totals = write_split(out, split, count, size, seed, boxes)
        listed = ", ".join(f"{total} {name}s" for name, total in zip(NAMES, totals, strict=True))
        empty = count - len({annotation["image_id"] for annotation in coco["annotations"]})
        print(f"{split}: {count} images ({empty} empty), {totals.sum()} objects: {listed}")
    (out / ANNOTATIONS).parent.mkdir()
    (out / ANNOTATIONS).write_text(json.dumps(coco))
    (out / STAMP).write_text(json.dumps({**wanted, "complete": True}))
    print(f"written to {printable(out)} ({'boxes' if boxes else 'polygons'}, seed {seed})")
    return True


def options_parser():
    parser = argparse.ArgumentParser(description="Draw a small detection data set of textured shapes.")
    parser.add_argument("--out", default="shapes", help="folder to write (default: shapes)")
    parser.add_argument("--train", type=int, default=240, help="number of training images")
    parser.add_argument("--val", type=int, default=60, help="number of validation images")
    parser.add_argument("--size", type=int, default=160, help="longer side of the images in pixels")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same images")
    parser.add_argument("--boxes", action="store_true", help="label rows are boxes instead of polygons")
    return parser


def main(options):
    make_shapes(**vars(options))


if __name__ == "__main__":
    entry.run(main, options_parser().parse_args(), go_on="the same command draws all anew")
