"""Matching, average precision, confusion and fitness against hand-computed values and stock's numbers."""

import numpy as np
import pytest
import torch

from tests import parity
from utils.metrics.detection import (
    IOU_THRESHOLDS,
    ConfusionMatrix,
    DetectionScores,
    ap_per_class,
    fitness,
    match_predictions,
    precision_recall_curves,
)
from utils.ops.boxes import box_iou

TRAIN = parity.GOLDEN / "train"
AP_FILES = sorted(TRAIN.glob("ap_*.npz"))


def test_golden_files_are_there():
    assert len(AP_FILES) >= 5


def test_fitness_weighs_the_two_map_values():
    assert fitness((0.9, 0.8, 0.5, 0.3, 7.0)) == pytest.approx(0.1 * 0.5 + 0.9 * 0.3)
    assert fitness(np.array([[1, 1, 0, 0], [0, 0, 1, 1]])).tolist() == pytest.approx([0, 1])


# Matching

BOX = [0.0, 0.0, 10.0, 10.0]


def detection(box, conf, cls=0):
    return [*box, conf, cls]


def match(detections, labels):
    return match_predictions(torch.tensor(detections).reshape(-1, 6), torch.tensor(labels).reshape(-1, 5))


def test_match_counts_the_thresholds_that_the_overlap_exceeds():
    """IoU 0.7 exactly is above 0.5, 0.55, 0.6 and 0.65 only."""
    correct = match([detection([0.0, 0.0, 7.0, 10.0], 0.9)], [[0.0, *BOX]])
    assert correct.tolist() == [[True] * 4 + [False] * 6]


def test_match_gives_a_label_to_one_prediction_and_no_second_choice():
    """Both predictions prefer the first label, though the second would do for the other one as well."""
    labels = [[0.0, *BOX], [0.0, 0.0, 3.0, 10.0, 13.0]]
    boxes = [[0.0, 0.0, 10.0, 10.0], [0.0, 1.0, 10.0, 11.0]]
    correct = match([detection(boxes[0], 0.9), detection(boxes[1], 0.8)], labels)
    assert correct.any(1).tolist() == [True, False]
    correct = match([detection(boxes[1], 0.9), detection(boxes[0], 0.8)], labels)
    assert correct.any(1).tolist() == [True, False]


def test_match_needs_the_class_and_half_the_area():
    assert not match([detection(BOX, 0.9, cls=1)], [[0.0, *BOX]]).any()
    assert not match([detection([0.0, 0.0, 5.0, 10.0], 0.9)], [[0.0, *BOX]]).any()


def test_match_of_nothing():
    assert match([], [[0.0, *BOX]]).shape == (0, 10)
    assert match([detection(BOX, 0.9)], []).tolist() == [[False] * 10]


def one_by_one(detections, labels):
    """The same rule as plain loops: class after class, best first, a used label is gone."""
    correct = np.zeros((len(detections), 10), bool)
    used = set()
    for class_id in labels[:, 0].unique():
        mine = [j for j, label in enumerate(labels) if label[0] == class_id]
        for i, row in enumerate(detections):
            if row[5] != class_id:
                continue
            overlaps = box_iou(row[None, :4], labels[mine, 1:])[0]
            target = mine[int(overlaps.argmax())]
            if overlaps.max() > 0.5 and target not in used:
                used.add(target)
                correct[i] = (overlaps.max() > IOU_THRESHOLDS).numpy()
    return correct


def random_image(generator, num_detections=60, num_labels=15, nc=3):
    centre, size = torch.rand(num_labels, 2, generator=generator) * 100, 10 + torch.rand(num_labels, 2) * 30
    boxes = torch.cat((centre - size / 2, centre + size / 2), 1)
    labels = torch.cat((torch.randint(nc, (num_labels, 1), generator=generator).float(), boxes), 1)
    source = torch.randint(num_labels, (num_detections,), generator=generator)
    shifted = boxes[source] + torch.randn(num_detections, 4, generator=generator) * 3
    conf = torch.rand(num_detections, 1, generator=generator).sort(0, descending=True)[0]
    return torch.cat((shifted, conf, labels[source, :1]), 1), labels


