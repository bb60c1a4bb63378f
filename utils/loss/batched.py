"""The losses of `criterion` for a whole batch at once: equal values, few kernels, no waiting for a GPU (--fast-loss).

    BatchedLoss        as ComputeLoss
    BatchedLossOTA     as ComputeLossOTA
    BatchedLossAuxOTA  as ComputeLossAuxOTA
    BatchedHeadsLoss   as HeadsLoss

They are called in the same way, best with `targets` on the host: what does not depend on predictions is worked out
there (`prepare`) while the GPU is still busy with the model. The rest (`compute`) has fixed shapes: every candidate
takes part in every sum, with weight 0 unless it is assigned to a target. So it may run inside a CUDA graph:

    sets = loss.prepare(targets, shapes, image_size)             # on the host
    static = [candidates.to(device) for candidates in sets]      # once for each size
    loss, items = loss.compute(predictions, static)              # captured
    for old, new in zip(static, sets): old.copy_(new)            # before each replay

`compute` has three parts: `gather` reads from the predictions what matters, `loss_and_gradients` works out the loss and
its gradients from that, `attach_gradients` hands these to autograd, whose backward pass only writes them where they
belong. On a GPU with Triton `on_gpu` does all of it, from the candidates on, in kernels of our own; `prepare` then
returns TargetSets instead of CandidateSets, which are used in the same way.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from utils.loss import batched_assigner
from utils.loss.assigner import NO_IMAGE_SIZE
from utils.loss.batched_assigner import decode_boxes, gather_rows
from utils.loss.candidates import CandidateSet, find_candidates
from utils.loss.criterion import AUXILIARY_WEIGHT, ComputeLoss, LossClasses, smooth_labels
from utils.loss.gradients import KnownGradients, binary_loss, binary_loss_change, complete_iou
from utils.loss.multi_head import HeadsLoss, LossAndItems
from utils.system.compilers import why_no_kernels


class GatheredPredictions(NamedTuple):
    """What the loss needs of the predictions of a branch of the head: the lead heads, or the auxiliary ones."""

    rows: Tensor  # [u x 5+nc] raw, of the distinct cells of a CandidateSet
    objectness: Tensor  # [cells of all layers] raw, float32
    lead_rows: Tensor | None  # [u x 5+nc] what the lead heads predict there, if these are not those


class LossAndGradients(NamedTuple):
    """Loss and gradients of a branch of the head."""

    loss: Tensor  # [1]
    items: Tensor  # [4]
    cell_position: Tensor  # [u] within all layers
    rows: Tensor  # [u x 5+nc] gradients in these cells
    objectness: Tensor  # [cells of all layers] gradients everywhere, in addition


class Assignments(NamedTuple):
    """What each of the m candidates is assigned to; fixed shapes, so those without a target are among them."""

    is_assigned: Tensor
    weight: Tensor  # its share of the mean over the assigned ones of its layer, 0 if it is not assigned
    cell: Tensor  # which of the distinct cells
    target: Tensor  # row of the targets, any if it has none


class BatchedLoss(ComputeLoss):
    """The plain loss: every candidate is assigned to the target that made it one. See ComputeLoss for `model`.

    There is no autobalance, which reads the losses of the layers on the host.
    """

    REACHES: tuple[float, ...] = (0.5,)  # of the candidates: those of the lead heads, then of the auxiliary heads
    NUM_IOUS: int | None = None  # of OTA; without it every candidate is assigned

    def __init__(self, model):
        super().__init__(model)
        self._anchors = None  # (tensor of the head, its version, copy on the host)
        self.use_kernels: bool | None = None  # of Triton (`on_gpu`); None until `prepare` has looked whether they run

    def __call__(self, predictions: Sequence[Tensor], targets: Tensor, images: Tensor | None = None) -> LossAndItems:
        """As ComputeLoss; `targets` on the host save waiting for the device."""
        image_size = None if images is None else tuple(images[0].shape[-2:])
        shapes = [prediction.shape for prediction in predictions[: self.head.nl]]
        candidate_sets = self.prepare(targets, shapes, image_size)
        device = predictions[0].device
        return self.compute(predictions, [candidates.to(device) for candidates in candidate_sets])

    def prepare(
        self, targets: Tensor, shapes: Sequence, image_size: Sequence | None = None, at_least: Sequence | None = None
    ) -> list:
        """The CandidateSet of each branch of the head, on the host; TargetSets where there are kernels.

        `shapes` of the lead predictions; `image_size` (height, width) in pixels, for OTA; `at_least` the Sizes of the
        sets that one wants to replace.
        """
        if image_size is None and self.NUM_IOUS is not None:
            raise ValueError(NO_IMAGE_SIZE)
        find = partial(load_kernels().target_set, balance=self.balance) if self.has_kernels() else find_candidates
        strides = getattr(self.head, "stride", [1] * len(shapes))
        return [
            find(
                targets.cpu(), shapes, self._host_anchors(), strides, image_size,
                anchor_threshold=self.hyp["anchor_t"], reach=reach, at_least=sizes, pinned=self.head.anchors.is_cuda,
            )
            for reach, sizes in zip(self.REACHES, at_least or [None] * len(self.REACHES), strict=True)
        ]  # fmt: skip

    def has_kernels(self):
        """Whether `on_gpu` does the work: Triton is there and compiles for the device of the head."""
        if self.use_kernels is None:
            head, device = self.head, self.head.anchors.device
            self.use_kernels = not why_no_kernels(device) and load_kernels().can_run(device, head.nl, head.na)
        return self.use_kernels

    def _host_anchors(self):
        """The head's anchors on the host, copied again only after a change: copying waits for the device."""
        anchors = self.head.anchors
        if self._anchors is None or self._anchors[0] is not anchors or self._anchors[1] != anchors._version:
            self._anchors = anchors, anchors._version, anchors.detach().cpu().clone()
        return self._anchors[2]

    def compute(self, predictions: Sequence[Tensor], candidate_sets: Sequence) -> LossAndItems:
        """Loss [1] and items [4] of `predictions` with `candidate_sets` on their device. Waits for nothing."""
        branches = [predictions[: self.head.nl], predictions[self.head.nl :]][: len(candidate_sets)]
        if not isinstance(candidate_sets[0], CandidateSet):
            return load_kernels().compute(self, branches, candidate_sets)
        gathered = [gather(branch, c, branches[0]) for branch, c in zip(branches, candidate_sets, strict=True)]
        return attach_gradients(branches, self.loss_and_gradients(gathered, candidate_sets))

    @torch.no_grad()
    def loss_and_gradients(self, gathered, candidate_sets):
        """The LossAndGradients of each branch of the head from its GatheredPredictions and its CandidateSet."""
        shares = (1.0, AUXILIARY_WEIGHT)[: len(gathered)]
        return [self._of_branch(*branch) for branch in zip(gathered, candidate_sets, shares, strict=True)]

    def _of_branch(self, gathered, candidates, share):
        """The LossAndGradients of one branch of the head, `share` of its loss."""
        tensors, batch_size = candidates.tensors, candidates.shapes[0][0]
        rows, boxes = gathered.rows, decode_boxes(gathered.rows, tensors)
        assigned = self._assign(gathered, boxes, candidates)
        # everything is in float32 already: autocast would only cost time
        with torch.autocast(rows.device.type, enabled=False):
            assignments = as_assignments(assigned, tensors, len(candidates.shapes))
            gains = [share * self.hyp[gain] for gain in ("box", "obj", "cls")]
            gradient_gains = [gain * batch_size for gain in gains]  # the loss is multiplied by the batch size
            class_term, gradients = self._class_term(rows, tensors, assignments, gradient_gains[2])
            box_term, overlap, gradients[:, :4] = self._box_term(rows, boxes, tensors, assignments, gradient_gains[0])
            target = self._objectness_target(rows, assignments, overlap)
            object_term, gradients[:, 4], elsewhere = self._object_term(gathered, target, candidates, gradient_gains[1])
            items = [gain * term for gain, term in zip(gains, (box_term, object_term, class_term), strict=True)]
            items = torch.stack((*items, sum(items)))
        return LossAndGradients(items[3:] * batch_size, items, tensors.cell_position, gradients, elsewhere)

    def _assign(self, gathered, boxes, candidates):
        """The target of each candidate [m], -1 for none. Both branches are assigned by what the lead heads predict."""
        if self.NUM_IOUS is None:
            return candidates.tensors.target_of_candidate
        rows = gathered.rows if gathered.lead_rows is None else gathered.lead_rows
        # the assignment wants float32 throughout; `boxes` are that only if the predictions are
        known = boxes if gathered.lead_rows is None and rows.dtype == torch.float32 else None
        with torch.autocast(rows.device.type, enabled=False):
            return batched_assigner.assign(rows, candidates, self.NUM_IOUS, known)

    def _class_term(self, rows, tensors, assignments, gain):
        """Class loss, and `gain` times its gradients for the cells, as columns 5 and up of [u x 5+nc].

        Every class of an assigned cell gets the negative label first; then the true ones change to the positive label.
        """
        dtype, rows, num_classes = rows.dtype, rows.float(), self.head.nc
        if num_classes == 1:
            return rows.new_zeros(()), torch.zeros_like(rows)
        settings = self.hyp["cls_pw"], self.hyp["fl_gamma"]
        labels = smooth_labels(self.hyp.get("label_smoothing", 0.0))
        positive, negative = (rounded_to(dtype, label, rows.device) for label in labels)
        value, gradient = binary_loss(rows, negative, *settings)
        weight = assignments.weight / num_classes
        weight_of_cell = weight.new_zeros(len(rows)).index_add_(0, assignments.cell, weight)
        gradient = gradient * (weight_of_cell * gain)[:, None]

        place = (tensors.target_class[assignments.target] + 5).add_(assignments.cell, alpha=rows.shape[1])
        more, more_gradient = binary_loss_change(rows.view(-1)[place], positive, negative, *settings)
        gradient.view(-1).index_add_(0, place, weight * (more_gradient * gain))
        return (value[:, 5:].sum(1) * weight_of_cell).sum() + (more * weight).sum(), gradient

    def _box_term(self, rows, boxes, tensors, assignments, gain):
        """Box loss, the overlap [m] of each candidate, and `gain` times the gradients [u x 4] for the cells."""
        true, cell = tensors.target_box[assignments.target], assignments.cell
        geometry = tensors.geometry[cell]  # gathered at once, not column by column
        corner, grid_size = geometry[:, 0:2], geometry[:, 4:6]
        centres = torch.stack((boxes.centre[cell], true[:, :2] * grid_size - corner))
        sizes = torch.stack((boxes.size[cell], true[:, 2:] * grid_size))
        overlap, by_centre, by_size = complete_iou(centres, sizes)
        # where, and not the weight of 0 alone: without a target of its own a candidate's overlap may be nan
        value = (torch.where(assignments.is_assigned, 1 - overlap, 0.0) * assignments.weight).sum()

        gradients = torch.cat((by_centre, by_size), 1) * (assignments.weight * -gain)[:, None]
        gradients = torch.where(assignments.is_assigned[:, None], gradients, 0.0)
        gradients = gradients.new_zeros(len(rows), 4).index_add_(0, cell, gradients)
        doubled = rows[:, :4].float().sigmoid() * 2
        by_logit = torch.cat((doubled[:, :2], boxes.size), 1) * (2 - doubled)  # of twice the centre, and of the size
        return value, overlap, gradients * by_logit

    def _objectness_target(self, rows, assignments, overlap):
        """The objectness target of each cell [u]: the overlap of the last match in it, 0 without one."""
        position = torch.arange(len(overlap), device=overlap.device)
        position = torch.where(assignments.is_assigned, position, -1)
        last = position.new_full((len(rows),), -1).scatter_reduce_(0, assignments.cell, position, "amax")
        score = overlap.clamp(min=0)
        if self.gr != 1:
            score = (1 - self.gr) + self.gr * score
        target = torch.where(last >= 0, score[last], 0.0)
        return target.to(rows.dtype).float()  # stock behaviour: rounded like the predictions

    def _object_term(self, gathered, target, candidates, gain):
        """Objectness loss, and `gain` times its gradients: what objects add in the cells [u], and all cells without."""
        settings = self.hyp["obj_pw"], self.hyp["fl_gamma"]
        counts = [math.prod(shape[:4]) for shape in candidates.shapes]  # cells of each layer
        value, gradient = binary_loss(gathered.objectness, 0.0, *settings)
        more, more_gradient = binary_loss_change(gathered.rows[:, 4].float(), target, 0.0, *settings)

        factors = [balance / count for balance, count in zip(self.balance, counts, strict=True)]
        gradient_factors, used = [gain * factor for factor in factors], candidates.sizes.cells
        torch._foreach_mul_([*value.split(counts), *more.split(used)], factors * 2)
        torch._foreach_mul_([*gradient.split(counts), *more_gradient.split(used)], gradient_factors * 2)
        return value.sum() + more.sum(), more_gradient, gradient


