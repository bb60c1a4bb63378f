"""The matching and the curves of `metrics`, on the device of the detections: equal values, few kernels.

match              as metrics.match_predictions, all images of a batch at once
precision_recall   as metrics.precision_recall_curves, from tensors on any device
"""

import numpy as np
import torch

from utils.metrics.detection import CURVE_AXIS, IOU_THRESHOLDS, RECALL_GRID, Curves, area
from utils.ops.boxes import paired_iou

TOGETHER = 500_000  # predictions of several classes whose curves are made at once


def match(rows, valid, labels, num_labels):
    """Which detections are right at each of IOU_THRESHOLDS, [b x k x thresholds] bool.

    rows [b x k x 6: x1, y1, x2, y2, confidence, class] best first, of which `valid` [b x k] count; labels [b x m x 5:
    class, x1, y1, x2, y2], of which each image has `num_labels` [b].
    """
    num_slots = labels.shape[1]
    thresholds = IOU_THRESHOLDS.to(rows.device)
    if not rows.shape[1] or not num_slots:
        return torch.zeros(*valid.shape, len(thresholds), dtype=torch.bool, device=rows.device)
    is_label = torch.arange(num_slots, device=rows.device) < num_labels[:, None]
    comparable = (rows[:, :, None, 5] == labels[:, None, :, 0]) & is_label[:, None]  # [b x k x m]
    overlaps = paired_iou(rows[:, :, None, :4], labels[:, None, :, 1:5]).masked_fill_(~comparable, -1)
    best_iou, wanted = overlaps.max(2)
    is_candidate = (best_iou > thresholds[0]) & valid
    # the most confident candidate of a label is the first one
    position = torch.arange(rows.shape[1], device=rows.device).expand_as(wanted)
    position = torch.where(is_candidate, position, rows.shape[1])
    first = torch.full(labels.shape[:2], rows.shape[1], device=rows.device).scatter_reduce_(1, wanted, position, "amin")
    is_winner = is_candidate & (first.gather(1, wanted) == position)
    return is_winner[..., None] & (best_iou[..., None] > thresholds)


def precision_recall(tp, conf, pred_cls, target_cls, v5_metric=False):
    """Curves of a whole data set: tp [n x T], conf and pred_cls [n] on a device, target_cls [m] in NumPy."""
    classes, num_labels = np.unique(target_cls, return_counts=True)
    precision, recall, envelope = (np.zeros((len(classes), len(CURVE_AXIS))) for _ in range(3))
    ap = np.zeros((len(classes), tp.shape[1]))

    # NumPy's unstable order of equal confidences, as in the reference
    order = torch.from_numpy(np.argsort(-conf.cpu().numpy())).to(tp.device)
    order = order[pred_cls[order].argsort(stable=True)]
    tp, conf, pred_cls = tp[order], conf[order].double(), pred_cls[order]
    wanted = torch.from_numpy(classes).to(pred_cls)
    starts, ends = (torch.searchsorted(pred_cls, wanted, right=right).tolist() for right in (False, True))
    counts = np.subtract(ends, starts)
    for rows in _of_similar_size(counts, TOGETHER):
        found = _class_curves(
            tp, conf, *(pred_cls.new_tensor(part[rows], dtype=torch.long) for part in (np.array(starts), counts)),
            conf.new_tensor(num_labels[rows]), v5_metric,
        )  # fmt: skip
        recall[rows], precision[rows], envelope[rows], at_grid = (part.cpu().numpy() for part in found)
        ap[rows] = area(at_grid)
    f1 = 2 * precision * recall / (precision + recall + 1e-16)
    return Curves(CURVE_AXIS, precision, recall, f1, CURVE_AXIS, envelope, ap, classes.astype(np.int32))


