"""Whole runs with the flags that shorten or stage them, and several processes that stop and resume together."""

from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

import train
from tests import small_run
from tests.rank_cases import run_ranks
from tests.test_train import SLOW_WARMUP, results_of
from utils.config.options import train_parser
from utils.engine import early_stopping, resume
from utils.engine.checkpoint_reader import read_checkpoint
from utils.plots.run import read_results

FAST_WARMUP = {"warmup_min_iters": 1, "warmup_epochs": 0.0}


@pytest.fixture
def opened(monkeypatch):
    """The Loaders of the runs of a test."""
    seen, original = [], train.open_loaders
    monkeypatch.setattr(train, "open_loaders", lambda *args: seen.append(original(*args)) or seen[-1])
    return seen


def test_subset_leaves_validation_alone(tmp_path, opened):
    for seed in "112":
        small_run.run(tmp_path, "--epochs", "1", "--subset-size", "4", "--subset-seed", seed, num_images=12)
    names = [[Path(name).name for name in loaders.dataset.img_files] for loaders in opened]
    assert names[0] == names[1] != names[2] and all(len(chosen) == 4 for chosen in names)
    assert all(len(loaders.val.dataset) == 12 for loaders in opened)
    assert {int(row[0]) for labels in opened[0].dataset.labels for row in labels} == {0, 1}