class BatchedLossOTA(BatchedLoss):
    """The loss on the cells that OTA selects. Needs the images for their size, and the head's strides."""

    NUM_IOUS = 10


class BatchedLossAuxOTA(BatchedLossOTA):
    """The loss of a head with auxiliary outputs, which learn from a coarser assignment to the lead heads."""

    REACHES = (0.5, 1.0)
    NUM_IOUS = 20


class BatchedHeadsLoss(HeadsLoss):
    """HeadsLoss of batched losses: with `prepare` and `compute`, as they have them."""

    def prepare(self, targets, shapes, image_size=None, at_least=None):
        """The CandidateSets of all heads in a row, on the host; arguments as for `BatchedLoss.prepare`.

        `shapes` (batch, na, ny, nx, any) of the levels; `at_least` has one entry for each CandidateSet.
        """
        at_least = self._by_head(at_least) if at_least else [None] * len(self.losses)
        candidate_sets = []
        for compute, own, sizes in zip(self.losses, self.route(targets.cpu()), at_least, strict=True):
            levels = [(*shape[:4], 5 + compute.head.nc) for shape in shapes]
            candidate_sets += compute.prepare(own, levels, image_size, sizes)
        return candidate_sets

    def has_kernels(self):
        """As BatchedLoss: the heads lie on one device."""
        return all(compute.has_kernels() for compute in self.losses)

    def compute(self, predictions, candidate_sets):
        """Loss [1] and items [4] of `predictions` with the `candidate_sets` of all heads on their device."""
        heads = zip(self.losses, self.own_columns(predictions), self._by_head(candidate_sets), strict=True)
        return self.total([compute.compute(maps, own) for compute, maps, own in heads])

    def _by_head(self, values):
        """A list with one entry for each CandidateSet, cut into a list for each head."""
        share = len(values) // len(self.losses)
        return [values[start : start + share] for start in range(0, len(values), share)]


