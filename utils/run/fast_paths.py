"""Which implementation fills each seam of a run: one table, and the only reader of the flags that ask for speed.

An opt-in module is imported when its row is chosen, never before: a run without flags loads none of them.
"""

import logging
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pkgutil import resolve_name as load
from typing import Any, NamedTuple

import torch
from torch import nn

from utils.config.flags import TRAIN_FLAGS
from utils.engine import batches
from utils.engine.checkpoint import Checkpoints
from utils.engine.evaluate import evaluate
from utils.engine.trainer import Trainer
from utils.loss import losses_by_epoch
from utils.system import distributed
from utils.system.compilers import keep_triton_key, why_no_kernels
from utils.system.cores import usable_cores
from utils.system.files import folded

logger = logging.getLogger(__name__)

COMPOSE = "compose"  # field of LoaderOptions
MOST_WORKERS = 16  # cores that keep any of the GPUs busy that were measured; and as many workers are enough
LOADER_FLAGS = ("fast", "fast_dataloader", "persistent_workers", "worker_tensor", "micro_batch_size", "prefetch_factor",
                "max_iter", "seed")  # fmt: skip


def itself(chosen: Any) -> Any:
    """The reference of some seams: a model makes its own forward pass, a Trainer its own steps."""
    return chosen


def by_one(evaluate: Callable, with_room: Callable) -> Callable:
    """The reference of `together`: one rank validates."""
    return with_room(evaluate)


def stays_eager(model: nn.Module, on_compiled: Callable) -> None:
    """The reference of `compile`."""


def starts_at_once(steps: Any, shape: tuple, num_steps: int) -> None:
    """The reference of `ahead`: the first step makes what it needs."""


@dataclass(frozen=True)
class Paths:
    """One implementation for each seam; without flags it is this very object: REFERENCE."""

    loader: dict[str, Any] = field(default_factory=dict)  # keyword arguments of create_dataloader; none: torch's loader
    batches: Callable = batches.plain  # (loader, device) -> Batch after Batch
    losses: Callable = losses_by_epoch  # (model, epochs) -> function of the epoch that names its loss, validation loss
    forward: Callable[[nn.Module], nn.Module] = itself  # model -> what training calls: other code over the same tensors
    data_parallel: Callable = distributed.data_parallel  # (model, device, ranks, devices, sync_bn) -> model
    compile: Callable[[nn.Module, Callable], None] = stays_eager  # (model, what is told the seconds it took); in place
    steps: Callable[[Trainer], Any] = itself  # trainer -> what makes its steps, by the methods of Trainer
    ahead: Callable[[Any, tuple, int], None] = starts_at_once  # (steps, image shape, number of steps)
    evaluate: Callable = evaluate  # scores the epochs before the last, which are not drawn
    drawn: Callable[[Callable], Callable] = itself  # `evaluate` -> what scores the last epoch, which is drawn
    # (what evaluates, with_room) -> what tries it so, by all processes, each with its share of images
    together: Callable = by_one
    kept: Callable | None = None  # (validation loader, what training takes) -> a loader that remembers its batches
    checkpoints: Callable[..., Checkpoints] = Checkpoints  # (folder, epochs, save_every_epoch, period)

    @property
    def shares_validation(self) -> bool:
        """Whether all processes validate; otherwise the main one does."""
        return self.together is not by_one


REFERENCE = Paths()


class FastPath(NamedTuple):
    """A row of the table: an opt-in implementation of a seam."""

    seam: str  # field of Paths
    chosen: str  # what it is, for the log
    wanted: str | None  # the flag that asks for it
    obstacle: str | None  # what keeps this run from having it
    make: Callable  # what fills the seam so far -> the implementation
    is_loud: bool = False  # an obstacle is a warning: the user asked for this very path


