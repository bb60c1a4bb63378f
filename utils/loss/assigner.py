"""Which prediction cells learn which target: the readable reference matchers.

    plain  every cell near a target, at every anchor of similar shape: the candidates
    ota    of those, the few cells per target that already predict it best (SimOTA)

Both share one signature, `(predictions, targets, anchors, strides, image_size, ...) -> Matches`, so that a loss can be
handed either of them. They run on the device of their inputs, without gradient: matches are indices.

Source: Ge et al. 2021, YOLOX (arXiv 2107.08430) for SimOTA; Wang et al. 2022, YOLOv7 (arXiv 2207.02696) for its
candidates and for the coarse assignment of auxiliary heads.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from utils.ops.boxes import box_iou, xywh2xyxy

# Own cell, then its neighbours to the left, above, to the right, below: what is subtracted from (x, y), in cells.
NEIGHBOUR_STEPS = ((0, 0), (1, 0), (0, 1), (-1, 0), (0, -1))
IOU_WEIGHT = 3.0  # in the cost, against the class term's 1


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
def plain(predictions, targets, anchors, strides=None, image_size=None, *, anchor_threshold=4.0, reach=0.5):
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
    """The cells that learn a box centred at `centres` [m x 2, in cells]: its own and near neighbours inside the grid.

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
def ota(predictions, targets, anchors, strides, image_size, *, anchor_threshold=4.0, reach=0.5, num_ious=10):
    """Each target gets the candidates of its image that predict it at the lowest cost; a candidate serves one target.

    Arguments as for `plain`, and
    strides      [layers] pixels per cell, on any device
    image_size   (height, width) of the network input in pixels
    num_ious     how many of the best overlaps vote on the number of candidates of a target

    Order within a layer: by image, then as the candidates of `plain`. The target of a match need not be the one that
    made its cell a candidate.
    """
    candidates = plain(predictions, targets, anchors, anchor_threshold=anchor_threshold, reach=reach)
    cells, cell_of_candidate = _decode(predictions, candidates, anchors, torch.as_tensor(strides).tolist())
    image_of_candidate = torch.cat(candidates.image)
    height, width = image_size
    true_boxes = xywh2xyxy(targets[:, 2:6] * targets.new_tensor((width, height, width, height)))

    winners = [cell_of_candidate[:0]]
    targets_won = [cell_of_candidate[:0]]
    for image in range(len(predictions[0])):
        rivals = (image_of_candidate == image).nonzero()[:, 0]
        truths = (targets[:, 0] == image).nonzero()[:, 0]
        if len(rivals) == 0 or len(truths) == 0:
            continue
        # Duplicates of a cell get their cost by copying: equal to the last bit, so that ties are ties.
        distinct, column = cell_of_candidate[rivals].unique(return_inverse=True)
        iou, cost = matching_cost(true_boxes[truths], targets[truths, 1].long(), cells.take(distinct))
        rival, truth = match(cost[:, column], dynamic_k(iou[:, column], num_ious))
        winners.append(rivals[rival])
        targets_won.append(truths[truth])
    return _select(candidates, torch.cat(winners), torch.cat(targets_won))


@dataclass(frozen=True)
class Cells:
    """What the distinct candidate cells of a batch predict, u rows each."""

    boxes: torch.Tensor  # [u x 4, xyxy] in pixels of the network input
    background_cost: torch.Tensor  # [u] cross-entropy if no class were true
    class_logits: torch.Tensor  # [u x classes] of the joint score sqrt(class * objectness)

    def take(self, rows):
        return Cells(self.boxes[rows], self.background_cost[rows], self.class_logits[rows])


