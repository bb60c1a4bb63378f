"""How --overfit trains: a short warm-up, batches that count for nominal ones, quick statistics."""

import pytest
import torch

import train
from tests import small_run
from tests.tiny_model import tiny_model
from utils.engine import overfit


def test_the_warmup_keeps_what_the_file_says():
    assert overfit.short_warmup({"lr0": 1, "warmup_epochs": 3.0}) == {"lr0": 1, **overfit.SHORT_WARMUP}
    named = {"warmup_min_iters": 7, "warmup_epochs": 3.0}
    assert overfit.short_warmup(named) == named


def test_a_batch_counts_for_a_nominal_one():
    assert overfit.batch_weight(num_images=10, total_batch=16) == 6.4
    assert overfit.batch_weight(num_images=10, total_batch=4) == 16


def test_statistics_keep_up():
    model = tiny_model()
    overfit.quicken_statistics(model)
    norms = [layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    assert len(norms) == 5 and all(layer.momentum == overfit.MOMENTUM for layer in norms)


@pytest.mark.parametrize("flags", [(), ("--fast",)])
def test_only_the_model_that_trains_has_them(flags, tmp_path, monkeypatch):
    trainers, restore = [], train.Trainer.restore
    monkeypatch.setattr(train.Trainer, "restore", lambda self, *args: trainers.append(self) or restore(self, *args))
    weights = small_run.run(tmp_path, "--overfit", "--epochs", "1", *flags) / "weights"
    for file in ("last.pt", "best.pt"):
        stripped = torch.load(weights / file, weights_only=False)["model"]
        assert {layer.momentum for layer in stripped.modules() if hasattr(layer, "running_mean")} == {0.03}
    norms = [layer for layer in trainers[0].model.modules() if hasattr(layer, "running_mean")]
    assert {layer.momentum for layer in norms} == {overfit.MOMENTUM}
