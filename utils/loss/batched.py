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

It is done in three parts: `see` reads from the predictions what matters, `learn` works out the loss and its slopes from
that, `attach` hands the slopes to autograd, whose backward pass only writes them where they belong. Called in the
ordinary way on a GPU, `learn` is replayed from a CUDA graph of its own (`loss_graph`).
"""

import math
from typing import NamedTuple

import torch

from utils.loss import batched_assigner
from utils.loss.batched_assigner import boxes_in_cells, gather_rows
from utils.loss.candidates import prepare
from utils.loss.criterion import AUXILIARY_WEIGHT, ComputeLoss, LossClasses, smooth_labels
from utils.loss.gradients import KnownSlopes, binary_loss, binary_loss_change, complete_iou
from utils.loss.graphed import LossGraphs


class Seen(NamedTuple):
    """What the loss needs of the predictions of a branch of the head (the lead heads, or the auxiliary ones)."""

    rows: torch.Tensor  # [u x 5+nc] raw, of the distinct cells of a plan
    objectness: torch.Tensor  # [cells of all layers] raw, float32
    judged: torch.Tensor | None  # [u x 5+nc] what the lead heads predict there, if these are not those


class Learnt(NamedTuple):
    """Loss and slopes of a branch of the head."""

    total: torch.Tensor  # [1]
    items: torch.Tensor  # [4]
    cells: torch.Tensor  # [u] position within all layers
    rows: torch.Tensor  # [u x 5+nc] slopes in these cells
    objectness: torch.Tensor  # [cells of all layers] slopes everywhere, in addition


class View(NamedTuple):
    """What a branch of the head predicts for the distinct cells of a plan."""

    rows: torch.Tensor  # [u x 5+nc] raw
    centre: torch.Tensor  # [u x 2] of the boxes, in cells from the corner of their own
    size: torch.Tensor  # [u x 2] in cells


class Matched(NamedTuple):
    """Candidates and what they learn, n of each; with fixed shapes also those that are no match."""

    is_match: torch.Tensor
    weight: torch.Tensor  # in the mean over the matches of its layer, 0 if it is none
    cell: torch.Tensor  # which of the distinct cells
    target: torch.Tensor


class BatchedLoss(ComputeLoss):
    """The plain loss: every candidate learns the target that made it one. See ComputeLoss for `model`.

    There is no autobalance, which reads the losses of the layers on the host.
    """

    REACHES = (0.5,)  # of the candidates: those of the lead heads, then those of the auxiliary heads
    NUM_IOUS = None  # votes of OTA; without it every candidate is a match

    def __init__(self, model):
        super().__init__(model)
        self._anchors = None  # (tensor of the head, its version, copy on the host)
        self.graphs = LossGraphs(self.learn)

    def __call__(self, predictions, targets, images=None):
        """As ComputeLoss; `targets` on the host save waiting for the device."""
        image_size = None if images is None else tuple(images[0].shape[-2:])
        shapes = [prediction.shape for prediction in predictions[: self.head.nl]]
        device = predictions[0].device
        graph = self.graphs.find(predictions, self._settings())
        room = graph and graph.room.sizes
        plans = self.prepare(targets, shapes, image_size, padded=device.type != "cpu", at_least=room)
        return self.compute(predictions, [plan.to(device) for plan in plans], graph)

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

    def compute(self, predictions, plans, graph=None):
        """Loss [1] and items [4] of `predictions` with `plans` on their device. Fixed shapes; waits for nothing.

        `graph` may replay `learn`.
        """
        branches = [predictions[: self.head.nl], predictions[self.head.nl :]][: len(plans)]
        seen = [see(branch, plan, branches[0]) for branch, plan in zip(branches, plans, strict=True)]
        learnt = graph.learn(seen, plans) if graph else self.learn(seen, plans)
        return attach(branches, learnt)

    @torch.no_grad()
    def learn(self, seen, plans):
        """The Learnt of each branch of the head from its Seen and its Plan."""
        shares = (1.0, AUXILIARY_WEIGHT)
        return [self._branch(*branch) for branch in zip(seen, plans, shares[: len(plans)], strict=True)]

    def _settings(self):
        """What `learn` depends on apart from its arguments."""
        names = ("box", "obj", "cls", "cls_pw", "obj_pw", "fl_gamma", "label_smoothing")
        return self.head.nc, self.gr, *self.balance, *map(self.hyp.get, names)

    def owners(self, view, plan):
        """The target of each candidate [m], -1 for none."""
        if self.NUM_IOUS is None:
            return plan.layout.proposer
        with torch.autocast(view.rows.device.type, enabled=False):
            boxes = view[1:] if view.rows.dtype == torch.float32 else None
            return batched_assigner.owners(view.rows, plan, self.NUM_IOUS, boxes)

    def _branch(self, seen, plan, share):
        """The Learnt of one branch of the head, `share` of its loss."""
        layout, sizes, batch_size = plan.layout, plan.sizes.cells, plan.shapes[0][0]
        view = look(seen.rows, layout)
        owner = self.owners(view if seen.judged is None else look(seen.judged, layout), plan)
        if not plan.padded:  # nobody asks for fixed shapes, so only matches are computed
            view, layout, sizes, owner = only_matches(view, layout, sizes, owner)
        with torch.autocast(owner.device.type, enabled=False):
            matched = matched_candidates(layout, owner, len(sizes))
            gains = [share * self.hyp[gain] for gain in ("box", "obj", "cls")]
            slopes = [gain * batch_size for gain in gains]  # the loss is multiplied by the batch size
            class_term, rows = self._class_term(view, layout, matched, slopes[2])
            box, overlap, rows[:, :4] = self._box_term(view, layout, matched, slopes[0])
            wanted = self._wanted_objectness(view, matched, overlap)
            counts = [math.prod(shape[:4]) for shape in plan.shapes]
            logits = seen.objectness, counts
            object_term, rows[:, 4], objectness = self._object_term(logits, view, wanted, sizes, slopes[1])
            items = [gain * term for gain, term in zip(gains, (box, object_term, class_term), strict=True)]
            items = torch.stack((*items, sum(items)))
        return Learnt(items[3:] * batch_size, items, layout.cell_position, rows, objectness)

    def _class_term(self, view, layout, matched, gain):
        """Class loss, and `gain` times its slopes for the cells, as columns 5 and up of [u x 5+nc].

        Every class of a matched cell learns the negative label first; then the true ones change to the positive label.
        """
        rows, num_classes = view.rows.float(), self.head.nc
        if num_classes == 1:
            return rows.new_zeros(()), torch.zeros_like(rows)
        settings = self.hyp["cls_pw"], self.hyp["fl_gamma"]
        labels = smooth_labels(self.hyp.get("label_smoothing", 0.0))
        positive, negative = (rounded_to(view.rows.dtype, label, rows.device) for label in labels)
        value, slope = binary_loss(rows, negative, *settings)
        weight = matched.weight / num_classes
        weight_of_cell = weight.new_zeros(len(rows)).index_add_(0, matched.cell, weight)
        slope = slope * (weight_of_cell * gain)[:, None]

        place = (layout.target_class[matched.target] + 5).add_(matched.cell, alpha=rows.shape[1])
        more, more_slope = binary_loss_change(rows.view(-1)[place], positive, negative, *settings)
        slope.view(-1).index_add_(0, place, weight * (more_slope * gain))
        return (value[:, 5:].sum(1) * weight_of_cell).sum() + (more * weight).sum(), slope

    def _box_term(self, view, layout, matched, gain):
        """Box loss, the overlap [n] of each candidate, and `gain` times the slopes [u x 4] for the cells."""
        true, geometry = layout.target_box[matched.target], layout.geometry[matched.cell]
        true_centre = true[:, :2] * geometry[:, 4:6] - geometry[:, :2]
        centres = torch.stack((view.centre[matched.cell], true_centre))
        sizes = torch.stack((view.size[matched.cell], true[:, 2:] * geometry[:, 4:6]))
        overlap, by_centre, by_size = complete_iou(centres, sizes)
        value = (torch.where(matched.is_match, 1 - overlap, 0.0) * matched.weight).sum()

        slopes = torch.cat((by_centre, by_size), 1) * (matched.weight * -gain)[:, None]
        slopes = torch.where(matched.is_match[:, None], slopes, 0.0)
        slopes = slopes.new_zeros(len(view.rows), 4).index_add_(0, matched.cell, slopes)
        doubled = view.rows[:, :4].float().sigmoid() * 2
        by_logit = torch.cat((doubled[:, :2], view.size), 1) * (2 - doubled)  # of twice the centre, and of the size
        return value, overlap, slopes * by_logit

    def _wanted_objectness(self, view, matched, overlap):
        """What each cell [u] learns: the overlap of the last match in it, 0 without one."""
        position = torch.arange(len(overlap), device=overlap.device)
        position = torch.where(matched.is_match, position, -1)
        last = position.new_full((len(view.rows),), -1).scatter_reduce_(0, matched.cell, position, "amax")
        score = overlap.clamp(min=0)
        if self.gr != 1:
            score = (1 - self.gr) + self.gr * score
        if len(score) == 0:
            return score.new_zeros(len(last))
        wanted = torch.where(last >= 0, score[last], 0.0)
        return wanted.to(view.rows.dtype).float()  # stock behaviour: rounded like the predictions

    def _object_term(self, everywhere, view, wanted, sizes, gain):
        """Objectness loss, and `gain` times its slopes: what objects add in the cells [u], and all cells without.

        everywhere  logits [cells of all layers], and the number of cells of each layer
        """
        settings = self.hyp["obj_pw"], self.hyp["fl_gamma"]
        logits, counts = everywhere
        value, slope = binary_loss(logits, 0.0, *settings)
        more, more_slope = binary_loss_change(view.rows[:, 4].float(), wanted, 0.0, *settings)

        factors = [balance / count for balance, count in zip(self.balance, counts, strict=True)]
        slope_factors = [gain * factor for factor in factors]
        torch._foreach_mul_([*value.split(counts), *more.split(sizes)], factors * 2)
        torch._foreach_mul_([*slope.split(counts), *more_slope.split(sizes)], slope_factors * 2)
        return value.sum() + more.sum(), more_slope, slope


class BatchedLossOTA(BatchedLoss):
    """The loss on the cells that OTA selects. Needs the images for their size, and the head's strides."""

    NUM_IOUS = 10


