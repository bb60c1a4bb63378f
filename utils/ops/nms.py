"""Non-maximum suppression: from the network's decoded output to a list of detections for each image."""

import functools
import logging
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch

from utils.ops.boxes import xywh2xyxy

logger = logging.getLogger(__name__)

MAX_CANDIDATES = 30_000  # boxes of one image that enter the suppression
MAX_DETECTIONS = 300  # boxes of one image that leave it
CLASS_OFFSET = 4096  # pixels between the copies of the plane on which the classes are suppressed
SLOW_SECONDS = 10.0


def non_max_suppression(
    prediction, conf_thres=0.25, iou_thres=0.45, classes=None, agnostic=False, multi_label=False, labels=()
):
    """Detections of each image: a list of float32 tensors [k x 6: x1, y1, x2, y2, confidence, class], best first.

    `prediction` [images x n x 5 + nc: x, y, w, h in pixels, objectness, class scores] is not modified. `classes` keeps
    only these ids; `agnostic` lets boxes of different classes suppress each other; `multi_label` gives a box every
    class above `conf_thres` instead of its best one. `labels` holds known boxes of each image [m x 5: class, x, y, w, h
    in pixels] that compete with the predictions at full confidence.
    """
    start = time.perf_counter()
    detections = []
    for index, rows in enumerate(prediction):
        rows = rows[rows[:, 4] > conf_thres]
        if len(labels) and len(labels[index]):
            rows = torch.cat((rows, _label_rows(labels[index], rows)))
        candidates = _score(rows, conf_thres, multi_label)
        if classes is not None:
            candidates = candidates[torch.isin(candidates[:, 5], candidates.new_tensor(classes))]
        detections.append(_suppress(candidates, iou_thres, agnostic))
    if time.perf_counter() - start > SLOW_SECONDS:
        _warn_slow()
    return detections


def _label_rows(labels, like):
    """Known boxes [m x 5: class, x, y, w, h] as prediction rows [m x 5 + nc] that are certain of their class."""
    rows = like.new_zeros(len(labels), like.shape[1])
    rows[:, :4] = labels[:, 1:5]
    rows[:, 4] = 1
    rows[torch.arange(len(labels)), 5 + labels[:, 0].long()] = 1
    return rows


def _score(rows, conf_thres, multi_label):
    """Prediction rows [n x 5 + nc] to candidates [k x 6: x1, y1, x2, y2, score, class], float32, in row order."""
    num_classes = rows.shape[1] - 5
    boxes_xyxy = xywh2xyxy(rows[:, :4])
    # stock behaviour: with one class the objectness alone is the score; half predictions are multiplied in half
    scores = rows[:, 4:5] if num_classes == 1 else rows[:, 5:] * rows[:, 4:5]
    if multi_label and num_classes > 1:
        box, label = (scores > conf_thres).nonzero(as_tuple=True)
        best = scores[box, label]
    else:
        best, label = scores.max(1)
        box = (best > conf_thres).nonzero().flatten()
        best, label = best[box], label[box]
    return torch.cat((boxes_xyxy[box].float(), best[:, None].float(), label[:, None].float()), 1)


def _suppress(candidates, iou_thres, agnostic):
    """The at most `MAX_DETECTIONS` rows of `candidates` [n x 6] that no better one overlaps beyond `iou_thres`."""
    if len(candidates) > MAX_CANDIDATES:
        candidates = candidates[candidates[:, 4].argsort(descending=True, stable=True)[:MAX_CANDIDATES]]
    boxes_xyxy = candidates[:, :4]
    if not agnostic:
        # stock behaviour: a fixed offset, so on inputs above 4096 pixels neighbouring classes can meet
        boxes_xyxy = boxes_xyxy + candidates[:, 5:6] * CLASS_OFFSET
    return candidates[_operator()(boxes_xyxy, candidates[:, 4], iou_thres)[:MAX_DETECTIONS]]


@functools.cache
def _operator():
    """torchvision's nms. Its library is loaded alone if it can be: all of the package takes seconds to import."""
    spec = find_spec("torchvision")
    for path in sorted(Path(spec.origin).parent.glob("_C*")) if spec and spec.origin else ():
        with suppress(OSError, AttributeError):
            torch.ops.load_library(str(path))
            return torch.ops.torchvision.nms
    from torchvision.ops import nms

    return nms


@functools.cache
def _warn_slow():
    """Say it once in a process; the images are all processed nevertheless."""
    logger.warning(
        "non-maximum suppression took more than %g s for one batch: raise --conf-thres or lower --batch-size",
        SLOW_SECONDS,
    )
