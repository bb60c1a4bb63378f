"""Checkpoints: stock's layout out and in, every kind of file that people have, and what a run writes."""

import os
import pickletools
import shutil
import zipfile
from copy import deepcopy
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

import models.yolo
from models.experimental import rebuild
from tests.tiny_model import tiny_model
from utils.engine import checkpoint as reader
from utils.engine.checkpoint import (
    Checkpoints,
    NoCheckpoints,
    full_state_path,
    read_checkpoint,
    same_layout,
    save,
    training_checkpoint,
    transfer,
)
from utils.engine.ema import ModelEMA
from utils.engine.optimizer import build_optimizer

FAMILY = sorted(Path(models.yolo.__file__).parents[1].glob("cfg/training/*.yaml"))
STOCK_KEYS = {"epoch", "best_fitness", "training_results", "model", "ema", "updates", "optimizer", "wandb_id"}
LAYERS = {
    "models.yolo Model", "models.yolo IDetect", "models.common Conv", "models.common ImplicitA",
    "models.common ImplicitM", "torch.nn.modules.conv Conv2d", "torch.nn.modules.batchnorm BatchNorm2d",
    "torch.nn.modules.activation SiLU", "torch.nn.modules.container Sequential",
    "torch.nn.modules.container ModuleList",
}  # fmt: skip
PLAIN = {
    "collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter",
    "torch HalfStorage", "torch FloatStorage", "torch DoubleStorage", "torch LongStorage", "__builtin__ set",
}  # fmt: skip


def trained(updates=3, nc=2):
    """A model, its average and its optimiser after some steps, with what training attaches to the model."""
    torch.manual_seed(0)
    model = tiny_model(nc)
    ema, optimizer = ModelEMA(model), build_optimizer(model, 0.01, 0.9, 0.0005)
    for _ in range(updates):
        sum(maps.square().mean() for maps in model(torch.rand(2, 3, 64, 64))).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
    model.nc, model.names, model.gr = nc, ["cat", "dog", "cow"][:nc], 1.0
    model.hyp, model.class_weights = {"lr0": 0.01, "loss_ota": 1}, torch.ones(nc, dtype=torch.float64)
    ema.update_attr(model, include=("yaml", "nc", "hyp", "gr", "names", "stride", "class_weights"))
    return model, ema, optimizer


def content_of_epoch(epoch=7, best_fitness=0.25, updates=3):
    model, ema, optimizer = trained(updates)
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    return training_checkpoint(epoch, best_fitness, "0/9 line\n", model, ema, optimizer, scaler)


@pytest.fixture(scope="module")
def content():
    return content_of_epoch()


def written(content, folder, **options):
    path = Path(folder) / "file.pt"
    torch.save(content, path, **options)
    return path


