"""USE_COMPILE=1: the model is compiled for training by torch.compile; DIAGNOSE_COMPILE=1: why that would fall apart.

The model is compiled in place, as `nn.Module.compile` does it: names in its state dict stay, copies of it (the moving
average, checkpoints) are plain models. Only training on full batches runs compiled; a smaller last batch and everything
in evaluation mode run as before, so nothing is compiled twice.

Environment, all optional:

    COMPILE_BACKEND         inductor (default; needs a C++ compiler), or aot_eager or eager, which make nothing faster
    COMPILE_MODE            default, max-autotune-no-cudagraphs, ... (see torch.compile)
    TORCHINDUCTOR_CACHE_DIR where compiled kernels stay for the next run; default ~/.cache/yolov7fast/inductor
"""

import logging
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.config.hyp import scale_hyp
from utils.loss import batched
from utils.system.distributed import unwrap
from utils.system.files import cause_of, user_cache

logger = logging.getLogger(__name__)

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# of the batch that DIAGNOSE_COMPILE=1 looks at
NUM_IMAGES = 2  # the graphs do not depend on it, and BatchNorm wants more than one value
BOXES = ((0.3, 0.4, 0.2, 0.3), (0.6, 0.5, 0.4, 0.5))  # x, y, w, h, normalised


class CompileOptions(NamedTuple):
    """What to compile with."""

    backend: str
    mode: str


def options_from_environment() -> CompileOptions:
    """The CompileOptions that the environment asks for. Raises ValueError for an unknown mode."""
    options = CompileOptions(
        os.environ.get("COMPILE_BACKEND") or "inductor", os.environ.get("COMPILE_MODE") or "default"
    )
    if options.mode not in MODES:
        raise ValueError(f"COMPILE_MODE={options.mode} is unknown: give one of {', '.join(MODES)}")
    return options


def compile_model(called: nn.Module, on_compiled: Callable, options: CompileOptions) -> None:
    """Compile `called`, the model as training calls it, in place at its first batch; failing is a warning.

    `on_compiled(seconds)` is told what compiling has cost, before the batch is trained.
    """
    if isinstance(called, nn.DataParallel):
        logger.warning("USE_COMPILE=1 has no effect with several GPUs in one process: start with torchrun")
        return
    use_lasting_cache()
    model = unwrap(called)
    eager = model._call_impl
    try:
        torch.compiler.reset()  # an earlier training of this process, in a search, counts against torch's limit
        model.compile(backend=options.backend, mode=options.mode, dynamic=False)
    except Exception as error:  # compilers fail in any way, and none is worth the run
        _warn_eager(error)
        return
    model._compiled_call_impl = CompiledCall(model, eager, model._compiled_call_impl, on_compiled)


def use_lasting_cache():
    """Let compiled kernels outlive the run, in the user's cache folder unless TORCHINDUCTOR_CACHE_DIR is set."""
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")  # torch before 2.6 has it off
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return
    try:
        folder = user_cache() / "inductor"
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning(
            "compiled kernels are not kept for the next run: %s; set TORCHINDUCTOR_CACHE_DIR",
            cause_of(error, with_file=True),
        )
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


class CompiledCall:
    """What calling a compiled model comes to: `compiled` for training batches of the first one's shape, else `eager`.

    The first batch of an image size is rehearsed, forward and backward: only then is everything compiled, and an error
    cannot reach the training. What the rehearsal does to BatchNorm statistics is undone; gradients are not touched.
    """

    def __init__(self, model, eager, compiled, on_compiled):
        self.model, self.eager, self.compiled, self.on_compiled = model, eager, compiled, on_compiled
        self.shape = None

    def __call__(self, images, *args, **kwargs):
        is_training = self.model.training and torch.is_grad_enabled() and not (args or kwargs)
        is_new_size = self.shape is None or images.shape[2:] != self.shape[2:]  # as --resize-schedule brings them
        if is_training and is_new_size and self.compiled is not self.eager:
            self.shape = images.shape
            self._try(images)
        use = self.compiled if is_training and images.shape == self.shape else self.eager
        return use(images, *args, **kwargs)

    def _try(self, images):
        started = time.perf_counter()
        statistics = [b for layer in self.model.modules() if isinstance(layer, _BatchNorm) for b in layer.buffers()]
        before = [buffer.clone() for buffer in statistics]
        try:
            self._rehearse(images)
        except Exception as error:  # compilers fail in any way; an error of the model's own comes again, eagerly
            _warn_eager(error)
            self.compiled = self.eager
        with torch.no_grad():
            for buffer, value in zip(statistics, before, strict=True):
                buffer.copy_(value)
        seconds = time.perf_counter() - started
        if self.compiled is not self.eager:
            logger.info("Model compiled successfully")
            logger.info("compiled in %.1f s, not part of the epoch's speed", seconds)
        self.on_compiled(seconds)

    def _rehearse(self, images):
        outputs = self.compiled(images)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with torch.autocast(images.device.type, enabled=False):
            total = sum(output.float().sum() for output in tensors_in(outputs))
            torch.autograd.grad(total, parameters, allow_unused=True)
        if images.device.type == "cuda":
            torch.cuda.synchronize(images.device)  # kernels may fail late


