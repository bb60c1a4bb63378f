"""The one reader of .pt files, and what a model takes over from them.

Reading never runs code from a file: torch's restricted unpickler maps the known class names to empty stand-ins, takes
the tensors and plain values from those, and refuses every other name. The caller rebuilds the model from its yaml.
"""

import logging
import pickle
import tarfile
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from utils.head_config import description_in_model

logger = logging.getLogger(__name__)

LAYER_CLASSES = {
    "models.yolo": ("Model", "Detect", "IDetect", "IAuxDetect"),
    "models.common": ("Conv", "Concat", "Chuncat", "Shortcut", "MP", "SP", "ReOrg", "DownC", "SPPCSPC", "RepConv",
                      "ImplicitA", "ImplicitM"),
    "models.multihead": ("MultiHeadDetect",),
    "models.multihead_attention": ("MultiHeadDetectAttention",),
    "models.attention": ("CBAM", "ChannelAttention", "SpatialAttention"),
    "utils.head_config": ("HeadConfig",),
    "torch.nn.modules.conv": ("Conv2d",),
    "torch.nn.modules.batchnorm": ("BatchNorm2d", "SyncBatchNorm"),
    "torch.nn.modules.pooling": ("MaxPool2d", "AdaptiveAvgPool2d", "AdaptiveMaxPool2d"),
    "torch.nn.modules.upsampling": ("Upsample",),
    "torch.nn.modules.container": ("Sequential", "ModuleList"),
    "torch.nn.modules.linear": ("Identity",),
    "torch.nn.modules.activation": ("SiLU", "LeakyReLU", "ReLU", "ReLU6", "Hardswish", "Mish", "GELU", "Sigmoid"),
}  # fmt: skip
# What a training run attaches to a model beside its parameters.
ATTACHED = ("names", "nc", "hyp", "gr", "class_weights")
PLAIN_KEYS = {
    "epoch": int, "best_fitness": float, "training_results": str, "optimizer": dict, "updates": int, "scaler": dict,
}  # fmt: skip


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


class _Layer:
    """Stand-in for every layer: what the file says about it stays data in its `__dict__`."""


class _Dtype:
    """Stand-in for numpy.dtype, which can be forged in a file so that its numbers are taken for addresses."""

    def __init__(self, code, *_):
        if code not in ("f2", "f4", "f8", "i4", "i8"):
            raise pickle.UnpicklingError(f"a NumPy array of {code!r}")
        self.code = code

    def __setstate__(self, state):
        if state[1] != "<":
            raise pickle.UnpicklingError(f"a NumPy array in the byte order {state[1]!r}")

    def numbers(self, raw):
        return np.frombuffer(raw, self.code).tolist()


class _Array:
    """Stand-in for numpy.ndarray: a flat list of numbers."""

    def __setstate__(self, state):
        _, _, dtype, _, raw = state
        self.numbers = dtype.numbers(raw)


def _scalar(dtype, raw):
    return dtype.numbers(raw)[0]


def _stand_ins():
    """Classes and functions under the names that checkpoints mention; none of them is the real one."""

    def named(module, name, base=_Layer):
        return type(name, (base,), {"__module__": module})

    def called(module, name, function):
        def stand_in(*args):
            return function(*args)

        stand_in.__module__, stand_in.__name__, stand_in.__qualname__ = module, name, name
        return stand_in

    for module, names in LAYER_CLASSES.items():
        yield from (named(module, name) for name in names)
    for module in ("pathlib", "pathlib._local"):  # the path of a head configuration; Python 3.13 has the second name
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            yield called(module, name, lambda *parts: "/".join(map(str, parts)))
    yield called("builtins", "set", set)  # torch 2.4 refuses this one, and the next, unlike later ones
    yield called("_codecs", "encode", lambda text, _: text.encode("latin1"))  # how pickle writes bytes
    yield named("numpy", "dtype", _Dtype)
    yield named("numpy", "ndarray", _Array)
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # NumPy 1 and 2
        yield called(module, "_reconstruct", lambda kind, *_: kind())
        yield called(module, "scalar", _scalar)


