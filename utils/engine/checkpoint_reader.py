"""The one reader of .pt files, and what a model takes over from them.

Reading never runs code from a file: stand_ins.py gives stand-ins for the known class names, which hold the tensors and
plain values, and refuses every other name. The caller rebuilds the model from its yaml. A file that stands for far more
than its bytes, because it names one thing many times, is refused before anything is copied.
"""

import logging
import os
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import nn

from utils.engine import torch_file
from utils.engine.file_kind import foreign_kind
from utils.engine.stand_ins import Array, Layer
from utils.head_config import description_in_model
from utils.system.files import printable, shown

logger = logging.getLogger(__name__)

# What a training run attaches to a model beside its parameters.
ATTACHED = ("names", "nc", "hyp", "gr", "class_weights")
PLAIN_KEYS = {
    "epoch": int, "best_fitness": float, "training_results": str, "optimizer": dict, "updates": int, "scaler": dict,
}  # fmt: skip
PLAIN = (str, int, float, list, tuple, dict, type(None))  # what a yaml file can hold
MAX_ENTRIES = 1_000_000  # values, those counted again that are named again; a large training has 0.1 million
SPARE_BYTES = 64 << 20  # beyond a multiple of the file's size
MAX_DEPTH = 60  # containers or layers inside each other
MAX_COUNT = 10**12  # epochs or updates


@dataclass
class StoredModel:
    """A model as a file holds it: tensors by name, its yaml, and the plain attributes that training attached.

    `yaml` is None for a bare state dict.
    """

    state: dict
    yaml: dict | None = None
    attributes: dict = field(default_factory=dict)


