"""Non-maximum suppression against hand-made boxes and against stock's detections."""

import json
import logging

import numpy as np
import pytest
import torch

from tests import parity
from utils.ops import nms
from utils.ops.nms import non_max_suppression

FILES = sorted((parity.GOLDEN / "train").glob("nms_*.npz"))


def test_golden_files_are_there():
    assert len(FILES) >= 7


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_golden(file):
    golden = np.load(file)
    prediction = torch.from_numpy(golden["prediction"])
    before = prediction.clone()
    kwargs = json.loads(str(golden["kwargs"]))
    if "labels0" in golden:
        kwargs["labels"] = [torch.from_numpy(golden[f"labels{i}"]) for i in range(len(prediction))]
    detections = non_max_suppression(prediction, **kwargs)
    assert len(detections) == len(prediction)
    for i, rows in enumerate(detections):
        parity.check("nms", f"{file.stem}/out{i}", rows, golden[f"out{i}"])
    assert torch.equal(prediction, before)


def image(*rows):
    return torch.tensor([rows])


def test_overlap_within_a_class_is_suppressed_and_between_classes_not():
    same = image([50, 50, 20, 20, 0.9, 1.0, 0.0], [51, 50, 20, 20, 0.8, 1.0, 0.0])
    other = image([50, 50, 20, 20, 0.9, 1.0, 0.0], [51, 50, 20, 20, 0.8, 0.0, 1.0])
    (best,) = non_max_suppression(same)
    assert torch.allclose(best, torch.tensor([[40, 40, 60, 60, 0.9, 0]]))
    assert non_max_suppression(other)[0][:, 5].tolist() == [0, 1]
    assert non_max_suppression(other, agnostic=True)[0][:, 5].tolist() == [0]
    assert non_max_suppression(other, classes=[1])[0][:, 5].tolist() == [1]


def test_multi_label_gives_a_box_each_of_its_classes():
    prediction = image([50, 50, 20, 20, 1.0, 0.4, 0.6])
    assert non_max_suppression(prediction, multi_label=True)[0][:, 4:].tolist() == pytest.approx(
        torch.tensor([[0.6, 1], [0.4, 0]]).numpy()
    )
    assert non_max_suppression(prediction)[0][:, 5].tolist() == [1]


def test_thresholds_are_strict():
    """A score of exactly the threshold is no candidate."""
    assert non_max_suppression(image([50, 50, 20, 20, 0.5, 1.0, 0.0]), conf_thres=0.5)[0].shape == (0, 6)


def test_images_without_candidates_and_empty_batches():
    assert [d.shape for d in non_max_suppression(torch.zeros(2, 10, 8))] == [(0, 6), (0, 6)]
    assert [d.shape for d in non_max_suppression(torch.zeros(2, 0, 6), multi_label=True)] == [(0, 6), (0, 6)]
    assert non_max_suppression(torch.zeros(0, 10, 8)) == []


def test_half_scores_are_compared_in_half_and_returned_in_float():
    rows = [50, 50, 20, 20, 0.3333, 0.7777, 0.1]
    (detection,) = non_max_suppression(image(rows).half(), conf_thres=0.1)
    assert detection.dtype == torch.float32
    assert detection[0, 4] == (torch.tensor(0.3333).half() * torch.tensor(0.7777).half()).float()


def test_only_the_best_candidates_enter_and_at_most_300_leave(monkeypatch):
    """Boxes far apart, so nothing is suppressed: the limits alone decide."""
    n = 400
    prediction = torch.ones(1, n, 6)
    prediction[0, :, 0] = torch.arange(n) * 10.0
    prediction[0, :, 4] = torch.linspace(0.3, 0.9, n)
    (detection,) = non_max_suppression(prediction)
    assert len(detection) == 300
    assert torch.equal(detection[:, 4], prediction[0, :, 4].flip(0)[:300])
    monkeypatch.setattr(nms, "MAX_CANDIDATES", 50)
    assert torch.equal(non_max_suppression(prediction)[0], detection[:50])


def test_a_slow_batch_is_finished_and_reported_once(monkeypatch, caplog):
    monkeypatch.setattr(nms, "SLOW_SECONDS", -1.0)
    nms._warn_slow.cache_clear()
    prediction = image([50, 50, 20, 20, 0.9, 1.0, 0.0]).repeat(3, 1, 1)
    with caplog.at_level(logging.WARNING):
        detections = [non_max_suppression(prediction) for _ in range(2)]
    nms._warn_slow.cache_clear()
    assert [len(rows) for batch in detections for rows in batch] == [1] * 6
    assert len(caplog.records) == 1
