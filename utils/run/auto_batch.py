"""--batch-size -1: the largest batch that fits on the GPU, found by trying."""

import gc
import logging
import math
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from utils.config import resize_schedule
from utils.config.hyp import scale_hyp
from utils.data.labels.image_list import expand_paths
from utils.data.subset import OVERFIT_SAMPLES
from utils.engine import optimizer as optim
from utils.engine.ema import ModelEMA
from utils.engine.trainer import Trainer, freeze_layers
from utils.run import fast_paths
from utils.run.context import Run
from utils.system import random_state
from utils.system.distributed import init_seeds

logger = logging.getLogger(__name__)

MARGIN = 0.1  # share of the memory that stays free: for fragments, validation, and images with more boxes
MOST = 4096  # images; more are not tried
GRAIN = 8  # larger batches are multiples of it
FAR = 16  # a guess goes at most so many times beyond what has been measured
CLOSE = 1.06  # times the best: no need to look for a larger one
STRIDE = 64  # the largest one of all models
BOXES_PER_IMAGE = 25  # in the trials; a mosaic of everyday images has about 14
SLOT = 3  # times the bytes of its images: what workers leave to the GPU comes in twice as many, and is made elsewhere


def largest(need, limit, most=MOST):
    """The largest batch size up to `most` found whose step takes at most `limit` bytes; 0 if not even one image does.

    `need(size)` measures the bytes, infinity if the step fails. They grow nearly in proportion to the size, so that a
    line through two measurements tells where to try next: a handful of trials, few of them large.
    """
    measured, best, bound, size = [], 0, most, 1
    while best < size <= bound:
        peak = need(size)
        if peak < math.inf:
            measured.append((size, peak))
        if peak <= limit:
            best = size
        else:
            bound = size - (1 if peak < math.inf else max(size // 8, 1))
        size = min(_guess(measured, limit), bound)
        size -= size % GRAIN if size > GRAIN else 0
        if best >= GRAIN and size < max(best * CLOSE, best + GRAIN):
            break
    return best


def _guess(measured, limit):
    """The size at which a line through the two largest of the `measured` (size, bytes) reaches `limit`."""
    if len(measured) < 2:  # one image says nothing about the share of each
        return 4 * len(measured)
    (before, peak_before), (size, peak) = sorted(measured)[-2:]
    share = max(peak - peak_before, 1) / (size - before)
    return min(size + math.floor((limit - peak) / share), FAR * size)


class BatchTrial:
    """Steps of a run on random images of `image_size` pixels, with as many of them as are asked for.

    `steps` is what makes them, `batches(loader, device)` yields their batches; `num_classes` those of the model.
    """

    def __init__(self, steps, batches, image_size, num_classes, device):
        self.steps, self.batches, self.device = steps, batches, device
        self.image_size, self.num_classes = image_size, num_classes
        # batches that are on their way in a run, of which a trial has but one, as bytes
        self.num_waiting = max(SLOT * getattr(batches, "ahead", 0) - 1, 0)

    def step(self, batch_size):
        """Train on one batch, with an optimiser step."""
        self.steps.begin_epoch()
        num_bytes = self.num_waiting * batch_size * 3 * self.image_size**2
        waiting = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        for batch in self.batches([self._batch(batch_size)], self.device):
            self.steps.step(0, 0, batch)
        del waiting  # here, so that it was there

    def _batch(self, batch_size):
        """What a loader would deliver: noise with boxes."""
        image = torch.randint(256, (1, 3, self.image_size, self.image_size), dtype=torch.uint8)
        targets = torch.rand(batch_size * BOXES_PER_IMAGE, 6)
        targets[:, 0] = torch.arange(len(targets)) // BOXES_PER_IMAGE
        targets[:, 1] = (targets[:, 1] * self.num_classes).floor()
        targets[:, 4:] *= 0.3
        return image.repeat(batch_size, 1, 1, 1), targets, ("noise",) * batch_size, None


def fitting(trial, limit, batch_size):
    """As `memory_of`, with a line in the log."""
    peak = memory_of(trial, batch_size)
    logger.info("--batch-size -1: %4d images need %5.1f of %.1f GB", batch_size, peak / 1e9, limit / 1e9)
    return peak


def memory_of(trial, batch_size):
    """Bytes of GPU memory that a step of `trial` on `batch_size` images takes; infinity if there are not so many."""
    torch.cuda.reset_peak_memory_stats(trial.device)
    try:
        trial.step(batch_size)
    except torch.cuda.OutOfMemoryError:
        peak = math.inf
    else:
        peak = torch.cuda.max_memory_reserved(trial.device)
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def largest_side(opt):
    """The longest side in pixels of the images that a run with these options trains on."""
    side = max(stage.size for stage in resize_schedule.from_options(opt).stages)
    return -(-int(side * (1.5 if opt.multi_scale else 1)) // STRIDE) * STRIDE


def settle(run: Run, build_model: Callable[[], nn.Module]) -> None:
    """Replace batch_size -1 of the options by what fits; the same for all processes, the least of what each measures.

    Never more than there are training images. `build_model()` returns the model on the device. Raises ValueError
    without a GPU, or when nothing fits.
    """
    opt, device, ranks = run.options, run.device, run.ranks
    if opt.batch_size != -1:
        return
    if device.type != "cuda":
        raise ValueError("--batch-size -1 measures what fits on a GPU, and this run uses the CPU; give a number")
    side = largest_side(opt)
    torch.cuda.empty_cache()
    limit = (1 - MARGIN) * torch.cuda.mem_get_info(device)[0]
    trial = new_trial(run, side, build_model())
    num_images = len(expand_paths(run.data.train)) // ranks.world_size
    size = largest(partial(fitting, trial, limit), limit, max(min(MOST, num_images), 1))
    del trial
    gc.collect()
    torch.cuda.empty_cache()
    if ranks.is_distributed:
        least = torch.tensor(size, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        size = int(least)
    if not size:
        raise ValueError(f"--batch-size -1: not even one image of {side} px fits on {device}; use a smaller --img-size")
    opt.batch_size, opt.total_batch_size = size, size * ranks.world_size
    logger.info("--batch-size -1: %d images a step (%d for each process)", opt.total_batch_size, opt.batch_size)


def step_cost(run: Run, build_model: Callable[[], nn.Module]) -> tuple[float, float]:
    """(bytes of GPU memory, seconds an image) that steps of this run take, on its largest images.

    Measured, with a model of their own beside what is there already; infinite if they do not fit.
    """
    device, batch_size, side = run.device, run.options.batch_size, largest_side(run.options)
    with random_state.kept():
        before = torch.cuda.memory_reserved(device)
        trial = new_trial(run, side, build_model())
        try:
            # As the run will do: cuDNN's search, if there is one, may take more memory, and torch keeps what it found.
            ahead = fast_paths.for_trials(run.options, device).ahead
            ahead(trial.steps, (batch_size, 3, side, side), most_steps(run))
            peak = memory_of(trial, batch_size)
        except torch.cuda.OutOfMemoryError:
            peak = math.inf
        seconds = seconds_of(trial, batch_size) / batch_size if peak < math.inf else math.inf
        del trial
        gc.collect()
        torch.cuda.empty_cache()
    return peak - before, seconds


def most_steps(run):
    """How many steps the run makes at most."""
    opt, num_images = run.options, len(expand_paths(run.data.train))
    num_chosen = opt.subset_size or (OVERFIT_SAMPLES if opt.overfit else num_images)
    num_batches = math.ceil(min(num_images, num_chosen) / opt.total_batch_size)
    return opt.epochs * min(num_batches, opt.max_iter or num_batches)


def seconds_of(trial, batch_size):
    """How long a step of `trial` on `batch_size` images takes, its first one being past."""
    trial.step(batch_size)  # cuDNN has chosen its kernels for this size
    torch.cuda.synchronize(trial.device)
    started = time.perf_counter()
    trial.step(batch_size)
    torch.cuda.synchronize(trial.device)
    return time.perf_counter() - started


def new_trial(run, side, model):
    """A BatchTrial with the losses and the steps of the run; without graph or compiler: each size has another shape."""
    opt, hyp, num_classes = run.options, run.hyp, run.data.nc
    init_seeds(2)  # as in the run, cuDNN looks for the fastest kernels, which may take memory
    paths = fast_paths.for_trials(opt, run.device)
    freeze_layers(model, opt.freeze)
    model.gr, model.hyp = 1.0, scale_hyp(hyp, model.model[-1].nl, num_classes, side, opt.label_smoothing)
    optimizer = optim.build_optimizer(model, hyp["lr0"], hyp["momentum"], hyp["weight_decay"], opt.adam)
    scheduler = LambdaLR(optimizer, optim.lr_factor(opt.epochs, hyp["lrf"], opt.linear_lr))
    trainer = Trainer(model, hyp, optim.NOMINAL_BATCH, optimizer, scheduler, ModelEMA(model), opt.amp)
    loss_of_epoch, _ = paths.losses(model, opt.epochs)
    steps = paths.steps(trainer)
    trainer.start(model, loss_of_epoch(opt.epochs - 1), loss_factor=1, first_epoch=0, num_warmup=1,
                  network=paths.forward(model))  # fmt: skip
    return BatchTrial(steps, paths.batches, side, num_classes, run.device)
