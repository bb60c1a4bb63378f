"""Checkpoints: the one reader of .pt files, and everything that writes them.

Files have stock YOLOv7's layout, a pickled `models.yolo.Model` inside a dict, so that stock tools load them. Reading
never runs code from a file: torch's restricted unpickler maps the known class names to empty stand-ins, takes the
tensors and plain values from those, and refuses every other name. The caller rebuilds the model from its yaml.
"""

import logging
import pickle
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from utils.dist import unwrap
from utils.files import atomic_write

logger = logging.getLogger(__name__)

MODEL_CLASSES = {
    "models.yolo": ("Model", "Detect", "IDetect", "IAuxDetect"),
    "models.common": ("Conv", "Concat", "Chuncat", "Shortcut", "MP", "SP", "ReOrg", "DownC", "SPPCSPC", "RepConv",
                      "ImplicitA", "ImplicitM"),
}  # fmt: skip
TORCH_CLASSES = (
    nn.Conv2d, nn.BatchNorm2d, nn.SyncBatchNorm, nn.MaxPool2d, nn.Upsample, nn.Sequential, nn.ModuleList, nn.Identity,
    nn.SiLU, nn.LeakyReLU, nn.ReLU, nn.ReLU6, nn.Hardswish, nn.Mish, nn.GELU, nn.Sigmoid,
)  # fmt: skip
# What a training run attaches to a model beside its parameters.
ATTACHED = ("names", "nc", "hyp", "gr", "class_weights")


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

    def for_inference(self):
        """The model to use for detection: the EMA where there is one."""
        return self.ema or self.model


def _stand_ins():
    """Empty classes under the names that checkpoints mention; nn.Module's own __setstate__ fills them."""
    for module, names in MODEL_CLASSES.items():
        for name in names:
            yield type(name, (nn.Module,), {"__module__": module})


def _numpy_names():
    """What a pickled NumPy number needs, under the module names of NumPy 1 and 2."""
    core = np.core.multiarray if np.__version__.startswith("1.") else np._core.multiarray

    def alias(function, module):
        def call(*args):
            return function(*args)

        call.__module__, call.__name__, call.__qualname__ = module, function.__name__, function.__name__
        return call

    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        yield alias(core._reconstruct, module)
        yield alias(core.scalar, module)
    yield from (np.ndarray, np.dtype, type(np.dtype("float64")), type(np.dtype("float32")))


@contextmanager
def _allowed_names():
    """The allow-list of the restricted unpickler for one read; what was allowed before is restored."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*_stand_ins(), *TORCH_CLASSES, *_numpy_names()])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def read_checkpoint(path):
    """Read a .pt file (a training checkpoint, a pickled model, or a state dict) on the CPU without running its code.

    Raises ValueError, naming the file, when it is missing, damaged, or contains names outside the allow-list.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such checkpoint; give the path of an existing .pt file")
    try:
        with _allowed_names():
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split("WeightsUnpickler error:")[-1].split())[:300]
        raise ValueError(
            f"{path} was refused, nothing of it was run: it holds more than tensors, plain values and YOLOv7 "
            f"layers ({reason})"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} cannot be read as a checkpoint, it may be cut off or no .pt file: {error}") from error
    return _sort_content(content, path)