@dataclass
class Checkpoint:
    """What a .pt file holds; whatever the file lacks is None."""

    path: Path
    model: StoredModel | None = None
    ema: StoredModel | None = None
    epoch: int | None = None
    best_fitness: float | None = None
    training_results: str | None = None
    optimizer: dict | None = None
    updates: int | None = None
    scaler: dict | None = None
    extra: dict = field(default_factory=dict)

    def for_training(self) -> StoredModel:
        """The model to train further, or its EMA where the file holds that alone."""
        stored = self.model or self.ema
        assert stored is not None  # read_checkpoint refuses a file without any
        return stored

    def for_inference(self):
        """The model to use for detection: the EMA where there is one."""
        return self.ema or self.model


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a .pt file (a training checkpoint, a pickled model, or a state dict) on the CPU without running its code.

    Raises ValueError, naming the file, when it is missing, damaged, something else, or contains other names than
    those of YOLOv7 layers, tensors and plain values.
    """
    path = Path(path)
    name = printable(path)
    if not os.path.isfile(path):
        reason = "this is a folder, " if os.path.isdir(path) else ""
        reason += "the unpacked content of a .pt file, " if os.path.exists(path / "data.pkl") else ""
        raise ValueError(f"{name}: no such checkpoint; {reason}give the path of an existing .pt file")
    try:
        kind = foreign_kind(path)
        if kind is None:
            size = path.stat().st_size
            with path.open("rb") as file:
                content = torch_file.load(file, size)
            return _sort_content(content, path, Extent(size))
    except UnpicklingError as error:
        raise ValueError(
            f"{name} was refused, nothing of it was run: it is no .pt file, or holds more than tensors, plain values "
            f"and YOLOv7 layers ({_reason(error)})"
        ) from error
    except Exception as error:  # a damaged file can fail in any way
        raise ValueError(f"{name} is no checkpoint that can be used, or it is cut off: {_reason(error)}") from error
    raise ValueError(f"{name} {kind}")


def _reason(error):
    if isinstance(error, (TypeError, AttributeError, LookupError, struct.error)):  # what Python says of damaged data
        return "its content is damaged"
    return " ".join(str(error).split())[:300] or type(error).__name__


class Extent:
    """How much the content of a file of `size` bytes is once everything that is named twice is written out twice."""

    def __init__(self, size):
        self.entries, self.bytes = MAX_ENTRIES, 4 * size + SPARE_BYTES

    def add(self, value, plain=""):
        """Count a value and all that is in it; returns it. Raises ValueError when the limits are exceeded.

        `plain` is the name of one that may hold only text, numbers, lists and mappings.
        """
        waiting = [(value, 0)]
        while waiting:
            part, depth = waiting.pop()
            if plain and not isinstance(part, PLAIN):
                raise ValueError(f"{plain} of its model holds a {type(part).__name__} where text or numbers are due")
            if isinstance(part, torch.Tensor):
                self.bytes -= part.numel() * part.element_size()
            elif isinstance(part, (str, bytes)):
                self.bytes -= len(part)
            elif isinstance(part, (dict, list, tuple, set)):
                self.entries -= len(part)
                if self.entries >= 0:  # or `waiting` would be what fills the memory
                    waiting += [(inner, depth + 1) for inner in (part.values() if isinstance(part, dict) else part)]
            self.check(depth)
        return value

    def check(self, depth):
        if self.entries < 0 or self.bytes < 0 or depth > MAX_DEPTH:
            raise ValueError(
                "it names the same things so often, or one inside the other, that it stands for far more than it has"
            )


def _sort_content(content, path, extent):
    if isinstance(content, Layer):
        return Checkpoint(path, model=_stored(content, extent))
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, neither a checkpoint nor a state dict")
    if content and all(isinstance(value, torch.Tensor) for value in content.values()):
        return Checkpoint(path, model=_stored(content, extent))
    model = content.get("model") if content.get("model") is not None else content.get("state_dict")
    if model is None and content.get("ema") is None:
        keys = ", ".join(printable(key)[:50] for key in list(content)[:20])
        raise ValueError(f"it holds no model (its keys: {keys})")
    models = {"model": _stored(model, extent), "ema": _stored(content.get("ema"), extent)}
    rest = {key: extent.add(value) for key, value in content.items() if key not in models}
    values = {key: _value(rest, key, kind) for key, kind in PLAIN_KEYS.items()}
    return Checkpoint(path, **models, extra={k: v for k, v in rest.items() if k not in values}, **values)


def _value(content, key, kind):
    """content[key] as a `kind`; None if the file lacks it."""
    value = content.get(key)
    if isinstance(value, Array):  # best_fitness of stock YOLOv7
        value = value.numbers[0]
    if value is not None and not isinstance(value, (kind, int) if kind is float else kind):
        raise ValueError(f"'{key}' is a {type(value).__name__}, not a {kind.__name__}")
    if isinstance(value, int) and not -1 <= value < MAX_COUNT:
        raise ValueError(f"'{key}' is not a number that a training reaches")
    return value


def _stored(model, extent):
    """A StoredModel of a stand-in, or of a dict of tensors; None stays None."""
    if model is None:
        return None
    if isinstance(model, dict):
        return StoredModel({name: _tensor(value, name, extent) for name, value in model.items()})
    if not isinstance(model, Layer):
        raise ValueError(f"'model' is a {type(model).__name__}, not a model")
    state = _collect(model, "", {}, extent)
    attributes = vars(model)
    cfg = extent.add(attributes.get("yaml"), plain="the yaml")
    if not isinstance(cfg, dict | None):
        raise ValueError("the yaml of its model is no mapping")
    attached = {name: extent.add(attributes[name]) for name in ATTACHED if name in attributes}
    names = extent.add(attached.get("names", []), plain="the names")
    if not isinstance(names, list | tuple | dict):
        raise ValueError("the names of its model are no list")
    if isinstance(names, dict):  # {0: name, 1: name, ...}, as in files of other programs
        attached["names"] = [names[key] for key in sorted(names, key=lambda key: str(key).zfill(9))]
    heads = description_in_model(attributes)
    if cfg is not None and heads is not None:
        cfg = cfg | {"head_config": heads}
    return StoredModel(state, cfg, attached)


def stored_model(model: nn.Module) -> StoredModel:
    """What would be read of a model on the CPU if it were written."""
    content = vars(model)
    return StoredModel(
        model.state_dict(), content["yaml"], {name: content[name] for name in ATTACHED if name in content}
    )


def _collect(layer, prefix, state, extent, depth=0):
    """Add a stand-in's parameters, its buffers, then those of its inner layers to `state`, named as in a state dict.

    A layer that stands in several places is read, and counted, in each of them, so that a graph of layers has its end.
    """
    content = vars(layer)
    own = content.get("_parameters", {}) | content.get("_buffers", {})
    modules = content.get("_modules", {})
    extent.entries -= 1 + len(own) + len(modules)
    extent.check(depth + len(prefix) // 100)
    if isinstance(content.get("head_config"), Layer):
        _check_heads(extent.add(vars(content["head_config"])))
    temporary = content.get("_non_persistent_buffers_set")
    temporary = temporary if isinstance(temporary, set) else ()  # looked through for each name
    for name, value in own.items():
        if value is not None and name not in temporary:
            state[prefix + name] = _tensor(value, prefix + name, extent)
    for name, inner in modules.items():
        if inner is not None:
            _collect(inner, f"{prefix}{name}.", state, extent, depth + 1)
    return state


def _check_heads(config):
    """Raise ValueError unless the attributes of a stored HeadConfig have the form that a description is made of."""
    classes = config.get("head_classes")
    classes = list(classes.values()) if isinstance(classes, dict) else classes  # as other programs write it
    is_listed = isinstance(classes, list) and all(isinstance(ids, list) for ids in classes)
    if not is_listed or config.get("num_heads") != len(classes):
        raise ValueError("its head configuration is damaged")


def _tensor(value, name, extent):
    if not isinstance(value, torch.Tensor) or value.is_complex():
        raise ValueError(f"{shown(name)} is no tensor that a model could hold")
    extent.bytes -= len(name)
    return extent.add(value)


def intersect_dicts(da: dict, db: dict, exclude: Sequence[str] = ()) -> dict:
    """The entries of the state dict `da` that `db` has under the same name and shape.

    Entries whose name contains a word of `exclude` are left out.
    """
    common = {key: value for key, value in da.items() if key in db and value.shape == db[key].shape}
    return {key: value for key, value in common.items() if not any(word in key for word in exclude)}


def transfer(model: nn.Module, state: dict, exclude: Sequence[str] = ()) -> int:
    """Load the `intersect_dicts` of `state` and the model, in full precision; returns how many there are."""
    taken = intersect_dicts(state, model.state_dict(), exclude)
    taken = {key: value.float() if value.is_floating_point() else value for key, value in taken.items()}
    model.load_state_dict(taken, strict=False)
    return len(taken)


def take_body(model, state, path):
    """Load backbone, neck and anchors from `state`, of the file `path`; the detection layer keeps its fresh weights.

    Logs what was taken and what was not. Raises ValueError when nothing fits.
    """
    own, head = model.state_dict(), f"model.{len(model.model) - 1}."
    body = {key: value for key, value in state.items() if not key.startswith(head) or "anchor" in key}
    taken = {key for key, value in body.items() if key in own and own[key].shape == value.shape}
    if not any(not key.startswith(head) for key in taken):
        raise ValueError(f"{path} has no layer in common with this model; give a checkpoint of the same network")
    transfer(model, {key: body[key] for key in taken})
    logger.info("Transferred %d/%d items from %s: backbone, neck, anchors", len(taken), len(own), path)
    other_shape = [key for key in body if key in own and key not in taken]
    lists = {
        "fresh": [key for key in own if key not in taken],
        "in the file with another shape": other_shape,
        "in the file only": [key for key in state if key not in taken and key not in other_shape],
    }
    for title, keys in lists.items():
        logger.info("  %s: %d%s", title, len(keys), f" ({_in_groups(keys)})" if keys else "")


def _in_groups(keys):
    """Names of tensors by layer and part, with how many each has: model.77.heads (24)."""
    count = Counter(".".join(key.split(".")[:3]) for key in keys)
    return ", ".join(f"{name} ({number})" if number > 1 else name for name, number in count.items())


def check_finite(stored, path):
    """Raise ValueError when the weights of a StoredModel would make every prediction NaN.

    Infinite running statistics pass: half precision makes them of large ones, and they do no such harm.
    """
    for name, value in stored.state.items():
        if not value.isfinite().all() and (value.isnan().any() or "running_" not in name):
            raise ValueError(
                f"{path} holds NaN or infinite numbers in {name}: the training that wrote it went wrong; take an "
                "earlier checkpoint, and a smaller lr0 from there on"
            )


def same_layout(model, state):
    """Whether `state` has exactly the model's entries, in name and shape."""
    return {key: value.shape for key, value in model.state_dict().items()} == {k: v.shape for k, v in state.items()}


def full_state_path(last):
    """Where the full state of a finished run lies: beside the stripped last.pt."""
    return Path(last).with_name("last_full.pt")