class BatchedLossAuxOTA(BatchedLossOTA):
    """The loss of a head with auxiliary outputs, which learn from a coarser assignment to the lead heads."""

    REACHES = (0.5, 1.0)
    NUM_IOUS = 20


CLASSES = LossClasses(BatchedLoss, BatchedLossOTA, BatchedLossAuxOTA)


@torch.no_grad()
def see(predictions, plan, lead):
    """The Seen of a branch with `predictions` per layer in the cells of `plan`; `lead` are those of the lead heads."""
    cells = plan.layout.cell_index, plan.sizes.cells
    judged = None if predictions is lead else gather_rows(*cells, lead)
    objectness = torch.cat([prediction[..., 4].reshape(-1) for prediction in predictions]).float()
    return Seen(gather_rows(*cells, predictions), objectness, judged)


def attach(branches, learnt):
    """Loss [1] and items [4] over all branches; the gradient of the loss goes to their predictions."""
    results = [
        (KnownSlopes.apply(mine.total, mine.cells, mine.rows, mine.objectness, *predictions), mine.items)
        for predictions, mine in zip(branches, learnt, strict=True)
    ]
    (total, items), *rest = results
    for more in rest:
        total, items = total + more[0], items + more[1]
    return total, items


def look(rows, layout):
    """The View of `rows` [u x 5+nc] in the cells of `layout`."""
    centre, size = boxes_in_cells(rows, layout)
    return View(rows, centre.float(), size.float())


