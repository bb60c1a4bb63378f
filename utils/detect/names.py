"""What the words behind --source mean, and by which names the results tell the sources apart."""

import glob
import logging
import os
import re
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from utils.data.images.reading import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from utils.data.labels.image_list import OTHER_IMAGE_SUFFIXES
from utils.metrics.coco_annotations import listing
from utils.metrics.names import image_names
from utils.system.files import counted, printable, read_text, split_lines, stand_in

logger = logging.getLogger(__name__)

STREAM_SCHEMES = ("rtsp://", "rtmp://", "http://", "https://")
END_BYTES = 64  # of a GIF, in which its end mark is; zeros may follow
OTHER_SUFFIXES = (*OTHER_IMAGE_SUFFIXES, "3gp", "asf", "flv", "m2ts", "mts", "ogv", "vob", "webm")
LONGEST_NAME = 100  # letters of the name of a stream, to which results add theirs; signed addresses are longer
NOTHING = np.empty((0, 0, 3), np.uint8)
FORMATS = f"images {', '.join((*IMAGE_SUFFIXES, 'gif'))}; videos {', '.join(VIDEO_SUFFIXES)}"


@dataclass
class Item:
    """A file or a stream: `path` is what opens it, `label` what messages call it, `name` what its results are called.

    `kind` is image, video or stream. `fps` and `num_frames` (0: unknown) of a video are known once it is open.
    """

    path: str
    kind: str
    label: str = ""
    name: str = ""
    position: str = ""
    fps: float = 30.0
    num_frames: int = 1


@dataclass
class Frame:
    """An image [h x w x 3, uint8, BGR] of an item, and the network's input made of it [3 x h x w, uint8, RGB].

    `number` counts the frames of a video or a stream from 1. `is_last` of its item. `fault` says why there is no image.
    `order` counts all frames of the files from 0; those of streams have none, they are used as they come.
    """

    item: Item
    image: np.ndarray = field(default_factory=lambda: NOTHING)
    pixels: np.ndarray = field(default_factory=lambda: NOTHING)
    number: int = 0
    is_last: bool = True
    fault: str = ""
    order: int = -1
    seconds: float = 0.0  # when a stream delivered it

    @property
    def name(self) -> str:
        """What its results are called, unique in a detection."""
        return self.item.name if self.item.kind == "image" else f"{self.item.name}_{self.number}"


def find_items(sources: Sequence[str]) -> list[Item]:
    """The items of all `sources`: streams alone, or images and then videos, each sorted by path.

    Raises ValueError, in one sentence, for a source that does not exist or holds nothing that can be used.
    """
    words = [word for source in sources for word in _words(source)]
    streams = list(dict.fromkeys(word for word in words if _is_stream(word)))
    if streams and len(set(words)) > len(streams):
        raise ValueError(
            f"--source {' '.join(map(printable, sources))} mixes streams and files; detect them in two runs"
        )
    if streams:
        return _with_positions(_named_streams(streams))
    files = _without_repetitions(file for word in words for file in _files(word))
    kinds = {file: _kind(file) for file in files}
    if not any(kinds.values()):
        below = [word for word in words if glob.glob(os.path.join(glob.escape(os.path.expanduser(word)), "*", ""))]
        pattern = os.path.join(glob.escape(below[0]), "**") if below else ""
        hint = f"; folders in it are not searched, '{printable(pattern)}' takes them too" if below else ""
        raise ValueError(
            f"--source {' '.join(map(printable, sources))} has no file of a supported format ({FORMATS}){hint}"
        )
    others = [file for file in files if not kinds[file] and _has_suffix(file, OTHER_SUFFIXES)]
    if others:
        logger.warning("%s ignored: suffix not supported (%s)", counted(len(others), "file"), listing(others))
    items = [Item(file, kind, printable(file)) for kind in ("image", "video") for file in files if kinds[file] == kind]
    names = image_names([item.path for item in items])
    taken = set(names.values())
    for item in items:
        item.name = names[item.path]
        if item.kind == "video" and any(re.fullmatch(rf"{re.escape(item.name)}_\d+", other) for other in taken):
            item.name += Path(item.path).suffix  # a frame of clip.mp4 and the image clip_1.jpg
    return _with_positions(items)


def _without_repetitions(files):
    """`files`, sorted; one that is named by several paths counts once. A link to another file is a file."""
    places = {}
    for file in sorted(files):
        folder, name = os.path.split(file)
        places.setdefault(os.path.join(os.path.realpath(folder), name), file)
    return list(places.values())


