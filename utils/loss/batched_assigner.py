"""The OTA assignment of `assigner` for a whole batch at once: equal matches, fixed shapes, no waiting for a GPU.

The steps are the same, candidates -> cost -> dynamic k -> conflicts, and cost, k and conflict rule are the functions of
`assigner`. What differs is their data: not one matrix [targets x candidates] for each image, but one list of pairs for
the batch, a target and a candidate of its image. Rows of different length in one list have no topk; so the list is
sorted by target, and within it by overlap or cost. The sorts are stable: equal costs go to the lowest candidate.

A crowded batch is taken in chunks of targets, in bounded memory.
"""

import logging
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from utils.loss.assigner import Cells, dynamic_k, joint_class_logits, matching_cost, resolve_conflicts, with_area

logger = logging.getLogger(__name__)

MAX_PAIRS = 12_000_000  # at once, about 1 GB of passing memory; beyond that, and then in chunks of
CHUNK_PAIRS = 5_000_000
HIGH = 1 << 32  # packs two numbers into an int64: high * HIGH + low


@torch.no_grad()
def assign(rows, candidates, num_ious=10, boxes=None):
    """The target that each candidate of the CandidateSet is assigned to [m], -1 for none.

    rows      [u x 5+classes, raw predictions] of its distinct cells
    num_ious  how many of a target's best overlaps are summed up to its number of candidates
    boxes     `decode_boxes(rows, ...)`, if known
    """
    tensors, pairs = candidates.tensors, candidates.sizes.pairs
    cells = decode(rows.float(), tensors, boxes)
    chunks = [Chunk(0, candidates.sizes.targets, 0, pairs)]
    if candidates.sizes.is_too_large:
        if rows.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(f"{candidates.sizes} are too many pairs for a CUDA graph (at most {MAX_PAIRS}): "
                             "run it without")  # fmt: skip
        _warn_once(pairs)
        chunks = _chunks(candidates, CHUNK_PAIRS)
    return _assign_chunks(cells, tensors, chunks, num_ious)


_warned: set[bool] = set()


def _warn_once(pairs):
    if not _warned:
        _warned.add(True)
        logger.warning(
            "a crowded batch (%d pairs of a box and a cell, more than %d): it is assigned piece by piece, which is "
            "slower and needs less memory; later ones will not be reported", pairs, MAX_PAIRS)  # fmt: skip


# --- what the cells predict ------------------------------------------------------------------------------------------


class DecodedBoxes(NamedTuple):
    """The boxes that cells predict, in cells, float32."""

    centre: torch.Tensor  # [u x 2: x, y] from the corner of the cell
    size: torch.Tensor  # [u x 2: width, height]


def gather_rows(cell_index, sizes, predictions):
    """Rows [u x 5+nc] of the cells `cell_index` [u], of which each layer has one of `sizes`."""
    parts = zip(predictions, cell_index.split(sizes), strict=True)
    return torch.cat([grid.reshape(-1, grid.shape[-1]).index_select(0, index) for grid, index in parts])


def decode_boxes(rows, tensors):
    """DecodedBoxes of the raw `rows` [u x 5+nc] of the distinct cells; float16 is rounded as in the reference loss."""
    doubled = rows[:, :4].sigmoid() * 2
    return DecodedBoxes((doubled[:, :2] - 0.5).float(), (doubled[:, 2:] ** 2 * tensors.anchor_size).float())


def decode(rows, tensors, boxes=None):
    """The distinct cells as Cells of `assigner`; `rows` [u x 5+nc] float32."""
    centre, size = boxes or decode_boxes(rows, tensors)
    centre, half = (centre + tensors.corner) * tensors.stride, size * tensors.stride / 2
    corners = torch.cat((centre - half, centre + half), 1)
    return Cells(with_area(corners), *joint_class_logits(rows[:, 5:], rows[:, 4:5]))


# --- cost, dynamic k, conflicts --------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A range of targets, and the range of their pairs."""

    first_target: int
    last_target: int  # not included
    first_pair: int
    num_pairs: int


def _chunks(candidates, most):
    """The targets of a CandidateSet in chunks of at most `most` pairs, without padding."""
    cuts, edges = cut(candidates.pairs_of_target.cumsum(), most)
    return [
        Chunk(first, last, start, end - start)
        for (first, last), (start, end) in zip(pairwise(cuts), pairwise(edges), strict=True)
    ]


