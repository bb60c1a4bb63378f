"""Parameter groups in stock's order, and the schedules iteration by iteration."""

import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests import parity
from utils.engine import optimizer as optim

CFG_FOLDER = Path(__file__).resolve().parents[2] / "cfg"
SCHEDULES = np.load(parity.GOLDEN / "train" / "lr_schedules.npz")
SCHEDULE_KEYS = [key for key in SCHEDULES if not key.endswith("_epoch_end") and key != "hyp"]
CFGS = list(json.loads((parity.GOLDEN / "model" / "param_groups.json").read_text()))


@pytest.mark.parametrize(
    ("batch", "lr0", "warmup"),
    [(16, 0.01, 3), (64, 0.01, 3), (96, 0.012247, 3), (128, 0.014142, 5), (256, 0.02, 5), (384, 0.024495, 5)],
)
def test_large_batches_learn_faster_after_a_longer_warmup(batch, lr0, warmup):
    hyp = {"lr0": 0.01, "warmup_epochs": 3, "momentum": 0.9}
    changed = optim.for_large_batch(hyp, batch)
    assert changed == {"lr0": pytest.approx(lr0, abs=1e-6), "warmup_epochs": warmup, "momentum": 0.9}
    assert hyp == {"lr0": 0.01, "warmup_epochs": 3, "momentum": 0.9}


@pytest.mark.parametrize(("batch", "said"), [(64, "batch 64 is not above 64, lr0 0.01"), (256, "lr0 0.01 -> 0.02")])
def test_auto_lr_says_what_it_did(batch, said, caplog):
    caplog.set_level("INFO")
    optim.for_large_batch({"lr0": 0.01, "warmup_epochs": 3}, batch)
    assert len(caplog.messages) == 1 and said in caplog.text


def test_a_longer_warmup_stays():
    assert optim.for_large_batch({"lr0": 0.01, "warmup_epochs": 7.5}, 256)["warmup_epochs"] == 7.5


class Implicit(nn.Module):
    def __init__(self):
        super().__init__()
        self.implicit = nn.Parameter(torch.zeros(1))


