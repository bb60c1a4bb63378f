"""`nms.non_max_suppression` for all images of a batch at once on a GPU: the same boxes in the same order."""

from typing import NamedTuple

import torch

from utils.ops.boxes import xywh2xyxy
from utils.ops.nms import CLASS_OFFSET, MAX_CANDIDATES, MAX_DETECTIONS

MAX_SCORES = 1 << 29  # class scores that are looked at together, 1.5 GB in half precision; a batch with more is split


class Detections(NamedTuple):
    """`rows` [images x 300 x 6: x1, y1, x2, y2, confidence, class] float32, best first; `count` [images] are filled."""

    rows: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]  # a tuple has a method of this name, which nobody calls

    @property
    def valid(self):
        """[images x 300] which rows are filled."""
        return torch.arange(self.rows.shape[1], device=self.rows.device) < self.count[:, None]

    def per_image(self):
        """A list of [k x 6], as `non_max_suppression` returns it."""
        return [rows[:count] for rows, count in zip(self.rows, self.count.tolist(), strict=True)]


def stacked(detections):
    """Detections of a list of [k x 6], as the reference returns it; at least one."""
    rows = torch.zeros(len(detections), MAX_DETECTIONS, 6, device=detections[0].device)
    for slots, found in zip(rows, detections, strict=True):
        slots[: len(found)] = found
    return Detections(rows, torch.tensor([len(found) for found in detections], device=rows.device))


class Candidates(NamedTuple):
    """Boxes above the threshold, image after image, best first; equal scores in the order of the predictions."""

    rows: torch.Tensor  # [n x 6] as in Detections
    first: torch.Tensor  # [images] where those of an image begin
    count: torch.Tensor  # type: ignore[assignment]  # [images]


def non_max_suppression(prediction, conf_thres, iou_thres):
    """Detections of `prediction` [images x n x 5 + nc], every class of a box counted (multi-label). Needs Triton."""
    step = max(1, MAX_SCORES // max(prediction[0].numel(), 1)) if len(prediction) else 1
    from utils.fast.nms_triton import suppress  # here: it needs Triton

    found = [find_candidates(part, conf_thres) for part in prediction.split(step)]
    parts = [suppress(*candidates, iou_thres, MAX_DETECTIONS, CLASS_OFFSET) for candidates in found]
    return Detections(*map(torch.cat, zip(*parts, strict=True)))


def find_candidates(prediction, conf_thres):
    """The Candidates of `prediction` [images x n x 5 + nc]; waits for the device once."""
    objectness, classes = prediction[..., 4:5], prediction[..., 5:]
    # stock behaviour: with one class the objectness alone is the score; half predictions are multiplied in half
    scores = objectness if classes.shape[-1] == 1 else classes * objectness
    image, box, label = (scores > conf_thres).nonzero(as_tuple=True)
    score = scores[image, box, label].float()
    order = score.argsort(descending=True, stable=True)
    order = order[image[order].argsort(stable=True)]
    image, box = image[order], box[order]
    boxes_xyxy = xywh2xyxy(prediction[image, box, :4]).float()
    rows = torch.cat((boxes_xyxy, score[order, None], label[order, None].float()), 1)
    edges = torch.searchsorted(image, torch.arange(len(prediction) + 1, device=rows.device))
    return Candidates(rows, edges[:-1], edges.diff().clamp(max=MAX_CANDIDATES))
