"""The table of results: a row that can be told from the others for every class and every head."""

import torch

from utils.engine.evaluate import log_scores
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
    log_scores(scores, ["dog", "all", "dog", "a class whose name is longer than its column"], True, heads)
    rows = [line[:20].strip() for line in caplog.messages]
    assert rows[:3] == ["all", "a head with a lo (0)", "a head with a lo (1)"]
    assert rows[3:6] == ["dog (0)", "all (1)", "dog (2)"]
    assert caplog.messages[6].startswith("a class whose name is longer than its column    ")