def globals_of(path):
    """All names that the pickle inside a .pt file mentions."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return {argument for code, argument, _ in pickletools.genops(archive.read(name)) if code.name == "GLOBAL"}


def same(state, other):
    assert list(state) == list(other)
    return all(torch.equal(state[key], other[key]) and state[key].dtype == other[key].dtype for key in state)


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
    known = {f"{module}.{name}" for module, names in reader.LAYER_CLASSES.items() for name in names}
    with torch.device("meta"):
        used = {f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in family_model(cfg).modules()}
    assert used <= known


def family_model(cfg):
    content = models.yolo.read_cfg(cfg)
    layers, _ = models.yolo.parse_model(content, content["ch"])
    return layers


def test_known_layers_exist_under_their_names():
    for name, classes in reader.LAYER_CLASSES.items():
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


# ---- writing --------------------------------------------------------------------------------------------------------


def test_crash_while_saving_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    save({"w": torch.ones(1)}, path)

    def crash(content, file):
        file.write(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(OSError, match="disk full"):
        save({"w": torch.zeros(1)}, path)
    assert read_checkpoint(path).model.state["w"].tolist() == [1.0]
    assert os.listdir(tmp_path) == ["last.pt"]


def names_after(checkpoints, epoch, is_best):
    """Of the files that an epoch writes; all have its content."""
    for path in checkpoints.folder.iterdir():
        path.unlink()
    checkpoints.after_epoch(lambda: {"epoch": epoch}, epoch, is_best)
    files = list(checkpoints.folder.iterdir())
    assert all(torch.load(path) == {"epoch": epoch} for path in files)
    return {path.name for path in files}


@pytest.mark.parametrize(
    ("epoch", "is_best", "expected"),
    [
        (0, True, {"last.pt", "best.pt", "epoch_000.pt"}),
        (1, False, {"last.pt"}),
        (23, True, {"last.pt", "best.pt"}),
        (24, False, {"last.pt", "epoch_024.pt"}),
        (25, False, {"last.pt"}),
        (199, True, {"last.pt", "best.pt", "epoch_199.pt"}),
        (200, True, {"last.pt", "best.pt", "best_200.pt"}),
        (200, False, {"last.pt"}),
        (294, False, {"last.pt"}),
        (295, False, {"last.pt", "epoch_295.pt"}),
        (299, True, {"last.pt", "best.pt", "best_299.pt", "epoch_299.pt"}),
    ],
)
def test_file_names(epoch, is_best, expected, tmp_path):
    checkpoints = Checkpoints(tmp_path / "weights", epochs=300)
    assert names_after(checkpoints, epoch, is_best) == expected


def test_nosave_writes_only_after_the_last_epoch(tmp_path):
    checkpoints = Checkpoints(tmp_path, epochs=3, save_every_epoch=False)
    checkpoints.after_epoch(lambda: pytest.fail("built for nothing"), 0, True)
    checkpoints.after_epoch(lambda: pytest.fail("built for nothing"), 1, True)
    assert names_after(checkpoints, 2, True) == {"last.pt", "best.pt", "epoch_002.pt"}


def test_every_nth_epoch_is_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, epochs=300, period=4)
    kept = [e for e in range(1, 24) if f"epoch_{e:03d}.pt" in names_after(checkpoints, e, False)]
    assert kept == [3, 7, 11, 15, 19, 23]


def test_last_is_written_last(tmp_path, monkeypatch):
    names, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda new, old: names.append(Path(old).name) or replace(new, old))
    Checkpoints(tmp_path, epochs=3).after_epoch(dict, 0, True)
    assert names[-1] == "last.pt" and len(names) == 3


def test_a_copy_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, epochs=300)
    checkpoints.after_epoch(lambda: {"epoch": 30}, 30, False)

    def full(source, target):
        Path(target).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left on device.*last.pt"):
        checkpoints.after_epoch(lambda: {"epoch": 31}, 31, True)
    assert torch.load(tmp_path / "last.pt") == {"epoch": 30} and torch.load(tmp_path / "best.pt") == {"epoch": 31}
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt"]


def test_initial_model(tmp_path):
    model = tiny_model()
    Checkpoints(tmp_path / "weights", epochs=1).initial(model)
    stored = read_checkpoint(tmp_path / "weights" / "init.pt")
    assert same(stored.model.state, model.state_dict())


def test_strip(tmp_path):
    checkpoints = Checkpoints(tmp_path, epochs=9)
    assert checkpoints.written() == []
    best, last = content_of_epoch(3, 0.5, updates=1), content_of_epoch(8, 0.5, updates=2)
    checkpoints.after_epoch(lambda: best, 3, True)
    checkpoints.after_epoch(lambda: last, 8, False)
    full = checkpoints.last.read_bytes()
    checkpoints.strip(rebuild)

    assert checkpoints.written() == [tmp_path / "last.pt", tmp_path / "best.pt"]
    assert full_state_path(checkpoints.last).read_bytes() == full, "the full state stays beside the stripped one"
    for path, before in ((checkpoints.last, last), (checkpoints.best, best)):
        content = torch.load(path, weights_only=False)
        assert set(content) == STOCK_KEYS | {"scaler"}
        assert content["epoch"] == -1 and content["best_fitness"] == 0.5
        assert all(content[key] is None for key in set(content) - {"epoch", "best_fitness", "model"})
        model = content["model"]
        assert same(dict(model.state_dict()), dict(before["ema"].state_dict())), "the average, bit by bit, in half"
        assert not any(parameter.requires_grad for parameter in model.parameters()) and not model.training
        assert model.names == ["cat", "dog"] and model.hyp == {"lr0": 0.01, "loss_ota": 1}
        assert globals_of(path) - LAYERS <= PLAIN
    size = checkpoints.last.stat().st_size
    checkpoints.strip(rebuild)
    assert checkpoints.last.stat().st_size == size, "stripping twice changes nothing"
    assert full_state_path(checkpoints.last).read_bytes() == full


def test_no_checkpoints(tmp_path):
    nothing = NoCheckpoints()
    nothing.initial(None)
    nothing.after_epoch(lambda: pytest.fail("built for nothing"), 0, True)
    nothing.strip(rebuild)
    assert nothing.written() == []