def test_match_equals_the_plain_loops():
    generator = torch.Generator().manual_seed(3)
    right = 0
    for _ in range(20):
        detections, labels = random_image(generator)
        correct = match_predictions(detections, labels)
        assert np.array_equal(correct, one_by_one(detections, labels))
        right += correct[:, 0].sum()
    assert right > 100


# Average precision


@pytest.mark.parametrize("file", AP_FILES, ids=lambda f: f.stem)
def test_golden_average_precision(file):
    """The case with ties holds where NumPy sorts with AVX2 or better: its order of equal values depends on that."""
    if "ties" in file.stem and np.__version__.startswith("1."):
        pytest.skip("NumPy 1 puts equal confidences in another order")
    golden = np.load(file)
    inputs = (golden[k] for k in ("tp", "conf", "pred_cls", "target_cls"))
    p, r, ap, f1, classes = ap_per_class(*inputs, v5_metric=bool(golden["v5_metric"]))
    values = {"p": p, "r": r, "ap": ap, "f1": f1, "classes": classes, "map50": ap[:, 0].mean(), "map": ap.mean()}
    for name, value in values.items():
        parity.check("average precision", f"{file.stem}/{name}", value, golden[name], rtol=1e-12)


def test_average_precision_of_three_predictions():
    """Right, wrong, right for two labels: precision 1 up to recall 1/2, then 2/3; both ends by hand."""
    tp = np.array([[True], [False], [True]])
    conf = np.array([0.9, 0.8, 0.7], np.float32)
    curves = precision_recall_curves(tp, conf, np.zeros(3), np.zeros(2), v5_metric=True)
    # at recall .50 the precision is already 2/3: strips at 1 up to .49, one slope, strips at 2/3 up to .99, one slope
    strips = 49 * 1 + (1 + 2 / 3) / 2 + 49 * (2 / 3) + (2 / 3 + 0) / 2
    assert curves.ap[0, 0] == pytest.approx(strips / 100)
    assert curves.best == 0  # below the least confident prediction nothing changes any more: the first of equals
    assert np.interp(0.8, curves.confidence, curves.recall[0]) == pytest.approx(0.5, abs=1e-2)
    assert curves.recall[0, 0] == 1
    assert curves.recall[0, -1] == 0
    assert curves.precision[0, -1] == 1
    assert curves.pr_precision[0, [0, 499, 999]] == pytest.approx([1, 1, 0], abs=1e-2)


def test_average_precision_of_nothing():
    nothing = np.zeros((0, 10), bool), np.zeros(0), np.zeros(0)
    p, r, ap, f1, classes = ap_per_class(*nothing, np.zeros(0))
    assert (len(p), len(r), ap.shape, len(f1), len(classes)) == (0, 0, (0, 10), 0, 0)
    p, r, ap, f1, classes = ap_per_class(*nothing, np.array([2.0, 2.0, 5.0]))
    assert classes.tolist() == [2, 5]
    assert not ap.any()
    assert not p.any()


def test_predictions_of_a_class_without_labels_do_not_matter():
    rng = np.random.default_rng(0)
    tp, conf, cls = rng.random((40, 10)) < 0.5, rng.random(40), rng.integers(0, 2, 40).astype(float)
    labels = rng.integers(0, 2, 30).astype(float)
    before = ap_per_class(tp, conf, cls, labels)
    more = np.concatenate((tp, np.zeros((5, 10), bool))), np.append(conf, rng.random(5)), np.append(cls, [7.0] * 5)
    for a, b in zip(before, ap_per_class(*more, labels), strict=True):
        assert np.array_equal(a, b)


# The scores of a data set


def test_scores_of_a_small_data_set():
    scores = DetectionScores()
    scores.add(
        torch.tensor([detection(BOX, 0.9), detection([50.0, 50.0, 60.0, 60.0], 0.3)]), torch.tensor([[0.0, *BOX]])
    )
    scores.add(torch.zeros(0, 6), torch.tensor([[2.0, *BOX]]))
    scores.add(torch.zeros(0, 6), torch.zeros(0, 5))
    summary = scores.summary(nc=4)
    assert (summary.num_images, summary.num_labels, summary.num_predictions) == (3, 2, 2)
    assert summary.labels_per_class.tolist() == [1, 0, 1, 0]
    assert summary.classes.tolist() == [0, 2]
    assert summary.class_recall.tolist() == pytest.approx([1, 0])
    assert summary.class_ap50[0] > 0.99
    assert summary.maps.tolist() == pytest.approx([summary.class_ap[0], summary.map, 0, summary.map])
    assert summary.map50 == pytest.approx(summary.class_ap50.mean())
    assert summary.problem == ""