@contextmanager
def _allowed_names():
    """The allow-list of the restricted unpickler for one read; what was allowed before is restored."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(list(_stand_ins()))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a .pt file (a training checkpoint, a pickled model, or a state dict) on the CPU without running its code.

    Raises ValueError, naming the file, when it is missing, damaged, or contains names outside the allow-list.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such checkpoint; give the path of an existing .pt file")
    try:
        if tarfile.is_tarfile(path):  # torch before 2.6 unpacks those without restriction
            raise pickle.UnpicklingError("a tar archive")
        with _allowed_names():
            content = torch.load(path, map_location="cpu", weights_only=True)
        return _sort_content(content, path)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} was refused, nothing of it was run: it is no .pt file, or holds more than tensors, plain values "
            f"and YOLOv7 layers ({_reason(error)})"
        ) from error
    except Exception as error:  # a damaged file can fail in any way
        raise ValueError(f"{path} is no checkpoint that can be used, or it is cut off: {_reason(error)}") from error


def _reason(error):
    """The sentence of torch's message that says what is wrong, without its advice to switch the protection off."""
    text = " ".join(str(error).split("WeightsUnpickler error:")[-1].split())
    return text.split(" Check the documentation")[0].split(" Please use ")[0][:300] or type(error).__name__


def _sort_content(content, path):
    if isinstance(content, _Layer):
        return Checkpoint(path, model=_stored(content))
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, neither a checkpoint nor a state dict")
    if content and all(isinstance(value, torch.Tensor) for value in content.values()):
        return Checkpoint(path, model=_stored(content))
    model = content.get("model") if content.get("model") is not None else content.get("state_dict")
    if model is None and content.get("ema") is None:
        raise ValueError(f"it holds no model (its keys: {', '.join(map(str, content))})")
    values = {key: _value(content, key, kind) for key, kind in PLAIN_KEYS.items()}
    extra = {key: value for key, value in content.items() if key not in (*PLAIN_KEYS, "model", "ema")}
    return Checkpoint(path, model=_stored(model), ema=_stored(content.get("ema")), extra=extra, **values)


def _value(content, key, kind):
    """content[key] as a `kind`; None if the file lacks it."""
    value = content.get(key)
    if isinstance(value, _Array):  # best_fitness of stock YOLOv7
        value = value.numbers[0]
    if value is not None and not isinstance(value, (kind, int) if kind is float else kind):
        raise ValueError(f"'{key}' is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _stored(model):
    """A StoredModel of a stand-in, or of a dict of tensors; None stays None."""
    if model is None:
        return None
    if isinstance(model, dict):
        return StoredModel({name: _tensor(value, name) for name, value in model.items()})
    if not isinstance(model, _Layer):
        raise ValueError(f"'model' is a {type(model).__name__}, not a model")
    attributes = vars(model)
    if not isinstance(attributes.get("yaml"), dict | None):
        raise ValueError("the yaml of its model is no mapping")
    attached = {name: attributes[name] for name in ATTACHED if name in attributes}
    cfg, heads = attributes.get("yaml"), description_in_model(attributes)
    if cfg is not None and heads is not None:
        cfg = cfg | {"head_config": heads}
    return StoredModel(_collect(model, "", {}), cfg, attached)


def _collect(layer, prefix, state):
    """Add a stand-in's parameters, its buffers, then those of its inner layers to `state`, named as in a state dict."""
    content = vars(layer)
    own = content.get("_parameters", {}) | content.get("_buffers", {})
    temporary = content.get("_non_persistent_buffers_set", ())
    for name, value in own.items():
        if value is not None and name not in temporary:
            state[prefix + name] = _tensor(value, prefix + name)
    for name, inner in content.get("_modules", {}).items():
        if inner is not None:
            _collect(inner, f"{prefix}{name}.", state)
    return state


def _tensor(value, name):
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
        raise ValueError(f"'{name}' is no tensor that a model could hold")
    return value.detach()


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
    taken = intersect_dicts(body, own)
    if not any(not key.startswith(head) for key in taken):
        raise ValueError(f"{path} has no layer in common with this model; give a checkpoint of the same network")
    transfer(model, taken)
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
