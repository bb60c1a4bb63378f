"""The only reader of the opt-in speed flags: which implementation fills each seam of a training step."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from utils import compiled, feed, loss, loss_batched
from utils.checkpoint import Checkpoints
from utils.checkpoint_thread import BackgroundCheckpoints
from utils.fast_val import FastValidation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Paths:
    """One callable for each seam."""

    feed: Callable  # (loader, device) -> batches
    losses: Callable  # (model, epochs) -> function of the epoch that gives its training loss, validation loss


REFERENCE = Paths(feed=feed.plain, losses=loss.losses_by_epoch)


def choose(opt, device):
    """The paths of this run, without flags REFERENCE; what flags chose is logged."""
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


def is_diagnosis():
    """Whether DIAGNOSE_COMPILE=1 asks for a report instead of a training run."""
    return compiled.is_on("DIAGNOSE_COMPILE")


def compile_model(called, opt, on_compiled):
    """With USE_COMPILE=1, compile `called`, the model as training calls it; see compiled.py."""
    chosen = compiled.settings()
    if chosen is None:
        return
    changing = [flag for flag in ("--multi-scale", "--rect") if getattr(opt, flag[2:].replace("-", "_"))]
    if changing:
        logger.warning("USE_COMPILE=1 has no effect with %s: image sizes change, so the model runs eagerly", *changing)
        return
    logger.info("%-8s| %-40s| %s", "model", f"compiled ({', '.join(chosen)})", "USE_COMPILE=1")
    compiled.compile_model(called, chosen, on_compiled)


def checkpoints(opt):
    """The class that writes the checkpoints: under --fast-step and --fast a thread does."""
    in_thread = getattr(opt, "fast_step", False) or getattr(opt, "fast", False)
    return BackgroundCheckpoints if in_thread else Checkpoints


def validation(opt):
    """What scores the epochs before the last instead of test.evaluate: with --fast-val a FastValidation, else None."""
    if not (opt.fast_val or getattr(opt, "fast", False)):
        return None
    why = "--fast-val" if opt.fast_val else "--fast"
    logger.info("%-8s| %-40s| %s", "validate", "on the device, in batches (fast_val.py)", why)
    return FastValidation()
