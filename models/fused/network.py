"""The form of a model that trains and validates fastest on a GPU: the same parameters and buffers, planned operations.

In training the whole network is one operation of autograd. The layers are translated once into operations that write
each result where it is read and add the pieces of a gradient where they read it (plan.py, operations.py,
convolutions.py); what has no such operation is run by autograd as before. The model itself stays what is
averaged, evaluated and saved. Beyond rounding in half precision the fused form differs in one thing: where the maximum
of a window of max pooling occurs twice in it, the gradient may go to the other one.

    batch norm, activation   one operation (kernels.py)
    concatenation            its parts are written in place; the parts of its gradient are read in place
    convolutions of an input are one convolution
    max pooling, up-sampling read and write in place; 9x9 is 5x5 twice, 13x13 three times (pools.py)
    first convolution        with the sums of its norm; its gradient goes straight into that of the weight (stem.py)
    weights                  copied to half precision all at once
    implicit knowledge       folded into the output convolutions anew in each step, with its gradient
    detection layer          its maps are views of what the convolutions put out, of which boxes are made (boxes.py)
"""

import logging
from functools import partial

import torch
from torch import nn

from models.fused import boxes, kernels
from models.fused.plan import HEADS, Plan

logger = logging.getLogger(__name__)


def fused_model(model):
    """A module over the parameters and buffers of `model` (a Model) that computes what it does.

    Its maps are views [b x na x ny x nx x no] that are not contiguous. For another kind of detection layer, and where
    Triton does not work, it is the model itself, and a warning says why.
    """
    reason = why_not_fused(model)
    if reason:
        logger.warning("forward: not fused, %s", reason)
        return model
    fused = FusedModel(model)
    logger.info("forward: %s", fused.summary())
    return fused


def quietly_fused(model):
    """`fused_model` without a word in the log."""
    return model if why_not_fused(model) else FusedModel(model)


def why_not_fused(model):
    """What keeps `model` from being fused, in words; None if nothing does."""
    head = type(model.model[-1])
    if head not in HEADS:
        return f"there are no operations for {head.__name__}"
    return kernels.why_not_on(next(model.parameters()).device)


class FusedModel(nn.Module):
    """Runs `model` by a Plan; `model` itself where images need a gradient, or only some of the norms train.

    Images may be bytes.
    """

    takes_bytes = True

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.plan = Plan(model)

    def forward(self, images):
        """The output of the detection layer for images [b x ch x h x w], 0..1 (bytes: 0..255)."""
        plan, device, head = self.plan, images.device.type, self.model.model[-1]
        if images.requires_grad or head.export or any(norm.training is not self.training for norm in plan.norms):
            return self.model(images if images.is_floating_point() else images / 255)
        dtype = plan.parameters[0].dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        if self.training:
            return self._nested(PlannedNetwork.apply(plan, dtype, images, *plan.parameters))
        maps = self._nested(plan.evaluate(images, dtype))
        maps = maps[: head.nl] if isinstance(maps[0], torch.Tensor) else maps
        return head.eval_output(maps, partial(boxes.decode_all, head))

    def _nested(self, maps):
        """Maps in a row as those of the detection layer: lists of several heads."""
        maps = iter(maps)
        return [[next(maps) for _ in entry] if isinstance(entry, list) else next(maps) for entry in self.plan.outputs]

    def summary(self):
        """How many layers run by which code, in words."""
        num_layers, ordinary = len(self.model.model), self.plan.ordinary
        if not ordinary:
            return f"all {num_layers} layers fused"
        names = ", ".join(f"{count} {name}" for name, count in ordinary.items())
        return f"{num_layers} layers fused but for {names}"


class PlannedNetwork(torch.autograd.Function):
    """The maps of a Plan for images; gradients go to its parameters."""

    @staticmethod
    def forward(ctx, plan, dtype, images, *parameters):
        ctx.set_materialize_grads(False)
        maps, ctx.tape = plan.forward(images, dtype)
        ctx.plan = plan
        return tuple(maps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        return None, None, None, *ctx.plan.backward(ctx.tape, gradients)
