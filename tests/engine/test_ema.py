"""The moving average against stock's numbers, and the promises about rounding, wrappers and anchors."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from tests import parity
from utils.engine.ema import ModelEMA


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.register_buffer("b", torch.zeros(2))
        self.register_buffer("n", torch.tensor(0))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("anchors", torch.ones(1, 3, 2))
        self.register_buffer("anchor_grid", torch.ones(1, 1, 3, 1, 1, 2))
        self.register_buffer("other", torch.ones(1))


def test_golden_decay_and_trace():
    golden = np.load(parity.GOLDEN / "model" / "ema.npz")
    model = Toy()
    ema = ModelEMA(model)
    parity.check("ema", "decay", [ema.decay(int(u)) for u in golden["decay_at"]], golden["decay"])
    rows = []
    for k in range(1, 6):
        with torch.no_grad():
            model.w += k * torch.tensor([1.0, 2.0, -1.0])
            model.b += k
            model.n += 1
        ema.update(model)
        rows.append(torch.cat((ema.ema.w, ema.ema.b, ema.ema.n[None])).double())
    parity.check("ema", "trace", torch.stack(rows), golden["trace"])


def test_golden_convolution_and_batchnorm():
    golden = np.load(parity.GOLDEN / "train" / "ema_.npz")
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))
    state = model.state_dict()
    for name, value in state.items():
        value.copy_(torch.from_numpy(golden[f"init_{name}"]))
    ema = ModelEMA(model)
    for u in range(6):
        for name, value in state.items():
            value += torch.from_numpy(golden[f"delta{u}_{name}"]) if value.is_floating_point() else 1
        ema.update(model)
        for name, value in ema.ema.state_dict().items():
            parity.check("ema", f"ema{u}_{name}", value, golden[f"ema{u}_{name}"])
    parity.check("ema", "ramp", [ema.decay(int(u)) for u in golden["updates"]], golden["decay"])
    assert ema.updates == 6


def test_first_update_nearly_replaces_the_start():
    """decay(1) = 0.9999 (1 - exp(-1/2000)), about 0.0005."""
    model = Toy()
    ema = ModelEMA(model)
    with torch.no_grad():
        model.w += 1
    ema.update(model)
    assert ema.ema.w[0].item() == pytest.approx(1 - 0.9999 * (1 - np.exp(-1 / 2000)))
    assert ema.ema.w.requires_grad is False
    assert model.w.requires_grad is True


def test_average_of_a_constant_model_stays():
    """Invariant: averaging equal values changes nothing but rounding."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    ema = ModelEMA(model, updates=5000)
    for _ in range(20):
        ema.update(model)
    assert torch.allclose(ema.ema.weight, model.weight, rtol=1e-5)
    assert ema.updates == 5020


def test_wrapped_models_are_unwrapped():
    model = Toy()
    ema = ModelEMA(nn.DataParallel(model))
    assert list(ema.ema.state_dict()) == ["w", "b", "n"]
    with torch.no_grad():
        model.w += 1
    model.names = ["a"]
    ema.update(nn.DataParallel(model))
    ema.update_attr(nn.DataParallel(model), include=["names"])
    assert ema.ema.w[0] > 0.9
    assert ema.ema.names == ["a"]


def test_update_attr_copies_what_was_asked_for():
    model = Toy()
    ema = ModelEMA(model)
    model.names, model.hyp, model.reducer, model._private = ["a"], {"box": 1}, "never", "never"
    ema.update_attr(model, include=["names"])
    assert ema.ema.names == ["a"]
    assert not hasattr(ema.ema, "hyp")
    ema.update_attr(model)
    assert ema.ema.hyp == {"box": 1}
    assert not hasattr(ema.ema, "reducer")
    assert not hasattr(ema.ema, "_private")


def test_anchors_are_copied_exactly_and_nothing_else():
    model = nn.Sequential(nn.Linear(1, 1), Head())
    ema = ModelEMA(model)
    for buffer in model[1].buffers():
        buffer.fill_(1 / 3)
    ema.copy_anchors(model)
    assert torch.equal(ema.ema[1].anchors, model[1].anchors)
    assert torch.equal(ema.ema[1].anchor_grid, model[1].anchor_grid)
    assert ema.ema[1].other == 1


def test_evaluation_in_half_does_not_round_the_average():
    ema = ModelEMA(nn.Linear(3, 3))
    before = deepcopy(ema.ema.state_dict())
    assert ema.ema_for_evaluation(half=True).weight.dtype == torch.float16
    assert all(torch.equal(before[name], value) for name, value in ema.ema.state_dict().items())
    assert ema.ema_for_evaluation(half=False) is ema.ema
