"""What a detection leaves behind: pictures and videos with boxes, labels, tables, crops. Each takes frame by frame.

A writer has `add(frame, detections)`, detections [k x 6: x1, y1, x2, y2, confidence, class] in pixels of the frame's
image, best first, on the CPU; and `close()`, which is called in any case.
"""

import csv
import json
import logging
import os
import re
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import torch

from utils.data.images.reading import IMAGE_SUFFIXES
from utils.data.stream import opencv_path
from utils.detect.names import NOTHING, Frame, Item
from utils.metrics.coco import detection_rows
from utils.metrics.text_files import write_rows
from utils.plots.images import BoxStyle, class_name, draw_detections
from utils.system.files import atomic_write, printable, short_name

logger = logging.getLogger(__name__)

WRITABLE = tuple(suffix for suffix in IMAGE_SUFFIXES if suffix not in ("dng", "mpo"))
MAX_GAP = 1.0  # seconds of a stream that are filled with its last image
MAX_SIDE = 8190  # pixels of an mp4
WAITING = 64  # images that may wait to be drawn and written


def counts_text(class_ids: Sequence[float], names: Sequence) -> str:
    """`2 persons, 1 bus`, in the order of the class ids; `nothing` without any."""
    counts = sorted(Counter(int(class_id) for class_id in class_ids).items())
    return ", ".join(f"{n} {class_name(names, c)}{'s' * (n > 1)}" for c, n in counts) or "nothing"


def write_image(path: Path, image: np.ndarray) -> None:
    """Write `image` [h x w x 3, uint8, BGR] whole or not at all, in the format of the suffix; any path works."""
    done, data = cv2.imencode(path.suffix, image)
    if not done:
        raise ValueError(f"{printable(path)} cannot be encoded as {path.suffix[1:]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(data.tobytes())


class Pictures:
    """Images and videos with boxes in `folder`, drawn and written in threads; videos and streams are mp4 files."""

    def __init__(self, folder: Path, names: Sequence, style: BoxStyle = BoxStyle(), with_counts: bool = False):
        self.folder, self.names, self.style, self.with_counts = folder, names, style, with_counts
        self.pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "write")
        self.video_pool = ThreadPoolExecutor(1, "write")  # its frames have an order
        self.pending: deque[Future] = deque()
        self.videos: dict[str, Video] = {}

    def add(self, frame: Frame, detections: torch.Tensor) -> None:
        pool, task = (self.pool, self._save) if frame.item.kind == "image" else (self.video_pool, self._append)
        self.pending.append(pool.submit(task, frame, detections))
        while len(self.pending) > WAITING:
            self.pending.popleft().result()

    def draw(self, frame: Frame, detections: torch.Tensor) -> np.ndarray:
        caption = counts_text(detections[:, 5].tolist(), self.names) if self.with_counts else ""
        return draw_detections(frame.image, detections, self.names, self.style, caption)

    def _save(self, frame, detections):
        write_image(self.path_of(frame.item), self.draw(frame, detections))

    def _append(self, frame, detections):
        name = frame.item.name
        if name not in self.videos:
            self.videos[name] = Video(self.path_of(frame.item), frame.item, frame.image.shape)
        self.videos[name].add(self.draw(frame, detections), frame.seconds)
        if frame.is_last:
            self.videos.pop(name).close()

    def path_of(self, item: Item) -> Path:
        """Where the picture or video of an item goes, never over the item itself."""
        suffix = ".mp4"
        if item.kind == "image":
            suffix = Path(item.path).suffix
            suffix = suffix if suffix[1:].lower() in WRITABLE else ".jpg"
        has_own = Path(item.name).name == Path(item.path).name and item.name.endswith(suffix)
        path = self.folder / (item.name if has_own else f"{item.name}{suffix}")
        if path.exists() and os.path.realpath(path) == os.path.realpath(item.path):
            raise ValueError(f"{printable(path)} would be written over; choose another --project or --name")
        return path

    def close(self) -> None:
        """Wait for all pictures and end the videos; raises the first error of a thread after that."""
        self.pool.shutdown()
        self.video_pool.shutdown()
        for video in self.videos.values():
            video.close()
        for future in self.pending:
            future.result()


class Video:
    """An mp4 file in the rate of its source; images of another size than the first one are scaled to that.

    A stream is written in its own time: an image that stayed for longer is repeated, up to MAX_GAP seconds.
    """

    def __init__(self, path: Path, item: Item, shape: Sequence[int]):
        self.size, self.fps, self.is_live = size_of_video(shape), rate_of_video(item.fps), item.kind == "stream"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.writer = cv2.VideoWriter(opencv_path(path), cv2.VideoWriter.fourcc(*"mp4v"), self.fps, self.size)
        if not self.writer.isOpened():
            raise ValueError(f"{printable(path)}: OpenCV cannot write a video of {self.size} pixels there")
        self.due, self.image = 0.0, NOTHING

    def add(self, image: np.ndarray, seconds: float = 0.0) -> None:
        if image.shape[1::-1] != self.size:
            image = cv2.resize(image, self.size)
        if self.is_live and self.image.size:
            self.due = max(self.due, seconds - MAX_GAP)
            while self.due + 1 / self.fps < seconds:
                self.writer.write(self.image)
                self.due += 1 / self.fps
        self.due = self.due + 1 / self.fps if self.image.size else seconds
        self.image = image
        self.writer.write(image)

    def close(self) -> None:
        self.writer.release()