class Toy(nn.Module):
    """A convolution with bias, a norm layer, a free parameter, and implicit tensors in the order ia, im."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.conv = nn.Conv2d(1, 2, 1)
        self.bn = nn.BatchNorm2d(2)
        self.ia = nn.ModuleList([Implicit(), Implicit()])
        self.im = nn.ModuleList([Implicit()])


def test_every_parameter_is_in_one_group():
    groups = optim.parameter_groups(Toy())
    assert list(groups.no_decay) == ["im.0.implicit", "ia.0.implicit", "ia.1.implicit", "bn.weight", "scale"]
    assert list(groups.decay) == ["conv.weight"]
    assert list(groups.biases) == ["conv.bias", "bn.bias"]


@pytest.mark.parametrize("cfg", CFGS)
def test_golden_parameter_groups(cfg):
    from models.yolo import Model

    golden = json.loads((parity.GOLDEN / "model" / "param_groups.json").read_text())[cfg]
    groups = optim.parameter_groups(Model(CFG_FOLDER / f"{cfg}.yaml", ch=3, nc=80))
    for group, name in zip(groups, ("pg0_no_decay", "pg1_decay", "pg2_bias"), strict=True):
        parity.check("parameter groups", f"{cfg}/{name}", list(group), golden[name])


def test_optimizers_and_their_groups(caplog):
    with caplog.at_level(logging.INFO):
        sgd = optim.build_optimizer(Toy(), 0.01, 0.9, 0.0005)
    assert "Optimizer groups: 2 .bias, 1 conv.weight, 5 other" in caplog.text
    assert [g["weight_decay"] for g in sgd.param_groups] == [0, 0.0005, 0]
    assert [len(g["params"]) for g in sgd.param_groups] == [5, 1, 2]
    assert all((g["lr"], g["momentum"], g["nesterov"]) == (0.01, 0.9, True) for g in sgd.param_groups)
    adam = optim.build_optimizer(Toy(), 0.01, 0.9, 0.0005, adam=True)
    assert isinstance(adam, torch.optim.Adam)
    assert all(g["betas"] == (0.9, 0.999) for g in adam.param_groups)


def test_a_model_without_norm_layers_has_an_empty_group():
    model = nn.Linear(2, 2)
    optimizer = optim.build_optimizer(model, 0.1, 0.9, 0.1)
    assert [len(g["params"]) for g in optimizer.param_groups] == [0, 1, 1]
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_accumulation_and_weight_decay():
    assert [optim.accumulation_steps(b) for b in (1, 16, 24, 64, 384)] == [64, 4, 3, 1, 1]
    assert optim.scaled_weight_decay(0.0005, 16) == 0.0005
    assert optim.scaled_weight_decay(0.0005, 24) == pytest.approx(0.0005 * 72 / 64)
    assert optim.scaled_weight_decay(0.0005, 128) == pytest.approx(0.001)


def test_warmup_length():
    assert optim.warmup_length({"warmup_epochs": 3.0}, 100, epochs=300) == 1000
    assert optim.warmup_length({"warmup_epochs": 3.0}, 600, epochs=300) == 1800
    assert optim.warmup_length({"warmup_epochs": 3.0, "warmup_min_iters": 4}, 2, epochs=2) == 6
    assert optim.warmup_length({"warmup_epochs": 0.0, "warmup_min_iters": 0}, 2, epochs=2) == 0


def test_a_warmup_of_no_length_is_over_at_once():
    values = optim.warmup(0, 0, 16, target_lr=0.01, bias_lr=0.1, start_momentum=0.8, momentum=0.9)
    assert values == optim.Warmup(4, (0.01, 0.01, 0.01), 0.9)


def test_a_run_shorter_than_its_warmup_is_told_what_helps(caplog):
    assert optim.warmup_length({"warmup_epochs": 3.0}, 11, epochs=100) == 1000
    assert not caplog.records
    optim.warmup_length({"warmup_epochs": 3.0}, 11, epochs=60)
    assert "warmup_min_iters: 33 " in caplog.text
    caplog.clear()
    optim.warmup_length({"warmup_epochs": 3.0}, 100, epochs=2)
    assert "warmup_min_iters: 40 and warmup_epochs: 0.4 " in caplog.text
    caplog.clear()
    optim.warmup_length({"warmup_epochs": 3.0, "warmup_min_iters": 1000}, 11, epochs=2)
    assert not caplog.records, "who sets it, knows"


def test_linear_factor_of_one_epoch():
    assert optim.lr_factor(1, 0.1, linear=True)(0) == 1
    assert optim.lr_factor(3, 0.1, linear=True)(2) == pytest.approx(0.1)
    assert optim.lr_factor(3, 0.1)(3) == pytest.approx(0.1)


def reenact(key):
    """Rows of every iteration and of every epoch end, as a training loop would live through them."""
    hyp = json.loads(str(SCHEDULES["hyp"]))
    shape, epochs, batches, batch, nw, resume = re.fullmatch(
        r"(\w+)_(\d+)x(\d+)_bs(\d+)_nw(\d+)(?:_resume_at(\d+))?", key
    ).groups()
    epochs, batches, batch, nw, start = int(epochs), int(batches), int(batch), int(nw), int(resume or 0)
    optimizer = optim.build_optimizer(Toy(), hyp["lr0"], hyp["momentum"], 0.0005)
    factor = optim.lr_factor(epochs, hyp["lrf"], linear=shape == "linear")
    scheduler = lr_scheduler.LambdaLR(optimizer, factor)
    if start:
        for group in optimizer.param_groups:  # the checkpoint was saved after the step that follows epoch start - 1
            group["lr"] = group["initial_lr"] * factor(start - 1)
    scheduler.last_epoch = start - 1
    accumulate = optim.accumulation_steps(batch)
    iterations, epoch_ends = [], []
    for epoch in range(start, epochs):
        for i in range(batches):
            ni = i + batches * epoch
            if ni <= nw:
                target = optimizer.param_groups[0]["initial_lr"] * factor(epoch)
                values = optim.warmup(
                    ni, nw, batch, target, hyp["warmup_bias_lr"], hyp["warmup_momentum"], hyp["momentum"]
                )
                optim.apply_warmup(optimizer, values)
                accumulate = values.accumulate
            step = ni % accumulate == 0
            if step:
                optimizer.step()
            groups = optimizer.param_groups
            iterations.append([epoch, i, ni, accumulate, *(g["lr"] for g in groups), groups[0]["momentum"], step])
        before = [g["lr"] for g in optimizer.param_groups]
        scheduler.step()
        epoch_ends.append([epoch, *before, *(g["lr"] for g in optimizer.param_groups)])
    return np.array(iterations), np.array(epoch_ends)


@pytest.mark.parametrize("key", SCHEDULE_KEYS)
def test_golden_schedule(key):
    iterations, epoch_ends = reenact(key)
    golden = SCHEDULES[key]
    if len(golden) < len(iterations):  # long tables are stored every 25th row
        iterations = iterations[::25]
    parity.check("learning rate schedules", key, iterations, golden, rtol=1e-12, atol=1e-15)
    parity.check("learning rate schedules", f"{key}_epoch_end", epoch_ends, SCHEDULES[f"{key}_epoch_end"], rtol=1e-12)


def test_there_are_golden_schedules_and_groups():
    assert len(SCHEDULE_KEYS) >= 8
    assert len(CFGS) >= 3
