"""Validation by several processes: their shares, joined, give the scores of one process to the last bit."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from tests.fast.test_validation import case  # noqa: F401
from utils.datasets import create_dataloader
from utils.engine.batches import FromStart
from utils.engine.evaluate import evaluate
from utils.fast import shared_validation
from utils.fast.validation import FastValidation
from utils.system import distributed

NAMES = ["a", "b"]


def open_share(folder, share, **options):
    return create_dataloader(folder, 64, 4, 32, SimpleNamespace(single_cls=False), pad=0.5, share=share, **options)


@pytest.mark.parametrize("world_size", [2, 3, 6])  # there are four batches
@pytest.mark.parametrize("options", [{"rect": True}, {}, {"persistent_workers": True, "workers": 2}], ids=str)
def test_shares_are_the_batches_of_one_process(case, world_size, options):  # noqa: F811
    folder, options = case[1].dataset.path, {"workers": 0} | options
    whole, _ = open_share(folder, None, **options)
    for cache in (None, "ram", "disk"):
        shares = [open_share(folder, (rank, world_size), cache=cache, **options) for rank in range(world_size)]
        assert sum(len(dataset) for _, dataset in shares) == 14 and sum(len(loader) for loader, _ in shares) == 4
        assert all(len(dataset.imgs) == len(dataset) for _, dataset in shares)
        for expected, found in zip(whole, (batch for loader, _ in shares for batch in loader), strict=True):
            assert expected[0].equal(found[0]) and expected[1].equal(found[1]) and expected[2:] == found[2:]


class Processes:
    """Stands for the process group: `gather_lists` of ranks that come one after the other, rank 0 at the end."""

    def __init__(self, world_size, monkeypatch):
        self.rank, self.num_others, self.lists, self.calls = 0, world_size - 1, [], 0
        monkeypatch.setattr(distributed, "broadcast_tensors", lambda tensors: None)
        monkeypatch.setattr(distributed, "from_rank_zero", lambda value: value)
        monkeypatch.setattr(distributed, "gather_lists", self.gather)

    def gather(self, items):
        if self.rank:
            self.lists.append((self.rank, items))
            return []
        number, count = self.calls, len(self.lists) // self.num_others
        self.calls += 1
        others = sorted((rank, items) for rank, items in self.lists[number::count])
        return [*items, *(item for _, items in others for item in items)]


def fast(*args, **options):
    return FastValidation()(*args, **options)


@pytest.mark.parametrize("world_size", [2, 3, 6])
@pytest.mark.parametrize("function", [evaluate, fast])
def test_joined_scores_equal_those_of_one_process(case, function, world_size, monkeypatch, caplog):  # noqa: F811
    model, loader, compute_loss = case
    expected = function(model, loader, 2, NAMES, compute_loss=compute_loss)
    processes = Processes(world_size, monkeypatch)
    for processes.rank in reversed(range(world_size)):
        share, _ = open_share(loader.dataset.path, (processes.rank, world_size), rect=True, workers=0)
        found = shared_validation.shared(partial(function, compute_loss=compute_loss), lambda call: call)(
            model, share, 2, NAMES
        )
        assert processes.rank == 0 or found.scores.num_images == 0, "what the others get is from rank 0"
    assert found.results == expected.results and np.array_equal(found.maps, expected.maps)
    assert found.scores.num_predictions == expected.scores.num_predictions > 1000
    assert found.scores.num_images == 14 and "Validation:" not in caplog.text


@pytest.mark.parametrize("function", [evaluate, fast])
def test_a_second_attempt_asks_the_others_for_nothing_more(case, function, monkeypatch):  # noqa: F811
    """One process is out of memory after all have sent what they found, as when rank 0 scores the whole data set."""
    model, loader, compute_loss = case
    expected, num_tries = function(model, loader, 2, NAMES, compute_loss=compute_loss), []

    def with_room(call):
        def tried_again():
            call()
            num_tries.append(1)
            return call()

        return tried_again

    processes, num_sent = Processes(2, monkeypatch), []
    for processes.rank in (1, 0):
        share, _ = open_share(loader.dataset.path, (processes.rank, 2), rect=True, workers=0)
        evaluates = shared_validation.shared(partial(function, compute_loss=compute_loss), with_room)
        found = evaluates(model, FromStart(share), 2, NAMES)
        num_sent.append(len(processes.lists) if processes.rank else processes.calls)
    assert len(num_tries) == 2 and num_sent[0] == num_sent[1] == (2 if function is fast else 3)
    assert found.results == expected.results and found.scores.num_images == 14


def test_pictures_show_all_images(case, monkeypatch, tmp_path):  # noqa: F811
    """The confusion matrix of rank 0 counts the images of all."""
    model, loader, _ = case
    drawn = []
    monkeypatch.setattr("utils.engine.evaluate.plots.in_background", lambda function, *args: function(*args))
    monkeypatch.setattr("utils.engine.evaluate.plots.plot_confusion_matrix", lambda matrix, *_: drawn.append(matrix))
    monkeypatch.setattr("utils.engine.evaluate.plots.plot_curves", lambda *_, **__: None)
    monkeypatch.setattr("utils.engine.evaluate.grids_of", lambda *_: [])
    evaluate(model, loader, 2, NAMES, plot_dir=tmp_path)
    processes = Processes(2, monkeypatch)
    for processes.rank in (1, 0):
        share, _ = open_share(loader.dataset.path, (processes.rank, 2), rect=True, workers=0)
        plot_dir = "" if processes.rank else tmp_path
        shared_validation.shared(evaluate, lambda call: call)(model, share, 2, NAMES, plot_dir=plot_dir)
    assert len(drawn) == 2 and np.array_equal(*drawn) and drawn[0].sum() > 0
