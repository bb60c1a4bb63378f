"""How good a detector is: matching, precision, recall and average precision, the confusion matrix, fitness."""

from dataclasses import dataclass

import numpy as np
import torch

from utils.ops.boxes import box_iou

IOU_THRESHOLDS = torch.linspace(0.5, 0.95, 10)
CURVE_AXIS = np.linspace(0, 1, 1000)  # of the curves: confidence, or recall
RECALL_GRID = np.linspace(0, 1, 101)  # COCO's 101 recall values
FITNESS_WEIGHTS = np.array([0.0, 0.0, 0.1, 0.9])  # of precision, recall, mAP@.5, mAP@.5:.95


def fitness(results: np.ndarray | list | tuple) -> np.ndarray:
    """One number to choose the best epoch by, from `results` [... x 4+: P, R, mAP@.5, mAP@.5:.95, ...]."""
    return (np.asarray(results)[..., :4] * FITNESS_WEIGHTS).sum(-1)


# Matching detections with labels ------------------------------------------------------------------------------------


def match_predictions(detections: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    """Which detections of one image are right at each of IOU_THRESHOLDS, [k x thresholds] bool (NumPy).

    `detections` [k x 6: x1, y1, x2, y2, confidence, class] best first and `labels` [m x 5: class, x1, y1, x2, y2] are
    in the same pixels. Every detection wants the label of its class that it overlaps most, and the most confident
    one gets it; the others are wrong and do not try their second best.
    """
    correct = np.zeros((len(detections), len(IOU_THRESHOLDS)), bool)
    if not len(detections) or not len(labels):
        return correct
    overlaps = box_iou(detections[:, :4], labels[:, 1:5])
    overlaps[detections[:, 5:6] != labels[:, 0]] = -1
    best_iou, wanted = (column.cpu() for column in overlaps.max(1))
    candidates = (best_iou > IOU_THRESHOLDS[0]).nonzero().flatten()
    winners = candidates[_first_of_each(wanted[candidates])]
    correct[winners] = (best_iou[winners, None] > IOU_THRESHOLDS).numpy()
    return correct


def _first_of_each(values):
    """Positions in `values` [n] where a value occurs for the first time, ordered by value."""
    return np.unique(np.asarray(values), return_index=True)[1]


# Average precision --------------------------------------------------------------------------------------------------


@dataclass
class Curves:
    """Precision and recall of each class that has labels; C classes, T IoU thresholds.

    All curves but `ap` belong to the first threshold (IoU 0.5).
    """

    confidence: np.ndarray  # [1000] where the next three are sampled
    precision: np.ndarray  # [C x 1000]
    recall: np.ndarray  # [C x 1000]
    f1: np.ndarray  # [C x 1000]
    pr_recall: np.ndarray  # [1000] where the next one is sampled
    pr_precision: np.ndarray  # [C x 1000] the best precision at that recall or above
    ap: np.ndarray  # [C x T]
    classes: np.ndarray  # [C] ascending class ids

    @property
    def best(self):
        """Index along `confidence` of the point with the largest mean F1, 0 without classes."""
        return int(self.f1.mean(0).argmax()) if len(self.classes) else 0


def precision_recall_curves(
    tp: np.ndarray, conf: np.ndarray, pred_cls: np.ndarray, target_cls: np.ndarray, v5_metric: bool = False
) -> Curves:
    """`Curves` of a whole data set.

    `tp` [n x T] tells at which IoU thresholds each prediction is right, `conf` and `pred_cls` [n] are its confidence
    and class, `target_cls` [m] the classes of all labels. `v5_metric` lets the precision fall to 0 only at recall 1.
    Classes without labels are left out; a class without predictions has zeros, which count in means.
    """
    classes, num_labels = np.unique(target_cls, return_counts=True)
    precision, recall, envelope = (np.zeros((len(classes), len(CURVE_AXIS))) for _ in range(3))
    ap = np.zeros((len(classes), tp.shape[1]))

    order = np.argsort(-conf)  # stock behaviour: an unstable sort, so equal confidences come in NumPy's order
    tp, conf, pred_cls = tp[order], conf[order], pred_cls[order]
    for row, (class_id, n) in enumerate(zip(classes, num_labels, strict=True)):
        mine = np.flatnonzero(pred_cls == class_id)
        if not len(mine):
            continue
        hits = tp[mine].cumsum(0)  # [predictions of the class x T]
        class_recall = hits / (n + 1e-16)
        class_precision = hits / np.arange(1, len(mine) + 1)[:, None]
        # interp wants ascending abscissae; left of the most confident prediction nothing is found and nothing is wrong
        recall[row] = np.interp(-CURVE_AXIS, -conf[mine], class_recall[:, 0], left=0)
        precision[row] = np.interp(-CURVE_AXIS, -conf[mine], class_precision[:, 0], left=1)
        for threshold in range(tp.shape[1]):
            r, p = _envelope(class_recall[:, threshold], class_precision[:, threshold], v5_metric)
            ap[row, threshold] = area(np.interp(RECALL_GRID, r, p))
            if threshold == 0:
                envelope[row] = np.interp(CURVE_AXIS, r, p)

    f1 = 2 * precision * recall / (precision + recall + 1e-16)
    return Curves(CURVE_AXIS, precision, recall, f1, CURVE_AXIS, envelope, ap, classes.astype(np.int32))


def _envelope(recall, precision, v5_metric):
    """Recall and falling precision [n + 2], closed at both ends: each precision is the best at that recall or above."""
    end = 1.0 if v5_metric else recall[-1] + 0.01
    recall = np.concatenate(([0.0], recall, [end]))
    precision = np.concatenate(([1.0], precision, [0.0]))
    return recall, np.maximum.accumulate(precision[::-1])[::-1]


def area(precision):
    """Areas [...] under `precision` [... x 101] at `RECALL_GRID`, by the trapezium rule (np.trapz has two names)."""
    return (np.diff(RECALL_GRID) * (precision[..., 1:] + precision[..., :-1]) / 2.0).sum(-1)


def ap_per_class(
    tp: np.ndarray, conf: np.ndarray, pred_cls: np.ndarray, target_cls: np.ndarray, v5_metric: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Precision, recall [C], AP [C x T], F1 [C] and ids [C] of the classes with labels, at the best mean F1."""
    curves = precision_recall_curves(tp, conf, pred_cls, target_cls, v5_metric)
    at = curves.best
    return curves.precision[:, at], curves.recall[:, at], curves.ap, curves.f1[:, at], curves.classes


# The scores of a data set -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """What an evaluation found. Precision and recall are those at the confidence with the best mean F1."""

    num_images: int
    num_predictions: int
    labels_per_class: np.ndarray  # [nc]
    curves: Curves

    @property
    def num_labels(self):
        return int(self.labels_per_class.sum())

    @property
    def classes(self):
        """Ids [C] of the classes that have labels; the `class_...` arrays are in this order."""
        return self.curves.classes

    @property
    def class_precision(self):
        return self.curves.precision[:, self.curves.best]

    @property
    def class_recall(self):
        return self.curves.recall[:, self.curves.best]

    @property
    def class_ap50(self):
        return self.curves.ap[:, 0]

    @property
    def class_ap(self):
        return self.curves.ap.mean(1)

    @property
    def precision(self):
        return _mean(self.class_precision)

    @property
    def recall(self):
        return _mean(self.class_recall)

    @property
    def map50(self):
        return _mean(self.class_ap50)

    @property
    def map(self):
        return _mean(self.curves.ap)

    @property
    def maps(self):
        """AP@.5:.95 of every class [nc]; a class without labels gets the mean of the others."""
        maps = np.full(len(self.labels_per_class), self.map)
        maps[self.classes] = self.class_ap
        return maps

    @property
    def problem(self):
        """A sentence if the numbers mean nothing, else an empty string."""
        if not self.num_images:
            return "no image was evaluated"
        if not self.num_labels:
            return f"none of the images ({self.num_images}) has a label, so precision, recall and mAP say nothing"
        return ""


def _mean(values):
    """The mean, 0 of nothing."""
    return float(values.mean()) if values.size else 0.0


class DetectionScores:
    """Collects the detections of image after image and scores them in the end.

    `images` has an entry for each: what is right, confidences, predicted classes, classes of the labels.
    """

    def __init__(self):
        self.images = []

    @property
    def num_images(self):
        return len(self.images)

    def add(self, detections: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
        """Take in one image, its detections and labels as `match_predictions` wants them; returns what that says."""
        correct = match_predictions(detections, labels)
        columns = detections[:, 4], detections[:, 5], labels[:, 0]
        self.images.append((correct, *(column.cpu().numpy() for column in columns)))
        return correct

    def summary(self, nc: int, v5_metric: bool = False) -> Scores:
        """`Scores` of the images added so far, for a data set of `nc` classes."""
        hits, *columns = zip(*self.images, strict=True) if self.images else [()] * 4
        correct = np.concatenate([np.zeros((0, len(IOU_THRESHOLDS)), bool), *hits])
        conf, pred_cls, target_cls = (np.concatenate([np.zeros(0, np.float32), *parts]) for parts in columns)
        curves = precision_recall_curves(correct, conf, pred_cls, target_cls, v5_metric)
        labels_per_class = np.bincount(target_cls.astype(np.int64), minlength=nc)
        return Scores(self.num_images, len(conf), labels_per_class, curves)


# Confusion ----------------------------------------------------------------------------------------------------------


class ConfusionMatrix:
    """Counts which class was taken for which: `matrix` [nc + 1 x nc + 1], rows predicted, columns true.

    The last row is what was missed (true objects taken for background), the last column what was seen in the
    background.
    """

    def __init__(self, nc: int, conf: float = 0.25, iou_thres: float = 0.45):
        self.nc, self.conf, self.iou_thres = nc, conf, iou_thres
        self.matrix = np.zeros((nc + 1, nc + 1))

    def process_batch(self, detections: torch.Tensor, labels: torch.Tensor) -> None:
        """Add one image: `detections` [k x 6: x1, y1, x2, y2, confidence, class], `labels` [m x 5: class, x1, ..., y2].

        Either may be empty: what is left over counts as missed or as seen in the background.
        """
        detections = detections[detections[:, 4] > self.conf]
        predicted = detections[:, 5].cpu().numpy().astype(np.int64)
        true = labels[:, 0].cpu().numpy().astype(np.int64)
        rows, columns = self._pairs(detections, labels)
        np.add.at(self.matrix, (predicted[rows], true[columns]), 1)
        np.add.at(self.matrix, (predicted[_others(rows, len(predicted))], self.nc), 1)
        np.add.at(self.matrix, (self.nc, true[_others(columns, len(true))]), 1)

    def _pairs(self, detections, labels):
        """Indices of the detections and of the labels that belong together, whatever their classes.

        Every detection wants the label that it overlaps most; the label goes to the one that overlaps it most.
        """
        if not len(detections) or not len(labels):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        best_iou, wanted = (x.cpu().numpy() for x in box_iou(detections[:, :4], labels[:, 1:5]).max(1))
        candidates = np.flatnonzero(best_iou > self.iou_thres)
        candidates = candidates[np.argsort(-best_iou[candidates], kind="stable")]
        rows = candidates[_first_of_each(wanted[candidates])]
        return rows, wanted[rows]


def _others(indices, n):
    """The indices of range(n) that are not in `indices`."""
    return np.setdiff1d(np.arange(n), indices)
