"""Score a model on a data set: detections of every image, matched with its labels, as precision, recall and AP."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unicodedata import east_asian_width

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from utils.loss.multi_head import in_float32
from utils.metrics.detection import ConfusionMatrix, DetectionScores, Scores
from utils.metrics.names import class_names
from utils.ops.boxes import scale_coords, xywh2xyxy
from utils.ops.nms import non_max_suppression
from utils.plots import run as plots
from utils.plots.images import MOST_CELLS, output_to_targets, plot_images
from utils.system.progress import progress

logger = logging.getLogger(__name__)

CONF_THRES, IOU_THRES = 0.001, 0.6  # of the NMS in the validation of a training
NAME_WIDTH = 20
HEADER = ("%8s" * 2 + "%10s" * 3 + "%12s") % ("images", "labels", "P", "R", "mAP@.5", "mAP@.5:.95")
ROW = "%8i" * 2 + "%10.3g" * 3 + "%12.3g"


@dataclass
class Evaluation:
    """Scores of a data set, and the mean validation losses (box, obj, cls; zeros where none were computed)."""

    scores: Scores
    losses: Sequence[float]
    times: tuple = ()  # ms an image for inference, NMS and both; empty where they were not measured

    @property
    def results(self) -> tuple:
        """P, R, mAP@.5, mAP@.5:.95, box, obj, cls loss."""
        return self.scores.precision, self.scores.recall, self.scores.map50, self.scores.map, *self.losses

    @property
    def maps(self) -> np.ndarray:
        """[nc] AP of every class; the mean for a class without labels."""
        return self.scores.maps


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader, nc: int, names: Sequence[str], *, conf_thres: float = CONF_THRES,
    iou_thres: float = IOU_THRES, single_cls: bool = False, augment: bool = False, compute_loss: Callable | None = None,
    hybrid: bool = False, v5_metric: bool = False, plot_dir: str | Path | None = None, sinks: Iterable = (),
    gather: Callable[[list], list] = list,
) -> Evaluation:  # fmt: skip
    """Run `model` (in evaluation mode; its device and precision are used) over `loader` and score the detections.

    `compute_loss(maps, targets)` adds the validation losses. `plot_dir` asks for plots there; each of `sinks` is given
    (path, detections, image shape) of every image. With `hybrid` the labels compete with the detections in NMS.
    `gather` makes of a list that of all processes that share the images, in their order.
    """
    weight, names = next(model.parameters()), class_names(names, taken=("background",))
    scores, confusion = DetectionScores(), ConfusionMatrix(nc)
    losses, grids, seconds = [], [], {"inference": 0.0, "nms": 0.0}
    for index, (images, targets, paths, shapes) in enumerate(progress(loader, desc="scoring", unit="batch")):
        images, targets = images.to(weight.device, weight.dtype) / 255, targets.to(weight.device)
        shape = images.shape[2:]
        with timed(seconds, "inference", weight.device):
            predictions, maps = model(images, augment=augment)
        if compute_loss is not None:
            losses.append(compute_loss(in_float32(maps), targets)[1][:3])
        in_pixels = targets * targets.new_tensor([1, 1, shape[1], shape[0], shape[1], shape[0]])
        known = [in_pixels[in_pixels[:, 0] == i, 1:] for i in range(len(images))] if hybrid else ()
        with timed(seconds, "nms", weight.device):
            detections = non_max_suppression(predictions, conf_thres, iou_thres, labels=known, multi_label=True)
        # all that follows happens image by image, on the host
        detections, in_pixels = [rows.cpu() for rows in detections], in_pixels.cpu()
        for i, (rows, path, (original, ratio_pad)) in enumerate(zip(detections, paths, shapes, strict=True)):
            if single_cls:
                rows[:, 5] = 0
            native = to_native(rows, shape, original, ratio_pad)
            labels = in_pixels[in_pixels[:, 0] == i, 1:]
            boxes = scale_coords(shape, xywh2xyxy(labels[:, 1:5]), original, ratio_pad)
            labels = torch.cat((labels[:, :1], boxes), 1)
            scores.add(native, labels)
            confusion.process_batch(native, labels)
            for sink in sinks:
                sink.add(path, native, original)
        if plot_dir and index < 3:
            grids += grids_of(images, targets, detections, paths, names, Path(plot_dir) / f"test_batch{index}")

    times = [1e3 * spent / max(scores.num_images, 1) for spent in seconds.values()]
    losses, scores.images, matrices = gather(losses), gather(scores.images), gather([confusion.matrix])
    confusion.matrix = sum(matrices)
    summary = scores.summary(nc, v5_metric)
    if summary.problem and matrices:  # not what was gathered elsewhere
        logger.warning("Validation: %s", summary.problem)
    if plot_dir:  # what takes longest first
        plots.in_background(plots.plot_confusion_matrix, confusion.matrix, names, plot_dir)
        plots.plot_curves(summary.curves, plot_dir, names, call=plots.in_background)
    for grid in grids:
        plots.in_background(draw_grid, *grid)
    return Evaluation(summary, mean_losses(losses), (*times, sum(times)))


def mean_losses(losses: Sequence[torch.Tensor]) -> list[float]:
    """The mean of the loss items [3] of all batches, summed in their order; zeros of none."""
    total = torch.zeros(3, device=losses[0].device if losses else None)
    for items in losses:
        total += items
    return (total / max(len(losses), 1)).tolist()


@contextmanager
def timed(seconds, stage, device):
    """Adds the time of what happens inside to seconds[stage]; waits for the GPU at both ends."""

    def now():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start = now()
    yield
    seconds[stage] += now() - start


def to_native(detections, network_shape, image_shape, ratio_pad):
    """A copy of `detections` [k x 6] in pixels of the original image."""
    native = detections.clone()
    scale_coords(network_shape, native, image_shape, ratio_pad)
    return native


def grids_of(images, targets, detections, paths, names, stem):
    """What `plot_images` is given for <stem>_labels.jpg and <stem>_pred.jpg: the first images of a batch."""
    pixels = (images[:MOST_CELLS] * 255).byte().cpu().numpy()
    found = output_to_targets(detections[:MOST_CELLS], *reversed(images.shape[2:]))
    true, paths = targets.cpu().clone(), list(paths)  # a loader may use its buffers again
    return [(pixels, rows, paths, f"{stem}_{kind}.jpg", names) for kind, rows in (("labels", true), ("pred", found))]


def draw_grid(*grid):
    """As `plot_images`, but nothing is returned, which would have to be sent back."""
    plot_images(*grid)


def log_scores(scores: Scores, names: Sequence[str], per_class: bool, heads: Iterable = (), title: str = "") -> None:
    """Log the results under a `title`, in one line.

    With `heads` (HeadScores, called by number and name) or `per_class` (classes with labels) it is a table.
    """
    means = scores.precision, scores.recall, scores.map50, scores.map
    rows = [("all", scores.num_labels, *means)]
    rows += [(f"{number}: {head.name}"[:NAME_WIDTH], *head[1:]) for number, head in enumerate(heads)]
    if per_class:
        columns = (scores.classes, scores.class_precision, scores.class_recall, scores.class_ap50, scores.class_ap)
        labels = class_names(names, taken=[row[0] for row in rows], longest=NAME_WIDTH)
        rows += [
            (labels[c], scores.labels_per_class[c], p, r, ap50, ap) for c, p, r, ap50, ap in zip(*columns, strict=True)
        ]
    if len(rows) == 1:
        logger.info("%s: P %.3g R %.3g mAP@.5 %.3g mAP@.5:.95 %.3g", title, *means)
        return
    logger.info("%s", right_aligned(" ".join(title.split()), NAME_WIDTH) + HEADER)
    for name, *numbers in rows:
        logger.info("%s", right_aligned(name, NAME_WIDTH) + ROW % (scores.num_images, *numbers))


def right_aligned(text, width):
    """`text` at the end of `width` columns of a terminal, where a Chinese, Japanese or Korean letter takes two."""
    taken = sum(1 + (east_asian_width(letter) in "WF") for letter in text)
    return " " * (width - taken) + text
