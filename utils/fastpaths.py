"""The only reader of the opt-in speed flags: which implementation fills each seam of a training step."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from utils import feed, loss, loss_batched

logger = logging.getLogger(__name__)

# Flags that the command line knows already, whose faster path is not there yet.
ANNOUNCED = ("fast_dataloader", "persistent_workers", "worker_tensor")


@dataclass(frozen=True)
class Paths:
    """One callable for each seam."""

    feed: Callable  # (loader, device) -> batches
    losses: Callable  # (model, epochs) -> function of the epoch that gives its training loss, validation loss


REFERENCE = Paths(feed=feed.plain, losses=loss.losses_by_epoch)


def choose(opt, device):
    """The paths of this run. Without flags they are REFERENCE; a flag that cannot be served here is a warning."""
    asked = [f"--{name.replace('_', '-')}" for name in ANNOUNCED if getattr(opt, name)]
    if asked:
        logger.warning("%s: not available yet, the reference loader on %s is used", " ".join(asked), device)
    paths, reasons = choose_losses(REFERENCE, opt, device)
    for row in [("seam", "chosen", "why"), *reasons] if reasons else ():
        logger.info("%-8s| %-40s| %s", *row)
    return paths


def choose_losses(paths, opt, device):
    """`paths` with the losses of --fast-loss and --ota-last, and rows (seam, chosen, why) for the log."""
    options, reasons = {}, []
    if opt.fast_loss:
        options["classes"] = loss_batched.CLASSES
        reasons.append(("losses", "whole batch at once (loss_batched.py)", "--fast-loss"))
        if device.type != "cpu":
            paths = replace(paths, feed=partial(paths.feed, targets_device=torch.device("cpu")))
            reasons.append(("feed", "targets stay on the host", "--fast-loss prepares its candidates there"))
    if opt.ota_last is not None:
        options["ota_last"] = opt.ota_last
        reasons.append(("losses", f"plain, OTA in the last {opt.ota_last} epochs", f"--ota-last {opt.ota_last}"))
    return (replace(paths, losses=partial(paths.losses, **options)) if options else paths), reasons
