"""The matchers of `assign` for a whole batch at once: equal matches in equal order, without waiting for a GPU.

`owners` is the heart: for every candidate of a Plan the target that it learns, or -1. Two ways lead to the same answer:

    flat      all pairs of a target and a candidate of its image in one list, ordered by one sort with keys (target,
              cost): fixed shapes, few kernels, no loop; for a GPU
    by image  one image after another on small matrices: fast on a CPU, which sorts slowly and launches quickly; and in
              bounded memory, so it also takes the crowded batches of a GPU

Equal costs go to the lowest candidate in both, because a key is a cost and a position in one integer.
"""

import logging
from dataclasses import fields

import torch

from utils import assign
from utils.assign import Cells, Matches, decode, dynamic_k, matching_cost, overlap_cost
from utils.boxes import paired_iou
from utils.loss_plan import prepare

logger = logging.getLogger(__name__)

FLAT_PAIRS = 12_000_000  # at most, about 1 GB of passing memory
CHUNK_PAIRS = 2_000_000  # of the way by image
HIGH = 1 << 32  # a key is high word * HIGH + low word
LARGEST = (1 << 31) - 1


@torch.no_grad()
def plain(predictions, targets, anchors, strides=None, image_size=None, *, anchor_threshold=4.0, reach=0.5):
    """As `assign.plain`, worked out on the host: nothing in it depends on predictions."""
    options = {"anchor_threshold": anchor_threshold, "reach": reach}
    found = assign.plain(predictions, targets.cpu(), anchors.cpu(), strides, image_size, **options)
    device = predictions[0].device
    return Matches(*([tensor.to(device) for tensor in getattr(found, field.name)] for field in fields(found)))


@torch.no_grad()
def ota(predictions, targets, anchors, strides, image_size, *, anchor_threshold=4.0, reach=0.5, num_ious=10):
    """As `assign.ota`."""
    plan = prepare(
        targets.cpu(), [prediction.shape for prediction in predictions], anchors.cpu(), strides, image_size,
        anchor_threshold=anchor_threshold, reach=reach, padded=predictions[0].device.type != "cpu",
    ).to(predictions[0].device)  # fmt: skip
    rows = [
        prediction.reshape(-1, prediction.shape[-1])[index]
        for prediction, index in zip(predictions, plan.layout().cell_index.split(plan.sizes.cells), strict=True)
    ]
    return matches(plan, owners(torch.cat(rows), plan, num_ious), anchors)


@torch.no_grad()
def owners(rows, plan, num_ious=10):
    """Which target row of `plan` each of its candidates learns [m], -1 for none; targets there are sorted by image.

    rows      [u x 5+classes, raw predictions] of the distinct cells of the plan
    num_ious  how many of the best overlaps vote on the number of candidates of a target
    """
    layout = plan.layout()
    if plan.sizes.candidates == 0:
        return torch.full_like(layout.proposer, -1)
    scale = layout.anchor_size, layout.stride
    cells = Cells(*decode(rows.float(), layout.corner, *scale))
    if not plan.padded:
        return _owners_by_image(cells, layout, plan.blocks(), num_ious)
    if plan.sizes.pairs > FLAT_PAIRS:
        if rows.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(f"{plan.sizes} are too many pairs for a CUDA graph (at most {FLAT_PAIRS}): run it without")
        _tell_once(plan.sizes.pairs)
        return _owners_by_image(cells, layout, plan.blocks(), num_ious)
    return _owners_flat(cells, layout, plan.sizes, num_ious)


_told = set()


def _tell_once(pairs):
    if not _told:
        _told.add(True)
        logger.warning(
            "a crowded batch (%d pairs of a box and a cell, more than %d): its images are assigned one by one, which "
            "is slower and needs less memory; later ones will not be reported", pairs, FLAT_PAIRS)  # fmt: skip


# --- all pairs in one list -------------------------------------------------------------------------------------------


