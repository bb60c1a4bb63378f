"""What a run reads: its loaders for training and validation, and the size of the training images by epoch."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from threading import Thread

import torch
from torch.utils.data import DataLoader

from utils.config import resize_schedule
from utils.config.options import check_img_size
from utils.config.resize_schedule import ResizeSchedule
from utils.data import subset
from utils.data.image_cache import check_memory_for, give_back_memory
from utils.data.labels.scan import check_has_boxes, check_labels
from utils.datasets import LoadImagesAndLabels, create_dataloader
from utils.run import auto_batch
from utils.run.context import Run
from utils.run.fast_paths import COMPOSE, Paths
from utils.system import random_state
from utils.system.distributed import check_alike, gather_everywhere
from utils.system.files import counted

logger = logging.getLogger("train")


@dataclass
class Loaders:
    """`val` is None in a process that does not validate; `image_size` in pixels is that of `train` and `dataset`."""

    train: DataLoader
    dataset: LoadImagesAndLabels
    image_size: int
    val: DataLoader | None
    sizes: ResizeSchedule
    open_training: Callable  # (image size, first epoch) -> train, dataset

    def __post_init__(self):
        self.size_of_gains = self.sizes.final

    def begin(self):
        """Let workers begin ahead of the first epoch: to fork another process is slow while they are busy."""
        for loader in (self.train, self.val):
            getattr(loader, "begin", lambda: None)()

    def enter(self, epoch):
        """Begin an epoch. True when the gains of the losses have to follow, which were made for the final size.

        The workers and cached images of another size go before new ones come.
        """
        size = self.sizes.at(epoch)
        if size != self.image_size:
            before, self.train, self.dataset = self.dataset, None, None
            give_back_memory(before)  # which the workers of the validation map as well
            del before
            with random_state.kept():  # as in a run that is resumed here
                self.train, self.dataset = self.open_training(size, epoch)
            self.image_size = size
        changed, self.size_of_gains = size != self.size_of_gains, size
        return changed

    def close(self):
        """After the last batch: let a thread, which is returned, end the workers and free what was made for them."""
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        thread = Thread(target=self._close, args=(device,), name="closing the loaders")
        thread.start()
        return thread

    def _close(self, device):
        if device is not None:
            torch.cuda.set_device(device)  # a thread begins with the first one, where to unlock memory makes a context
        for loader in (self.train, self.val):
            if hasattr(loader, "end"):
                loader.end()
                give_back_memory(loader.dataset)


def open_loaders(run: Run, paths: Paths, stride: int, first_epoch: int, build_model: Callable) -> Loaders:
    """The Loaders of a run, with labels checked: ids within the classes, and at least one box to learn from.

    `stride` in pixels: all image sizes become multiples of it. `build_model()` returns a model on the device; what its
    training takes is measured once, if images are to lie beside it.
    """
    step_cost, fast = cache(partial(auto_batch.step_cost, run, build_model)), dict(paths.loader)
    is_shared = run.ranks.world_size > 1
    # Other exchanges follow, so all processes take part or none: they may have other cores, or lack a compiler.
    may_compose = run.options.fast or run.options.cache_images == "gpu"
    if is_shared and may_compose and not all(gather_everywhere(COMPOSE in fast)):
        fast.pop(COMPOSE, None)
    if COMPOSE in fast:
        fast[COMPOSE] = partial(fast[COMPOSE], step_cost=step_cost, prefix="train: ", is_shared=is_shared)
    sizes = resize_schedule.from_options(run.options).rounded(partial(check_img_size, s=stride))
    open_training = partial(open_train_loader, run, fast, stride)
    image_size = sizes.at(first_epoch)
    train_loader, dataset = open_training(image_size, first_epoch)
    if dataset.memory_cache is not None:
        check_memory_for(dataset, max(stage.size for stage in sizes.stages))  # not only when its time has come
    share = (run.ranks.rank, run.ranks.world_size) if paths.shares_validation else None
    val_loader = None
    if share or run.ranks.is_main:
        keep = partial(paths.kept, step_cost=step_cost) if paths.kept else None
        val_loader = open_val_loader(run, fast, stride, first_epoch, dataset.row_forms, share, keep)
    return Loaders(train_loader, dataset, image_size, val_loader, sizes, open_training)


def open_train_loader(run, fast, stride, image_size, first_epoch):
    """The training loader for images of `image_size` from `first_epoch` on, and its data set."""
    opt, ranks = run.options, run.ranks
    loader, dataset = create_dataloader(
        run.data.train, image_size, opt.batch_size, stride, opt, hyp=run.hyp, augment=not opt.overfit,
        cache=_cache_of_data_set(opt, COMPOSE in fast), rect=opt.rect, rank=ranks.rank, world_size=ranks.world_size,
        image_weights=opt.image_weights, quad=opt.quad, prefix="train: ", subset_filter=subset.from_options(opt),
        keypoints=run.data.keypoints, **_loader_options(opt, fast, first_epoch),
    )  # fmt: skip
    check_labels(dataset, run.data, opt.strict_data)
    if opt.total_batch_size > len(dataset):
        few = counted(len(dataset), "training image")
        verb = "is" if len(dataset) == 1 else "are"
        logger.warning("--batch-size %d: there %s only %s", opt.total_batch_size, verb, few)
    if not opt.allow_background:
        check_has_boxes(dataset.labels, dataset.label_files, dataset.findings)
    return loader, dataset


def open_val_loader(run, fast, stride, first_epoch, row_forms, share=None, keep=None):
    """The validation loader, or that of a `share`; --overfit validates on its training images as training sees them.

    `row_forms` of the training set: a validation set of a few images may not show what its label rows are. `keep` makes
    of the loader one that remembers its batches.
    """
    opt, image_size = run.options, check_img_size(run.options.img_size[1], stride)
    path, subset_filter = (run.data.train, subset.from_options(opt)) if opt.overfit else (run.data.val, None)
    # --max-iter shortens training only, and only training batches pass where the GPU does the last steps
    fast = {name: value for name, value in fast.items() if name not in ("max_batches", "defer_steps", COMPOSE)}
    loader, dataset = create_dataloader(
        path, image_size, opt.test_batch_size or opt.batch_size * 2, stride, opt, hyp=run.hyp,
        cache=not opt.notest and _cache_of_data_set(opt, keep), rect=not opt.overfit, pad=0.5,
        world_size=run.ranks.world_size, prefix="val: ", subset_filter=subset_filter, keypoints=run.data.keypoints,
        share=share, row_forms=row_forms, **_loader_options(opt, fast, first_epoch),
    )  # fmt: skip
    check_labels(dataset, run.data, opt.strict_data)
    if share:
        check_alike({"validation images": dataset.total})
    return keep(loader) if keep and len(dataset) else loader


def _cache_of_data_set(opt, is_elsewhere):
    """What a data set shall keep of its images itself: nothing where --cache-images gpu keeps them elsewhere."""
    if opt.cache_images == "gpu":
        return not is_elsewhere
    return opt.cache_images


def _loader_options(opt, fast, first_epoch):
    return {"workers": opt.workers} | fast | ({"first_epoch": first_epoch} if fast else {})
