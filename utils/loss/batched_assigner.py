"""The matchers of `assign` for a whole batch at once: equal matches in equal order, without waiting for a GPU.

`owners` is the heart: for every candidate of a Plan the target that it learns, or -1. Two ways lead to the same answer:

    flat      all pairs of a target and a candidate of its image in one list, sorted by target and then by cost: fixed
              shapes, few kernels, no loop; for a GPU. A crowded batch is taken in pieces, in bounded memory
    by image  one image after another (`assign_by_image`); for a CPU, which sorts slowly and starts small work quickly

Equal costs go to the lowest candidate in both: the sorts are stable.
"""

import logging
from dataclasses import fields
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from utils.loss import assign_by_image, assigner
from utils.loss.assigner import IOU_WEIGHT, Cells, Matches, joint_class_logits
from utils.loss.candidates import prepare

logger = logging.getLogger(__name__)

FLAT_PAIRS = 12_000_000  # at once, about 1 GB of passing memory; beyond that, and then in pieces of
PIECE_PAIRS = 5_000_000
CACHED_ROWS = 1024  # decoded at once on a CPU: what passes then stays in its cache
HIGH = 1 << 32  # two numbers in one: a vote is number of takers * HIGH + sum of their rows; keys of sorting likewise


@torch.no_grad()
def plain(predictions, targets, anchors, strides=None, image_size=None, *, anchor_threshold=4.0, reach=0.5):
    """As `assign.plain`, worked out on the host: nothing in it depends on predictions."""
    options = {"anchor_threshold": anchor_threshold, "reach": reach}
    found = assigner.plain(predictions, targets.cpu(), anchors.cpu(), strides, image_size, **options)
    device = predictions[0].device
    return Matches(*([tensor.to(device) for tensor in getattr(found, field.name)] for field in fields(found)))


@torch.no_grad()
def ota(predictions, targets, anchors, strides, image_size, *, anchor_threshold=4.0, reach=0.5, num_ious=10):
    """As `assign.ota`."""
    plan = prepare(
        targets.cpu(), [prediction.shape for prediction in predictions], anchors.cpu(), strides, image_size,
        anchor_threshold=anchor_threshold, reach=reach, padded=predictions[0].device.type != "cpu",
    ).to(predictions[0].device)  # fmt: skip
    rows = gather_rows(plan.layout.cell_index, plan.sizes.cells, predictions)
    return matches(plan, owners(rows, plan, num_ious), anchors)


def gather_rows(cell_index, sizes, predictions):
    """Rows [u x 5+nc] of the cells `cell_index` [u], of which each layer has one of `sizes`."""
    parts = zip(predictions, cell_index.split(sizes), strict=True)
    return torch.cat([grid.reshape(-1, grid.shape[-1]).index_select(0, index) for grid, index in parts])


@torch.no_grad()
def owners(rows, plan, num_ious=10, boxes=None):
    """Which target row of `plan` each of its candidates learns [m], -1 for none; targets there are sorted by image.

    rows      [u x 5+classes, raw predictions] of the distinct cells of the plan
    num_ious  how many of the best overlaps vote on the number of candidates of a target
    boxes     centre and size [u x 2 each] of `boxes_in_cells(rows, ...)`, if known
    """
    layout = plan.layout
    if plan.sizes.candidates == 0:
        return torch.full_like(layout.proposer, -1)
    if not plan.padded:
        cells = decode(rows.float(), layout, boxes, at_once=CACHED_ROWS)
        return assign_by_image.owners(cells, layout, plan.blocks(), num_ious)
    cells = decode(rows.float(), layout, boxes)
    pieces = [Piece(0, plan.sizes.targets, 0, plan.sizes.pairs)]
    if plan.sizes.pairs > FLAT_PAIRS:
        if rows.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(f"{plan.sizes} are too many pairs for a CUDA graph (at most {FLAT_PAIRS}): run it without")
        _tell_once(plan.sizes.pairs)
        pieces = _pieces(plan, PIECE_PAIRS)
    return _owners_flat(cells, layout, pieces, num_ious)