def test_overfit_trains_and_validates_on_the_same_images(tmp_path, opened):
    run = small_run.run(tmp_path, "--overfit", "--subset-size", "4", "--batch-size", "2", num_images=6)
    (loaders,) = opened
    assert sorted(loaders.dataset.img_files) == sorted(loaders.val.dataset.img_files)
    assert [Path(name).name for name in loaders.dataset.img_files] == [f"{i:02d}.png" for i in range(4)]
    first, second = ([images for images, *_ in loaders.train] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "the same batches in each epoch"
    state = resume.of(read_checkpoint(run / "weights" / "last_full.pt"))
    assert state["accumulate"] == 1, "each batch is a step"


def test_epochs_of_few_batches(tmp_path, opened):
    run = small_run.run(tmp_path, "--max-iter", "2", "--batch-size", "1", "--epochs", "3", hyp=FAST_WARMUP)
    assert len(opened[0].train) == 2 and len(opened[0].val) == 3, "validation is complete"
    assert read_results(run / "results.txt").shape == (3, 15)
    assert opened[0].train.sampler.epoch == 1, "three epochs of two batches are one pass"


def test_rhythm_of_validation_and_of_files(tmp_path):
    run = small_run.run(tmp_path, "--epochs", "9", "--eval-interval", "4", "--save-period", "2", hyp=SLOW_WARMUP)
    tested = [line.split()[12] != "0" for line in results_of(run).splitlines()]  # the box loss of validation
    assert tested == [False] * 3 + [True] * 6, "later lines repeat the last validation"
    table = read_results(run / "results.txt")
    assert len({tuple(row) for row in table[3:7, 8:]}) == 1 and tuple(table[8, 8:]) != tuple(table[7, 8:])
    names = {path.name for path in (run / "weights").glob("epoch_*")}
    assert {"epoch_001.pt", "epoch_003.pt"} <= names and "epoch_002.pt" not in names


def test_image_size_by_epoch(tmp_path, opened, monkeypatch):
    gains, losses = [], train.train_one_epoch

    def train_one_epoch(epoch, num_batches, batches, trainer, report):
        gains.append(trainer.compute_loss.hyp["obj"])
        return losses(epoch, num_batches, batches, trainer, report)

    monkeypatch.setattr(train, "train_one_epoch", train_one_epoch)
    run = small_run.run(tmp_path, "--resize-schedule", "0:64,1:100,3:32", "--epochs", "4", "--cache-images")
    assert read_results(run / "results.txt")[:, 7].tolist() == [64, 128, 128, 32]
    assert gains == pytest.approx([small_run.HYP["obj"] * (size / 640) ** 2 for size in (64, 128, 128, 32)])
    assert opened[0].val.dataset.img_size == 32, "validation has the last size"
    assert opened[0].dataset.imgs[0].shape[0] == 32, "and the cache is that of the stage"


def test_patience_ends_a_run(tmp_path, monkeypatch):
    scores = iter([0.1, 0.5, 0.4, 0.3, 0.2, 0.1])
    monkeypatch.setattr(train, "fitness", lambda results: next(scores))
    run = small_run.run(tmp_path, "--epochs", "6", "--patience", "2")
    assert read_results(run / "results.txt")[:, 0].tolist() == [0, 1, 2, 3]
    full = read_checkpoint(run / "weights" / "last_full.pt")
    assert (resume.of(full)["best_epoch"], full.epoch, full.best_fitness) == (1, 3, 0.5)
    assert read_checkpoint(run / "weights" / "last.pt").epoch == -1
    last = str(run / "weights" / "last.pt")
    with pytest.raises(train.entry.NothingToDo, match="stopped by --patience 2 after epoch 3; --resume with a larger"):
        small_run.run_line(["--resume", last])
    small_run.run_line(["--resume", last, "--patience", "4", "--device", "cpu"])
    assert read_results(run / "results.txt")[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


class Interrupted(Exception):
    """Stands for a killed run."""


class Compared(train.Trainer):
    """After each epoch every rank has the weights of the first; the statistics of BatchNorm are its own."""

    def end_epoch(self):
        state = self.model.module.state_dict()
        trained = [name for name in state if "running_" not in name and "num_batches" not in name]
        assert trained
        for name in trained:
            first = state[name].clone()
            torch.distributed.broadcast(first, 0)
            assert torch.equal(first, state[name]), name
        return super().end_epoch()


def epochs_of(line, stop_at=None):
    """Train as one of several processes; the epochs that it began."""
    seen, original = [], early_stopping.epochs_to_train

    def epochs_to_train(*args):
        for epoch in original(*args):
            if epoch == stop_at:
                raise Interrupted
            seen.append(epoch)
            yield epoch

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(early_stopping, "epochs_to_train", epochs_to_train))
        stack.enter_context(mock.patch("sys.argv", ["train.py", *line]))
        stack.enter_context(small_run.drawing(pictures=False))
        stack.enter_context(small_run.group_kept())
        stack.enter_context(suppress(Interrupted))
        train.main(train_parser().parse_args(line))
    torch.distributed.barrier()
    return seen


def train_thrice(line, last, rank):
    train.Trainer = Compared
    epochs_of([*line, "--name", "reference"])
    epochs_of(line, stop_at=1)
    assert epochs_of(["--resume", str(last), "--device", "cpu"]) == [1, 2]
    scores = iter([0.5, 0.4, 0.3, 0.2])
    train.fitness = lambda results: next(scores)
    patient = [*line, "--patience", "1", "--epochs", "4", "--name", "patience"]
    assert epochs_of(patient) == [0, 1], "on both ranks"


@pytest.mark.skipif(torch.__version__.startswith("2.4."), reason="several runs in one process group do not end there")
def test_two_processes_train_one_model_resume_bit_equal_and_stop_together(tmp_path):
    last = tmp_path / "runs" / "run" / "weights" / "last.pt"
    line = small_run.arguments(tmp_path, "--batch-size", "4", "--epochs", "3", num_images=8)
    for ended in run_ranks(partial(train_thrice, line, last), tmp_path):
        assert ended.status == 0, ended.text
    reference = tmp_path / "runs" / "reference"
    names = sorted(path.name for path in reference.parent.iterdir())
    assert names == ["patience", "reference", "run"], "one folder for both"
    assert read_results(reference / "results.txt")[:, 0].tolist() == [0, 1, 2]
    assert results_of(last.parent.parent) == results_of(reference)
    states = [resume.of(read_checkpoint(run / "weights" / "last_full.pt"))
              for run in (last.parent.parent, reference)]  # fmt: skip
    assert len(states[0]["random_states"]) == 2
    for name in ("model", "ema"):
        assert all(torch.equal(value, states[1][name][key]) for key, value in states[0][name].items())