def _words(source):
    """A source, or the lines of a list of sources."""
    if not source.lower().endswith(".txt") or os.path.isdir(source):
        return [source]
    if not os.path.isfile(source):
        raise ValueError(f"--source {printable(source)} does not exist; a list has one source a line")
    text = read_text(source)
    if kind := stand_in(text):
        raise ValueError(f"--source {printable(source)} is {kind}")
    lines = [line.strip() for line in split_lines(text)]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise ValueError(f"--source {printable(source)} is empty; a list has one source a line")
    if nested := [line for line in lines if line.lower().endswith(".txt")]:
        raise ValueError(f"{printable(source)} names the list {printable(nested[0])}; a list holds no lists")
    words = [_beside(line, os.path.dirname(source)) for line in lines]
    for word in words:
        if not _is_stream(word) and not _exists(word):
            raise ValueError(f"--source {printable(source)} names {printable(word)}, which does not exist")
    return words


def _beside(line, folder):
    """What a line of a list in `folder` means: a path from there, else from here; also with Windows' backslashes."""
    ways = dict.fromkeys((line, line.replace("\\", "/")))
    exact = [path for way in ways for path in (os.path.join(folder, way), way) if os.path.exists(path)]
    return next(iter(exact), next((way for way in ways if _exists(way)), line))


def _exists(word):
    path = os.path.expanduser(word)
    return os.path.lexists(path) or bool(glob.glob(path, recursive=True))


def _is_stream(word):
    return _is_camera(word) or word.lower().startswith(STREAM_SCHEMES)


def _is_camera(word):
    return word.isascii() and word.isdecimal()


def _files(word):
    """The files that a path or a pattern means; links to nothing stay, to be named as damaged."""
    path = os.path.expanduser(word)
    if os.path.isdir(path):
        found = sorted(glob.glob(os.path.join(glob.escape(path), "*.*")))
    elif os.path.lexists(path):
        if not os.path.isfile(path) and not os.path.islink(path):
            raise ValueError(f"--source {printable(word)} is no file (a pipe or a device)")
        if not _has_suffix(path, (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES, "gif")):
            raise ValueError(f"--source {printable(word)} is of no supported format ({FORMATS})")
        found = [path]
    else:
        found = sorted(glob.glob(path, recursive=True))
        if not found:
            raise ValueError(f"--source {printable(word) if word.strip() else repr(word)} does not exist")
    return [file for file in found if os.path.isfile(file) or os.path.islink(file) and not os.path.isdir(file)]


def _has_suffix(path, suffixes):
    return os.path.splitext("a" + os.path.basename(path))[1][1:].lower() in suffixes  # .jpg alone is one as well


def _kind(path):
    if _has_suffix(path, ("gif",)):
        return "video" if _moves(path) else "image"
    return "image" if _has_suffix(path, IMAGE_SUFFIXES) else "video" if _has_suffix(path, VIDEO_SUFFIXES) else None


def _moves(path):
    """Whether a GIF has several images, or is damaged: they are read one by one then, until the damage."""
    try:
        with Image.open(path) as image:
            return getattr(image, "is_animated", False) or not gif_is_complete(path)
    except Exception:  # Pillow answers broken files with nearly every exception class there is
        return True


def gif_is_complete(path) -> bool:
    """Whether a GIF has its end mark; Pillow makes up what is missing without a word."""
    with Path(path).open("rb") as file:
        file.seek(-min(END_BYTES, os.path.getsize(path)), os.SEEK_END)
        return file.read().rstrip(b"\0").endswith(b";")


def _named_streams(addresses):
    """Items whose labels and names have no user and no password in them; equal names are numbered."""
    items = []
    for address in addresses:
        try:
            parts = urllib.parse.urlsplit(address)
        except ValueError as error:
            raise ValueError(f"--source {printable(address)} is no address ({error})") from error
        label = printable(
            f"camera {address}"
            if _is_camera(address)
            else parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        )
        name = re.sub(r"[^\w.-]+", "_", label).strip("_")[:LONGEST_NAME]
        number = sum(item.name == name or item.name.rpartition("-")[0] == name for item in items)
        items.append(Item(address, "stream", label, f"{name}-{number + 1}" if number else name, num_frames=0))
    return items


def _with_positions(items):
    for number, item in enumerate(items, 1):
        item.position = f"{number}/{len(items)}"
    return items
