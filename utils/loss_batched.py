"""The losses of `loss` for a whole batch at once: equal values, few kernels, no waiting for a GPU.

    BatchedLoss        as ComputeLoss
    BatchedLossOTA     as ComputeLossOTA
    BatchedLossAuxOTA  as ComputeLossAuxOTA

They are called in the same way, best with `targets` on the host: what does not depend on predictions is worked out
there (`prepare`) while the GPU is still busy with the model. The rest (`compute`) has fixed shapes: every candidate
takes part in every sum, with weight 0 unless it is a match. So it may run inside a CUDA graph:

    plans = loss.prepare(targets, shapes, image_size)            # on the host
    static = [plan.to(device) for plan in plans]                 # once for each size
    loss, items = loss.compute(predictions, static)              # captured
    for old, new in zip(static, plans): old.copy_(new)           # before each replay
"""

import math

import torch
from torch.autograd.function import once_differentiable

from utils import assign_batched
from utils.loss import AUXILIARY_WEIGHT, ComputeLoss, LossClasses
from utils.loss_plan import prepare


class BatchedLoss(ComputeLoss):
    """The plain loss: every candidate learns the target that made it one. See ComputeLoss for `model`.

    There is no autobalance, which reads the losses of the layers on the host.
    """

    REACHES = (0.5,)  # of the candidates: those of the lead heads, then those of the auxiliary heads
    NUM_IOUS = None  # votes of OTA; without it every candidate is a match

    def __init__(self, model):
        super().__init__(model)
        self._anchors = None  # (tensor of the head, its version, copy on the host)

    def __call__(self, predictions, targets, images=None):
        """As ComputeLoss; `targets` on the host save waiting for the device."""
        image_size = None if images is None else tuple(images[0].shape[-2:])
        shapes = [prediction.shape for prediction in predictions[: self.head.nl]]
        device = predictions[0].device
        plans = self.prepare(targets, shapes, image_size, padded=device.type != "cpu")
        return self.compute(predictions, [plan.to(device) for plan in plans])

    def prepare(self, targets, shapes, image_size=None, padded=True, at_least=None):
        """The Plan of each kind of candidates, on the host.

        `shapes` of the lead predictions; `image_size` (height, width) in pixels, for OTA; `at_least` the Sizes of each
        plan that one wants to replace.
        """
        if image_size is None and self.NUM_IOUS is not None:
            raise ValueError("OTA compares boxes in pixels: hand it the images, or their (height, width)")
        strides = getattr(self.head, "stride", [1] * len(shapes))
        at_least = at_least or [None] * len(self.REACHES)
        return [
            prepare(
                targets.cpu(), shapes, self._host_anchors(), strides, image_size,
                anchor_threshold=self.hyp["anchor_t"], reach=reach, padded=padded, at_least=sizes,
                pinned=self.head.anchors.is_cuda,
            )
            for reach, sizes in zip(self.REACHES, at_least, strict=True)
        ]  # fmt: skip

    def _host_anchors(self):
        """The head's anchors on the host, copied again only after a change."""
        anchors = self.head.anchors
        if self._anchors is None or self._anchors[0] is not anchors or self._anchors[1] != anchors._version:
            self._anchors = anchors, anchors._version, anchors.detach().cpu().clone()
        return self._anchors[2]

    def compute(self, predictions, plans):
        """Loss [1] and items [4] of `predictions` with `plans` on their device. Fixed shapes; waits for nothing."""
        lead = predictions[: self.head.nl]
        fine = plans[0]
        rows, objectness = CellRows.apply(fine.layout().cell_index, fine.sizes.cells, *lead)
        terms = self.terms(rows, objectness, fine, self.owners(rows.detach(), fine))
        if len(plans) > 1:
            coarse = plans[1]
            index = coarse.layout().cell_index
            owner = self.owners(gather_rows(index, coarse.sizes.cells, lead), coarse)
            rows, objectness = CellRows.apply(index, coarse.sizes.cells, *predictions[self.head.nl :])
            auxiliary = self.terms(rows, objectness, coarse, owner)
            terms = [term + AUXILIARY_WEIGHT * other for term, other in zip(terms, auxiliary, strict=True)]

        gained = [self.hyp[gain] * term for gain, term in zip(("box", "obj", "cls"), terms, strict=True)]
        total = sum(gained)
        return total.reshape(1) * len(lead[0]), torch.stack((*gained, total)).detach()

    def owners(self, rows, plan):
        """The target of each candidate [m], -1 for none; `rows` [u x 5+nc] are what its distinct cells predict."""
        if self.NUM_IOUS is None:
            return plan.layout().proposer
        return assign_batched.owners(rows, plan, self.NUM_IOUS)

    def terms(self, rows, objectness, plan, owner):
        """Box, objectness and class loss [3 scalars] over all layers, before gains.

        rows [u x 5+nc] of the distinct cells, objectness [cells of all layers], owner [m] of the candidates
        """
        layout = plan.layout()
        candidate = slice(None)
        if not plan.padded:  # nobody asks for fixed shapes, so only matches are computed
            candidate = (owner >= 0).nonzero()[:, 0]
        owner, cell = owner[candidate], layout.cell_of_candidate[candidate]
        matched, target = owner >= 0, owner.clamp(min=0)
        weight = _share_of_layer(matched, layout.layer_of_candidate[candidate], len(plan.shapes))

        logits = rows.index_select(0, cell)  # [n x 5+nc]
        overlap = self.overlap(
            logits, layout.corner[cell], layout.target_box[target], layout.anchor_size[cell], layout.grid_size[cell]
        )
        box_term = _weighted_sum(1 - overlap, weight)

        score = (1 - self.gr) + self.gr * overlap.detach().clamp(min=0)
        score = torch.where(_is_last(matched, cell, len(rows)), score, 0.0).to(objectness.dtype)
        wanted = torch.zeros_like(objectness).index_add_(0, layout.cell_position[cell], score)
        object_term = self._objectness_term(objectness, wanted, plan.shapes)

        class_term = torch.zeros_like(box_term)
        if self.head.nc > 1:
            elements = self.class_term(logits[:, 5:], layout.target_class[target], reduction="none")
            class_term = _weighted_sum(elements.float().mean(1), weight)
        return [box_term, object_term, class_term]

    def _objectness_term(self, logits, wanted, shapes):
        """The balanced sum of the layers' mean losses."""
        elements = self.binary_loss(logits, wanted, "obj_pw", reduction="none").float()
        layers = elements.split([math.prod(shape[:4]) for shape in shapes])
        return sum(balance * layer.mean() for balance, layer in zip(self.balance, layers, strict=True))


