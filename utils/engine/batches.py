"""From loader batches to tensors that the model can take."""

import logging
import math
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

logger = logging.getLogger(__name__)


class Batch(NamedTuple):
    """What one training step consumes.

    images [B x 3 x H x W] float 0..1 and targets [n x 6: image, class, x, y, w, h normalised], both on the device
    (under --fast-loss the targets stay on the host, under --fast-step the images are bytes); paths, the files that the
    images came from.
    """

    images: torch.Tensor
    targets: torch.Tensor
    paths: tuple


def plain(loader: Iterable, device: torch.device, targets_device: torch.device | None = None) -> Iterator[Batch]:
    """Yield a Batch for each loader batch; the copy happens when the batch is asked for.

    `targets_device` is for a loss that wants its targets elsewhere.
    """
    for images, targets, paths, _ in loader:
        yield Batch(images.to(device, non_blocking=True).float() / 255, targets.to(targets_device or device), paths)


class FromStart:
    """Passes over a loader that all begin with its first batch, also after one that was left early.

    The loaders themselves go on where they were left, and all later passes would begin there.
    """

    def __init__(self, loader):
        self.loader, self.num_given = loader, 0  # of a pass that is not complete

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        if self.num_given:
            for _ in zip(range(len(self.loader) - self.num_given), self.loader, strict=False):
                pass
        for number, batch in enumerate(self.loader, 1):
            self.num_given = number
            yield batch
        self.num_given = 0


def multi_scaled(batches, image_size, stride):
    """Resize each batch to a random size of 0.5 to 1.5 times `image_size`, a multiple of `stride` (both in pixels).

    Draws once from Python's generator for each batch.
    """
    for batch in batches:
        size = random.randrange(image_size // 2, image_size * 3 // 2 + stride) // stride * stride
        factor = max(size, stride) / max(batch.images.shape[2:])
        if factor != 1:
            shape = [math.ceil(side * factor / stride) * stride for side in batch.images.shape[2:]]
            images = functional.interpolate(batch.images, size=shape, mode="bilinear", align_corners=False)
            batch = batch._replace(images=images)
        yield batch


class Trainable:
    """Passes batches on, but drops single images whose deepest feature map is one cell.

    BatchNorm cannot take statistics over one value. It happens to the last batch of an epoch; the first time is
    answered with a warning. One of several processes (`is_shared`) takes such an image twice instead: it cannot know
    whether the others have one as well, and all have to make the same steps.
    Raises ValueError when a whole epoch consists of such batches.
    """

    def __init__(self, stride, is_shared=False):
        self.stride, self.is_shared, self.warned = stride, is_shared, False

    def __call__(self, batches):
        num_passed = 0
        for batch in batches:
            if len(batch.images) > 1 or max(batch.images.shape[2:]) > self.stride:
                num_passed += 1
                yield batch
                continue
            if not self.warned:
                self.warned = True
                logger.warning(
                    "a batch of one image of %d px is %s each epoch: BatchNorm needs more than one value; choose "
                    "a batch size that divides the set, or larger images", self.stride,
                    "taken twice" if self.is_shared else "skipped")  # fmt: skip
            if self.is_shared:
                yield _twice(batch)
        if not num_passed:
            raise ValueError(
                f"no batch can be trained: all are single images of at most {self.stride} px, and BatchNorm needs "
                "more than one value; give a larger --batch-size or --img-size"
            )


def _twice(batch):
    """A Batch with its single image a second time."""
    again = batch.targets.clone()
    again[:, 0] = 1
    return Batch(torch.cat((batch.images,) * 2), torch.cat((batch.targets, again)), tuple(batch.paths) * 2)
