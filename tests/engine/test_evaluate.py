"""The table of results: a row that can be told from the others for every class and every head."""

import torch

from utils.engine.evaluate import log_scores, right_aligned
from utils.metrics.detection import DetectionScores
from utils.metrics.multi_head import score_heads


def scores_of(num_classes):
    """Every class has one label, which is found."""
    collected = DetectionScores()
    boxes = torch.tensor([[10.0 * c, 0, 10 * c + 9, 9] for c in range(num_classes)])
    ids = torch.arange(num_classes)[:, None].float()
    collected.add(torch.cat((boxes, torch.full_like(ids, 0.9), ids), 1), torch.cat((ids, boxes), 1))
    return collected.summary(num_classes)


def test_equal_names_have_rows_of_their_own(caplog):
    caplog.set_level("INFO")
    scores = scores_of(4)
    heads = score_heads(scores, [("a head with a long name 1", [0, 1]), ("a head with a long name 2", [2, 3])])
    log_scores(scores, ["dog", "all", "dog", "a class whose name is longer than its column"], True, heads,
               "val 3/17")  # fmt: skip
    title, *lines = caplog.messages
    assert title == "            val 3/17  images  labels         P         R    mAP@.5  mAP@.5:.95"
    rows = [line[:20].strip() for line in lines]
    assert rows[:3] == ["all", "0: a head with a lon", "1: a head with a lon"]
    assert rows[3:] == ["dog (0)", "all (1)", "dog (2)", "a class whose name i"]
    assert {len(line) for line in caplog.messages} == {78}


def test_one_row_is_one_line(caplog):
    caplog.set_level("INFO")
    log_scores(scores_of(1), ["dog"], False, (), "val   3/17")
    assert caplog.messages == ["val   3/17: P 1 R 1 mAP@.5 1 mAP@.5:.95 1"]


def test_chinese_names_take_two_columns_a_letter():
    assert right_aligned("紅血球", 8) == "  紅血球" and right_aligned("RBC", 8) == "     RBC"
    assert right_aligned("longer than that", 8) == "longer than that"
