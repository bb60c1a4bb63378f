"""Checkpoints: stock's layout out and in, and every other kind of file that people have."""

from copy import deepcopy
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

import models.yolo
from tests.engine.checkpoint_files import (
    LAYERS,
    PLAIN,
    STOCK_KEYS,
    content_of_epoch,
    globals_of,
    same,
    trained,
    written,
)
from tests.tiny_model import tiny_model
from utils.engine import stand_ins
from utils.engine.checkpoint import training_checkpoint
from utils.engine.checkpoint_reader import read_checkpoint, same_layout, transfer

FAMILY = sorted(Path(models.yolo.__file__).parents[1].glob("cfg/training/*.yaml"))


@pytest.fixture(scope="module")
def content():
    return content_of_epoch()


# ---- a training checkpoint ------------------------------------------------------------------------------------------


def test_training_checkpoint_has_stocks_layout(content, tmp_path):
    assert set(content) == STOCK_KEYS | {"scaler"}
    assert content["wandb_id"] is None and content["updates"] == 3 and len(content["optimizer"]["param_groups"]) == 3
    assert type(content["model"]) is models.yolo.Model and type(content["ema"]) is models.yolo.Model
    for name in ("model", "ema"):
        floats = {value.dtype for value in content[name].state_dict().values() if value.is_floating_point()}
        assert floats == {torch.float16}
    mentioned = globals_of(written(content, tmp_path))
    assert mentioned >= LAYERS
    assert mentioned - LAYERS <= PLAIN, "names that stock tools, or our own reader, do not know"


def test_training_checkpoint_leaves_the_model_as_it_is():
    model, ema, optimizer = trained(1)
    before = deepcopy(model.state_dict())
    training_checkpoint(0, 0.0, "", model, ema, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    assert same(model.state_dict(), before) and model.training


@pytest.mark.parametrize("names", [{1: "dog", 0: "cat"}, {"1": "dog", "0": "cat"}, ("cat", "dog")])
def test_names_of_other_programs_are_a_list_in_the_order_of_the_classes(names, tmp_path):
    model = tiny_model().eval()
    model.names = names
    assert list(read_checkpoint(written(model, tmp_path)).model.attributes["names"]) == ["cat", "dog"]


def test_round_trip(content, tmp_path):
    stored = read_checkpoint(written(content, tmp_path))
    assert (stored.epoch, stored.best_fitness, stored.updates, stored.training_results) == (7, 0.25, 3, "0/9 line\n")
    assert stored.extra == {"wandb_id": None} and stored.scaler == content["scaler"]
    assert same(stored.model.state, content["model"].state_dict()) and same(
        stored.ema.state, content["ema"].state_dict()
    )
    assert not same(stored.ema.state, stored.model.state)
    assert stored.for_inference() is stored.ema
    assert stored.model.yaml == content["model"].yaml
    attributes = stored.ema.attributes
    assert (attributes["names"], attributes["nc"], attributes["gr"]) == (["cat", "dog"], 2, 1.0)
    assert attributes["hyp"] == {"lr0": 0.01, "loss_ota": 1} and attributes["class_weights"].dtype == torch.float64
    for group, expected in zip(stored.optimizer["param_groups"], content["optimizer"]["param_groups"], strict=True):
        assert group == expected
    for key, value in content["optimizer"]["state"].items():
        assert torch.equal(stored.optimizer["state"][key]["momentum_buffer"], value["momentum_buffer"])


@pytest.mark.parametrize("core", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
@pytest.mark.parametrize("best", [np.array([0.625]), np.float64(0.625), np.array([0.625], np.float32)])
def test_best_fitness_of_numpy_1_and_2(core, best, tmp_path):
    content = {"model": {"w": torch.ones(2)}, "best_fitness": best}
    path = written(content, tmp_path, _use_new_zipfile_serialization=False)
    ours = best.__reduce__()[0].__module__.encode()
    data = path.read_bytes()
    assert b"c" + ours + b"\n" in data
    path.write_bytes(data.replace(b"c" + ours + b"\n", b"c" + core + b"\n"))
    assert read_checkpoint(path).best_fitness == 0.625


def test_numpy_numbers_elsewhere_become_plain(tmp_path):
    stored = read_checkpoint(written({"model": {"w": torch.ones(1)}, "epoch": np.int64(4)}, tmp_path))
    assert stored.epoch == 4 and type(stored.epoch) is int


# ---- the other files that people have -------------------------------------------------------------------------------


def test_bare_model(tmp_path):
    model, _, _ = trained(1)
    stored = read_checkpoint(written(model, tmp_path))
    assert same(stored.model.state, model.state_dict())
    assert stored.for_inference() is stored.model and stored.optimizer is None and stored.epoch is None


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"model": s}, lambda s: {"state_dict": s, "epoch": 3}])
def test_state_dicts(wrap, tmp_path):
    state = tiny_model().state_dict()
    stored = read_checkpoint(written(wrap(state), tmp_path))
    assert same(stored.model.state, dict(state)) and stored.model.yaml is None and stored.ema is None