def _owners_flat(cells, layout, sizes, num_ious):
    pair = torch.arange(sizes.pairs, device=layout.proposer.device)
    target = torch.repeat_interleave(layout.num_pairs, output_size=sizes.pairs)
    first_pair = layout.num_pairs.cumsum(0) - layout.num_pairs
    candidate = (pair + (layout.first_candidate - first_pair)[target]).clamp_(max=sizes.candidates - 1)
    cell = layout.cell_of_candidate[candidate]

    iou = paired_iou(layout.target_xyxy[target], cells.boxes[cell]).nan_to_num(0.0)
    class_cost = cells.background_cost[cell] - cells.class_logits[cell, layout.target_class[target]]
    cost = _sortable(class_cost + overlap_cost(iou))

    place = torch.arange(num_ious, device=pair.device)  # of a target's pairs in ascending order
    exists = place < layout.num_candidates[:, None]
    position = (first_pair[:, None] + place).clamp_(max=sizes.pairs - 1)  # [t x num_ious]
    falling = (target * HIGH + (LARGEST - _sortable(iou))).sort().values % HIGH  # no overlap is negative
    best_ious = (LARGEST - falling[position]).int().view(torch.float32)
    num_wanted = torch.where(exists, best_ious, 0.0).sum(1).int().clamp(min=1)

    cheapest_first = (target * HIGH + cost).sort(stable=True).indices[position]
    taken = exists & (place < num_wanted[:, None])
    least = torch.full_like(layout.proposer, torch.iinfo(torch.long).max)
    least.scatter_reduce_(0, candidate, cost * HIGH + target, "amin")
    return _owner(_votes(candidate[cheapest_first], taken, layout.proposer), least % HIGH)


def _sortable(values):
    """Integers (int64, but within int32) in the order of `values`, float32; 0 and -0 are equal."""
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & LARGEST)).long()


def _votes(candidate, taken, like):
    """For each candidate the number of its takers * HIGH + the sum of their rows, which is the taker if it is one."""
    row = torch.arange(len(candidate), device=like.device)
    votes = taken * (HIGH + row)[:, None]
    return torch.zeros_like(like).scatter_add_(0, candidate.reshape(-1), votes.reshape(-1))


def _owner(votes, cheapest):
    """The single taker of each candidate, or the target that is `cheapest` for it if there are several, or -1."""
    num_takers = votes >> 32
    owner = torch.where(num_takers > 1, cheapest, votes % HIGH)
    return torch.where(num_takers > 0, owner, -1)


# --- one image after another -----------------------------------------------------------------------------------------


def _owners_by_image(cells, layout, blocks, num_ious):
    owner = torch.full_like(layout.proposer, -1)
    for block in blocks:
        here = slice(block.first_candidate, block.first_candidate + block.num_candidates)
        rivals = cells.take(layout.cell_of_candidate[here])
        owner[here] = _owners_in_image(rivals, layout, block, num_ious)
    return owner


def _owners_in_image(rivals, layout, block, num_ious):
    """The owner of each candidate of one image; its targets are taken in chunks, so that memory is bounded."""
    column = torch.arange(block.num_candidates, device=layout.proposer.device)
    step = max(CHUNK_PAIRS // block.num_candidates, 1)
    votes, least, cheapest = torch.zeros_like(column), None, None
    for start in range(0, block.num_targets, step):
        first = block.first_target + start
        rows = slice(first, first + min(step, block.num_targets - start))
        iou, cost = matching_cost(layout.target_xyxy[rows], layout.target_class[rows], rivals)
        num_wanted = dynamic_k(iou, num_ious)
        size = min(num_ious, block.num_candidates)
        keys = _sortable(cost).mul_(HIGH).add_(column).topk(size, dim=1, largest=False).values
        taken = column[:size] < num_wanted[:, None]
        row = torch.arange(rows.start, rows.stop, device=column.device)
        votes.scatter_add_(0, (keys % HIGH).reshape(-1), (taken * (HIGH + row)[:, None]).reshape(-1))
        lowest, at = cost.min(0)
        if least is None:
            least, cheapest = lowest, at + first
        else:
            cheapest = torch.where(lowest < least, at + first, cheapest)
            least = torch.minimum(lowest, least)
    return _owner(votes, cheapest)


# --- as Matches ------------------------------------------------------------------------------------------------------


def matches(plan, owner, anchors):
    """The Matches of candidates with an `owner` [m] of at least 0. Waits for the device: for tests and comparisons."""
    layout, layers, start = plan.layout(), [], 0
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
