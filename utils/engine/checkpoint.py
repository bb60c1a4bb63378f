"""What a run writes into weights/: training checkpoints, and the models for inference that it leaves.

Files have stock YOLOv7's layout, a pickled `models.yolo.Model` inside a dict, so that stock tools load them. They are
read by checkpoint_reader.py.
"""

import filecmp
import logging
import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from utils.engine.checkpoint_reader import Checkpoint, StoredModel, full_state_path, read_checkpoint
from utils.system.distributed import unwrap
from utils.system.files import atomic_write, replacement

logger = logging.getLogger(__name__)


def save(content: Any, path: str | Path) -> None:
    """torch.save to a temporary file that then takes the place of `path`: a crash leaves the old file whole."""
    with atomic_write(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # A full disk or Ctrl-C, of which torch says only "unexpected pos"
            if isinstance(error.__context__, (OSError, KeyboardInterrupt)):
                raise error.__context__ from None
            raise


class NewCopies:
    """Copies of a model for a checkpoint, made anew for each: nothing that the training changes later is in it."""

    def half_model(self, model):
        """The model in stock's form."""
        return in_stock_order(model).half()

    def state(self, model):
        """Its state dict, in full precision."""
        return {name: value.detach().clone() for name, value in unwrap(model).state_dict().items()}

    def values(self, state):
        """The state dict of an optimiser."""
        return state


NEW_COPIES = NewCopies()


def training_checkpoint(epoch, best_fitness, training_results, model, ema, optimizer, scaler, copies=NEW_COPIES):
    """The dict of a checkpoint in stock's layout (models in half precision), plus the loss scaler's state."""
    return {
        "epoch": epoch,
        "best_fitness": best_fitness,
        "training_results": training_results,
        "model": copies.half_model(model),
        "ema": copies.half_model(ema.ema),
        "updates": ema.updates,
        "optimizer": copies.values(optimizer.state_dict()),
        "scaler": scaler.state_dict(),
        "wandb_id": None,
    }


def in_stock_order(model):
    """A copy with contiguous weights, whatever order they are trained in: tools that fuse layers rely on it."""
    return deepcopy(unwrap(model)).to(memory_format=torch.contiguous_format)


class Checkpoints:
    """Decides after each epoch which files of weights/ are written.

    With a `period` every so many epochs are kept for good, beside those that stock keeps. `copies` makes the copies of
    models for the content that is written.
    """

    copies = NEW_COPIES

    def __init__(self, folder, epochs, save_every_epoch=True, period=0):
        self.folder, self.epochs, self.save_every_epoch, self.period = Path(folder), epochs, save_every_epoch, period
        self.last, self.best = self.folder / "last.pt", self.folder / "best.pt"
        self.folder.mkdir(parents=True, exist_ok=True)

    def initial(self, model: nn.Module) -> None:
        """init.pt, the bare model before the first step."""
        save(in_stock_order(model), self.folder / "init.pt")

    def after_epoch(self, make_content: Callable[[], dict], epoch: int, is_best: bool) -> None:
        """Write last.pt, and before it the files that this epoch deserves; `is_best` only for a validated epoch.

        `make_content()` returns the checkpoint; it copies both models, and is not called when nothing is written. A run
        that is killed before last.pt resumes from the epoch before, and writes the other files again.
        """
        if not self.save_every_epoch and epoch + 1 < self.epochs:
            return
        paths = []
        if is_best:
            paths.append(self.best)
            if epoch >= 200:  # stock behaviour: late bests are kept, and below some epochs by number
                paths.append(self.folder / f"best_{epoch:03d}.pt")
        in_period = self.period > 0 and (epoch + 1) % self.period == 0
        if epoch == 0 or (epoch + 1) % 25 == 0 or epoch >= self.epochs - 5 or in_period:
            paths.append(self.folder / f"epoch_{epoch:03d}.pt")
        # last.pt stands at the end of the list: --resume trusts it, so everything else of this epoch is there before it
        self.write(make_content(), [*paths, self.last])

    def write(self, content, paths):
        """Write `content` to each of `paths`, in this order."""
        first, *others = paths
        save(content, first)
        for path in others:  # copied, because packing the content again would take several times as long
            with replacement(path) as unfinished:  # a temporary file: a kill leaves the old one whole
                shutil.copyfile(first, unfinished)

    def wait(self):
        """Return when the files of the epochs before are written; here they always are."""

    def written(self) -> list[Path]:
        """last.pt and best.pt, those that exist."""
        return [path for path in (self.last, self.best) if path.exists()]

    def strip(self, rebuild: Callable[[StoredModel], nn.Module]) -> None:
        """Reduce last.pt and best.pt to the model for inference; the full last state moves to last_full.pt.

        `rebuild` makes a Model of a StoredModel.
        """
        paths = self.written()
        are_same = len(paths) == 2 and self.are_same()
        for path in reversed(paths):  # last.pt at the end: until it is stripped, --resume knows what is left
            is_copy = are_same and path == self.last
            if not is_copy:
                checkpoint = self.read(path)
                content = _inference_content(self.inference_model(checkpoint, rebuild), checkpoint)
            if path == self.last and checkpoint.optimizer is not None:  # not when a kill came between the two files
                _end_link(full_state_path(path), path)
                with replacement(full_state_path(path)) as full:
                    _link(path, full)
            if is_copy:
                with replacement(path) as unfinished:
                    shutil.copyfile(self.best, unfinished)
            else:
                save(content, path)
            logger.debug("Optimizer stripped from %s, %.1fMB", path, path.stat().st_size / 1e6)

    def inference_model(self, checkpoint: Checkpoint, rebuild: Callable[[StoredModel], nn.Module]) -> nn.Module:
        """The model of a checkpoint for inference."""
        return rebuild(checkpoint.for_inference())

    def are_same(self) -> bool:
        """Whether last.pt and best.pt hold the same: the last epoch was the best one."""
        return filecmp.cmp(self.last, self.best, shallow=False)

    def read(self, path: Path) -> Checkpoint:
        """What one of the files holds."""
        return read_checkpoint(path)


class NoCheckpoints:
    """The checkpoints of a process, or of a search, that saves nothing."""

    copies = NEW_COPIES

    def _nothing(self, *_):
        """Writes no file."""

    initial = after_epoch = wait = strip = _nothing

    def written(self):
        return []


def _end_link(other, path):
    """Remove the symbolic link `other` if it leads to the file `path`, through which that would be written."""
    if other.is_symlink() and os.path.realpath(other) == os.path.realpath(path):
        other.unlink()


def _link(path, other):
    """Let the file `path` have the name `other` as well, until another one takes its own; a copy where that fails."""
    other.unlink()
    try:
        os.link(os.path.realpath(path), other)  # of a symbolic link the file, which is about to change
    except OSError:  # a file system without such links
        shutil.copyfile(path, other)


def _inference_content(model, checkpoint):
    """A stripped checkpoint in stock's layout: every key stays, what only training needs becomes None."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    emptied = ("optimizer", "training_results", "wandb_id", "ema", "updates", "scaler")
    return {"epoch": -1, "best_fitness": checkpoint.best_fitness, "model": model.half()} | dict.fromkeys(emptied)