def _of_similar_size(counts, most):
    """Indices of the classes with predictions, in groups: each at most twice as large as the first of its group.

    A group has no more than `most` predictions with padding, or is one class.
    """
    group = []
    for row in np.argsort(counts, kind="stable"):
        if group and (counts[row] > 2 * counts[group[0]] or (len(group) + 1) * counts[row] > most):
            yield np.array(group)
            group = []
        if counts[row]:
            group.append(row)
    if group:
        yield np.array(group)


def _class_curves(tp, conf, starts, counts, num_labels, v5_metric):
    """Of c classes on the device, whose predictions, most confident first, lie at `starts`, so many as `counts`.

    Recall and precision [c x 1000] by confidence, precision [c x 1000] by recall, all three at the first threshold, and
    the latter at COCO's recalls [c x T x 101].
    """
    axis, grid = (torch.from_numpy(points).to(conf.device) for points in (CURVE_AXIS, RECALL_GRID))
    place = torch.arange(int(counts.max()), device=conf.device)
    exists = place < counts[:, None]  # [c x n]; the rest is padding, which finds nothing
    index = torch.minimum(place, counts[:, None] - 1) + starts[:, None]
    # predictions come last, because a GPU accumulates along the last axis in parallel
    hits = (tp[index] & exists[..., None]).transpose(1, 2).contiguous().cumsum(2).double()  # [c x T x n]
    recall = hits / (num_labels + 1e-16)[:, None, None]  # by a tensor: by a number, a GPU multiplies with its inverse
    precision = hits / (place + 1)
    conf = torch.where(exists, conf[index], -torch.inf)
    by_confidence = torch.stack((recall[:, 0], precision[:, 0]), 1).flatten(0, 1)  # [2c x n]
    left = axis.new_tensor([[0.0], [1.0]]).repeat(len(counts), 1)  # above all confidences: nothing found, nothing wrong
    conf, last = (-conf).repeat_interleave(2, 0), (counts[:, None] - 1).repeat_interleave(2, 0)
    by_confidence = interpolate(-axis.expand(len(conf), -1), conf, by_confidence, left, last)

    end = torch.ones_like(recall[..., -1:]) if v5_metric else recall[..., -1:] + 0.01
    recall = torch.where(exists[:, None], recall, end)
    recall = torch.cat((torch.zeros_like(end), recall, end), 2).flatten(0, 1)  # [cT x n + 2]
    precision = torch.where(exists[:, None], precision, 0.0)
    precision = torch.cat((torch.ones_like(end), precision, torch.zeros_like(end)), 2).flatten(0, 1)
    precision = precision.flip(1).cummax(1).values.flip(1)
    at_grid = interpolate(grid.expand(len(recall), -1), recall, precision, precision[:, :1])
    first = slice(None, None, tp.shape[1])
    by_recall = interpolate(axis.expand(len(counts), -1), recall[first], precision[first], precision[first, :1])
    return by_confidence[0::2], by_confidence[1::2], by_recall, at_grid.view(len(counts), -1, len(grid))


def interpolate(x, xp, fp, left, last=None):
    """np.interp of each row: values at `x` [r x m] of the lines through (`xp`, `fp`) [r x n], xp ascending.

    Below xp[0] it is `left` [r x 1], above the end fp[-1]. A row may end earlier, at its entry of `last` [r x 1]; what
    comes then in xp is infinite.
    """
    last = xp.shape[1] - 1 if last is None else last
    below = torch.searchsorted(xp.contiguous(), x.contiguous(), right=True) - 1  # xp[below] <= x < xp[below + 1]
    start, end = below.clamp(min=0).clamp(max=last), (below + 1).clamp(max=last)
    x0, x1, y0, y1 = xp.gather(1, start), xp.gather(1, end), fp.gather(1, start), fp.gather(1, end)
    inside = (start != end) & (x0 != x)
    slope = (y1 - y0) / torch.where(inside, x1 - x0, 1.0)
    return torch.where(below < 0, left, torch.where(inside, slope * (x - x0) + y0, y0))