def test_only_an_average(content, tmp_path):
    stored = read_checkpoint(written({"model": None, "ema": content["ema"]}, tmp_path))
    assert stored.model is None and same(stored.for_inference().state, content["ema"].state_dict())


def test_deploy_file_lacks_keys(content, tmp_path):
    keys = {"model": content["model"], "optimizer": None, "training_results": None, "epoch": -1}
    stored = read_checkpoint(written(keys, tmp_path))
    assert stored.epoch == -1 and stored.best_fitness is None and stored.ema is None and stored.updates is None


def test_file_of_an_old_torch_lacks_attributes(tmp_path):
    """What later versions added to nn.Module is missing, and so are the attributes that training attaches."""
    model = tiny_model()
    state = deepcopy(model.state_dict())
    for layer in model.modules():
        for name in ("_non_persistent_buffers_set", "_is_full_backward_hook", "_state_dict_pre_hooks"):
            vars(layer).pop(name, None)
    vars(model).pop("traced")
    stored = read_checkpoint(written({"model": model}, tmp_path))
    assert same(stored.model.state, dict(state)) and "hyp" not in stored.model.attributes


def test_temporary_buffers_and_absent_layers_are_no_state(tmp_path):
    model = tiny_model()
    names = list(model.state_dict())
    model.register_buffer("scratch", torch.ones(1), persistent=False)
    model.register_module("nothing", None)
    assert list(read_checkpoint(written(model, tmp_path)).model.state) == names


@pytest.mark.parametrize(
    "cfg", sorted(Path(models.yolo.__file__).parents[1].glob("cfg/training/*.yaml")), ids=lambda p: p.stem
)
def test_every_layer_of_the_family_is_known(cfg):
    """Checked by name, without the seconds that writing the large models takes."""
    known = {f"{module}.{name}" for module, names in stand_ins.LAYER_CLASSES.items() for name in names}
    with torch.device("meta"):
        used = {f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in family_model(cfg).modules()}
    assert used <= known


def family_model(cfg):
    content = models.yolo.read_cfg(cfg)
    layers, _ = models.yolo.parse_model(content, content["ch"])
    return layers


def test_known_layers_exist_under_their_names():
    for name, classes in stand_ins.LAYER_CLASSES.items():
        for kind in classes:
            assert getattr(import_module(name), kind).__module__ == name


# ---- weights into a model -------------------------------------------------------------------------------------------


def test_transfer_takes_what_fits():
    source, target = tiny_model(nc=2), tiny_model(nc=3)
    state = source.half().state_dict() | {"other": torch.ones(1)}
    before = deepcopy(target.state_dict())
    fitting = [key for key, value in state.items() if key in before and before[key].shape == value.shape]
    assert 0 < len(fitting) < len(before)
    assert transfer(target, state) == len(fitting)
    for key, value in target.state_dict().items():
        expected = state[key].to(value.dtype) if key in fitting else before[key]
        assert torch.equal(value, expected) and value.dtype == before[key].dtype


def test_transfer_leaves_out_excluded_names():
    source, target = tiny_model(), tiny_model()
    source.model[-1].anchors.mul_(2)
    before = target.model[-1].anchors.clone()
    assert transfer(target, source.state_dict(), exclude=("anchor",)) == len(source.state_dict()) - 2
    assert torch.equal(target.model[-1].anchors, before)
    assert torch.equal(target.model[0].conv.weight, source.model[0].conv.weight)
    assert transfer(target, {}) == 0


def test_same_layout():
    model = tiny_model(nc=2)
    state = model.state_dict()
    assert same_layout(model, state) and not same_layout(tiny_model(nc=3), state)
    assert not same_layout(model, state | {"more": torch.ones(1)}) and not same_layout(model, {})