def table(opt: Namespace, device: torch.device) -> tuple[FastPath, ...]:
    """All opt-in paths. Where two rows of one seam are chosen, the later one builds on the earlier, or replaces it."""
    graph, step, loss = (wanted_for_a_step(opt, name) for name in ("cuda_graph", "fast_step", "fast_loss"))
    targets_device = torch.device("cpu") if loss else None  # --fast-loss prepares its candidates there
    on_gpu, loader, changing = device.type == "cuda", loader_options(opt, device), asked(opt, "multi_scale", "rect")
    validation, is_several = asked(opt, "fast_val", "fast"), has_several(opt)
    images, has_asked = wanted_images(opt, device), opt.cache_images == "gpu"
    compiling = "USE_COMPILE=1" if is_on("USE_COMPILE") else None
    compiler = load("utils.fast.compile:options_from_environment")() if compiling else ()
    losses = "whole batch at once (loss/batched.py)"
    lacking = why_no_kernels(device)
    if on_gpu and lacking:
        losses += f", by operations of torch ({lacking})"
    return (
        FastPath("loader", describe(loader), " ".join(filter(None, (asked(opt, name) for name in LOADER_FLAGS))), None,
                 lambda _: asking_ahead(loader, opt, device)),
        FastPath("loader", "images beside the model, if they fit (data/gpu)", images,
                 images and why_no_images(opt, device),
                 lambda loader: loader | {COMPOSE: partial(load("utils.data.gpu.placing:open_images"), device=device,
                                                           is_asked=has_asked)}, is_loud=has_asked),
        FastPath("kept", "validation batches stay where the GPU reads them",
                 validation if has_asked or opt.fast else None, why_not_kept(opt, device),
                 lambda _: partial(load("utils.data.gpu.kept_batches:keep"), device=device, is_asked=has_asked)),
        FastPath("losses", losses, loss, None,
                 lambda losses: partial(losses, classes=load("utils.loss.batched:CLASSES"))),
        FastPath("losses", f"plain, OTA in the last {opt.ota_last} epochs", asked(opt, "ota_last"), None,
                 lambda losses: partial(losses, ota_last=opt.ota_last)),
        FastPath("batches", "targets stay on the host", loss if on_gpu else None, None,
                 lambda plain: partial(plain, targets_device=targets_device)),
        FastPath("batches", "copied ahead on a side stream, as bytes" if on_gpu else "as bytes", step, None,
                 lambda _: load("utils.fast.prefetcher:Prefetcher")(targets_device, floats=opt.multi_scale)),
        FastPath("data_parallel", "gradients added in one piece (fast/exchange.py)", step if is_several else None,
                 why_wrapped(opt), lambda _: distributed.without_wrapper),
        FastPath("forward", "fused kernels (models/fused)", step, step and why_not_fused(opt, device, compiling),
                 lambda _: load("models.fused.network:fused_model")),
        FastPath("compile", f"torch.compile ({', '.join(compiler)})", compiling,
                 changing and f"no effect with {changing}, image sizes change",
                 lambda _: partial(load("utils.fast.compile:compile_model"), options=compiler), is_loud=True),
        FastPath("steps", f"no waiting, losses every {opt.sync_interval} steps", step, None,
                 lambda _: partial(load("utils.fast.train_step:FastSteps"), **step_options(opt))),
        FastPath("steps", "captured in a CUDA graph", graph, why_no_graph(opt, device),
                 lambda _: partial(load("utils.fast.graph_step:GraphSteps"), **step_options(opt)),
                 is_loud=opt.cuda_graph),
        FastPath("ahead", "kernels made ready by all cores" if on_gpu else "torch's compiler is not loaded", step, None,
                 lambda _: load("utils.fast.start:prepare")(why_not_ahead(opt, compiling) is None, device,
                                                            bool(loss and not lacking))),
        FastPath("evaluate", "on the device, in batches (fast/validation.py)", validation, None,
                 lambda _: load("utils.fast.validation:FastValidation")()),
        FastPath("evaluate", "by the fused kernels, in CUDA graphs (fast/graph_network.py)",
                 validation if graph and on_gpu else None, why_not_fused(opt, device, compiling),
                 lambda evaluate: evaluate.fused_by(partial(load("utils.fast.graph_network:replayed"),
                                                            load("models.fused.network:quietly_fused")))),
        FastPath("drawn", "without cuDNN's search", validation if on_gpu else None, None,
                 lambda _: load("utils.fast.validation:without_search")()),
        FastPath("together", "each process validates its share", validation if is_several else None, None,
                 lambda _: load("utils.fast.shared_validation:shared")),
        FastPath("checkpoints", "written by a thread", step, None,
                 lambda _: load("utils.fast.async_checkpoint:BackgroundCheckpoints")),
    )  # fmt: skip