def cut(ends, most):
    """Cut a list of n items into chunks of at most `most` parts each; an item with more is a chunk of its own.

    `ends` [n]: at which part each item ends. Returns the edges of the chunks twice, counted in items and in parts; both
    begin with 0, and one edge is the end of a chunk and the beginning of the next.
    """
    cuts = [0]
    while cuts[-1] < len(ends):
        start = ends[cuts[-1] - 1] if cuts[-1] else 0
        cuts.append(max(int(ends.searchsorted(start + most, side="right")), cuts[-1] + 1))
    return cuts, [0, *ends[np.array(cuts[1:], dtype=int) - 1].tolist()]


def _assign_chunks(cells, tensors, chunks, num_ious):
    """The target of each candidate [m], -1 for none; `chunks` cover all targets that have pairs."""
    cell_values = torch.cat((cells.boxes, cells.background_cost[:, None]), 1)  # gathered at once, not one by one
    # of each candidate: number of targets that selected it * HIGH + sum of their rows
    selecting = torch.zeros_like(tensors.target_of_candidate)
    # of each candidate: lowest cost * HIGH + its target, so that of equal costs the first target's counts
    cheapest = torch.full_like(tensors.target_of_candidate, 2**63 - 1)
    for chunk in chunks:
        target, candidate, iou, cost = _pair_costs(cell_values, cells.class_logits, tensors, chunk)
        first = _first_pairs(tensors, chunk, num_ious)
        k = dynamic_k(_best_ious(iou, target, first))
        rank = sortable(cost)
        _select_cheapest(selecting, rank, target, candidate, first, k, chunk.first_target)
        cheapest.scatter_reduce_(0, candidate, torch.add(target + chunk.first_target, rank, alpha=HIGH), "amin")
    return resolve_conflicts(selecting >> 32, selecting % HIGH, cheapest % HIGH)


def _pair_costs(cell_values, class_logits, tensors, chunk):
    """The pairs of a chunk by target, then by candidate: target (counted in the chunk), candidate, IoU, cost [p each].

    cell_values [u x 6: x1, y1, x2, y2, area, cost of no class]
    """
    rows = slice(chunk.first_target, chunk.last_target)
    target = torch.repeat_interleave(tensors.num_pairs[rows], output_size=chunk.num_pairs)
    pair = torch.arange(chunk.first_pair, chunk.first_pair + chunk.num_pairs, device=target.device)
    candidate = pair.add_((tensors.first_candidate - tensors.first_pair)[rows][target])
    candidate.clamp_(max=len(tensors.target_of_candidate) - 1)  # the last target's pairs are padding
    cell = tensors.cell_of_candidate[candidate]

    values, class_logit = cell_values[cell], class_logits[cell, tensors.target_class[rows][target]]
    iou, cost = matching_cost(tensors.target_xyxy[rows][target], values[:, :5], values[:, 5], class_logit)
    return target, candidate, iou, cost


class FirstPairs(NamedTuple):
    """The first `num_ious` pairs of every target, [t x num_ious] each."""

    exist: torch.Tensor  # whether it has so many
    position: torch.Tensor  # in the list, for any order within the targets


def _first_pairs(tensors, chunk, num_ious):
    rows = slice(chunk.first_target, chunk.last_target)
    place = torch.arange(num_ious, device=tensors.first_pair.device)
    position = torch.add(tensors.first_pair[rows, None], place)
    position.sub_(chunk.first_pair).clamp_(max=chunk.num_pairs - 1)
    return FirstPairs(place < tensors.num_candidates[rows, None], position)


def sortable(numbers):
    """Integers (int32) in the order of `numbers` (float32, no nan, 0 of one sign): their bits, negative ones turned."""
    bits = numbers.view(torch.int32)
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)


def _best_ious(iou, target, first):
    """The best overlaps of each target [t x num_ious], 0 where it has fewer candidates."""
    by_iou = torch.sub(iou.view(torch.int32), target, alpha=HIGH).sort(descending=True).values
    return torch.where(first.exist, (by_iou[first.position] & (HIGH - 1)).int().view(torch.float32), 0.0)


def _select_cheapest(selecting, rank, target, candidate, first, k, first_target):
    """Note in `selecting` that each target selects its `k` [t] cheapest candidates; `rank` [p] by cost."""
    by_cost = torch.add(rank, target, alpha=HIGH).sort(stable=True).indices
    cheapest = candidate[by_cost[first.position]]  # [t x num_ious]
    row, place = (torch.arange(n, device=candidate.device) for n in cheapest.shape)
    selected = first.exist & (place < k[:, None])
    # HIGH apart from `row`: inductor counts an arange in int32, also where a large constant is added to it
    packed = torch.add(selected * (row[:, None] + first_target), selected, alpha=HIGH)
    selecting.scatter_add_(0, cheapest.reshape(-1), packed.reshape(-1))
