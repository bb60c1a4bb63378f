"""Which prediction cell is trained on which target: the reference assigners.

    plain  every cell near a target, at every anchor of similar shape: the candidates
    ota    of these, the few that already predict a target best (SimOTA): candidates -> cost -> dynamic k -> conflicts

Both have the signature `(predictions, targets, anchors, strides, image_size, ...) -> Matches`, so that a loss can be
handed either of them. They run on the device of their inputs, without gradient: matches are indices.

`matching_cost`, `dynamic_k` and `resolve_conflicts` serve `batched_assigner` too: a new term of the cost is added here.

Source: Ge et al. 2021, YOLOX (arXiv 2107.08430) for SimOTA; Wang et al. 2022, YOLOv7 (arXiv 2207.02696) for its
candidates and for the coarse assignment of auxiliary heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from utils.ops.boxes import box_area, paired_iou, xywh2xyxy

# Own cell, then its neighbours to the left, above, to the right, below: what is subtracted from (x, y), in cells.
NEIGHBOUR_STEPS = ((0, 0), (1, 0), (0, 1), (-1, 0), (0, -1))
IOU_WEIGHT = 3.0  # in the cost, against the class term's 1
NO_IMAGE_SIZE = "OTA compares boxes in pixels: hand it the images, or their (height, width)"


@dataclass(frozen=True)
class Matches:
    """Pairs of a prediction cell and a target; every field holds one tensor per detection layer, with n rows each.

    A cell may occur more than once, with the same target or with others, and counts each time.
    """

    image: list  # [n] int64, index within the batch
    anchor: list  # [n] int64, which anchor of the layer
    cell_y: list  # [n] int64
    cell_x: list  # [n] int64
    target: list  # [n] int64, row of `targets`
    anchor_size: list  # [n x 2: width, height] in grid units

    @classmethod
    def of_layers(cls, layers):
        """From one tuple of the six fields per layer."""
        return cls(*(list(field) for field in zip(*layers, strict=True)))

    def cells(self, layer):
        """Index (image, anchor, y, x) into the predictions of `layer`."""
        return self.image[layer], self.anchor[layer], self.cell_y[layer], self.cell_x[layer]


@torch.no_grad()
def plain(
    predictions: Sequence[Tensor], targets: Tensor, anchors: Tensor, strides: Tensor | Sequence[float] | None = None,
    image_size: Sequence[int] | None = None, *, anchor_threshold: float = 4.0, reach: float = 0.5,
) -> Matches:  # fmt: skip
    """Every candidate is a match, with the target that it lies near.

    predictions  per layer [batch x anchors x ny x nx x 5+classes]; only the shapes are read
    targets      [N x 6: image, class, x, y, w, h normalised]
    anchors      [layers x anchors x 2: width, height] in grid units
    strides, image_size  not needed here, part of the common signature
    anchor_threshold  a side may differ from the anchor's by less than this factor
    reach        how near, in cells, the border to a neighbour cell must be for that cell to join (1: always)

    Order within a layer: own cells, then left, upper, right, lower neighbours; inside each by anchor, then by target.
    """
    return Matches.of_layers(
        _layer_candidates(grid.shape[2:4], targets, layer_anchors, anchor_threshold, reach)
        for grid, layer_anchors in zip(predictions, anchors, strict=True)
    )


def _layer_candidates(grid_shape, targets, anchors, anchor_threshold, reach):
    """The six fields of Matches for one layer of `grid_shape` (ny, nx) cells."""
    ny, nx = grid_shape
    boxes = targets[:, 2:6] * targets.new_tensor((nx, ny, nx, ny))  # [N x 4: x, y, w, h] in cells
    anchor, target = _similar_shapes(boxes[:, 2:], anchors, anchor_threshold)
    pair, cells = _cells_around(boxes[target, :2], (nx, ny), reach)
    anchor, target = anchor[pair], target[pair]
    return targets[target, 0].long(), anchor, cells[:, 1], cells[:, 0], target, anchors[anchor]


def _similar_shapes(sizes, anchors, threshold):
    """Pairs (anchor [m], target [m]) whose sides differ by a factor below `threshold`; by anchor, then by target."""
    ratio = sizes[None] / anchors[:, None]  # [anchors x N x 2]
    worst = torch.maximum(ratio, 1 / ratio).amax(2)  # a side of zero gives infinity
    return (worst < threshold).nonzero(as_tuple=True)


def _cells_around(centres, grid_size, reach):
    """The candidate cells of boxes centred at `centres` [m x 2, in cells]: their own and near neighbours in the grid.

    Returns pair [n], the row of `centres`, and cells [n x 2: x, y]. stock behaviour: a centre on a grid line counts as
    near on both sides, and rounding then leads the step to the right or down back to its own cell, which joins twice.
    """
    limits = centres.new_tensor(grid_size)

    def near(distance):
        return (distance % 1 < reach) & (distance > 1)

    joins = torch.cat((torch.ones_like(centres[:, :1], dtype=torch.bool), near(centres), near(limits - centres)), 1)
    step, pair = joins.T.nonzero(as_tuple=True)  # joins [m x 5], columns as NEIGHBOUR_STEPS
    cells = (centres[pair] - reach * centres.new_tensor(NEIGHBOUR_STEPS)[step]).long()
    return pair, torch.minimum(cells.clamp(min=0), limits.long() - 1)


@torch.no_grad()
def ota(
    predictions: Sequence[Tensor], targets: Tensor, anchors: Tensor, strides: Tensor | Sequence[float] | None,
    image_size: Sequence[int] | None, *, anchor_threshold: float = 4.0, reach: float = 0.5, num_ious: int = 10,
) -> Matches:  # fmt: skip
    """Each target gets the candidates of its image that predict it at the lowest cost; a candidate serves one target.

    Arguments as for `plain`, and
    strides      [layers] pixels per cell, on any device
    image_size   (height, width) of the network input in pixels
    num_ious     how many of a target's best overlaps are summed up to its number of candidates

    Order within a layer: by image, then as the candidates of `plain`. The target of a match need not be the one that
    made its cell a candidate.
    """
    if image_size is None:
        raise ValueError(NO_IMAGE_SIZE)
    candidates = plain(predictions, targets, anchors, anchor_threshold=anchor_threshold, reach=reach)
    cells, cell_of_candidate = _decode_candidates(predictions, candidates, anchors, torch.as_tensor(strides).tolist())
    image_of_candidate = torch.cat(candidates.image)
    height, width = image_size
    true_boxes = with_area(xywh2xyxy(targets[:, 2:6] * targets.new_tensor((width, height, width, height))))

    matched = [cell_of_candidate[:0]]
    matched_targets = [cell_of_candidate[:0]]
    for image in range(len(predictions[0])):
        of_image = (image_of_candidate == image).nonzero()[:, 0]
        truths = (targets[:, 0] == image).nonzero()[:, 0]
        if len(of_image) == 0 or len(truths) == 0:
            continue
        # A cell may be several candidates. Its cost is computed once and copied to them: were it computed for each of
        # them, rounding might differ, and ties would be none.
        distinct, column = cell_of_candidate[of_image].unique(return_inverse=True)
        here = cells.take(distinct)
        class_logit = here.class_logits.T[targets[truths, 1].long()]
        iou, cost = matching_cost(true_boxes[truths][:, None], here.boxes, here.background_cost, class_logit)
        iou, cost = iou[:, column], cost[:, column]
        selected = select_cheapest(cost, dynamic_k(best_ious(iou, num_ious)))
        assigned = resolve_conflicts(selected.sum(0), selected.int().argmax(0), cost.argmin(0))
        won = (assigned >= 0).nonzero()[:, 0]
        matched.append(of_image[won])
        matched_targets.append(truths[assigned[won]])
    return _select(candidates, torch.cat(matched), torch.cat(matched_targets))


# --- cost ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cells:
    """What the distinct candidate cells of a batch predict, u rows each."""

    boxes: Tensor  # [u x 5: x1, y1, x2, y2 in pixels of the network input, area]
    background_cost: Tensor  # [u] cross-entropy if no class were true
    class_logits: Tensor  # [u x classes] of the joint score sqrt(class * objectness)

    def take(self, rows):
        return Cells(self.boxes[rows], self.background_cost[rows], self.class_logits[rows])


def _decode_candidates(predictions, candidates, anchors, strides):
    """The distinct cells among `candidates` as Cells, and which of them each candidate is [M], all layers in a row."""
    parts, cell_of_candidate, num_cells = [], [], 0
    for layer, prediction in enumerate(predictions):
        distinct, inverse = torch.stack(candidates.cells(layer)).unique(dim=1, return_inverse=True)  # [4 x u], [n]
        image, anchor, cell_y, cell_x = distinct
        rows = prediction[image, anchor, cell_y, cell_x].float()
        corners = torch.stack((cell_x, cell_y), 1)
        parts.append(_decode(rows, corners, anchors[layer][anchor], strides[layer]))
        cell_of_candidate.append(inverse + num_cells)
        num_cells += len(rows)
    return Cells(*(torch.cat(part) for part in zip(*parts, strict=True))), torch.cat(cell_of_candidate)


def _decode(rows, corners, anchor_size, stride):
    """The three fields of Cells for `rows` [u x 5+classes, raw] of the cells at `corners` [u x 2: x, y, in cells]."""
    centre = (2 * rows[:, :2].sigmoid() - 0.5 + corners) * stride
    size = (2 * rows[:, 2:4].sigmoid()) ** 2 * anchor_size * stride
    return with_area(xywh2xyxy(torch.cat((centre, size), 1))), *joint_class_logits(rows[:, 5:], rows[:, 4:5])


def with_area(boxes_xyxy):
    """Corners [n x 4] and, as a fifth column, the area."""
    return torch.cat((boxes_xyxy, box_area(boxes_xyxy)[:, None]), 1)


def joint_class_logits(class_logits, object_logit):
    """Cross-entropy [u] against "no class" and logits [u x classes] of the scores y = sqrt(class * objectness).

    Everything stays in logarithms, so that a saturated prediction has a large cost but never an infinite one: log y is
    kept just below 0, and log(1 - y) is finite with it.
    """
    log_score = (F.logsigmoid(class_logits) + F.logsigmoid(object_logit)) / 2
    log_score = log_score.clamp(max=-torch.finfo(log_score.dtype).tiny)
    log_rest = (-torch.expm1(log_score)).log()
    return -log_rest.sum(1), log_score - log_rest


def matching_cost(true_boxes, boxes, background_cost, class_logit):
    """Overlap and cost of targets with cells; shapes broadcast: a matrix of all pairs, or a list of pairs.

    true_boxes, boxes  [... x 5: x1, y1, x2, y2, area] of the target and as the cell predicts it
    background_cost    [...] of the cell, see Cells
    class_logit        [...] of the cell, for the class of the target

    The class term is the cross-entropy against the one-hot class c: swapping one label of "no class" from 0 to 1 takes
    that class's logit off the sum, so it is `background_cost - logit[c]` and no [targets x cells x classes] arises.
    """
    iou = paired_iou(true_boxes[..., :4], boxes[..., :4], true_boxes[..., 4], boxes[..., 4])
    iou = iou.nan_to_num_(0.0)  # two boxes without area
    cost = background_cost - class_logit
    return iou, cost.add_((iou + 1e-8).log_().mul_(-IOU_WEIGHT))


# --- dynamic k, conflicts --------------------------------------------------------------------------------------------


def best_ious(iou, num_ious):
    """The `num_ious` best overlaps of each target in `iou` [G x M], or all there are, best first."""
    return iou.topk(min(num_ious, iou.shape[1]), dim=1).values


def dynamic_k(best_ious):
    """How many candidates each target gets [G]: the sum of its best overlaps [G x n], rounded down, at least 1."""
    return best_ious.sum(1).int().clamp(min=1)


def select_cheapest(cost, k):
    """Whether each target selects each candidate [G x M]: it selects its `k` [G] cheapest by `cost` [G x M].

    Among equal costs the lowest candidate index comes first, on every device.
    """
    cheapest_first = cost.argsort(dim=1, stable=True)
    within_k = torch.arange(cost.shape[1], device=cost.device) < k[:, None]
    return torch.zeros_like(within_k).scatter_(1, cheapest_first, within_k)


def resolve_conflicts(num_selecting, selecting, cheapest):
    """The target that each candidate is assigned to [M], -1 for none.

    num_selecting  how many targets selected the candidate
    selecting      the target that did, if there is only one
    cheapest       the target that is cheapest for it, the first in case of a tie

    A candidate selected by several goes to the one that is cheapest for it, be that one of them or not; the others get
    no replacement.
    """
    assigned = torch.where(num_selecting > 1, cheapest, selecting)
    return torch.where(num_selecting > 0, assigned, -1)


def _select(candidates, matched, matched_targets):
    """The Matches of candidates `matched` [n] (counted through all layers) with `matched_targets` [n]."""
    layers, start = [], 0
    for layer, num_candidates in enumerate(map(len, candidates.image)):
        here = (matched >= start) & (matched < start + num_candidates)
        rows = matched[here] - start
        start += num_candidates
        cells = (index[rows] for index in candidates.cells(layer))
        layers.append((*cells, matched_targets[here], candidates.anchor_size[layer][rows]))
    return Matches.of_layers(layers)