def size_of_video(shape: Sequence[int]) -> tuple[int, int]:
    """(width, height) of an mp4 of images [h x w x ...]: theirs, unless MPEG-4 has no such size."""
    gain = min(1.0, MAX_SIDE / max(shape[:2]))
    return max(2, int(shape[1] * gain)), max(2, int(shape[0] * gain))


def rate_of_video(fps: float) -> float:
    """`fps` with as many decimals as MPEG-4 can have: it keeps a rate as a fraction of numbers up to 65535."""
    digits = next((digits for digits in (3, 2, 1) if fps * 10**digits <= 65535), 0)
    return max(round(fps, digits), 0.01)


class LabelFiles:
    """labels/<name>.txt of each image, labels/<name>_<frame>.txt of a video: the rows of `metrics.text_files`."""

    def __init__(self, folder: Path, with_confidence: bool = False):
        self.folder, self.with_confidence = folder, with_confidence
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, frame: Frame, detections: torch.Tensor) -> None:
        path = self.folder / file_name(frame.name, ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, detections, frame.image.shape[:2], self.with_confidence)

    def close(self) -> None:
        """Nothing is left open."""


class CsvFile:
    """A table with a row for each detection; corners in pixels."""

    COLUMNS = ("source", "frame", "class", "name", "confidence", "x1", "y1", "x2", "y2", "width", "height")

    def __init__(self, path: Path, names: Sequence):
        self.names = names
        self.file = path.open("w", newline="", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
        self.table = csv.writer(self.file)
        self.table.writerow(self.COLUMNS)

    def add(self, frame: Frame, detections: torch.Tensor) -> None:
        source = frame.item.label if frame.item.kind == "stream" else frame.item.path
        height, width = frame.image.shape[:2]
        for *box, confidence, class_id in detections.tolist():
            corners = [f"{value:.2f}" for value in box]
            name = str(self.names[int(class_id)])
            self.table.writerow(
                (source, frame.number, int(class_id), name, f"{confidence:.5f}", *corners, width, height)
            )
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class JsonFile:
    """All detections in COCO's result format, with the names of image (and frame) and class beside their numbers.

    `category_ids` [class id -> category id]. An image whose name is a number has that as its id, else its name; so have
    all where two names are one number (1 and 01).
    """

    def __init__(self, path: Path, names: Sequence, category_ids: Sequence[int]):
        self.path, self.names, self.category_ids, self.rows = path, names, category_ids, []  # type: ignore[var-annotated]

    def add(self, frame: Frame, detections: torch.Tensor) -> None:
        rows = detection_rows(detections, frame.name, self.category_ids)
        for row, class_id in zip(rows, detections[:, 5].tolist(), strict=True):
            self.rows.append(row | {"file_name": frame.item.label, "name": str(self.names[int(class_id)])})

    def close(self) -> None:
        image_names = {row["image_id"] for row in self.rows}
        numbers = {name: int(name) for name in image_names if name.isdecimal()}
        ids = numbers if len(set(numbers.values())) == len(numbers) else {}
        with atomic_write(self.path, "w") as file:
            json.dump([row | {"image_id": ids.get(row["image_id"], row["image_id"])} for row in self.rows], file)


class Crops:
    """crops/<class>/<image>_<k>.jpg: detection k (from 1, the best one) of each image, without its box.

    They take the place of those that an earlier detection left of the same image.
    """

    def __init__(self, folder: Path, names: Sequence):
        self.folder, self.names = folder, names
        self.earlier: dict[str, list[Path]] = {}  # by the name of the image
        for path in folder.glob("*/**/*_*.jpg"):
            image_name, _, number = Path(*path.relative_to(folder).parts[1:]).with_suffix("").as_posix().rpartition("_")
            if number.isdecimal():
                self.earlier.setdefault(image_name, []).append(path)

    def add(self, frame: Frame, detections: torch.Tensor) -> None:
        for path in self.earlier.pop(frame.name, ()):
            path.unlink(missing_ok=True)
        for number, (*box, _, class_id) in enumerate(detections.tolist(), 1):
            crop = cut(frame.image, box)
            if crop.size:
                folder = self.folder / folder_name(self.names[int(class_id)])
                write_image(folder / file_name(frame.name, f"_{number}.jpg"), crop)

    def close(self) -> None:
        """Nothing is left open."""


def folder_name(name: object) -> str:
    """The name of a class as that of a folder, on any system."""
    return short_name(re.sub(r"[^\w. -]", "_", str(name)).strip(". ") or "_")


def file_name(image_name: str, end: str) -> str:
    """The file of a result of an image, which may have a folder in its name, on any file system."""
    folder, name = os.path.split(image_name)
    return os.path.join(folder, short_name(name, end))


def cut(image: np.ndarray, box_xyxy: Sequence[float]) -> np.ndarray:
    """The part [h x w x 3] of `image` in a box, by whole pixels."""
    x1, y1, x2, y2 = (max(round(value), 0) for value in box_xyxy)
    return image[y1:y2, x1:x2]
