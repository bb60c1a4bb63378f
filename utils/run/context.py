"""What one run is given; it travels in place of its parts."""

from argparse import Namespace
from dataclasses import dataclass, replace

import torch

from utils.config.data_yaml import DataConfig
from utils.engine import optimizer, overfit
from utils.system.distributed import Ranks


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