_told = set()


def _tell_once(pairs):
    if not _told:
        _told.add(True)
        logger.warning(
            "a crowded batch (%d pairs of a box and a cell, more than %d): it is assigned piece by piece, which is "
            "slower and needs less memory; later ones will not be reported", pairs, FLAT_PAIRS)  # fmt: skip


# --- what the cells predict ------------------------------------------------------------------------------------------


def boxes_in_cells(rows, layout):
    """Centre, from the corner of the cell, and size [u x 2 each] of the boxes in `rows` [u x 5+nc], in cells."""
    doubled = rows[:, :4].sigmoid() * 2
    return doubled[:, :2] - 0.5, doubled[:, 2:] ** 2 * layout.anchor_size


def decode(rows, layout, boxes=None, at_once=None):
    """`assign.decode` of the distinct cells; `rows` [u x 5+nc] float32, so many `at_once` or all."""
    centre, size = boxes or boxes_in_cells(rows, layout)
    centre, half = (centre + layout.corner) * layout.stride, size * layout.stride / 2
    corners = torch.cat((centre - half, centre + half), 1)
    parts = [joint_class_logits(part[:, 5:], part[:, 4:5]) for part in rows.split(at_once or len(rows))]
    return Cells(corners, *(part[0] if len(part) == 1 else torch.cat(part) for part in zip(*parts, strict=True)))


# --- all pairs in one list -------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A range of targets, and the range of their pairs."""

    first_target: int
    last_target: int  # not included
    first_pair: int
    num_pairs: int


def _pieces(plan, most):
    """The targets of `plan` in pieces of at most `most` pairs, without padding."""
    num_targets, num_candidates = plan.per_image
    ends = np.repeat(num_candidates, num_targets).cumsum()  # [targets] of their pairs
    cuts = [0]
    while cuts[-1] < len(ends):
        start = ends[cuts[-1] - 1] if cuts[-1] else 0
        cuts.append(max(int(ends.searchsorted(start + most, side="right")), cuts[-1] + 1))
    edges = [0, *ends[np.array(cuts[1:], dtype=int) - 1].tolist()]
    return [
        Piece(first, last, start, end - start)
        for (first, last), (start, end) in zip(pairwise(cuts), pairwise(edges), strict=True)
    ]


def _owners_flat(cells, layout, pieces, num_ious):
    """The owner [m] of each candidate; `pieces` cover all targets that have pairs."""
    area = (cells.boxes[:, 2:] - cells.boxes[:, :2]).prod(1, keepdim=True)
    cell_values = torch.cat((cells.boxes, area, cells.background_cost[:, None]), 1)
    votes, cheapest = torch.zeros_like(layout.proposer), torch.full_like(layout.proposer, 2**63 - 1)
    for piece in pieces:
        target, candidate, iou, cost = _pairs(cell_values, cells.class_logits, layout, piece)
        rank = sortable(cost)
        _vote(votes, layout, piece, (target, candidate, iou, rank), num_ious)
        # of equal costs the first target's counts
        cheapest.scatter_reduce_(0, candidate, torch.add(target + piece.first_target, rank, alpha=HIGH), "amin")
    return _owner(votes, cheapest % HIGH)


def sortable(numbers):
    """Integers (int32) in the order of `numbers` (float32, no nan, 0 of one sign): their bits, negative ones turned."""
    bits = numbers.view(torch.int32)
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)