def _decode(predictions, candidates, anchors, strides):
    """The distinct cells among `candidates` as Cells, and which of them each candidate is [M], all layers in a row."""
    parts, cell_of_candidate, num_cells = [], [], 0
    for layer, prediction in enumerate(predictions):
        distinct, inverse = torch.stack(candidates.cells(layer)).unique(dim=1, return_inverse=True)  # [4 x u], [n]
        image, anchor, cell_y, cell_x = distinct
        rows = prediction[image, anchor, cell_y, cell_x].float()
        corners = torch.stack((cell_x, cell_y), 1)
        parts.append(decode(rows, corners, anchors[layer][anchor], strides[layer]))
        cell_of_candidate.append(inverse + num_cells)
        num_cells += len(rows)
    return Cells(*(torch.cat(part) for part in zip(*parts, strict=True))), torch.cat(cell_of_candidate)


def decode(rows, corners, anchor_size, stride):
    """The three fields of Cells for `rows` [u x 5+classes, raw] of the cells at `corners` [u x 2: x, y, in cells]."""
    centre = (2 * rows[:, :2].sigmoid() - 0.5 + corners) * stride
    size = (2 * rows[:, 2:4].sigmoid()) ** 2 * anchor_size * stride
    return xywh2xyxy(torch.cat((centre, size), 1)), *joint_class_logits(rows[:, 5:], rows[:, 4:5])


def joint_class_logits(class_logits, object_logit):
    """Cross-entropy [u] against "no class" and logits [u x classes] of the scores y = sqrt(class * objectness).

    Everything stays in logarithms, so that a saturated prediction has a large cost but never an infinite one: log y is
    kept just below 0, and log(1 - y) is finite with it.
    """
    log_score = (F.logsigmoid(class_logits) + F.logsigmoid(object_logit)) / 2
    log_score = log_score.clamp(max=-torch.finfo(log_score.dtype).tiny)
    log_rest = (-torch.expm1(log_score)).log()
    return -log_rest.sum(1), log_score - log_rest


def matching_cost(true_boxes, true_classes, cells):
    """Overlap and cost [G x u] of every target (boxes [G x 4, xyxy], classes [G]) with every cell.

    The class term is the cross-entropy against the one-hot class c: swapping one label of "no class" from 0 to 1 takes
    that class's logit off the sum, so it is `background_cost - logit[c]` and no [G x u x classes] tensor arises.
    """
    iou = box_iou(true_boxes, cells.boxes).nan_to_num(0.0)  # two boxes without area
    class_cost = cells.background_cost - cells.class_logits.T[true_classes]
    return iou, class_cost + overlap_cost(iou)


def overlap_cost(iou):
    return IOU_WEIGHT * -(iou + 1e-8).log()


def dynamic_k(iou, num_ious=10):
    """How many candidates each target gets [G]: the sum of its `num_ious` best overlaps, rounded down, at least 1."""
    best = iou.topk(min(num_ious, iou.shape[1]), dim=1).values
    return best.sum(1).int().clamp(min=1)


def match(cost, num_wanted):
    """Hand out candidates by `cost` [G x M]: pairs (candidate [n] ascending, target [n]).

    Every target takes its `num_wanted` [G] cheapest; among equal costs the lowest candidate index comes first, on every
    device. A candidate taken by several goes to the target that is cheapest for it, be that one of the takers or not,
    the first in case of a tie; the others get no replacement.
    """
    cheapest_first = cost.argsort(dim=1, stable=True)
    within_k = torch.arange(cost.shape[1], device=cost.device) < num_wanted[:, None]
    taken = torch.zeros_like(within_k).scatter_(1, cheapest_first, within_k)

    num_takers = taken.sum(0)
    owner = torch.where(num_takers > 1, cost.argmin(0), taken.int().argmax(0))
    candidate = num_takers.nonzero()[:, 0]
    return candidate, owner[candidate]


def _select(candidates, winners, targets_won):
    """The Matches of candidates `winners` [n] (counted through all layers) with targets `targets_won` [n]."""
    layers, start = [], 0
    for layer, num_candidates in enumerate(map(len, candidates.image)):
        here = (winners >= start) & (winners < start + num_candidates)
        rows = winners[here] - start
        start += num_candidates
        cells = (index[rows] for index in candidates.cells(layer))
        layers.append((*cells, targets_won[here], candidates.anchor_size[layer][rows]))
    return Matches.of_layers(layers)
