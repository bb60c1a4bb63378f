"""OTA for the CPU: one image after another, on small NumPy matrices.

The costs and ties are those of `assign.ota`, to the last bit: the same arithmetic in the same order. What differs is
how the cheapest candidates are found: by a threshold for each target (a partial sort gives it), which all candidates
are compared with.
"""

import numpy as np
import torch

from utils.loss.assigner import IOU_WEIGHT


def owners(cells, layout, blocks, num_ious):
    """`assign_batched.owners` for a Plan on the CPU; `cells` are the decoded distinct cells, `blocks` its images."""
    owner = torch.full_like(layout.proposer, -1)
    x1, y1, x2, y2 = cells.boxes.T.contiguous()  # each of them in a row
    values = torch.stack((x1, y1, x2, y2, (x2 - x1) * (y2 - y1), cells.background_cost))
    mine = values.index_select(1, layout.cell_of_candidate)
    true = layout.target_xyxy.T[:, :, None].numpy()  # [5 x t x 1]
    mine, classes, logits = mine.numpy(), layout.target_class.numpy(), cells.class_logits.numpy()
    cell, result = layout.cell_of_candidate.numpy(), owner.numpy()
    for first_target, num_targets, first, number in blocks:
        rows, here = slice(first_target, first_target + num_targets), slice(first, first + number)
        iou = overlaps(true[:, rows], mine[:, here])
        cost = costs(iou, mine[5, here], logits[cell[here]], classes[rows])
        result[here] = match(cost, num_wanted(iou, num_ious), num_ious, first_target)
    return owner


@np.errstate(divide="ignore", invalid="ignore")
def overlaps(true, mine):
    """IoU [g x m] of boxes `true` [5 x g x 1: corners and area] with `mine` [5+ x m]."""
    width = np.minimum(true[2], mine[2])
    width -= np.maximum(true[0], mine[0])
    height = np.minimum(true[3], mine[3])
    height -= np.maximum(true[1], mine[1])
    intersection = np.maximum(width, 0, out=width)
    intersection *= np.maximum(height, 0, out=height)
    union = np.add(true[4], mine[4], out=height)
    union -= intersection
    iou = np.divide(intersection, union, out=intersection)
    if not np.isfinite(iou.sum()):
        np.nan_to_num(iou, copy=False)  # two boxes without area
    return iou


def costs(iou, background_cost, logits, classes):
    """Cost [g x m] of every target (of `classes` [g]) with every candidate (with class `logits` [m x nc])."""
    class_cost = logits.T[classes]
    np.subtract(background_cost, class_cost, out=class_cost)
    overlap_cost = torch.from_numpy(iou + np.float32(1e-8)).log_().numpy()
    overlap_cost *= np.float32(-IOU_WEIGHT)
    class_cost += overlap_cost
    return class_cost


def num_wanted(iou, num_ious):
    """How many candidates each target gets [g]; see `assign.dynamic_k`."""
    size = min(num_ious, iou.shape[1])
    best = np.partition(-iou, size - 1, axis=1)[:, :size]
    best.sort(axis=1)  # the largest overlap first, which decides how the sum is rounded
    return np.maximum(torch.from_numpy(-best).sum(1).int().numpy(), 1)


def match(cost, wanted, num_ious, first_target):
    """The owner of each candidate [m], counted from `first_target`, or -1; see `assign.match`.

    cost [g x m], wanted [g] and num_ious as for `num_wanted`
    """
    num_targets, number = cost.shape
    size = min(num_ious, number)
    wanted = np.minimum(wanted, size)
    lowest = np.partition(cost, size - 1, axis=1)[:, :size]
    lowest.sort(axis=1)
    limit = lowest[np.arange(num_targets), wanted - 1]
    taken = cost <= limit[:, None]
    pairs = np.flatnonzero(taken)
    if len(pairs) > wanted.sum():
        _drop_ties(taken, cost, limit, wanted)
        pairs = np.flatnonzero(taken)

    target = pairs // number
    candidate = pairs - target * number
    owner = np.full(number, -1)
    owner[candidate] = target + first_target
    contested = np.flatnonzero(np.bincount(candidate, minlength=number) > 1)
    if len(contested):
        owner[contested] = cost[:, contested].argmin(0) + first_target
    return owner


def _drop_ties(taken, cost, limit, wanted):
    """Where equal costs gave a target more candidates than it wants, take the last of these away."""
    surplus = taken.sum(1) - wanted
    for row in np.flatnonzero(surplus > 0):
        tied = np.flatnonzero(cost[row] == limit[row])
        taken[row, tied[-surplus[row] :]] = False
