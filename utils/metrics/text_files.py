"""Detections as text files, one for each image (--save-txt)."""

import logging
import os
from pathlib import Path

from utils.metrics.names import image_names
from utils.ops.boxes import xyxy2xywh
from utils.system.files import atomic_write, printable, remove_leftovers

logger = logging.getLogger(__name__)


class TextFiles:
    """labels/<name>.txt of each image: `class x y w h [confidence]`, normalised by the size of the original image.

    The name is the stem of the image, or where stems are not unique more of its path: see `image_names`. An image
    without detections has an empty file, as in a data set. `label_files` of the data set are never written over.
    """

    def __init__(self, folder, image_files, with_confidence=False, label_files=()):
        self.folder, self.with_confidence = Path(folder), with_confidence
        self.files = {path: self.folder / f"{name}.txt" for path, name in image_names(image_files).items()}
        written = {os.path.realpath(file) for file in self.files.values()}
        if any(os.path.realpath(file) in written for file in label_files):
            raise ValueError(f"{printable(folder)} holds labels of the data set; choose another --project or --name")
        if next(self.folder.rglob("*.txt"), None):
            logger.warning("%s has text files of an earlier test: those of the same images are replaced", folder)
        for parent in {file.parent for file in self.files.values()} | {self.folder}:
            parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(parent)  # of a test that was killed

    def add(self, path, detections, image_shape):
        """Write `detections` [k x 6: x1, y1, x2, y2, confidence, class], pixels of the image of (height, width)."""
        write_rows(self.files[str(path)], detections, image_shape, self.with_confidence)


def write_rows(path, detections, image_shape, with_confidence=False):
    """Write a text file of `detections` [k x 6, as in `TextFiles.add`], a line each, in place of an older one."""
    height, width = image_shape
    boxes = xyxy2xywh(detections[:, :4]) / detections.new_tensor([width, height, width, height])
    with atomic_write(path, "w") as file:
        for (*_, confidence, class_id), box in zip(detections.tolist(), boxes.tolist(), strict=True):
            columns = (class_id, *box, confidence) if with_confidence else (class_id, *box)
            file.write(" ".join(f"{value:g}" for value in columns) + "\n")
