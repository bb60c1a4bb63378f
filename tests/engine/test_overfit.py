"""How --overfit trains: a short warm-up, batches that count for nominal ones, quick statistics."""

import torch

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