def tensors_in(outputs):
    """All tensors in nested lists: a model of several heads returns a list of each."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    else:
        for part in outputs:
            yield from tensors_in(part)


def _warn_eager(error):
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    logger.warning("USE_COMPILE=1: compiling failed, the model runs as without it (%s)", reason[:300])


# DIAGNOSE_COMPILE=1 ---------------------------------------------------------------------------------------------------


def explain(model, hyp, nc, image_size):
    """The report, as text, for `model` in training and for the batched losses (--fast-loss) that fit its head.

    `hyp` as its file gives it, `image_size` in pixels. The reference losses are not looked at: they are Python loops
    over layers and images, and never compiled.
    """
    model.hyp, model.nc, model.gr = scale_hyp(hyp, model.model[-1].nl, nc, image_size, 0.0), nc, 1.0
    parameter, stride = next(model.parameters()), int(model.stride.max())
    side = -(-image_size // stride) * stride
    images = torch.zeros(NUM_IMAGES, 3, side, side, device=parameter.device)
    rows = [(i, 0, *box) for i in range(NUM_IMAGES) for box in BOXES]
    with torch.autocast(parameter.device.type, enabled=parameter.device.type == "cuda"):
        predictions = _leaves(model.train()(images))
        levels = predictions if torch.is_tensor(predictions[0]) else predictions[0]  # of the first of several heads
        subjects = [(f"model, images {list(images.shape)}", model, (images,))]
        for name, loss in losses_of(model):
            sets = loss.prepare(torch.tensor(rows), [p.shape for p in levels[: loss.head.nl]], images.shape[2:])
            arguments = predictions, [candidates.to(parameter.device) for candidates in sets]
            subjects.append((name, loss.compute, arguments))
        return report([(name, _explain(function, arguments)) for name, function, arguments in subjects])


def _leaves(outputs):
    """Tensors in nested lists, cut off from what made them, to be differentiated by."""
    return outputs.detach().requires_grad_() if torch.is_tensor(outputs) else [_leaves(part) for part in outputs]


def losses_of(model):
    """(name, batched loss) of those that `model` can be trained with; without kernels, which nobody compiles again."""
    classes, head = batched.CLASSES, model.model[-1]
    if hasattr(head, "num_heads"):
        kinds = classes.plain, classes.ota
        found = [(f"{kind.__name__}, {head.num_heads} heads", classes.heads(model, kind)) for kind in kinds]
    else:
        kinds = (classes.auxiliary,) if hasattr(head, "m2") else (classes.plain, classes.ota)
        found = [(kind.__name__, kind(model)) for kind in kinds]
    for _, loss in found:
        for of_head in getattr(loss, "losses", [loss]):
            of_head.use_kernels = False
    return found


def _explain(function, arguments):
    torch.compiler.reset()
    return torch._dynamo.explain(function)(*arguments)


def report(explanations):
    """The text for (name, ExplainOutput of torch) pairs: counts of each, its reasons, and the sums."""
    lines = ["DYNAMO EXPLANATION REPORT", f"torch {torch.__version__}", ""]
    for name, found in explanations:
        lines.append(f"{name}: graph count {found.graph_count}, break count {found.graph_break_count}")
        lines += [f"    {number}. {_reason(reason)}" for number, reason in enumerate(found.break_reasons, 1)]
    graphs, breaks = (sum(getattr(found, f"{kind}_count") for _, found in explanations)
                      for kind in ("graph", "graph_break"))  # fmt: skip
    return "\n".join([*lines, "", f"total: graph count {graphs}, break count {breaks}"])


def _reason(reason):
    """What broke a graph, and the line of the program where it did."""
    where = f" ({reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno})" if reason.user_stack else ""
    return " ".join(str(reason.reason).split())[:300] + where
