"""What one run is given; it travels in place of its parts."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from utils.config.data_yaml import DataConfig
from utils.config.flags import TRAIN_FLAGS
from utils.engine import optimizer, overfit
from utils.system import distributed
from utils.system.distributed import Ranks

# Flags that may differ from machine to machine: where files lie, and how it works.
OF_A_MACHINE = {"data", "cfg", "hyp", "weights", "head_config", "resume", "project", "name", "exist_ok", "device",
                "verbose", "local_rank", "workers", "prefetch_factor", "micro_batch_size",
                "loader_timeout"}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One run of train.py.

    The options are completed in place until training begins: batch_size by run/auto_batch.py, save_dir by
    run/folder.py. Classes are given the values that they need, not a Run.
    """

    options: Namespace
    hyp: dict  # hyper-parameters as their file gives them, or as the search has changed them
    data: DataConfig
    device: torch.device
    ranks: Ranks

    def adapted(self) -> "Run":
        """This run with the hyper-parameters that it trains with: changed for --overfit and for --auto-lr."""
        hyp = overfit.short_warmup(self.hyp) if self.options.overfit else self.hyp
        if self.options.auto_lr:
            hyp = optimizer.for_large_batch(hyp, self.options.total_batch_size)
        return replace(self, hyp=hyp)

    def check_alike(self, model: nn.Module | None = None, labels: Sequence = ()) -> None:
        """Raise ValueError when another process, perhaps on another machine, was given something else.

        All call it: before anything is made of what they were given, and with the model and the labels of all images.
        """
        shapes = [(name, tuple(value.shape)) for name, value in model.state_dict().items()] if model else ()
        distributed.check_alike({
            "flags": {name: getattr(self.options, name) for name in TRAIN_FLAGS.keys() - OF_A_MACHINE},
            "hyper-parameters": self.hyp,
            "classes": self.data.names,
            "model": shapes,
            "labels": sum(map(len, labels)),
        })  # fmt: skip
