"""From the network's input to detections in pixels of the original images, in half precision where that works."""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from utils.ops.boxes import scale_coords
from utils.ops.nms import non_max_suppression

logger = logging.getLogger(__name__)


@dataclass
class Thresholds:
    """What NMS keeps: `confidence`, `iou`, `classes` (ids, or None for all), `agnostic` of the class."""

    confidence: float = 0.25
    iou: float = 0.45
    classes: Sequence[int] | None = None
    agnostic: bool = False


class Predictor:
    """Runs `model` (evaluation mode) on its device; `half` None: in half precision on a GPU."""

    def __init__(
        self, model: nn.Module, thresholds: Thresholds, half: bool | None = False, augment: bool = False
    ) -> None:
        self.device = next(model.parameters()).device
        if half and self.device.type != "cuda":
            logger.warning("--half has no effect on a %s: float32 is used", self.device.type.upper())
        self.half = half is not False and self.device.type == "cuda"
        self.full = model.float()
        self.model = copy.deepcopy(self.full).half() if self.half else self.full
        self.thresholds, self.augment = thresholds, augment

    @torch.inference_mode()
    def __call__(self, pixels: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Detections [k x 6: x1, y1, x2, y2, confidence, class] of inputs [3 x h x w, uint8, RGB] of one shape.

        One tensor each, in pixels of the input, float32, on the CPU, best first.
        """
        images = torch.from_numpy(np.stack(pixels)).to(self.device)
        predictions = self._forward(images)
        if self.half and not predictions.isfinite().all():
            logger.warning("half precision gives NaN on this GPU, as on a GTX 16xx: float32 is used (--no-half)")
            self.half, self.model = False, self.full  # whose weights were never rounded
            predictions = self._forward(images)
        return suppress(predictions, self.thresholds)

    def _forward(self, images):
        images = (images.half() if self.half else images.float()) / 255
        return self.model(images, augment=self.augment)[0]


def suppress(predictions: torch.Tensor, thresholds: Thresholds) -> list[torch.Tensor]:
    """The detections of each image of `predictions` [b x n x 5 + nc], on the CPU; see `non_max_suppression`."""
    keep = predictions[..., 4] > thresholds.confidence
    counts = keep.sum(1).tolist()
    rows = predictions[keep].cpu()  # one transfer: the host waits for the GPU once, not in every step of every image
    return non_max_suppression(
        rows.split(counts), thresholds.confidence, thresholds.iou, thresholds.classes, thresholds.agnostic
    )


def to_original(detections: torch.Tensor, input_shape: Sequence[int], image_shape: Sequence[int]) -> torch.Tensor:
    """The finite `detections` [k x 6] of an input (height, width), in pixels of the image (height, width)."""
    detections = detections[detections.isfinite().all(1)]
    return scale_coords(input_shape[:2], detections, image_shape[:2])
