"""The form of a model that trains fastest on a GPU: the same parameters and buffers, other kernels.

A fused model shares every tensor with its model, so training one trains the other; the model itself stays what is
averaged, evaluated and saved. Beyond rounding in half precision it differs in one thing: where a maximum of max pooling
occurs twice in a window, the gradient may reach another one of the equals.

    batch norm, activation   one operation (models/fused_kernels.py)
    2x2 max pooling          remembers its choices in a byte each
    pyramids of max pooling  9x9 is 5x5 twice, 13x13 three times, so each level goes on from the one before
    implicit knowledge       folded into the output convolutions anew in each step, with its gradient
"""

from copy import deepcopy
from itertools import chain

import torch
from torch import nn
from torch.nn import functional

from models.common import MP, SP, SPPCSPC, Conv, RepConv
from models.fused_kernels import IDENTITY, LEAKY_RELU, SILU, HalvingPool, NormActivation
from models.yolo import IAuxDetect, IDetect, Model


def fused_model(model):
    """A module with the parameters and buffers of `model` (a Model on a GPU) that computes what it does in training."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    fused = deepcopy(model, shared)
    _chain_pyramids(fused)
    for module in fused.modules():
        if type(module) in FUSED:
            module.__class__ = FUSED[type(module)]
    return fused


def norm_activation(x, norm, activation=None):
    """activation(norm(x)), in one operation where there is one."""
    kind, slope = _kind(activation)
    if kind is None or not norm.training:
        x = norm(x)
        return x if activation is None else activation(x)
    return NormActivation.apply(
        x, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.momentum, norm.eps, kind, slope
    )


def _kind(activation):
    if activation is None or type(activation) is nn.Identity:
        return IDENTITY, 0.0
    if type(activation) is nn.LeakyReLU:
        return LEAKY_RELU, activation.negative_slope
    return (SILU, 0.0) if type(activation) is nn.SiLU else (None, 0.0)


class FusedConv(Conv):
    def forward(self, x):
        return norm_activation(self.conv(x), self.bn, self.act)


class FusedRepConv(RepConv):
    def forward(self, x):
        y = sum(norm_activation(convolve(x), norm) for convolve, norm in (self.rbr_dense, self.rbr_1x1))
        if self.rbr_identity is not None:
            y = y + norm_activation(x, self.rbr_identity)
        return self.act(y)


class FusedMP(MP):
    def forward(self, x):
        halves = self.m.kernel_size == self.m.stride == 2 and x.shape[2] % 2 == x.shape[3] % 2 == 0
        return HalvingPool.apply(x) if halves else self.m(x)


class FusedSPPCSPC(SPPCSPC):
    def forward(self, x):
        base = self.cv4(self.cv3(self.cv1(x)))
        pyramid, window = [base], 1
        for pool in self.m:  # windows 5, 9, 13
            pyramid.append(_grown(pool, window)(pyramid[-1]))
            window = pool.kernel_size
        return self.cv7(torch.cat((self.cv6(self.cv5(torch.cat(pyramid, 1))), self.cv2(x)), 1))


class FusedIDetect(IDetect):
    def _lead(self, level, features):
        with torch.autocast(features.device.type, enabled=False):  # sums over channels, in float32
            weight, bias = self.folded(level)
        return functional.conv2d(features, weight, bias)


class FusedIAuxDetect(FusedIDetect, IAuxDetect):
    pass


class FusedModel(Model):
    """Counts the batches of all norms at once: one launch instead of one for each layer."""

    def forward(self, x, augment=False, profile=False):
        if self.training:
            counters = [norm.num_batches_tracked for norm in self.modules() if isinstance(norm, nn.BatchNorm2d)]
            torch._foreach_add_(counters, 1)
        return super().forward(x, augment, profile)


FUSED = {
    Model: FusedModel, Conv: FusedConv, RepConv: FusedRepConv, MP: FusedMP, SPPCSPC: FusedSPPCSPC,
    IDetect: FusedIDetect, IAuxDetect: FusedIAuxDetect,
}  # fmt: skip


def _grown(pool, window):
    """What is still to be done to reach `pool` (stride 1, same size) after max pooling with a `window`."""
    size = pool.kernel_size - window + 1
    return nn.MaxPool2d(size, stride=1, padding=size // 2)


def _chain_pyramids(fused):
    """Let max pooling layers of one input and growing windows (SP) work on each other's output."""
    source, window = None, 1
    for layer in fused.model:
        if type(layer) is not SP or layer.m.stride != 1:
            source = None
            continue
        own_source, own_window = layer.f if layer.f >= 0 else layer.i + layer.f, layer.m.kernel_size
        if own_source == source and own_window > window and (own_window - window) % 2 == 0:
            layer.f, layer.m = -1, _grown(layer.m, window)
        source, window = own_source, own_window
