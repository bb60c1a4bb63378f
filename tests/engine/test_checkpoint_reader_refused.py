"""Files that mean harm, are damaged, or are no checkpoints: refused by name, and nothing in them is run."""

import io
import os
import pickle
import tarfile
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import models.yolo
from tests.engine.checkpoint_files import written
from tests.tiny_model import CFG, tiny_model
from utils.engine.checkpoint_reader import read_checkpoint

# ---- files that mean harm -------------------------------------------------------------------------------------------


class Call:
    """Pickles as a call of `function` with `args`."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args

    def __call__(self):
        """pickle wants something callable where an attribute is looked up first."""


class ArmedLayer(nn.Module):
    """A layer that pickles as a call."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def __reduce__(self):
        return self.call.function, self.call.args


def touch(path):
    return Call(os.system, f"touch {path}")


def chain(path):
    return Call(Call(getattr, path, "touch"))


def with_optimizer(payload):
    return {"model": {"w": torch.ones(1)}, "optimizer": {"state": {0: {"momentum_buffer": payload}}}}


def in_layer(payload):
    model = tiny_model()
    model.model[0].extra = payload
    return {"model": model}


def object_array(payload):
    array = np.empty(1, dtype=object)
    array[0] = payload
    return {"model": {"w": torch.ones(1)}, "best_fitness": array}


ATTACKS = {
    "os.system": lambda path: {"model": touch(path)},
    "eval": lambda path: {"model": Call(eval, f"open({str(path)!r}, 'w')")},
    "exec as the file": lambda path: Call(exec, f"open({str(path)!r}, 'w')"),
    "getattr chain": lambda path: {"model": chain(path)},
    "layer with __reduce__": lambda path: {"model": ArmedLayer(touch(path))},
    "inside a known layer": lambda path: in_layer(touch(path)),
    "in the optimizer": lambda path: with_optimizer(touch(path)),
    "value of a state dict": lambda path: {"conv.weight": torch.ones(1), "conv.bias": touch(path)},
    "key of a dict": lambda path: {"model": {"w": torch.ones(1)}, "names": {touch(path): 1}},
    "object array": lambda path: object_array(touch(path)),
}


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_code_in_a_file_is_refused_and_does_not_run(attack, options, tmp_path):
    canary = tmp_path / "canary"
    path = written(attack(canary), tmp_path, **options)
    with pytest.raises(ValueError, match="file.pt was refused, nothing of it was run"):
        read_checkpoint(path)
    assert not canary.exists()
    torch.load(path, weights_only=False)
    assert canary.exists(), "the attack itself does not work, so this test proves nothing"


def test_tar_archive_is_refused(tmp_path):
    """The oldest format, whose restricted reading could be circumvented before torch 2.6."""
    canary, path = tmp_path / "canary", tmp_path / "file.pt"
    members = {"storages": 0, "tensors": 0, "pickle": touch(canary)}
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            data = pickle.dumps(content, protocol=2)
            information = tarfile.TarInfo(name)
            information.size = len(data)
            archive.addfile(information, io.BytesIO(data))
    with pytest.raises(ValueError, match="file.pt was refused.*tar"):
        read_checkpoint(path)
    assert not canary.exists()


def test_unknown_model_class_is_refused(tmp_path, monkeypatch):
    backdoor = type("Backdoor", (models.yolo.Model,), {"__module__": "models.yolo"})
    monkeypatch.setattr(models.yolo, "Backdoor", backdoor, raising=False)
    with pytest.raises(ValueError, match="file.pt was refused.*models.yolo.Backdoor"):
        read_checkpoint(written({"model": backdoor(CFG)}, tmp_path))


def test_forged_numpy_type_is_refused(tmp_path):
    """A float whose type says that its 8 bytes are the address of an object."""
    forged = np.dtype("f8", False, True)
    forged.__setstate__((3, "<", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 8, 0))
    if forged.fields is None:
        pytest.skip("this NumPy cannot write such a file")
    state = (1, (1,), forged, False, b"\x01" * 8)
    best = Call(np.zeros(1).__reduce__()[0], np.ndarray, (0,), b"b")
    best.__class__ = type("Forged", (Call,), {"__reduce__": lambda self: (self.function, self.args, state)})
    with pytest.raises(ValueError, match="file.pt was refused.*NumPy array of 'O8'"):
        read_checkpoint(written({"model": {"w": torch.ones(1)}, "best_fitness": best}, tmp_path))


