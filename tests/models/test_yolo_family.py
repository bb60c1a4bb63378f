"""Every shipped configuration: counts, names, shapes and order of parameters, savelists, GFLOPs, also when fused.

Names and shapes are compared through SHA-256 of the lines `key:shape`; parameter order decides which optimiser state of
a checkpoint belongs to which parameter.
"""

import hashlib
import json
from pathlib import Path

import pytest
import yaml
from torch import nn

from models.summary import model_summary
from models.yolo import Model
from tests.parity import GOLDEN, check

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("training", "deploy")
FAMILY = json.loads((ROOT / "tests" / "golden" / "model" / "family.json").read_text())
ORDERS = json.loads((GOLDEN / "model" / "param_groups.json").read_text())  # of three of them, not only as digests


def digest(lines):
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def entries(model):
    return [f"{key}:{'x'.join(map(str, value.shape))}" for key, value in model.state_dict().items()]


def parameter_groups(model):
    """Parameter names in stock's three groups: norms and implicits, other weights, biases."""
    norms, weights, biases = [], [], []
    for name, module in model.named_modules():
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            biases.append(f"{name}.bias")
        if isinstance(getattr(module, "weight", None), nn.Parameter):
            (norms if isinstance(module, nn.BatchNorm2d) else weights).append(f"{name}.weight")
        for part in ("im", "ia"):
            norms += [f"{name}.{part}.{i}.implicit" for i in range(len(getattr(module, part, ())))]
    return norms, weights, biases


def counts(model):
    summary = model_summary(model)
    return [summary.parameters, len(model.state_dict()), summary.layers, f"{summary.gflops:.1f}"]


def check_order(name, model):
    golden = ORDERS[name]
    check("model: names and order", f"{name} state", entries(model), golden["state_dict_keys"])
    check("model: names and order", f"{name} savelist", model.save, golden["save"])
    for group, key in zip(parameter_groups(model), ("pg0_no_decay", "pg1_decay", "pg2_bias"), strict=True):
        check("model: names and order", f"{name} {key}", group, golden[key])


@pytest.mark.parametrize("name", FAMILY)
def test_structure(name, monkeypatch):
    monkeypatch.setattr(nn.Conv2d, "reset_parameters", lambda self: None)  # the numbers do not matter, and take seconds
    facts = FAMILY[name]
    model = Model(ROOT / "cfg" / f"{name}.yaml")
    lines = entries(model)
    assert len(model.model) == facts["layers"]
    assert counts(model) == facts["counts"]
    assert digest(sorted(lines)) == facts["sorted"]
    assert digest(lines) == facts["ordered"]
    assert [digest(group) for group in parameter_groups(model)] == facts["groups"]
    assert sum(len(group) for group in parameter_groups(model)) == len(list(model.parameters()))
    if name in ORDERS:
        check_order(name, model)
    model.fuse()
    assert counts(model) == facts["fused_counts"]
    assert digest(sorted(entries(model))) == facts["fused_sorted"]


@pytest.mark.parametrize("name", [Path(name).name for name in FAMILY if name.startswith("training")])
def test_deploy_rows_are_the_training_rows_with_a_plain_head(name):
    training, deploy = (yaml.safe_load((ROOT / "cfg" / kind / f"{name}.yaml").read_text()) for kind in KINDS)
    *rows, (sources, number, kind, args) = training["head"]
    if kind == "IAuxDetect":
        sources, rows = sources[: len(sources) // 2], rows[: -len(sources) // 2]
    assert deploy == {**training, "head": [*rows, [sources, number, "Detect", args]]}


def test_silu_variant_differs_in_the_activation_only():
    leaky, silu = (
        yaml.safe_load((ROOT / "cfg/deploy" / f"yolov7-tiny{end}.yaml").read_text()) for end in ("", "-silu")
    )
    for section in ("backbone", "head"):
        for row in leaky[section]:
            if row[2] == "Conv":
                assert row[3].pop() == "nn.LeakyReLU(0.1)" and row[3].pop() == 1 and row[3].pop() == "None"
    assert leaky == silu


def test_orders_belong_to_the_family():
    assert len(ORDERS) == 3 and set(ORDERS) <= set(FAMILY), "test_structure compares them"
