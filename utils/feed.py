"""From loader batches to tensors that the model can take."""

from typing import NamedTuple

import torch


class Batch(NamedTuple):
    """What one training step consumes.

    images [B x 3 x H x W] float 0..1 and targets [n x 6: image, class, x, y, w, h normalised], both on the device;
    paths, the files that the images came from.
    """

    images: torch.Tensor
    targets: torch.Tensor
    paths: tuple


def plain(loader, device):
    """Yield a Batch for each loader batch; the copy happens when the batch is asked for."""
    for images, targets, paths, _ in loader:
        yield Batch(images.to(device, non_blocking=True).float() / 255, targets.to(device), paths)