def _sort_content(content, path):
    if isinstance(content, nn.Module):
        return Checkpoint(path, model=_stored(content, path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, neither a checkpoint nor a state dict")
    if content and all(isinstance(value, torch.Tensor) for value in content.values()):
        return Checkpoint(path, model=StoredModel(dict(content)))
    model = content.get("model") if content.get("model") is not None else content.get("state_dict")
    if model is None and content.get("ema") is None:
        raise ValueError(f"{path} holds no model (its keys: {', '.join(map(str, content))})")
    plain = ("epoch", "training_results", "optimizer", "updates", "scaler")
    best_fitness = content.get("best_fitness")
    return Checkpoint(
        path,
        model=_stored(model, path),
        ema=_stored(content.get("ema"), path),
        best_fitness=None if best_fitness is None else float(np.asarray(best_fitness).reshape(-1)[0]),
        extra={key: value for key, value in content.items() if key not in (*plain, "model", "ema", "best_fitness")},
        **{key: content.get(key) for key in plain},
    )


def _stored(model, path):
    """A StoredModel of a stand-in module, or of a dict of tensors; None stays None."""
    if model is None:
        return None
    if isinstance(model, dict):
        if not all(isinstance(value, torch.Tensor) for value in model.values()):
            raise ValueError(f"{path}: the state dict holds something else than tensors")
        return StoredModel(dict(model))
    if not isinstance(model, nn.Module):
        raise ValueError(f"{path}: 'model' is a {type(model).__name__}, not a model")
    attached = {name: vars(model)[name] for name in ATTACHED if name in vars(model)}
    return StoredModel(model.state_dict(), getattr(model, "yaml", None), attached)


def transfer(model, state, exclude=()):
    """Load the entries of `state` that the model has under the same name and shape; returns how many.

    Entries whose name contains a word of `exclude` are left out.
    """
    own = model.state_dict()
    taken = {
        key: value.float() if value.is_floating_point() else value
        for key, value in state.items()
        if key in own and own[key].shape == value.shape and not any(word in key for word in exclude)
    }
    model.load_state_dict(taken, strict=False)
    return len(taken)


def same_layout(model, state):
    """Whether `state` has exactly the model's entries, in name and shape."""
    return {key: value.shape for key, value in model.state_dict().items()} == {k: v.shape for k, v in state.items()}


def save(content, path):
    """torch.save to a temporary file that then takes the place of `path`: a crash leaves the old file whole."""
    with atomic_write(path) as file:
        torch.save(content, file)


def training_checkpoint(epoch, best_fitness, training_results, model, ema, optimizer, scaler):
    """The dict of a checkpoint in stock's layout (models in half precision), plus the loss scaler's state."""
    return {
        "epoch": epoch,
        "best_fitness": best_fitness,
        "training_results": training_results,
        "model": deepcopy(unwrap(model)).half(),
        "ema": deepcopy(ema.ema).half(),
        "updates": ema.updates,
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "wandb_id": None,
    }


class Checkpoints:
    """Decides after each epoch which files of weights/ are written."""

    def __init__(self, folder, epochs, save_every_epoch=True):
        self.folder, self.epochs, self.save_every_epoch = Path(folder), epochs, save_every_epoch
        self.last, self.best = self.folder / "last.pt", self.folder / "best.pt"
        self.folder.mkdir(parents=True, exist_ok=True)

    def initial(self, model):
        """init.pt, the bare model before the first step."""
        save(unwrap(model), self.folder / "init.pt")

    def after_epoch(self, make_content, epoch, is_best):
        """Write last.pt, and beside it the files that this epoch deserves; `is_best` only for a validated epoch.

        `make_content()` returns the checkpoint; it is not called when nothing is written.
        """
        if not self.save_every_epoch and epoch + 1 < self.epochs:
            return
        paths = [self.last]
        if is_best:
            paths.append(self.best)
            if epoch >= 200:
                paths.append(self.folder / f"best_{epoch:03d}.pt")
        if epoch == 0 or (epoch + 1) % 25 == 0 or epoch >= self.epochs - 5:
            paths.append(self.folder / f"epoch_{epoch:03d}.pt")
        content = make_content()
        for path in paths:
            save(content, path)

    def written(self):
        """last.pt and best.pt, those that exist."""
        return [path for path in (self.last, self.best) if path.exists()]

    def strip(self, rebuild):
        """Reduce last.pt and best.pt to the model for inference; the full last state moves to last_full.pt.

        `rebuild` makes a Model of a StoredModel.
        """
        stored = {path: read_checkpoint(path) for path in self.written()}
        if self.last in stored:
            self.last.replace(full_state_path(self.last))
        for path, checkpoint in stored.items():
            save(_inference_content(rebuild(checkpoint.for_inference()), checkpoint), path)
            logger.info("Optimizer stripped from %s, %.1fMB", path, path.stat().st_size / 1e6)


class NoCheckpoints:
    """The checkpoints of a process, or of a search, that saves nothing."""

    def initial(self, model):
        pass

    def after_epoch(self, make_content, epoch, is_best):
        pass

    def written(self):
        return []

    def strip(self, rebuild):
        pass


def full_state_path(last):
    """Where the full state of a finished run lies: beside the stripped last.pt."""
    return Path(last).with_name("last_full.pt")


def _inference_content(model, checkpoint):
    """A stripped checkpoint in stock's layout: every key stays, what only training needs becomes None."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    emptied = ("optimizer", "training_results", "wandb_id", "ema", "updates", "scaler")
    return {"epoch": -1, "best_fitness": checkpoint.best_fitness, "model": model.half()} | dict.fromkeys(emptied)
