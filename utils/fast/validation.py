"""--fast-val: validation that leaves detections on the device, and works on all images of a batch at once.

The same detections as `evaluate`, matched by the same rules: given equal network outputs the scores are equal. No
plots, no confusion matrix, no files; who wants those takes `evaluate`. What depends on the labels alone is kept
from one validation to the next, because the batches of a validation set never change.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from utils.engine.evaluate import CONF_THRES, IOU_THRES, Evaluation, mean_losses
from utils.fast import metrics
from utils.fast import nms as nms_batched
from utils.loss.batched import BatchedHeadsLoss, BatchedLoss
from utils.loss.multi_head import has_several_heads, in_float32, level_shapes
from utils.metrics.detection import IOU_THRESHOLDS, Scores
from utils.ops import nms
from utils.ops.boxes import xywh2xyxy
from utils.system.compilers import why_no_kernels
from utils.system.progress import progress


@dataclass
class Truth:
    """What is known of a batch before its detections; all but `targets` and `classes` on the device."""

    targets: torch.Tensor  # [n x 6] as the loader gave them
    classes: np.ndarray  # [n]
    labels: torch.Tensor  # [images x m x 5: class, x1, y1, x2, y2], in pixels of the files
    num_labels: torch.Tensor  # [images]
    pad: torch.Tensor  # [images x 1 x 4] pixels that the letterbox added on the left and above
    gain: torch.Tensor  # [images x 1 x 1] by which it scaled
    limit: torch.Tensor  # [images x 1 x 4] width and height of the file
    candidate_sets: tuple = ()  # of the loss

    def to_native(self, boxes_xyxy):
        """Boxes [images x k x 4] in pixels of the network input to pixels of the files, clipped to them."""
        return ((boxes_xyxy - self.pad) / self.gain).clamp(min=0).minimum(self.limit)


class FastValidation:
    """Called once for every validation of a run, always with the same loader.

    `fuse` makes of a model what is called in its place; it may take images as bytes (`takes_bytes`).
    """

    def __init__(self, fuse=lambda model: model):
        self.truths, self.loss, self.fuse = {}, None, fuse
        self.model = self.network = None

    def fused_by(self, fuse):
        """A new one with another `fuse`."""
        return FastValidation(fuse)

    @torch.no_grad()
    def __call__(
        self, model, loader, nc, names=(), *, conf_thres=CONF_THRES, iou_thres=IOU_THRES, single_cls=False,
        compute_loss=None, v5_metric=False, gather=list,
    ):  # fmt: skip
        """As `evaluate` with the same arguments; returns an Evaluation."""
        weight = next(model.parameters())
        layout = torch.channels_last if weight.is_cuda else torch.contiguous_format
        if model is not self.model:  # mostly it is the same one, with new weights where the old ones were
            if weight.is_cuda:  # a copy, which may be changed; on a CPU it is the average itself
                model.to(memory_format=layout)
            self.model, self.network = model, self.fuse(model).eval()
        self.loss = _batched(compute_loss)
        with without_search():
            found, losses = self._pass(weight, loader, layout, conf_thres, iou_thres, single_cls)
        found.batches = gather(found.batches)
        return Evaluation(found.scores(nc, v5_metric), mean_losses(gather(losses)))

    def _pass(self, weight, loader, layout, conf_thres, iou_thres, single_cls):
        """(Found, the loss items [3] of each batch). `weight` is one of the model's."""
        found, losses = Found(weight.device), []
        for index, (images, targets, _, shapes) in enumerate(progress(loader, desc="scoring", unit="batch")):
            images = images.to(weight.device, non_blocking=True)
            if not getattr(self.network, "takes_bytes", False):
                images = images.to(weight.dtype, memory_format=layout) / 255
            predictions, maps = self.network(images)
            truth = self._truth(index, targets, shapes, images, maps)
            if self.loss:
                losses.append(self.loss.compute(in_float32(maps), truth.candidate_sets)[1][:3])
            detections = detect(predictions, conf_thres, iou_thres)
            if single_cls:
                detections.rows[..., 5] = 0
            found.add(detections, truth)
        return found, losses

    def _truth(self, index, targets, shapes, images, maps):
        """The Truth of batch number `index`, made anew only if its targets are not those of last time."""
        targets = targets.cpu()
        known = self.truths.get(index)
        if known is None or not torch.equal(known.targets, targets):
            known = make_truth(targets, shapes, tuple(images.shape[2:]), images.device)
            if self.loss:
                candidate_sets = self.loss.prepare(known.targets, level_shapes(maps))
                known.candidate_sets = tuple(candidates.to(images.device) for candidates in candidate_sets)
            self.truths[index] = known
        return known


