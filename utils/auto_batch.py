"""--batch-size -1: the largest batch that fits on the GPU, found by trying."""

import gc
import logging

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from utils import fastpaths, optim, resize_schedule
from utils.dist import init_seeds
from utils.ema import ModelEMA
from utils.hyp import scale_hyp
from utils.training import Training, freeze_layers

logger = logging.getLogger(__name__)

MARGIN = 0.1  # share of the memory that stays free: for fragments, validation, and images with more boxes
MOST = 4096  # images; more are not tried
GRAIN = 8  # larger batches are multiples of it
STRIDE = 64  # the largest one of all models
BOXES_PER_IMAGE = 25  # in the trials; a mosaic of everyday pictures has about 14


def largest(fits, most=MOST):
    """The largest batch size up to `most` for which `fits(size)`; 0 if not even one image does.

    Sizes are doubled until one does not fit, then the gap is halved, down to GRAIN images or a sixteenth.
    """
    good, bad = 0, 1
    while bad <= most and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, most + 1)
    while bad - good > max(1 if good < GRAIN else GRAIN, good // 16):
        middle = (good + bad) // 2
        middle -= middle % GRAIN if middle > GRAIN else 0
        if middle <= good:
            break
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


class Trial:
    """Trains on random images of `image_size` pixels and looks at the memory that this takes.

    `training` is a Training that has been started, `feed(loader, device)` yields its batches; `num_classes` those of
    its model.
    """

    def __init__(self, training, feed, image_size, num_classes, device):
        self.training, self.feed, self.device = training, feed, device
        self.image_size, self.num_classes = image_size, num_classes
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        self.limit = (1 - MARGIN) * (free + torch.cuda.memory_reserved(device))

    def fits(self, batch_size):
        """Whether a step on `batch_size` images stays within the limit."""
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            self._step(batch_size)
        except torch.cuda.OutOfMemoryError:
            peak = float("inf")
        else:
            peak = torch.cuda.max_memory_reserved(self.device)
        self.training.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        logger.info("--batch-size -1: %4d images need %5.1f of %.1f GB", batch_size, peak / 1e9, self.limit / 1e9)
        return peak <= self.limit

    def _step(self, batch_size):
        self.training.begin_epoch()
        for batch in self.feed([self._batch(batch_size)], self.device):
            self.training.forward_backward(batch)
        self.training.update()

    def _batch(self, batch_size):
        """What a loader would deliver: noise with boxes."""
        image = torch.randint(256, (1, 3, self.image_size, self.image_size), dtype=torch.uint8)
        targets = torch.rand(batch_size * BOXES_PER_IMAGE, 6)
        targets[:, 0] = torch.arange(len(targets)) // BOXES_PER_IMAGE
        targets[:, 1] = (targets[:, 1] * self.num_classes).floor()
        targets[:, 4:] *= 0.3
        return image.repeat(batch_size, 1, 1, 1), targets, ("noise",) * batch_size, None


def largest_side(opt):
    """The longest side in pixels of the images that a run with these options trains on."""
    side = max(stage.size for stage in resize_schedule.of_run(opt).stages)
    return -(-int(side * (1.5 if opt.multi_scale else 1)) // STRIDE) * STRIDE


def settle(opt, hyp, num_classes, device, ranks, build_model):
    """Replace batch_size -1 of the options by what fits; the same for all processes, the least of what each measures.

    `build_model()` returns the model on the device. Raises ValueError without a GPU, or when nothing fits.
    """
    if opt.batch_size != -1:
        return
    if device.type != "cuda":
        raise ValueError("--batch-size -1 measures what fits on a GPU, and this run uses the CPU; give a number")
    side = largest_side(opt)
    size = largest(_trial(opt, hyp, num_classes, device, side, build_model()).fits)
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


def _trial(opt, hyp, num_classes, device, side, model):
    """A Trial with the losses and the step of the run."""
    init_seeds(2)  # as in the run, cuDNN looks for the fastest kernels, which may take memory
    paths = fastpaths.choose(opt, device)
    freeze_layers(model, opt.freeze)
    model.gr, model.hyp = 1.0, scale_hyp(hyp, model.model[-1].nl, num_classes, side, opt.label_smoothing)
    optimizer = optim.build_optimizer(model, hyp["lr0"], hyp["momentum"], hyp["weight_decay"], opt.adam)
    scheduler = LambdaLR(optimizer, optim.lr_factor(opt.epochs, hyp["lrf"], opt.linear_lr))
    training = Training(model, hyp, optim.NOMINAL_BATCH, optimizer, scheduler, ModelEMA(model))
    loss_of_epoch, _ = paths.losses(model, opt.epochs)
    training.start(model, loss_of_epoch(opt.epochs - 1), loss_factor=1, first_epoch=0, num_warmup=1)
    return Trial(training, paths.feed, side, num_classes, device)
