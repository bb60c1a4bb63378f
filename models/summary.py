"""How large a model is and how long its layers take."""

import logging
import math
import time
from dataclasses import dataclass

import torch
from torch import nn

logger = logging.getLogger(__name__)

MAX_NUMBERS = 150_000_000  # that all layers put out for one image of 256 x 256; the largest model of the family has 44
POOLING = 30  # multiply-adds that take as long as one comparison of pooling, roughly
MAX_MACS = 300_000_000_000  # for that image; the largest model of the family needs 20 thousand million


@dataclass(frozen=True)
class Summary:
    """Size of a model; `gflops` is for one image, two operations per multiply-add."""

    layers: int  # nn.Module objects, containers included
    parameters: int
    gradients: int  # parameters that are trained
    gflops: float
    is_fused: bool = False  # no batch norms are left: for inference only

    def __str__(self):
        use = "fused for inference" if self.is_fused else f"{self.gradients} gradients"
        return f"{self.layers} layers, {self.parameters} parameters, {use}, {self.gflops:.1f} GFLOPs"


def model_summary(model, img_size=640):
    """Summary of a models.yolo.Model for images of `img_size` (int or [h, w])."""
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    side = max(int(model.stride.max()), 32)
    operations = 2 * count_macs(model, side) / side**2 * height * width
    parameters = list(model.parameters())
    return Summary(
        layers=len(list(model.modules())),
        parameters=sum(p.numel() for p in parameters),
        gradients=sum(p.numel() for p in parameters if p.requires_grad),
        gflops=operations / 1e9,
        is_fused=not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()),
    )


@torch.no_grad()
def count_macs(model, side):
    """Multiply-adds of one eval-mode pass over a zero image of `side` x `side` pixels.

    Counted as thop 0.1.1 does, so that the figures compare with published ones: convolutions without their bias, four
    per batch-norm output, one per up-sampled pixel, nothing else. An auxiliary head counts until the model is fused.
    """
    total = 0

    def count(module, _, output):
        nonlocal total
        if isinstance(module, nn.Conv2d):
            total += output.numel() * module.weight[0].numel()
        elif isinstance(module, nn.Upsample):
            total += output.numel()
        else:
            total += 4 * output.numel()

    counted = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.modules.batchnorm._BatchNorm, nn.Upsample))]
    hooks = [module.register_forward_hook(count) for module in counted]
    training = {module: module.training for module in model.modules()}
    weight = next(model.parameters())
    try:
        model.eval()
        head = model.model[-1]
        head.training = not getattr(head, "implicit_folded", False)
        model(torch.zeros(1, model.yaml["ch"], side, side, device=weight.device, dtype=weight.dtype))
    finally:
        for hook in hooks:
            hook.remove()
        for module, flag in training.items():
            module.training = flag
    return total


class SizeLimit:
    """Refuses a network, layer by layer and before each runs, that would fill the memory or take minutes an image.

    `numbers` and `macs` are what the layers so far put out and multiplied for one image.
    """

    def __init__(self):
        self.numbers, self.macs = 0, 0

    def before(self, layer, x):
        """Count `layer` for the input `x`, a tensor or a list of them; raises ValueError beyond the limits."""
        inputs = x if isinstance(x, list) else [x]
        channels, *sides = inputs[0].shape[1:]
        largest = sum(tensor.numel() for tensor in inputs)
        for module in layer.modules():
            if not isinstance(module, (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.Upsample)):
                continue
            outputs = getattr(module, "out_channels", channels) * math.prod(_sides(module, sides))
            if isinstance(module, nn.Conv2d):
                self.macs += outputs * module.weight[0].numel()
            elif not isinstance(module, nn.Upsample):
                self.macs += POOLING * outputs * min(math.prod(_pair(module.kernel_size)), math.prod(sides))
            largest = max(largest, outputs)
            sides = [max(pair) for pair in zip(sides, _sides(module, sides), strict=True)]  # repetitions may grow
        self.numbers += largest
        if self.numbers > MAX_NUMBERS or self.macs > MAX_MACS:
            raise ValueError("the layers up to this one would fill the memory, or take minutes for one image")


def _sides(module, sides):
    """Height and width that a convolution, pooling or up-sampling makes of `sides`."""
    if isinstance(module, nn.Upsample):
        scale = _pair(module.scale_factor or 1)
        return list(_pair(module.size or [side * factor for side, factor in zip(sides, scale, strict=True)]))
    padding = (0, 0) if isinstance(module.padding, str) else _pair(module.padding)
    rows = zip(sides, padding, _pair(module.kernel_size), _pair(module.stride), strict=True)
    return [(side + 2 * p - kernel) // max(stride, 1) + 1 for side, p, kernel, stride in rows]


def _pair(value):
    return value if isinstance(value, (tuple, list)) else (value, value)


def timed(layer, x):
    """Run one layer of a Model and log how long it took."""
    _synchronise(x)
    start = time.perf_counter()
    y = layer(x)
    _synchronise(x)
    milliseconds = (time.perf_counter() - start) * 1e3
    logger.info("layer %4d %8.2f ms %10d parameters  %s", layer.i, milliseconds, layer.np, layer.type)
    return y


def _synchronise(x):
    tensor = x[0] if isinstance(x, (list, tuple)) else x
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