def _pairs(cell_values, class_logits, layout, piece):
    """The pairs of a piece by target, then by candidate: target (counted in the piece), candidate, IoU, cost [p each].

    cell_values [u x 6: x1, y1, x2, y2, area, cost of no class]
    """
    rows = slice(piece.first_target, piece.last_target)
    target = torch.repeat_interleave(layout.num_pairs[rows], output_size=piece.num_pairs)
    pair = torch.arange(piece.first_pair, piece.first_pair + piece.num_pairs, device=target.device)
    candidate = pair.add_((layout.first_candidate - layout.first_pair)[rows][target])
    candidate.clamp_(max=len(layout.proposer) - 1)  # the last target's pairs are padding
    cell = layout.cell_of_candidate[candidate]

    true, mine = layout.target_xyxy[rows][target], cell_values[cell]
    overlap = torch.min(true[:, 2:4], mine[:, 2:4]).sub_(torch.max(true[:, :2], mine[:, :2])).clamp_(min=0)
    intersection = overlap[:, 0] * overlap[:, 1]
    union = (true[:, 4] + mine[:, 4]).sub_(intersection)
    iou = intersection.div_(union).nan_to_num_(0.0)  # two boxes without area

    cost = mine[:, 5] - class_logits[cell, layout.target_class[rows][target]]
    return target, candidate, iou, cost.add_((iou + 1e-8).log_().mul_(-IOU_WEIGHT))


def _vote(votes, layout, piece, pairs, num_ious):
    """Each target of the piece votes for the candidates that it takes: the cheapest, as many as its best overlaps say.

    pairs  target (counted in the piece), candidate, IoU and rank by cost [p each]
    """
    target, candidate, iou, rank = pairs
    rows = slice(piece.first_target, piece.last_target)
    row = torch.arange(piece.last_target - piece.first_target, device=votes.device)[:, None]
    place = torch.arange(num_ious, device=votes.device)
    exists = place < layout.num_candidates[rows, None]
    position = torch.add(layout.first_pair[rows, None], place)  # [t x num_ious] the first pairs of every target
    position.sub_(piece.first_pair).clamp_(max=piece.num_pairs - 1)

    by_iou = torch.sub(iou.view(torch.int32), target, alpha=HIGH).sort(descending=True).values
    best_ious = (by_iou[position] & (HIGH - 1)).int().view(torch.float32)
    num_wanted = torch.where(exists, best_ious, 0.0).sum(1).int().clamp_(min=1)
    taken = exists & (place < num_wanted[:, None])
    by_cost = torch.add(rank, target, alpha=HIGH).sort(stable=True).indices
    chosen = candidate[by_cost[position]]
    # HIGH apart from `row`: inductor counts an arange in int32, also where a large constant is added to it
    vote = torch.add(taken * (row + piece.first_target), taken, alpha=HIGH)
    votes.scatter_add_(0, chosen.reshape(-1), vote.reshape(-1))


def _owner(votes, cheapest):
    """The single taker of each candidate, or the target that is `cheapest` for it if there are several, or -1."""
    num_takers = votes >> 32
    owner = torch.where(num_takers > 1, cheapest, votes % HIGH)
    return torch.where(num_takers > 0, owner, -1)


# --- as Matches ------------------------------------------------------------------------------------------------------


def matches(plan, owner, anchors):
    """The Matches of candidates with an `owner` [m] of at least 0. Waits for the device: for tests and comparisons."""
    layout, layers, start = plan.layout, [], 0
    for layer, (shape, size) in enumerate(zip(plan.shapes, plan.sizes.cells, strict=True)):
        won = ((owner >= 0) & (layout.layer_of_candidate == layer)).nonzero()[:, 0]
        index = layout.cell_index[start : start + size][layout.cell_of_candidate[won] - start]
        start += size
        _, num_anchors, ny, nx, _ = shape
        anchor = index // (ny * nx) % num_anchors
        target = torch.from_numpy(plan.target_rows).to(owner.device)[owner[won]]
        image = index // (num_anchors * ny * nx)
        layers.append((image, anchor, index // nx % ny, index % nx, target, anchors[layer][anchor]))
    return Matches.of_layers(layers)
