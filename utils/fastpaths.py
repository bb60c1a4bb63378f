"""The only reader of the opt-in speed flags: which implementation fills each seam of a training step."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from utils import feed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Paths:
    """One callable for each seam."""

    feed: Callable  # (loader, device) -> batches


REFERENCE = Paths(feed=feed.plain)


def choose(opt, device):
    """The paths of this run, without flags REFERENCE."""
    return REFERENCE


def loader_options(opt, first_epoch=0):
    """Keyword arguments of create_dataloader for the loader flags; none without a flag, which means the reference."""
    asked = {
        "persistent_workers": opt.persistent_workers or opt.fast_dataloader,
        "worker_tensor": opt.worker_tensor or opt.fast_dataloader,
        "micro_batch_size": opt.micro_batch_size,
        "prefetch_factor": opt.prefetch_factor,
    }
    if not any(asked.values()) and opt.seed is None:
        return {}
    logger.info("loader: %s", loader_in_words(asked, opt))
    return asked | {"timeout": opt.loader_timeout, "seed": opt.seed, "first_epoch": first_epoch}


def loader_in_words(asked, opt):
    """What the loader flags chose, for the log."""
    if asked["worker_tensor"]:
        kind = "micro-batches assembled by the workers in shared memory (--worker-tensor)"
    elif asked["persistent_workers"]:
        kind = "torch's, with workers that stay (--persistent-workers)"
    else:
        kind = "torch's"
    return kind if opt.seed is None else f"{kind}; draws by seed, epoch and image (--seed {opt.seed})"
