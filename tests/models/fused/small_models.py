"""Models for the tests of the fused model, and what it has to have in common with the model."""

from copy import deepcopy

import torch
from torch import nn

from models.fused.network import fused_model
from models.yolo import Model
from utils.fast.compile import tensors_in

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEAKY = "nn.LeakyReLU(0.1)"


def small_cfg(*stem):
    """A network of every kind of layer, with two strides."""
    rows = [
        *stem,
        [-1, 1, "Conv", [16, 3, 2]],  # 1
        [-1, 1, "Conv", [8, 1, 1, None, 1, LEAKY]],
        [1, 1, "Conv", [8, 1, 1, None, 1, LEAKY]],
        [-1, 1, "Conv", [8, 3, 1, None, 2, "nn.ReLU()"]],
        [[-1, 3, 2], 1, "Concat", [1]],  # 5
        [-1, 1, "MP", []],
        [-1, 1, "DownC", [16]],
        [-1, 1, "Conv", [16, 1, 1, None, 1, "nn.Hardswish()"]],
        [[-1, 7], 1, "Shortcut", [1]],
        [-1, 1, "SPPCSPC", [16]],  # 10
        [-1, 1, "nn.Upsample", [None, 2, "nearest"]],
        [6, 2, "RepConv", [24, 3, 1]],
        [[-1, 11, 6], 1, "Concat", [1]],
        [-1, 1, "RepConv", [40, 3, 1]],
        [-1, 1, "SP", [3]],  # 15
        [14, 1, "SP", [5]],
        [[-1, 15, 14, 13, 14], 1, "Concat", [1]],
        [[17, 10], 1, "IDetect", ["nc", "anchors"]],
    ]
    return {"nc": 2, "depth_multiple": 1.0, "width_multiple": 1.0, "anchors": [[8, 8, 12, 10], [16, 16, 24, 20]],
            "backbone": rows[:10], "head": rows[10:]}  # fmt: skip


def distance(found, wanted):
    """Relative, over all numbers together."""
    found, wanted = (torch.cat([t.detach().double().flatten() for t in tensors]) for tensors in (found, wanted))
    return float((found - wanted).norm() / wanted.norm())


def random_model(cfg, **options):
    torch.manual_seed(0)
    model = Model(cfg, **options).to(DEVICE).to(memory_format=torch.channels_last).train()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def trained(net, images, dtype=torch.float32):
    """The maps of one training pass; a backward pass with fixed gradients follows."""
    torch.backends.cudnn.allow_tf32 = False  # float32 means float32 here, on a GPU as well
    with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
        maps = net(images)
    maps = list(tensors_in(maps))
    generator = torch.Generator().manual_seed(1)
    torch.autograd.backward(maps, [torch.randn(y.shape, generator=generator).to(y) for y in maps])
    return [y.detach() for y in maps]


def compare_evaluation(model, images, limit=1e-5):
    """In evaluation boxes and maps of the fused model are those of the model, up to `limit`, and nothing changes."""
    torch.backends.cudnn.allow_tf32 = False
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean, 0.0, 0.3), nn.init.uniform_(norm.running_var, 0.5, 2.0)
    before = deepcopy(model).eval()
    fused = fused_model(model).eval()
    with torch.no_grad():
        found, wanted = fused(images), before(images if images.is_floating_point() else images / 255)
    assert distance(tensors_in(found), tensors_in(wanted)) < limit
    assert all(a.equal(b) for a, b in zip(model.buffers(), before.buffers(), strict=True))
    return fused


def compare(model, images, dtype, slack):
    """The fused model is as close to float64 as the model itself, `slack` times: both err by rounding, by chance."""
    plain, exact = deepcopy(model), deepcopy(model).double()
    found, wanted = trained(fused_model(model).train(), images, dtype), trained(plain, images, dtype)
    best = trained(exact, images.double())
    least = 1e-5 if dtype == torch.float32 else 0  # a norm over few numbers multiplies what was rounded
    assert distance(found, best) < slack * distance(wanted, best) + least
    names = [name for name, parameter in plain.named_parameters() if parameter.grad is not None]
    assert names == [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    gradients = [[p.grad for p in net.parameters() if p.grad is not None] for net in (model, plain, exact)]
    assert distance(gradients[0], gradients[2]) < slack * distance(gradients[1], gradients[2]) + least
    limit = 1e-3 if dtype == torch.float32 else 1
    for name, mine, theirs, right in zip(names, *gradients, strict=True):
        error = slack * (theirs - right).norm()  # of the first layers of a deep network it is the larger one
        assert mine.dtype == torch.float32 and (mine - right).norm() <= max(limit * right.norm() + 1e-9, error), name
    assert distance(list(model.buffers()), list(plain.buffers())) < (1e-5 if dtype == torch.float32 else 1e-3)
    counters = [[b for name, b in net.named_buffers() if "tracked" in name] for net in (model, plain)]
    assert torch.stack(counters[0]).equal(torch.stack(counters[1]))