def only_matches(view, layout, sizes, owner):
    """The same without the candidates that are no matches, and without the cells that none of them needs."""
    candidate = (owner >= 0).nonzero()[:, 0]
    cells, cell = layout.cell_of_candidate[candidate].unique(return_inverse=True)
    ends = torch.tensor(sizes).cumsum(0)
    sizes = torch.searchsorted(cells, ends).diff(prepend=ends.new_zeros(1)).tolist()
    layout = layout._replace(
        cell_position=layout.cell_position[cells], geometry=layout.geometry[cells], cell_of_candidate=cell,
        layer_of_candidate=layout.layer_of_candidate[candidate],
    )  # fmt: skip
    return View(*(part[cells] for part in view)), layout, tuple(sizes), owner[candidate]


def matched_candidates(layout, owner, num_layers):
    """The Matched of candidates with the targets `owner` [n], -1 for none."""
    is_match, layer = owner >= 0, layout.layer_of_candidate
    count = torch.zeros(num_layers, device=owner.device).index_add_(0, layer, is_match.float())
    weight = is_match / count.clamp_(min=1)[layer]
    return Matched(is_match, weight, layout.cell_of_candidate, owner.clamp(min=0))


def rounded_to(dtype, number, device):
    """`number` as a tensor of `dtype` would hold it."""
    return number if dtype == torch.float32 else torch.full((), number, dtype=dtype, device=device).float()
