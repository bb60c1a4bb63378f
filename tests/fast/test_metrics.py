"""Matching and curves on tensors against the reference in NumPy: equal to the last bit."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from utils.fast import metrics as metrics_batched
from utils.metrics import detection


def boxes(n, rng):
    corner = rng.uniform(0, 60, (n, 2))
    return np.concatenate((corner, corner + rng.uniform(5, 40, (n, 2))), 1)


def image(num_detections, num_labels, rng, num_classes=2):
    """Detections [k x 6] best first, many near a label, and labels [m x 5]."""
    labels = np.concatenate((rng.integers(0, num_classes, (num_labels, 1)), boxes(num_labels, rng)), 1)
    found = boxes(num_detections, rng)
    classes = rng.integers(0, num_classes, num_detections)
    if num_labels:
        near = rng.integers(0, num_labels, num_detections)
        is_near = rng.random(num_detections) < 0.7
        found[is_near] = labels[near[is_near], 1:] + rng.normal(0, 2, (is_near.sum(), 4))
        classes[is_near] = labels[near[is_near], 0]
    conf = -np.sort(-rng.random(num_detections))
    rows = np.concatenate((found, conf[:, None], classes[:, None]), 1)
    return torch.tensor(rows, dtype=torch.float32), torch.tensor(labels, dtype=torch.float32)


def padded(tensors, length, width):
    out = torch.zeros(len(tensors), length, width)
    for row, tensor in zip(out, tensors, strict=True):
        row[: len(tensor)] = tensor
    return out


def test_match_equals_the_reference():
    rng = np.random.default_rng(0)
    images = [image(k, m, rng) for k, m in ((40, 6), (0, 3), (12, 0), (25, 9), (0, 0), (60, 1))]
    detections, labels = zip(*images, strict=True)
    counts = torch.tensor([len(rows) for rows in detections])
    valid = torch.arange(60) < counts[:, None]
    correct = metrics_batched.match(
        padded(detections, 60, 6), valid, padded(labels, 9, 5), torch.tensor([len(rows) for rows in labels])
    )
    assert correct.shape == (6, 60, 10)
    for row, (found, true) in zip(correct.numpy(), images, strict=True):
        expected = detection.match_predictions(found, true)
        assert np.array_equal(row[: len(found)], expected) and not row[len(found) :].any()
    assert correct.any(2).sum() >= 10


def test_match_by_hand():
    """Two detections of one label: the more confident one gets it, though the other overlaps more."""
    rows = torch.tensor([[[0.0, 0, 10, 6, 0.9, 1], [0, 0, 10, 10, 0.8, 1], [0, 0, 10, 10, 0.7, 0]]])
    label = torch.tensor([[[1.0, 0, 0, 10, 10]]])
    correct = metrics_batched.match(rows, torch.ones(1, 3, dtype=torch.bool), label, torch.tensor([1]))
    assert correct[0].sum(1).tolist() == [2, 0, 0]  # IoU 0.6: above 0.5 and 0.55
    nothing = metrics_batched.match(rows, torch.ones(1, 3, dtype=torch.bool), label[:, :0], torch.tensor([0]))
    assert nothing.shape == (1, 3, 10) and not nothing.any()


def batched_curves(tp, conf, pred_cls, target_cls, v5_metric, device="cpu"):
    on_device = (torch.from_numpy(part).to(device) for part in (tp, conf, pred_cls))
    return metrics_batched.precision_recall(*on_device, target_cls, v5_metric=v5_metric)


def assert_equal_curves(*arguments):
    expected, found = detection.precision_recall_curves(*arguments), batched_curves(*arguments)
    for field in fields(expected):
        assert np.array_equal(getattr(found, field.name), getattr(expected, field.name)), field.name
    return expected


@pytest.mark.parametrize("v5_metric", [False, True])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_curves_equal_the_reference(ties, v5_metric):
    rng = np.random.default_rng(1)
    conf = rng.random(2000).astype(np.float32)
    conf = conf.astype(np.float16).astype(np.float32) if ties else conf
    pred_cls = rng.integers(0, 6, 2000).astype(np.float32)
    tp = (rng.random((2000, 1)) < conf[:, None]) & (np.arange(10) < rng.integers(0, 11, (2000, 1)))
    target_cls = rng.choice([0, 1, 2, 4, 9], 300).astype(np.float32)  # 9 is never predicted, 3 and 5 never true
    curves = assert_equal_curves(tp, conf, pred_cls, target_cls, v5_metric)
    assert 0.1 < curves.ap[0, 0] < 1 and not curves.ap[-1].any()


SIZES = [1, 1, 2, 3, 3, 5, 40, 41, 79, 0, 700]


def predictions_of(sizes):
    """Arguments of `precision_recall` with so many predictions of each class, and 18 labels or so."""
    rng = np.random.default_rng(3)
    pred_cls = rng.permutation(np.repeat(np.arange(len(sizes)), sizes)).astype(np.float32)
    conf = rng.random(len(pred_cls)).astype(np.float16).astype(np.float32)
    tp = (rng.random((len(conf), 1)) < 0.7) & (np.arange(10) < rng.integers(0, 11, (len(conf), 1)))
    return tp, conf, pred_cls, rng.integers(0, len(sizes), 18 * len(sizes)).astype(np.float32), False


def test_curves_of_classes_of_very_different_sizes():
    """They are worked on in groups of similar size, with padding."""
    assert_equal_curves(*predictions_of(SIZES))
    groups = list(metrics_batched._of_similar_size(np.array(SIZES), most=150))
    assert [group.tolist() for group in groups] == [[0, 1, 2], [3, 4, 5], [6, 7], [8], [10]]


@pytest.mark.gpu
def test_curves_on_a_gpu():
    """A recall that is a rounding away from a multiple of 0.01 would change an AP by more than 1e-5."""
    arguments = predictions_of([100 * size for size in SIZES])
    expected, found = detection.precision_recall_curves(*arguments), batched_curves(*arguments, device="cuda")
    for field in fields(expected):
        np.testing.assert_allclose(getattr(found, field.name), getattr(expected, field.name), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("num_predictions", "num_labels"), [(0, 3), (3, 0), (0, 0), (1, 1)])
def test_curves_of_nearly_nothing(num_predictions, num_labels):
    ones = np.ones(num_predictions, np.float32)
    assert_equal_curves(ones[:, None].repeat(10, 1) > 0, ones, ones, np.ones(num_labels, np.float32), False)


def test_interpolation_is_that_of_numpy():
    rng = np.random.default_rng(2)
    xp = np.sort(rng.integers(0, 20, (3, 30)), 1) / 4.0  # with equal abscissae
    fp, x = rng.random((3, 30)), np.concatenate((rng.uniform(-1, 6, (3, 50)), xp[:, ::3]), 1)
    left = np.array([[7.0], [8.0], [9.0]])
    found = metrics_batched.interpolate(*map(torch.from_numpy, (x, xp, fp, left))).numpy()
    for row in range(3):
        assert np.array_equal(found[row], np.interp(x[row], xp[row], fp[row], left=left[row, 0]))
