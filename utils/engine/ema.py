"""Exponential moving average of a model's weights: the copy that is evaluated and saved."""

import math
from copy import deepcopy

import torch
from torch import nn

from utils.system.distributed import unwrap

RAMP_UPDATES = 2000  # the decay grows towards its full value with this time constant


def average_per_tensor(ema, model, decay):
    """Move each floating tensor of `ema` to e * decay + (1 - decay) * m, each product rounded on its own.

    stock behaviour: BatchNorm statistics are averaged like weights; whole numbers (num_batches_tracked) stay.
    """
    current = model.state_dict()
    for name, average in ema.state_dict().items():
        if average.is_floating_point():
            average.mul_(decay)
            average.add_(current[name].detach() * (1 - decay))


def new_half_copy(model):
    """A copy of `model` in half precision."""
    return deepcopy(model).half()


def empty_half_copy(model, device=None, memory_format=torch.preserve_format):
    """As `new_half_copy`, content undefined; on the device of `model` unless `device` says another."""
    copies = {}
    for tensor in (*model.parameters(), *model.buffers()):
        dtype = torch.half if tensor.is_floating_point() else tensor.dtype
        copies[id(tensor)] = torch.empty_like(tensor, dtype=dtype, device=device, memory_format=memory_format)
    return copy_with(copies, model)


def copy_with(tensors, model):
    """A copy of `model` whose parameters and buffers are `tensors` {id of the original: tensor}."""
    known = dict(tensors)
    for parameter in model.parameters():
        known[id(parameter)] = nn.Parameter(tensors[id(parameter)], parameter.requires_grad)
    return deepcopy(model, known)  # which takes those instead of making copies


class ModelEMA:
    """Holds `ema`, the average of a model in eval mode, and the number of `updates` that went into it.

    `half_copy` (ema) makes what a GPU evaluates.
    """

    half_copy = staticmethod(new_half_copy)

    def __init__(self, model, decay=0.9999, updates=0):
        self.ema = deepcopy(unwrap(model)).eval().requires_grad_(False)
        self.updates = updates
        self.final_decay = decay

    def decay(self, updates):
        """Weight of the old average at this update: near 0 at first, so that the average leaves the start quickly."""
        return self.final_decay * (1 - math.exp(-updates / RAMP_UPDATES))

    @torch.no_grad()
    def update(self, model):
        """Take in the weights of `model` after an optimiser step."""
        self.updates += 1
        average_per_tensor(self.ema, unwrap(model), self.decay(self.updates))

    def update_attr(self, model, include=(), exclude=("process_group", "reducer")):
        """Copy plain attributes of `model`: those named in `include`, or all public ones but `exclude`."""
        for name, value in vars(unwrap(model)).items():
            wanted = name in include if include else True
            if wanted and name not in exclude and not name.startswith("_"):
                setattr(self.ema, name, value)

    @torch.no_grad()
    def copy_anchors(self, model):
        """Take over the anchors of `model` exactly, after they were fitted to the data set."""
        current = dict(unwrap(model).named_buffers())
        for name, buffer in self.ema.named_buffers():
            if name.rpartition(".")[2] in ("anchors", "anchor_grid"):
                buffer.copy_(current[name])

    def ema_for_evaluation(self, half):
        """A model that may be evaluated: a half-precision copy with `half`, so that the average is never rounded."""
        return self.half_copy(self.ema) if half else self.ema
