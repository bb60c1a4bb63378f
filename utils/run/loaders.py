"""What a run reads: its loaders for training and validation, and the size of the training images by epoch."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch.utils.data import DataLoader

from utils.config import resize_schedule
from utils.config.options import check_img_size
from utils.config.resize_schedule import ResizeSchedule
from utils.data import subset
from utils.data.image_cache import check_memory_for, give_back_memory
from utils.data.labels.scan import check_has_boxes, check_labels
from utils.datasets import LoadImagesAndLabels, create_dataloader
from utils.run.context import Run
from utils.system import random_state
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


def open_loaders(run: Run, fast: dict, stride: int, first_epoch: int, shares_validation: bool = False) -> Loaders:
    """The Loaders of a run, with labels checked: ids within the classes, and at least one box to learn from.

    `fast` are further keyword arguments of create_dataloader (Paths.loader). `stride` in pixels: all image sizes become
    multiples of it. With `shares_validation` every process reads its share of the validation images.
    """
    sizes = resize_schedule.from_options(run.options).rounded(partial(check_img_size, s=stride))
    open_training = partial(open_train_loader, run, fast, stride)
    image_size = sizes.at(first_epoch)
    train_loader, dataset = open_training(image_size, first_epoch)
    if dataset.memory_cache is not None:
        check_memory_for(dataset, max(stage.size for stage in sizes.stages))  # not only when its time has come
    share = (run.ranks.rank, run.ranks.world_size) if shares_validation else None
    val_loader = None
    if share or run.ranks.is_main:
        val_loader = open_val_loader(run, fast, stride, first_epoch, dataset.row_forms, share)
    return Loaders(train_loader, dataset, image_size, val_loader, sizes, open_training)


def open_train_loader(run, fast, stride, image_size, first_epoch):
    """The training loader for images of `image_size` from `first_epoch` on, and its data set."""
    opt, ranks = run.options, run.ranks
    loader, dataset = create_dataloader(
        run.data.train, image_size, opt.batch_size, stride, opt, hyp=run.hyp, augment=not opt.overfit,
        cache=opt.cache_images, rect=opt.rect, rank=ranks.rank, world_size=ranks.world_size, workers=opt.workers,
        image_weights=opt.image_weights, quad=opt.quad, prefix="train: ", subset_filter=subset.from_options(opt),
        keypoints=run.data.keypoints, **(fast and fast | {"first_epoch": first_epoch}),
    )  # fmt: skip
    check_labels(dataset, run.data, opt.strict_data)
    if opt.total_batch_size > len(dataset):
        few = counted(len(dataset), "training image")
        verb = "is" if len(dataset) == 1 else "are"
        logger.warning("--batch-size %d: there %s only %s", opt.total_batch_size, verb, few)
    if not opt.allow_background:
        check_has_boxes(dataset.labels, dataset.label_files, dataset.findings)
    return loader, dataset


def open_val_loader(run, fast, stride, first_epoch, row_forms, share=None):
    """The validation loader, or that of a `share`; --overfit validates on its training images as training sees them.

    `row_forms` of the training set: a validation set of a few images may not show what its label rows are.
    """
    opt, image_size = run.options, check_img_size(run.options.img_size[1], stride)
    path, subset_filter = (run.data.train, subset.from_options(opt)) if opt.overfit else (run.data.val, None)
    # --max-iter shortens training only, and only training batches pass where the GPU does the last steps
    fast = {name: value for name, value in fast.items() if name not in ("max_batches", "defer_steps")}
    loader, dataset = create_dataloader(
        path, image_size, opt.test_batch_size or opt.batch_size * 2, stride, opt, hyp=run.hyp,
        cache=not opt.notest and opt.cache_images, rect=not opt.overfit, pad=0.5, world_size=run.ranks.world_size,
        workers=opt.workers, prefix="val: ", subset_filter=subset_filter, keypoints=run.data.keypoints,
        share=share, row_forms=row_forms, **(fast and fast | {"first_epoch": first_epoch}),
    )  # fmt: skip
    check_labels(dataset, run.data, opt.strict_data)
    return loader
