"""Many tensors in one: each becomes a view of a flat tensor, so that one operation handles all of them."""

from itertools import accumulate

import torch

ALIGNED = 64  # elements; every tensor starts at a multiple of this, as kernels like it


def starts_of(tensors):
    """Where each of `tensors` begins in a flat tensor [n], and the length of that; gaps between them hold zeros."""
    return list(accumulate((-(-tensor.numel() // ALIGNED) * ALIGNED for tensor in tensors), initial=0))


def view_of(flat, start, like):
    """The part of `flat` from `start` on, with the shape and strides of `like`."""
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset() + start)


def flatten(tensors, device):
    """Move the contents of `tensors`, float32, into one flat tensor, and return it; they stay the same objects."""
    starts = starts_of(tensors)
    flat = torch.zeros(starts[-1], device=device)
    for tensor, start in zip(tensors, starts, strict=False):
        place = view_of(flat, start, tensor)
        place.copy_(tensor.detach())
        tensor.data = place
    return flat
