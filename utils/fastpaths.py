"""The only reader of the opt-in speed flags: which implementation fills each seam of a training step."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from utils import feed

logger = logging.getLogger(__name__)

# Flags that the command line knows already, whose faster path is not there yet.
ANNOUNCED = ("fast_dataloader", "persistent_workers", "worker_tensor")


@dataclass(frozen=True)
class Paths:
    """One callable for each seam."""

    feed: Callable  # (loader, device) -> batches


REFERENCE = Paths(feed=feed.plain)


def choose(opt, device):
    """The paths of this run. Without flags they are REFERENCE; a flag that cannot be served here is a warning."""
    asked = [f"--{name.replace('_', '-')}" for name in ANNOUNCED if getattr(opt, name)]
    if asked:
        logger.warning("%s: not available yet, the reference loader on %s is used", " ".join(asked), device)
    return REFERENCE
