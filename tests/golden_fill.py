"""Deterministic numbers for the golden comparisons: they depend on names only, not on any generator."""

import math
import zlib

import numpy as np
import torch


def v(name, n, start=0):
    """`n` float64 values in [-1, 1): an integer hash of `name` and of the positions start, start + 1, ..."""
    h = np.arange(start, start + n, dtype=np.uint32)
    h *= np.uint32(2654435761)
    h += np.uint32(zlib.crc32(name.encode()))
    for shift, factor in ((15, 2246822519), (13, 3266489917)):
        h ^= h >> np.uint32(shift)
        h *= np.uint32(factor)
    h ^= h >> np.uint32(16)
    return h / 2.0**31 - 1


def fill(model, gain=1.0, prefix=""):
    """Overwrite parameters and buffers of `model` by rules on `prefix` + state_dict key; returns `model`.

    `gain` scales the convolutions. Anchors keep their value.
    """
    for key, tensor in model.state_dict().items():
        if key.endswith("num_batches_tracked"):
            tensor.zero_()
        elif not key.endswith(("anchors", "anchor_grid")):
            values = _scaled(prefix + key, v(prefix + key, tensor.numel()), tensor.shape, gain)
            tensor.copy_(torch.from_numpy(values.astype(np.float32)).view(tensor.shape))
    return model


def _scaled(name, values, shape, gain):
    if ".ia." in name:
        return 0.1 * values
    if ".im." in name:
        return 1 + 0.1 * values
    if name.endswith("running_var"):
        return 1 + 0.5 * values
    if name.endswith("running_mean"):
        return 0.1 * values
    if len(shape) == 4:
        return values * (gain * math.sqrt(3 / (shape[1] * shape[2] * shape[3])))
    if name.endswith(".bias"):
        return 0.1 * values
    assert len(shape) == 1 and name.endswith(".weight"), f"no fill rule for {name}"
    return 1 + 0.2 * values


def image(shape):
    """Input image(s) of `shape` [b x 3 x h x w, 0..1]."""
    return signal("input", shape, lambda values: (values + 1) / 2)


def signal(name, shape, scale=lambda values: values):
    """A float32 tensor of `shape` with the values of `name`."""
    return torch.from_numpy(scale(v(name, math.prod(shape))).astype(np.float32)).view(tuple(shape))