def choose(opt: Namespace, device: torch.device) -> Paths:
    """The Paths of this run; what flags chose is logged."""
    if wanted_for_a_step(opt, "fast_step") and not why_no_kernels(device):
        keep_triton_key()
    paths, rows = fill_seams(opt, device)
    if opt.fast:
        default = f"default on a {device.type.upper().replace('CUDA', 'GPU')}"
        precision = opt.amp or ("fp16" if device.type == "cuda" else "off")
        rows.append(("amp", precision, asked(opt, "amp") or default))
    for row in [("seam", "chosen", "why"), *rows] if rows else ():
        line = "{:<11} | {} | {}".format(*row)
        logger.info("%s", folded(line, indent=14))
    if asked(opt, "sync_interval") and not wanted_for_a_step(opt, "fast_step"):
        logger.warning("--sync-interval %d has no effect without --fast-step", opt.sync_interval)
    return paths


def for_trials(opt: Namespace, device: torch.device) -> Paths:
    """The Paths for steps of changing batch size: those of the run, but never captured in a graph. Logs no table."""
    every = opt.fast or opt.cuda_graph
    flags = {
        "fast": False,
        "cuda_graph": False,
        "fast_step": opt.fast_step or every,
        "fast_loss": opt.fast_loss or every,
        "world_size": 1,  # each process tries sizes of its own
        "cache_images": False,  # their batches are noise
    }
    return fill_seams(Namespace(**vars(opt) | flags), device)[0]


def fill_seams(opt, device):
    """The Paths, and rows (seam, chosen, why) of all that was wanted."""
    paths, rows = REFERENCE, []
    for path in table(opt, device):
        if path.wanted and path.obstacle:
            rows.append((path.seam, f"not {path.chosen}", path.obstacle))
            if path.is_loud:
                logger.warning("%s: %s (%s: not %s)", path.wanted, path.obstacle, path.seam, path.chosen)
        elif path.wanted:
            rows.append((path.seam, path.chosen, path.wanted))
            paths = replace(paths, **{path.seam: path.make(getattr(paths, path.seam))})
    return paths, rows


# Wanted: by which flag ------------------------------------------------------------------------------------------------


def asked(opt: Namespace, *names: str) -> str | None:
    """The first of these flags that is not at its default, as it is typed."""
    for name in names:
        value, flag = getattr(opt, name), TRAIN_FLAGS[name]
        if value != flag.default:
            return flag.name if value is True else f"{flag.name} {value}"
    return None


def has_several(opt: Namespace) -> bool:
    """Whether several processes train; options that no run has completed yet are of one."""
    return getattr(opt, "world_size", 1) > 1


def wanted_for_a_step(opt, name):
    """As `asked`, for the graph and what it needs: --fast means all that this machine can run."""
    return asked(opt, name, "fast") or (f"--cuda-graph needs {TRAIN_FLAGS[name].name}" if opt.cuda_graph else None)


def wanted_images(opt: Namespace, device: torch.device) -> str | None:
    """What asks for images beside the model: the flag, or few cores under --fast, if no other cache is asked for."""
    if opt.cache_images == "gpu":
        return asked(opt, "cache_images")
    cores = cores_of_process(opt)
    if not opt.fast or opt.cache_images or cores >= MOST_WORKERS or device.type != "cuda":
        return None
    return f"--fast, on {cores} cores a GPU: if they are too few"


def is_on(name: str) -> bool:
    """Whether the environment variable `name` is 1; unset, empty and 0 mean no. Raises ValueError for anything else."""
    value = os.environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}={value} is not understood: give 1 or 0")
    return value == "1"


def diagnosis() -> Callable | None:
    """With DIAGNOSE_COMPILE=1 what makes the report that is wanted then, instead of a training run."""
    return load("utils.fast.compile:explain") if is_on("DIAGNOSE_COMPILE") else None


# Obstacle: why not here -----------------------------------------------------------------------------------------------


def why_no_graph(opt: Namespace, device: torch.device) -> str | None:
    """What keeps the steps of this run from being captured in a CUDA graph."""
    return _first({
        "there is no CUDA device": device.type != "cuda",
        **_not_bare(opt),
        "--multi-scale changes the shape of every batch": opt.multi_scale,
        "--adam has no step for it, SGD has": opt.adam,
    })  # fmt: skip


