"""How large a model is and how long its layers take."""

import logging
import time
from dataclasses import dataclass

import torch
from torch import nn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Summary:
    """Size of a model; `gflops` is for one image, two operations per multiply-add."""

    layers: int  # nn.Module objects, containers included
    parameters: int
    gradients: int  # parameters that are trained
    gflops: float

    def __str__(self):
        return (
            f"{self.layers} layers, {self.parameters} parameters, {self.gradients} gradients, {self.gflops:.1f} GFLOPs"
        )


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