def detect(predictions, conf_thres, iou_thres):
    """Detections of `predictions` [images x n x 5 + nc]; without a GPU and Triton image by image."""
    if why_no_kernels(predictions.device) is None:
        return nms_batched.non_max_suppression(predictions, conf_thres, iou_thres)
    return nms_batched.stacked(nms.non_max_suppression(predictions, conf_thres, iou_thres, multi_label=True))


@contextmanager
def without_search():
    """Without cuDNN's search for the fastest kernels, which takes seconds for each of the many shapes of rectangular
    batches, more than a validation of few batches can win back."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _batched(compute_loss):
    """The batched form of a reference loss; None of None."""
    if compute_loss is None:
        return None
    model = SimpleNamespace(model=compute_loss.layers, hyp=compute_loss.hyp, gr=compute_loss.gr)
    return BatchedHeadsLoss(model, BatchedLoss) if has_several_heads(model) else BatchedLoss(model)


def make_truth(targets, shapes, network_shape, device):
    """The Truth of `targets` [n x 6: image, class, x, y, w, h normalised]; `shapes` of the images as the loader gives
    them, `network_shape` (height, width)."""
    targets = targets.clone()  # the buffers of a batch are used again
    pad = torch.tensor([(*pad, *pad) for _, (_, pad) in shapes], dtype=torch.float32)
    # stock behaviour: the gain of the height for both axes
    gain = torch.tensor([ratio[0] for _, (ratio, _) in shapes], dtype=torch.float32)
    limit = torch.tensor([(width, height) * 2 for (height, width), _ in shapes], dtype=torch.float32)
    height, width = network_shape
    image = targets[:, 0].long()
    boxes = xywh2xyxy(targets[:, 2:6] * targets.new_tensor((width, height, width, height)))
    boxes = ((boxes - pad[image]) / gain[image, None]).clamp(min=0).minimum(limit[image])

    num_labels = torch.bincount(image, minlength=len(shapes))
    order = image.argsort(stable=True)
    slot = torch.arange(len(image)) - (num_labels.cumsum(0) - num_labels)[image[order]]
    labels = torch.zeros(len(shapes), int(num_labels.max()) if len(image) else 0, 5)
    labels[image[order], slot] = torch.cat((targets[order, 1:2], boxes[order]), 1)
    on_device = [part.to(device) for part in (labels, num_labels, pad[:, None], gain[:, None, None], limit[:, None])]
    return Truth(targets, targets[:, 1].numpy(), *on_device)


class Found:
    """The detections of a data set, batch after batch, with what is right about them; stays on the device.

    `batches` has an entry for each: confidence and class [images x k x 2], what is right [images x k x thresholds],
    which of them count [images x k], and the classes of the labels.
    """

    def __init__(self, device=None):
        self.device, self.batches = device, []

    def add(self, detections, truth):
        """Take in the Detections of a batch, in pixels of the network input, and its Truth."""
        rows, valid = detections.rows, detections.valid
        rows = torch.cat((truth.to_native(rows[..., :4]), rows[..., 4:]), 2)
        correct = metrics.match(rows, valid, truth.labels, truth.num_labels)
        self.batches.append((rows[..., 4:], correct, valid, truth.classes))

    def scores(self, nc, v5_metric=False):
        """Scores of all batches, for a data set of `nc` classes."""
        *parts, classes = zip(*self.batches, strict=True) if self.batches else [()] * 4
        target_cls = np.concatenate([np.zeros(0, np.float32), *classes])
        if self.batches:
            rows, correct, valid = (torch.cat(part).to(self.device) for part in parts)
            num_images, correct, (conf, pred_cls) = len(valid), correct[valid], rows[valid].T
        else:
            num_images, conf, pred_cls = 0, torch.zeros(0), torch.zeros(0)
            correct = torch.zeros(0, len(IOU_THRESHOLDS), dtype=bool)
        curves = metrics.precision_recall(correct, conf, pred_cls, target_cls, v5_metric)
        labels_per_class = np.bincount(target_cls.astype(np.int64), minlength=nc)
        return Scores(num_images, len(conf), labels_per_class, curves)
