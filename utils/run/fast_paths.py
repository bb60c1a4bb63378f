"""The only reader of the opt-in speed flags: which implementation fills each seam of a training step."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from utils.data.fast.device_augment import has_triton
from utils.engine import batches as feed
from utils.engine.checkpoint import Checkpoints
from utils.fast import compile as compiled
from utils.fast.async_checkpoint import BackgroundCheckpoints
from utils.fast.graph_step import GraphSteps
from utils.fast.prefetcher import Prefetch
from utils.fast.train_step import FastSteps
from utils.fast.validation import FastValidation
from utils.loss import batched, criterion

logger = logging.getLogger(__name__)


def own_steps(training):
    """The reference: a Training makes its steps itself."""
    return training


@dataclass(frozen=True)
class Paths:
    """One callable for each seam."""

    feed: Callable  # (loader, device) -> batches
    losses: Callable  # (model, epochs) -> function of the epoch that gives its training loss, validation loss
    steps: Callable  # (training) -> what makes its steps, see FastSteps


REFERENCE = Paths(feed=feed.plain, losses=criterion.losses_by_epoch, steps=own_steps)


def choose(opt, device, make_twin=None):
    """The paths of this run, without flags REFERENCE; what flags chose is logged.

    `make_twin` makes the form of a model that trains fastest on a GPU, if there is one.
    """
    reasons = flags_that_are_on(opt, device)
    paths, rows = choose_losses(REFERENCE, reasons.get("fast_loss"), opt.ota_last, device)
    paths, more = choose_steps(paths, reasons, opt, device, make_twin)
    rows += more
    if opt.fast:
        rows = rows_about_the_machine(opt, device) + rows
    for row in [("seam", "chosen", "why"), *rows] if rows else ():
        logger.info("%-8s| %-48s| %s", *row)
    return paths


def flags_that_are_on(opt, device):
    """Why each of fast_loss, fast_step and cuda_graph is on; those that are off are missing.

    --fast means all that this machine can run, --cuda-graph needs the other two.
    """
    reasons = {}
    for name in ("cuda_graph", "fast_step", "fast_loss"):
        flag = f"--{name.replace('_', '-')}"
        if getattr(opt, name):
            reasons[name] = flag
        elif opt.fast:
            reasons[name] = "--fast"
        elif "cuda_graph" in reasons:
            reasons[name] = f"--cuda-graph needs {flag}"
    obstacle = why_no_graph(opt, device)
    if "cuda_graph" in reasons and obstacle:
        if opt.cuda_graph:
            logger.warning("--cuda-graph: %s; the steps of this run are not captured", obstacle)
        del reasons["cuda_graph"]
    return reasons


def why_no_graph(opt, device):
    """What keeps this run from being captured in a CUDA graph; None if nothing does."""
    obstacles = {
        "there is no CUDA device": device.type != "cuda",
        "gradients travel between several processes": getattr(opt, "world_size", 1) > 1,
        "several GPUs in one process": "," in str(opt.device),
        "--multi-scale changes the shape of every batch": opt.multi_scale,
        "--adam has no step for it, SGD has": opt.adam,
    }
    return next((reason for reason, is_true in obstacles.items() if is_true), None)


def choose_losses(paths, reason, ota_last, device):
    """`paths` with the losses of --fast-loss and --ota-last, and rows (seam, chosen, why) for the log."""
    options, rows = {}, []
    if reason:
        options["classes"] = batched.CLASSES
        rows.append(("losses", "whole batch at once (loss_batched.py)", reason))
        if device.type != "cpu":
            paths = replace(paths, feed=partial(paths.feed, targets_device=torch.device("cpu")))
            rows.append(("feed", "targets stay on the host", "--fast-loss prepares its candidates there"))
    if ota_last is not None:
        options["ota_last"] = ota_last
        rows.append(("losses", f"plain, OTA in the last {ota_last} epochs", f"--ota-last {ota_last}"))
    return (replace(paths, losses=partial(paths.losses, **options)) if options else paths), rows


def choose_steps(paths, reasons, opt, device, make_twin=None):
    """`paths` with feed and steps of --fast-step and --cuda-graph, and rows for the log."""
    if "fast_step" not in reasons:
        if opt.sync_interval != FastSteps.INTERVAL:
            logger.warning("--sync-interval %d has no effect without --fast-step", opt.sync_interval)
        return paths, []
    targets_device = torch.device("cpu") if "fast_loss" in reasons else None
    prefetch = Prefetch(targets_device, floats=opt.multi_scale)
    kind = GraphSteps if "cuda_graph" in reasons else FastSteps
    if not has_triton(device) or getattr(opt, "world_size", 1) > 1 or "," in str(opt.device) or compiled.settings():
        make_twin = None
    options = {"interval": opt.sync_interval} | ({"twin": make_twin} if make_twin else {})
    paths = replace(paths, feed=prefetch, steps=partial(kind, **options))
    rows = [("feed", "copied ahead on a side stream, as bytes" if device.type == "cuda" else "as bytes",
             reasons["fast_step"]),
            ("step", f"no waiting, losses every {opt.sync_interval} steps", reasons["fast_step"])]  # fmt: skip
    if make_twin:
        rows.append(("model", "fused kernels (models/fused.py)", reasons["fast_step"]))
    if "cuda_graph" in reasons:
        rows.append(("step", "captured in a CUDA graph", reasons["cuda_graph"]))
    elif opt.fast or opt.cuda_graph:
        rows.append(("step", "not captured in a CUDA graph", why_no_graph(opt, device)))
    return paths, rows


def rows_about_the_machine(opt, device):
    """What --fast found, for the log: loader and precision."""
    precision = opt.amp or ("fp16" if device.type == "cuda" else "off")
    why = f"--amp {opt.amp}" if opt.amp else f"default on a {device.type.upper().replace('CUDA', 'GPU')}"
    return [("loader", "workers stay and assemble batches", "--fast"), ("amp", precision, why)]


def loader_options(opt, first_epoch=0, device=None):
    """Keyword arguments of create_dataloader for the loader flags; none without a flag, which means the reference.

    `device` is where the steps of the run are made; without it samples are finished on the host. max_batches
    (--max-iter) is among them only when asked for, and not meant for validation.
    """
    asked = {
        "persistent_workers": opt.persistent_workers or opt.fast_dataloader or opt.fast,
        "worker_tensor": opt.worker_tensor or opt.fast_dataloader or opt.fast,
        "micro_batch_size": opt.micro_batch_size,
        "prefetch_factor": opt.prefetch_factor,
    }
    if opt.max_iter:
        asked["max_batches"] = opt.max_iter
    if not any(asked.values()) and opt.seed is None:
        return {}
    if asked["worker_tensor"] and (opt.fast_step or opt.cuda_graph or opt.fast) and device and has_triton(device):
        asked["defer_steps"] = True
    logger.info("loader: %s", loader_in_words(asked, opt))
    return asked | {"timeout": opt.loader_timeout, "seed": opt.seed, "first_epoch": first_epoch}


def loader_in_words(asked, opt):
    """What the loader flags chose, for the log."""
    if asked["worker_tensor"]:
        kind = "micro-batches assembled by the workers in shared memory (--worker-tensor)"
        kind += ", its last steps on the GPU (--fast-step)" if asked.get("defer_steps") else ""
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
    in_thread = opt.fast_step or opt.cuda_graph or opt.fast
    return BackgroundCheckpoints if in_thread else Checkpoints


def validation(opt):
    """What scores the epochs before the last instead of test.evaluate: with --fast-val a FastValidation, else None."""
    if not (opt.fast_val or opt.fast):
        return None
    why = "--fast-val" if opt.fast_val else "--fast"
    logger.info("%-8s| %-40s| %s", "validate", "on the device, in batches (fast_val.py)", why)
    return FastValidation()