def why_not_fused(opt: Namespace, device: torch.device, compiling: str | None) -> str | None:
    """What keeps the model from running by the kernels of models/fused."""
    return why_no_kernels(device) or _first({
        **_not_bare(opt),
        "torch.compile makes its own": compiling,
    })  # fmt: skip


def why_no_images(opt: Namespace, device: torch.device) -> str | None:
    """What keeps images from lying beside the model; what depends on the data set is seen when it is there."""
    reason = why_no_kernels(device) or (None if opt.workers else "there are no loader workers")
    return reason and reason + ", so they are in RAM" * (opt.cache_images == "gpu")


def why_not_kept(opt: Namespace, device: torch.device) -> str | None:
    """What makes it useless to remember the batches of validation."""
    return _first({
        "a GPU is needed": device.type != "cuda",
        "--notest validates once": opt.notest,
    })  # fmt: skip


def step_options(opt: Namespace) -> dict[str, Any]:
    """Keyword arguments of FastSteps and GraphSteps."""
    options = {"interval": opt.sync_interval}
    if has_several(opt) and not why_wrapped(opt):
        options["open_exchange"] = partial(load("utils.fast.exchange:Exchange"), timeout=opt.loader_timeout)
    return options


def why_wrapped(opt: Namespace) -> str | None:
    """What keeps several processes from exchanging gradients without DistributedDataParallel."""
    return "--adam has no flat gradient" if opt.adam else None


def _not_bare(opt):
    """What stands between the steps and the modules of the model."""
    several = has_several(opt)
    return {"--sync-bn exchanges statistics within the model": several and opt.sync_bn,
            "the model is wrapped for several processes": several and why_wrapped(opt),
            "several GPUs in one process": "," in str(opt.device) and not several}  # fmt: skip


def why_not_ahead(opt: Namespace, compiling: str | None) -> str | None:
    """What keeps the first step from being prepared: its shape or its form is not known before."""
    return asked(opt, "multi_scale", "rect", "quad") or compiling or _first(_not_bare(opt))


def _first(obstacles):
    return next((reason for reason, is_true in obstacles.items() if is_true), None)


# The loader -----------------------------------------------------------------------------------------------------------


def loader_options(opt: Namespace, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of create_dataloader for the loader flags; none without a flag, which means the reference.

    max_batches (--max-iter) and defer_steps are among them only when asked for, and are not meant for validation.
    """
    options = {
        "persistent_workers": opt.persistent_workers or opt.fast_dataloader or opt.fast,
        "worker_tensor": opt.worker_tensor or opt.fast_dataloader or opt.fast,
        "micro_batch_size": opt.micro_batch_size,
        "prefetch_factor": opt.prefetch_factor,
    }
    if opt.max_iter:
        options["max_batches"] = opt.max_iter
    if opt.fast and device.type == "cuda" and not asked(opt, "workers"):
        options["workers"] = min(cores_of_process(opt), MOST_WORKERS)
    if not any(options.values()) and opt.seed is None:
        return {}
    if options["worker_tensor"] and wanted_for_a_step(opt, "fast_step") and not why_no_kernels(device):
        options["defer_steps"] = True
    return options | {"timeout": opt.loader_timeout, "seed": opt.seed}


def cores_of_process(opt: Namespace) -> int:
    """Cores for each of the processes of this run on this machine."""
    return max(usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", getattr(opt, "world_size", 1))), 1)


def asking_ahead(loader: dict[str, Any], opt: Namespace, device: torch.device) -> dict[str, Any]:
    """`loader`; what it will ask the GPU about its last steps is asked now, while model and data are prepared."""
    if loader.get("defer_steps") and not asked(opt, "rect", "quad", "overfit"):
        load("utils.data.fast.device_augment:ask_ahead")(opt.img_size[0], device)
    return loader


def describe(loader: dict[str, Any]) -> str:
    """What the loader flags chose, for the log."""
    words = ["batches in shared memory" if loader.get("worker_tensor") else "torch's"]
    words += ["last steps on the GPU"] * ("defer_steps" in loader)
    words += [f"{loader['workers']} workers"] if "workers" in loader else []
    words += ["workers stay"] * bool(loader.get("persistent_workers"))
    words += ["draws by seed, epoch and image"] * (loader.get("seed") is not None)
    return ", ".join(words)
