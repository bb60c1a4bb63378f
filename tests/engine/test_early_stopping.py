"""Early stopping and the rhythm of validations."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from utils.engine.early_stopping import epochs_to_train, is_due, is_tested
from utils.engine.trainer import Progress


@pytest.mark.parametrize(
    ("best", "tested", "patience", "due"),
    [(4, 6, 3, False), (4, 7, 3, True), (4, 9, 3, True), (4, 100, 0, False), (-1, -1, 1, False), (-1, 0, 1, True)],
)
def test_is_due(best, tested, patience, due):
    assert is_due(best, tested, patience) is due


def run(scores, patience, epochs=10, start_epoch=0, best=-1, tested=-1):
    """Epoch numbers of a run with one score for each tested epoch; None: not tested."""
    progress = Progress(epochs, np.zeros(1), start_epoch, best_epoch=best, tested_epoch=tested)
    best_score, seen = -1.0, []
    for epoch in epochs_to_train(progress, patience):
        seen.append(epoch)
        if scores[epoch] is not None:
            progress.tested_epoch = epoch
            if scores[epoch] >= best_score:
                best_score, progress.best_epoch = scores[epoch], epoch
    return seen


def test_all_epochs_without_patience():
    assert run([0.5, *[0.1] * 9], patience=0) == list(range(10))


def test_stops_so_many_epochs_after_the_best(caplog):
    with caplog.at_level(logging.INFO):
        assert run([0.1, 0.5, 0.4, 0.3, 0.2, *[0.1] * 5], patience=3) == [0, 1, 2, 3, 4]
    assert "Stopping before epoch 5: nothing was better than epoch 1 for 3 epochs (--patience 3)" in caplog.text


def test_equal_scores_count_as_better():
    assert run([0.0] * 10, patience=2) == list(range(10)), "a run that has not begun to find anything goes on"


def test_only_tested_epochs_count():
    scores = [None, None, 0.5, None, None, 0.4, None, None, 0.3, None]
    assert run(scores, patience=5) == list(range(9))
    assert run(scores, patience=3) == list(range(6))


def test_resumed_run_remembers():
    assert run([0.0] * 10, patience=3, start_epoch=6, best=2, tested=5) == []
    assert run([0.0] * 10, patience=4, start_epoch=6, best=2, tested=5) == list(range(6, 10))


def options(notest=False, eval_interval=0):
    return SimpleNamespace(notest=notest, eval_interval=eval_interval)


def test_rhythm_of_validations():
    assert [e for e in range(9) if is_tested(e, options())] == list(range(9))
    assert [e for e in range(9) if is_tested(e, options(eval_interval=3))] == [2, 5, 8]
    assert not any(is_tested(e, options(notest=True, eval_interval=3)) for e in range(9))
