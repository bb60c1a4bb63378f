"""What a hub model found, as scripts use it: boxes in four forms, printed, drawn, saved, cut out, as tables."""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from utils.detect.writers import counts_text, cut, file_name, folder_name, write_image
from utils.metrics.names import class_names
from utils.ops.boxes import xyxy2xywh
from utils.plots.images import class_name, draw_detections
from utils.system.files import increment_path

CORNERS, CENTRE = ("xmin", "ymin", "xmax", "ymax"), ("xcenter", "ycenter", "width", "height")


class HubResults:
    """Detections of a list of images.

    imgs, the images [h x w x 3, uint8, RGB]; pred and xyxy, xywh, xyxyn, xywhn: a tensor [k x 6: box, confidence,
    class] each, best first, in pixels or normalised (n); names; files, a file name each; n images; t, ms an image for
    pre-process, inference, NMS; s, the shape of the network's input.
    """

    def __init__(self, imgs: Sequence, pred: Sequence, files: Sequence[str], times: Sequence[float], names, shape):
        self.imgs, self.pred, self.files, self.names = list(imgs), list(pred), list(files), names
        self._originals = self.imgs
        self.n, self.t, self.s = len(self.imgs), tuple(times), tuple(shape)
        self.xyxy = self.pred
        self.xywh = [xyxy2xywh(rows) for rows in self.pred]
        sides = [
            rows.new_tensor([*image.shape[1::-1], *image.shape[1::-1], 1, 1])
            for image, rows in zip(self.imgs, self.pred, strict=True)
        ]
        self.xyxyn = [rows / side for rows, side in zip(self.xyxy, sides, strict=True)]
        self.xywhn = [rows / side for rows, side in zip(self.xywh, sides, strict=True)]

    def __len__(self):
        return self.n

    def __str__(self):
        lines = [
            f"image {k}/{self.n}: {image.shape[0]}x{image.shape[1]} {counts_text(rows[:, 5].tolist(), self.names)}"
            for k, (image, rows) in enumerate(zip(self._originals, self.pred, strict=True), 1)
        ]
        times = "{:.1f}ms pre-process, {:.1f}ms inference, {:.1f}ms NMS per image".format(*self.t)
        return "\n".join([*lines, f"Speed: {times} at shape {self.s}"])

    def print(self) -> None:
        """Print a line for each image, and the times."""
        print(self)

    def render(self) -> list[np.ndarray]:
        """Copies of the images with their boxes, RGB, which become `imgs`; the arrays given stay as they are."""
        drawn = [
            draw_detections(image[..., ::-1], rows, self.names)[..., ::-1].copy()
            for image, rows in zip(self._originals, self.pred, strict=True)
        ]
        self.imgs = drawn
        return drawn

    def show(self) -> None:
        """Open every image with its boxes in the viewer of the system."""
        for image in self.render():
            Image.fromarray(image).show()

    def save(self, save_dir: str | Path = "runs/hub/exp") -> Path:
        """Write the images with their boxes to a folder, `save_dir` or with the next number; returns it."""
        folder = increment_path(save_dir)
        for name, image in zip(self._unique_files(), self.render(), strict=True):
            write_image(folder / name, image[..., ::-1])
        return folder

    def crop(self, save: bool = True, save_dir: str | Path = "runs/hub/exp") -> list[dict]:
        """The objects found: box [4, xyxy], conf, cls, label and im [h x w x 3, RGB]; with `save` also as files."""
        folder = increment_path(save_dir) if save else None
        crops = []
        for name, image, rows in zip(self._unique_files(), self._originals, self.pred, strict=True):
            for number, (*box, conf, cls) in enumerate(rows.tolist(), 1):
                label, part = class_name(self.names, cls), cut(image, box)
                crops.append({"box": box, "conf": conf, "cls": int(cls), "label": label, "im": part})
                if folder and part.size:
                    file = folder / "crops" / folder_name(label) / file_name(Path(name).stem, f"_{number}.jpg")
                    write_image(file, part[..., ::-1])
        return crops

    def pandas(self) -> "HubResults":
        """A copy whose xyxy, xyxyn, xywh and xywhn are lists of data frames, with the name of the class in the end."""
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise ImportError("results.pandas() needs pandas: pip install pandas") from error
        tables = copy.copy(self)
        for form in ("xyxy", "xyxyn", "xywh", "xywhn"):
            columns = [*(CORNERS if "xyxy" in form else CENTRE), "confidence", "class", "name"]
            rows = [
                [[*box, conf, int(cls), class_name(self.names, cls)] for *box, conf, cls in found.tolist()]
                for found in getattr(self, form)
            ]
            setattr(tables, form, [DataFrame(table, columns=columns) for table in rows])
        return tables

    def tolist(self) -> list["HubResults"]:
        """Results of each image alone."""
        parts = zip(self._originals, self.pred, self.files, strict=True)
        return [HubResults([image], [rows], [file], self.t, self.names, self.s) for image, rows, file in parts]

    def _unique_files(self):
        """`files`, those of equal names with the number of the image: `a (3).jpg`."""
        return [f"{stem}.jpg" for stem in class_names([Path(file).stem for file in self.files], form=str.casefold)]
