"""What the kernels of the fused model compute, written with torch: for plans of large models on a CPU."""

import torch
from torch.nn import functional

from models.common import ReOrg
from models.fused import boxes, kernels, pools, stem, sums

ACTIVATIONS = {
    kernels.IDENTITY: lambda z, slope: z,
    kernels.LEAKY_RELU: functional.leaky_relu,
    kernels.SILU: lambda z, slope: functional.silu(z),
}


def write(y, places):
    for place in places:
        if place is not None:
            place.copy_(y)


def gradients(function, inputs, pieces):
    """Those of `function` by the tensors `inputs`, from the sum of `pieces`."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.enable_grad():
        y = function(*leaves)
    return torch.autograd.grad(y, leaves, sum(pieces).to(y.dtype))


def norm_activation(x, norm, kind, slope, places, known=None):
    if known is not None:
        scale, shift = known[2:, :, None, None]
        write(ACTIVATIONS[kind](x * scale + shift, slope), places)
        return known
    numbers = norm.running_mean, norm.running_var, norm.weight, norm.bias  # without the count of batches
    y = functional.batch_norm(x, *numbers, True, norm.momentum, norm.eps)
    write(ACTIVATIONS[kind](y, slope), places)
    return norm.weight, norm.bias, norm.eps


def norm_activation_gradient(pieces, x, saved, kind, slope, result, of_weight, of_bias):
    *parameters, eps = saved

    def function(x, weight, bias):
        return ACTIVATIONS[kind](functional.batch_norm(x, None, None, weight, bias, True, eps=eps), slope)

    places = result, of_weight, of_bias
    for place, gradient in zip(places, gradients(function, [x, *parameters], pieces), strict=True):
        place.copy_(gradient)


def add_activation(terms, kind, slope, places):
    write(ACTIVATIONS[kind](sum(terms), slope), places)


def add_activation_gradient(pieces, terms, kind, slope):
    return gradients(lambda total: ACTIVATIONS[kind](total, slope), [sum(terms)], pieces)[0]


def _pool(window, stride):
    padding = window // 2 if stride == 1 else 0
    return lambda x: functional.max_pool2d(x, window, stride, padding)


def max_pool(x, window, stride=1, out=None, copy=None):
    write(_pool(window, stride)(x), (out, copy))
    return out, x.detach().clone()


def max_pool_gradient(pieces, choice, window, stride=1, size=None, plus=()):
    return sum(plus, gradients(_pool(window, stride), [choice], pieces)[0])


def upsample(x, out=None, copy=None):
    write(functional.interpolate(x, scale_factor=2), (out, copy))
    return out


def upsample_gradient(pieces, plus=()):
    batch, channels, height, width = pieces[0].shape
    x = pieces[0].new_zeros(batch, channels, height // 2, width // 2)
    return sum(plus, gradients(lambda x: functional.interpolate(x, scale_factor=2), [x], pieces)[0])


def as_stem_reads(images, block):
    images = images.float() / 255 if images.dtype == torch.uint8 else images
    return ReOrg()(images) if block == 2 else images


def stem_forward(images, conv, norm, kind, slope, block, dtype, places, known=None):
    x = as_stem_reads(images, block).to(dtype)
    y = functional.conv2d(x, conv.weight.to(dtype), None, conv.stride, 1)
    return x, y, norm_activation(y, norm, kind, slope, places, known)


def stem_gradient(pieces, kept, conv, kind, slope, of_weight, of_bias):
    x, y, saved = kept
    of_y = torch.empty_like(y)
    norm_activation_gradient(pieces, y, saved, kind, slope, of_y, of_weight, of_bias)
    return gradients(lambda w: functional.conv2d(x, w.to(x.dtype), None, conv.stride, 1), [conv.weight], [of_y])[0]


def use(monkeypatch):
    """Let the operations of the fused model call these."""
    monkeypatch.setattr(kernels, "why_not_on", lambda device: None)
    for name in ("norm_activation", "norm_activation_gradient"):
        monkeypatch.setattr(kernels, name, globals()[name])
    for name in ("add_activation", "add_activation_gradient"):
        monkeypatch.setattr(sums, name, globals()[name])
    for name in ("max_pool", "max_pool_gradient", "upsample", "upsample_gradient"):
        monkeypatch.setattr(pools, name, globals()[name])
    monkeypatch.setattr(boxes, "decode_all", lambda head, maps: head._decode_all(maps))
    monkeypatch.setattr(stem, "forward", stem_forward)
    monkeypatch.setattr(stem, "gradient", stem_gradient)