def test_other_byte_order_and_other_kinds_of_numbers_are_refused(tmp_path):
    for best in (np.array([0.5], ">f8"), np.array(["text"]), np.array([1j])):
        with pytest.raises(ValueError, match="NumPy array"):
            read_checkpoint(written({"model": {"w": torch.ones(1)}, "best_fitness": best}, tmp_path))


def test_methods_that_a_file_replaces_are_not_called(tmp_path):
    model = tiny_model()
    state = dict(model.state_dict())
    vars(model).update(state_dict=None, forward=None, _state_dict_hooks={0: None}, parameters="none")
    read = read_checkpoint(written(model, tmp_path)).model.state
    assert list(read) == list(state) and all(torch.equal(read[name], value) for name, value in state.items())


def test_allowed_names_are_restored(tmp_path):
    before = set(torch.serialization.get_safe_globals())
    torch.serialization.add_safe_globals([Fraction])
    try:
        read_checkpoint(written(tiny_model(), tmp_path))
        with pytest.raises(ValueError):
            read_checkpoint(written(touch(tmp_path / "canary"), tmp_path))
        assert set(torch.serialization.get_safe_globals()) == before | {Fraction}
        with pytest.raises(ValueError, match="Fraction"):
            read_checkpoint(written({"model": {"w": torch.ones(1)}, "extra": Fraction(1, 2)}, tmp_path))
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(list(before))


# ---- files that are damaged, or something else ----------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
def test_truncated_files(legacy, tmp_path):
    state = {name: value.half() for name, value in tiny_model().state_dict().items()}
    data = written(state, tmp_path, _use_new_zipfile_serialization=not legacy).read_bytes()
    path = tmp_path / "cut.pt"
    for length in (0, 1, 2, 40, len(data) // 4, len(data) // 2, len(data) - 30):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match="cut.pt"):
            read_checkpoint(path)


@pytest.mark.parametrize("text", ["", "hello", "version https://git-lfs.github.com/spec/v1\n", "<html></html>"])
def test_text_files(text, tmp_path):
    path = tmp_path / "text.pt"
    path.write_text(text)
    with pytest.raises(ValueError, match="text.pt"):
        read_checkpoint(path)


def test_folder_and_missing_file(tmp_path):
    for path in (tmp_path, tmp_path / "none.pt"):
        with pytest.raises(ValueError, match=f"{path.name}: no such checkpoint"):
            read_checkpoint(path)


W = {"w": torch.ones(1)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list"),
        ({}, "holds no model"),
        ({"epoch": 3, "optimizer": None}, "holds no model .its keys: epoch, optimizer"),
        ({"model": "yolov7"}, "'model' is a str"),
        ({"model": {"w": 1.0}}, "'w' is no tensor"),
        ({"model": {"w": torch.ones(2).to_sparse()}}, "'w' is no tensor"),
        ({"model": W, "epoch": "seven"}, "'epoch' is a str, not a int"),
        ({"model": W, "optimizer": [1]}, "'optimizer' is a list"),
        ({"model": W, "best_fitness": "high"}, "'best_fitness' is a str"),
        ({"model": W, "best_fitness": np.zeros(0)}, "file.pt"),
    ],
)
def test_wrong_content(content, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        read_checkpoint(written(content, tmp_path))
    assert "file.pt" in str(caught.value)


def test_models_that_are_none(tmp_path):
    model = tiny_model()
    model.yaml = "yolov7.yaml"
    with pytest.raises(ValueError, match="file.pt.*yaml of its model"):
        read_checkpoint(written(model, tmp_path))
    model = tiny_model()
    model._modules["loop"] = model
    with pytest.raises(ValueError, match="file.pt"):
        read_checkpoint(written(model, tmp_path))
    model = tiny_model()
    vars(model)["_parameters"] = [1]
    with pytest.raises(ValueError, match="file.pt"):
        read_checkpoint(written(model, tmp_path))