class BatchedLossOTA(BatchedLoss):
    """The loss on the cells that OTA selects. Needs the images for their size, and the head's strides."""

    NUM_IOUS = 10


class BatchedLossAuxOTA(BatchedLossOTA):
    """The loss of a head with auxiliary outputs, which learn from a coarser assignment to the lead heads."""

    REACHES = (0.5, 1.0)
    NUM_IOUS = 20


CLASSES = LossClasses(BatchedLoss, BatchedLossOTA, BatchedLossAuxOTA)


def _share_of_layer(matched, layer, num_layers):
    """The weight of each candidate [n] in its layer's mean over matches."""
    count = torch.zeros(num_layers, device=matched.device).index_add_(0, layer, matched.float())
    return matched / count.clamp(min=1)[layer]


def _weighted_sum(values, weight):
    """The sum of `values` [n] times `weight`; what has no weight may be anything."""
    return (torch.where(weight > 0, values, 0.0) * weight).sum()


def _is_last(matched, cell, num_cells):
    """Which candidates [n] are the last match of their `cell`: the one whose score counts."""
    position = torch.where(matched, torch.arange(len(cell), device=cell.device), -1)
    last = torch.full((num_cells,), -1, device=cell.device).scatter_reduce_(0, cell, position, "amax")
    return matched & (last[cell] == position)


def gather_rows(cell_index, sizes, predictions):
    """Rows [u x 5+nc] of the cells `cell_index` [u], of which each layer has one of `sizes`."""
    parts = zip(predictions, cell_index.split(sizes), strict=True)
    return torch.cat([grid.reshape(-1, grid.shape[-1]).index_select(0, index) for grid, index in parts])


class CellRows(torch.autograd.Function):
    """(cell_index, sizes, *predictions) -> rows [u x 5+nc] of the cells, objectness logits of all cells [all layers].

    Its gradient is written once for each layer. Two indexing operations would each fill a tensor as large as the
    prediction and then add the two, and that is most of the time of a plain loss.
    """

    @staticmethod
    def forward(ctx, cell_index, sizes, *predictions):
        ctx.save_for_backward(cell_index)
        ctx.sizes, ctx.shapes = sizes, [prediction.shape for prediction in predictions]
        objectness = torch.cat([prediction[..., 4].reshape(-1) for prediction in predictions])
        return gather_rows(cell_index, sizes, predictions), objectness

    @staticmethod
    @once_differentiable
    def backward(ctx, rows_gradient, objectness_gradient):
        (cell_index,) = ctx.saved_tensors
        counts = [math.prod(shape[:4]) for shape in ctx.shapes]
        parts = zip(
            cell_index.split(ctx.sizes), rows_gradient.split(ctx.sizes), objectness_gradient.split(counts), strict=True
        )
        gradients = []
        for shape, (index, rows, objectness) in zip(ctx.shapes, parts, strict=True):
            gradient = rows.new_zeros((len(objectness), shape[-1]))
            gradient[:, 4] = objectness
            gradients.append(gradient.index_add_(0, index, rows).view(shape))
        return None, None, *gradients