def test_labels_are_counted_when_nothing_is_correct():
    scores = DetectionScores()
    scores.add(torch.tensor([detection(BOX, 0.9, cls=1)]), torch.tensor([[0.0, *BOX], [0.0, *BOX]]))
    summary = scores.summary(nc=2)
    assert summary.num_labels == 2
    assert (summary.precision, summary.recall, summary.map50, summary.map) == (0, 0, 0, 0)


def test_a_data_set_without_labels_says_so():
    scores = DetectionScores()
    assert "no image" in scores.summary(nc=2).problem
    scores.add(torch.tensor([detection(BOX, 0.9)]), torch.zeros(0, 5))
    summary = scores.summary(nc=2)
    assert "label" in summary.problem
    assert (summary.map, summary.precision, summary.num_labels, summary.maps.tolist()) == (0, 0, 0, [0, 0])


# Confusion


def stock_increment(detections, labels, nc, conf=0.25, iou_thres=0.45):
    """What one image adds in our orientation, and what stock adds: matched cells the other way round, and nothing for
    false positives where nothing matched."""
    ours = ConfusionMatrix(nc, conf, iou_thres)
    ours.process_batch(detections, labels)
    matched, rest = ours.matrix.copy(), ours.matrix.copy()
    matched[nc], matched[:, nc] = 0, 0
    rest[:nc, :nc] = 0
    if not matched.any():
        rest[:, nc] = 0
    return matched.T + rest


def test_golden_confusion():
    """Stock's matrix is rebuilt from ours by undoing the two repairs."""
    golden = np.load(TRAIN / "confusion_.npz")
    total = np.zeros((4, 4))
    matched_calls = 0
    for b in range(4):
        increment = stock_increment(torch.from_numpy(golden[f"det{b}"]), torch.from_numpy(golden[f"lab{b}"]), nc=3)
        total += increment
        matched_calls += increment[:3, :3].any()
        parity.check("confusion matrix", f"matrix_after{b}", total, golden[f"matrix_after{b}"])
    assert matched_calls == 3


def test_confusion_rows_are_predicted_and_columns_true():
    confusion = ConfusionMatrix(nc=3)
    far = [50.0, 50.0, 60.0, 60.0]
    confusion.process_batch(
        torch.tensor([detection(BOX, 0.9, cls=2), detection(far, 0.9, cls=1), detection(far, 0.2, cls=0)]),
        torch.tensor([[0.0, *BOX], [1.0, 80.0, 80.0, 90.0, 90.0]]),
    )
    expected = np.zeros((4, 4))
    expected[2, 0] = 1  # a 0 taken for a 2
    expected[1, 3] = 1  # a 1 seen in the background
    expected[3, 1] = 1  # a 1 missed
    assert np.array_equal(confusion.matrix, expected)


def test_confusion_counts_images_with_only_detections_or_only_labels():
    confusion = ConfusionMatrix(nc=1)
    confusion.process_batch(torch.tensor([detection(BOX, 0.9), detection(BOX, 0.8)]), torch.zeros(0, 5))
    confusion.process_batch(torch.zeros(0, 6), torch.tensor([[0.0, *BOX]] * 3))
    confusion.process_batch(torch.zeros(0, 6), torch.zeros(0, 5))
    assert confusion.matrix.tolist() == [[0, 2], [3, 0]]


def test_confusion_counts_every_confident_detection_and_every_label_once():
    generator = torch.Generator().manual_seed(5)
    confusion, num_labels, num_confident = ConfusionMatrix(nc=3), 0, 0
    for _ in range(10):
        detections, labels = random_image(generator)
        confusion.process_batch(detections, labels)
        num_labels += len(labels)
        num_confident += int((detections[:, 4] > 0.25).sum())
    assert confusion.matrix[:, :3].sum() == num_labels
    assert confusion.matrix[:3].sum() == num_confident
    assert np.trace(confusion.matrix) > 50
