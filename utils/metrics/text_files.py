"""Detections as text files, one for each image (--save-txt)."""

from pathlib import Path

from utils.ops.boxes import xyxy2xywh


class TextFiles:
    """labels/<image stem>.txt: `class x y w h [confidence]`, normalised by the size of the original image.

    An image without detections has an empty file, as in a data set.
    """

    def __init__(self, folder, with_confidence=False):
        self.folder, self.with_confidence = Path(folder), with_confidence
        self.folder.mkdir(parents=True, exist_ok=True)

    def add(self, path, detections, image_shape):
        """Append `detections` [k x 6: x1, y1, x2, y2, confidence, class], pixels of the image of (height, width)."""
        height, width = image_shape
        boxes = xyxy2xywh(detections[:, :4]) / detections.new_tensor([width, height, width, height])
        with (self.folder / f"{Path(path).stem}.txt").open("a") as file:
            for (*_, confidence, class_id), box in zip(detections.tolist(), boxes.tolist(), strict=True):
                columns = (class_id, *box, confidence) if self.with_confidence else (class_id, *box)
                file.write(" ".join(f"{value:g}" for value in columns) + "\n")
