"""The fused model against the model: values, gradients, statistics, and the tensors they share."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from models.common import SP
from models.yolo import Model

CFGS = ("yolov7-tiny", "yolov7", "yolov7-w6")


def on_gpu(cfg, **kwargs):
    torch.manual_seed(0)
    return Model(f"cfg/training/{cfg}.yaml", nc=3, **kwargs).cuda().to(memory_format=torch.channels_last).train()


def passes(net, images, half, scale=1.0):
    """Predictions of one training pass, after a backward pass with fixed gradients."""
    with torch.autocast("cuda", enabled=half):
        predictions = net(images)
    generator = torch.Generator("cuda").manual_seed(1)
    gradients = [torch.randn(p.shape, generator=generator, device="cuda") * scale for p in predictions]
    torch.autograd.backward([p.float() for p in predictions], gradients)
    return [p.detach().float() for p in predictions]


def distance(a, b):
    """Relative, over all numbers together."""
    a, b = (torch.cat([t.detach().double().flatten() for t in tensors]) for tensors in (a, b))
    return float((a - b).norm() / b.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("cfg", CFGS)
def test_fused_model_computes_what_the_model_does(cfg):
    from models.fused import fused_model

    model = on_gpu(cfg)
    plain = deepcopy(model)
    exact = deepcopy(model).double()
    images = torch.rand(8, 3, 256, 256, device="cuda").to(memory_format=torch.channels_last)
    fused = fused_model(model)
    found, wanted = passes(fused, images, False), passes(plain, images, False)
    best = passes(exact, images.double(), False)
    # as close to float64 as the model itself is
    assert distance(found, best) < max(2 * distance(wanted, best), 1e-5)
    gradients = [[p.grad for p in net.parameters()] for net in (model, plain, exact)]
    assert distance(gradients[0], gradients[2]) < max(2 * distance(gradients[1], gradients[2]), 1e-4)
    buffers = [list(net.buffers()) for net in (model, plain)]
    assert distance(*buffers) < 1e-5
    counters = [[norm.num_batches_tracked.item() for norm in net.modules() if isinstance(norm, nn.BatchNorm2d)]
                for net in (model, plain)]  # fmt: skip
    assert counters[0] == counters[1]


@pytest.mark.gpu
@pytest.mark.parametrize("cfg", CFGS)
def test_half_precision_is_as_close_to_float64_as_that_of_the_model(cfg):
    from models.fused import fused_model

    model = on_gpu(cfg)
    plain, exact = deepcopy(model), deepcopy(model).double()
    images = torch.rand(8, 3, 256, 256, device="cuda").to(memory_format=torch.channels_last)
    found, wanted = passes(fused_model(model), images, True), passes(plain, images, True)
    best = passes(exact, images.double(), False)
    assert distance(found, best) < 1.2 * distance(wanted, best)
    gradients = [[p.grad for p in net.parameters()] for net in (model, plain, exact)]
    assert distance(gradients[0], gradients[2]) < 1.2 * distance(gradients[1], gradients[2])


@pytest.mark.gpu
def test_fused_model_shares_every_tensor_and_leaves_the_model_alone():
    from models.fused import fused_model

    model = on_gpu("yolov7-tiny")
    kinds = [type(module) for module in model.modules()]
    sources = [layer.f for layer in model.model]
    fused = fused_model(model)
    assert [type(module) for module in model.modules()] == kinds and [layer.f for layer in model.model] == sources
    assert all(a is b for a, b in zip(fused.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(fused.buffers(), model.buffers(), strict=True))
    windows = [layer.m.kernel_size for layer in fused.model if isinstance(layer, SP)]
    assert windows == [5, 5, 5] and list(fused.state_dict()) == list(model.state_dict())


@pytest.mark.gpu
def test_fused_model_evaluates_like_the_model():
    from models.fused import fused_model

    model = on_gpu("yolov7-tiny")
    images = torch.rand(2, 3, 64, 64, device="cuda")
    fused = fused_model(model)
    fused.eval(), model.eval()
    with torch.no_grad():
        assert fused(images)[0].sub(model(images)[0]).abs().max() < 1e-2  # pixels


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 5, 6, 4), (3, 64, 40, 40), (1, 200, 2, 2)])
def test_halving_pool(shape):
    from models.fused_kernels import HalvingPool

    x = torch.randint(-3, 3, shape, device="cuda").half()  # many ties
    x = x.to(memory_format=torch.channels_last)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, wanted = HalvingPool.apply(ours), nn.functional.max_pool2d(theirs, 2)
    gradient = torch.randn_like(wanted)
    y.backward(gradient), wanted.backward(gradient)
    assert y.equal(wanted) and ours.grad.equal(theirs.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [nn.Identity(), nn.LeakyReLU(0.1), nn.SiLU()])
@pytest.mark.parametrize("shape", [(2, 5, 7, 3), (4, 64, 20, 20), (1, 130, 4, 4)])
def test_norm_and_activation_on_slices(activation, shape):
    """x and its gradient are slices of larger maps, as in a concatenation."""
    from models.fused import norm_activation

    channels = shape[1]
    norm = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.03).cuda()
    nn.init.uniform_(norm.weight), nn.init.normal_(norm.bias)
    other = deepcopy(norm).double()
    whole = torch.randn(shape[0], channels + 6, *shape[2:], device="cuda").to(memory_format=torch.channels_last) * 3 + 1
    slices = [whole.detach()[:, 3 : 3 + channels] for _ in range(2)]
    x, exact = slices[0].clone().requires_grad_(), slices[1].double().requires_grad_()
    y, wanted = norm_activation(x, norm, activation), activation(other(exact))
    gradient = torch.randn_like(whole)[:, 2 : 2 + channels]
    y.backward(gradient), wanted.backward(gradient.double())
    pairs = [(y, wanted), (x.grad, exact.grad), (norm.weight.grad, other.weight.grad),
             (norm.bias.grad, other.bias.grad), (norm.running_mean, other.running_mean),
             (norm.running_var, other.running_var)]  # fmt: skip
    assert all(distance([a], [b]) < 1e-5 for a, b in pairs)
