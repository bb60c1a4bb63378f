"""The matching and the curves of `metrics`, on the device of the detections: equal values, few kernels.

match              as metrics.match_predictions, all images of a batch at once
precision_recall   as metrics.precision_recall_curves, from tensors on any device
"""

import numpy as np
import torch

from utils.boxes import paired_iou
from utils.metrics import IOU_THRESHOLDS, NUM_CURVE_POINTS, RECALL_GRID, Curves


def match(rows, valid, labels, num_labels, iou_thresholds=IOU_THRESHOLDS):
    """Which detections are right, [b x k x thresholds] bool.

    rows [b x k x 6: x1, y1, x2, y2, confidence, class] best first, of which `valid` [b x k] count; labels [b x m x 5:
    class, x1, y1, x2, y2], of which each image has `num_labels` [b].
    """
    num_slots = labels.shape[1]
    thresholds = iou_thresholds.to(rows.device)
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
    axis = np.linspace(0, 1, NUM_CURVE_POINTS)
    precision, recall, envelope = (np.zeros((len(classes), NUM_CURVE_POINTS)) for _ in range(3))
    ap = np.zeros((len(classes), tp.shape[1]))

    # NumPy's unstable order of equal confidences, as in the reference
    order = torch.from_numpy(np.argsort(-conf.cpu().numpy())).to(tp.device)
    order = order[pred_cls[order].argsort(stable=True)]
    tp, conf, pred_cls = tp[order], conf[order].double(), pred_cls[order]
    wanted = torch.from_numpy(classes).to(pred_cls)
    starts, ends = (torch.searchsorted(pred_cls, wanted, right=right).tolist() for right in (False, True))
    present = [row for row in range(len(classes)) if starts[row] < ends[row]]
    samples = [
        _class_curves(tp[starts[row] : ends[row]], conf[starts[row] : ends[row]], int(num_labels[row]), v5_metric)
        for row in present
    ]
    if samples:
        columns = [torch.stack(column).cpu().numpy() for column in zip(*samples, strict=True)]
        recall[present], precision[present], envelope[present], at_grid = columns
        ap[present] = (np.diff(RECALL_GRID) * (at_grid[..., 1:] + at_grid[..., :-1]) / 2.0).sum(-1)
    f1 = 2 * precision * recall / (precision + recall + 1e-16)
    return Curves(axis, precision, recall, f1, axis, envelope, ap, classes.astype(np.int32))


def _class_curves(tp, conf, num_labels, v5_metric):
    """Of one class, most confident first, on the device: recall and precision [1000] by confidence, precision [1000] by
    recall, all three at the first threshold, and the latter at COCO's recalls [T x 101]."""
    axis, grid = (torch.from_numpy(points).to(conf.device) for points in _axes())
    hits = tp.cumsum(0).double()  # [predictions x T]
    recall = hits / (num_labels + 1e-16)
    precision = hits / torch.arange(1, len(hits) + 1, device=hits.device)[:, None]
    by_confidence = torch.stack((recall[:, 0], precision[:, 0]))
    left = axis.new_tensor([[0.0], [1.0]])  # above the most confident prediction nothing is found, nothing is wrong
    by_confidence = interpolate(-axis.expand(2, -1), -conf.expand(2, -1), by_confidence, left)

    end = torch.ones_like(recall[-1:]) if v5_metric else recall[-1:] + 0.01
    recall = torch.cat((torch.zeros_like(end), recall, end)).T.contiguous()
    precision = torch.cat((torch.ones_like(end), precision, torch.zeros_like(end)))
    precision = precision.flip(0).cummax(0).values.flip(0).T.contiguous()
    at_grid = interpolate(grid.expand(len(recall), -1), recall, precision, precision[:, :1])
    by_recall = interpolate(axis[None], recall[:1], precision[:1], precision[:1, :1])
    return *by_confidence, by_recall[0], at_grid


def _axes():
    return np.linspace(0, 1, NUM_CURVE_POINTS), RECALL_GRID


def interpolate(x, xp, fp, left):
    """np.interp of each row: values at `x` [r x m] of the lines through (`xp`, `fp`) [r x n], xp ascending.

    Below xp[0] it is `left` [r x 1], above the end fp[-1].
    """
    last = xp.shape[1] - 1
    below = torch.searchsorted(xp.contiguous(), x.contiguous(), right=True) - 1  # xp[below] <= x < xp[below + 1]
    start, end = below.clamp(0, last), (below + 1).clamp(0, last)
    x0, x1, y0, y1 = xp.gather(1, start), xp.gather(1, end), fp.gather(1, start), fp.gather(1, end)
    inside = (start != end) & (x0 != x)
    slope = (y1 - y0) / torch.where(inside, x1 - x0, 1.0)
    return torch.where(below < 0, left, torch.where(inside, slope * (x - x0) + y0, y0))