CLASSES = LossClasses(BatchedLoss, BatchedLossOTA, BatchedLossAuxOTA, BatchedHeadsLoss)


def grid_shapes(head, images_shape):
    """The shapes [batch, na, ny, nx, no] of the lead maps of `head` for images of `images_shape` [b x c x h x w]."""
    batch, _, height, width = images_shape
    return [(batch, head.na, height // s, width // s, head.no) for s in map(int, head.stride.tolist())]


def load_kernels():
    """The module of the kernels, which needs Triton."""
    from utils.loss import on_gpu

    return on_gpu


@torch.no_grad()
def gather(predictions, candidates, lead):
    """The GatheredPredictions of a branch with `predictions` per layer; `lead` are those of the lead heads."""
    cells = candidates.tensors.cell_index, candidates.sizes.cells
    lead_rows = None if predictions is lead else gather_rows(*cells, lead)
    objectness = torch.cat([prediction[..., 4].reshape(-1) for prediction in predictions]).float()
    return GatheredPredictions(gather_rows(*cells, predictions), objectness, lead_rows)


def attach_gradients(branches, results):
    """Loss [1] and items [4] over all branches; the gradient of the loss goes to their predictions."""
    (loss, items), *rest = [
        (KnownGradients.apply(own.loss, own.cell_position, own.rows, own.objectness, *predictions), own.items)
        for predictions, own in zip(branches, results, strict=True)
    ]
    for more_loss, more_items in rest:
        loss, items = loss + more_loss, items + more_items
    return loss, items


def as_assignments(assigned, tensors, num_layers):
    """The Assignments of candidates with the targets `assigned` [m], -1 for none."""
    is_assigned, layer = assigned >= 0, tensors.layer_of_candidate
    count = torch.zeros(num_layers, device=assigned.device).index_add_(0, layer, is_assigned.float())
    weight = is_assigned / count.clamp_(min=1)[layer]
    return Assignments(is_assigned, weight, tensors.cell_of_candidate, assigned.clamp(min=0))


def rounded_to(dtype, number, device):
    """`number` as a tensor of `dtype` would hold it."""
    return number if dtype == torch.float32 else torch.full((), number, dtype=dtype, device=device).float()
