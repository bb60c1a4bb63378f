"""The kernels of models/fused/pools.py and stem.py against torch, on a GPU or interpreted on a CPU.

Run by test_network.py in a process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional

from models.common import ReOrg
from models.fused import pools, stem
from models.fused.plan import kind_of
from tests.models.fused.small_models import distance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# channels that are no multiple of 8 or more than a program takes, odd sides, sides smaller than the windows
SHAPES = [(2, 5, 7, 6), (1, 72, 3, 9), (3, 8, 1, 1)]


def random(shape, dtype=torch.float32, seed=0, ties=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 3, shape, generator=generator) if ties else torch.randn(shape, generator=generator)
    return x.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


def sliced(x, before=3, after=2):
    """The same numbers as a slice of channels of a larger map, as in a concatenation."""
    batch, channels, height, width = x.shape
    whole = random((batch, before + channels + after, height, width), x.dtype, seed=9)
    whole[:, before : before + channels] = x
    return whole[:, before : before + channels]


def whole_of(x):
    return x._base if x._base is not None else x


def torch_pool(x, window, stride):
    """Maximum and gradient function, by torch in float32 or as told."""
    x = x.detach().requires_grad_()
    y = functional.max_pool2d(x, window, stride, window // 2 if stride == 1 else 0)
    return y.detach(), lambda gradient: torch.autograd.grad(y, x, gradient, retain_graph=True)[0]


@pytest.mark.parametrize(("shape", "window", "stride", "dtype"), [
    (SHAPES[0], 5, 1, torch.float16), (SHAPES[1], 5, 1, torch.float32), (SHAPES[0], 3, 1, torch.float32),
    (SHAPES[0], 2, 2, torch.float32), (SHAPES[1], 2, 2, torch.float16), (SHAPES[0], 3, 3, torch.float16),
])  # fmt: skip
def test_max_pool_with_ties_equals_that_of_torch(shape, window, stride, dtype):
    x = random(shape, dtype, ties=True)
    wanted, gradient_of = torch_pool(x, window, stride)
    y, choice = pools.max_pool(x, window, stride)
    assert y.equal(wanted) and choice.dtype == torch.uint8 and choice.shape == y.shape
    gradient = random(wanted.shape, dtype, seed=1)
    found = pools.max_pool_gradient([gradient], choice, window, stride, size=shape[2:])
    exact = torch_pool(x.double(), window, stride)[1](gradient.double())
    assert found.dtype == dtype
    # up to 25 gradients meet in float32, then one rounding
    assert torch.allclose(found.double(), exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 5e-3)
    if stride > 1:
        assert found.equal(gradient_of(gradient))  # nothing to add


@pytest.mark.parametrize(("window", "stride"), [(5, 1), (3, 1), (2, 2)])
def test_maxima_that_are_not_numbers_or_infinite(window, stride):
    x = random((2, 9, 8, 8), ties=True)
    x[0, ::2, 3, 4], x[0, ::2, 4, 3] = float("nan"), float("nan")
    x[1, 1] = float("-inf")
    x[1, 2, 5, 5] = float("inf")
    wanted, gradient_of = torch_pool(x.cpu(), window, stride)  # of several NaN a GPU takes another one
    y, choice = (found.cpu() for found in pools.max_pool(x, window, stride))
    assert torch.equal(y.nan_to_num(7e7), wanted.nan_to_num(7e7)) and y.isnan().equal(wanted.isnan())
    gradient = random(wanted.shape, ties=True, seed=1)  # whole numbers: sums are exact
    found = pools.max_pool_gradient([gradient], choice.to(DEVICE), window, stride)
    assert found.cpu().equal(gradient_of(gradient.cpu()))


def test_a_gradient_that_is_no_number_reaches_the_chosen_only():
    x = random((1, 8, 6, 6))
    _, choice = pools.max_pool(x, 5)
    gradient = torch.ones_like(x)
    gradient[0, 0, 0, 0] = float("nan")
    assert pools.max_pool_gradient([gradient], choice, 5).isnan().sum() == 1


@pytest.mark.parametrize(("shape", "window", "stride"), [
    (SHAPES[0], 5, 1), (SHAPES[2], 5, 1), (SHAPES[0], 3, 1), (SHAPES[0], 2, 2), (SHAPES[1], 2, 2),
])  # fmt: skip
def test_max_pool_reads_and_writes_slices(shape, window, stride):
    x = random(shape, ties=True)
    wanted, gradient_of = torch_pool(x, window, stride)
    out, copy = sliced(torch.zeros_like(wanted)), sliced(torch.zeros_like(wanted), 8, 0)
    around = whole_of(out).clone()
    y, choice = pools.max_pool(sliced(x), window, stride, out=out, copy=copy)
    assert y is out and out.equal(wanted) and copy.equal(wanted)
    around[:, 3 : 3 + shape[1]] = wanted
    assert whole_of(out).equal(around)  # nothing beside the slice
    pieces = [sliced(random(wanted.shape, seed=n, ties=True), n, 4 - n) for n in (1, 2, 3)]
    plus = [sliced(random(shape, seed=n, ties=True), 1, n) for n in (4, 5)]
    for count, more in ((1, 1), (2, 2), (3, 0)):
        found = pools.max_pool_gradient(pieces[:count], choice, window, stride, shape[2:], plus[:more])
        assert found.equal(gradient_of(sum(pieces[:count])) + sum(plus[:more]))


def test_the_pyramid_in_one_chain():
    """9x9 is 5x5 twice, 13x13 three times; where no numbers are equal, its gradient is that of single pools."""
    x = random((1, 8, 8, 8)).requires_grad_()
    wanted = torch.cat([functional.max_pool2d(x, size, 1, size // 2) for size in (13, 9, 5)] + [x], 1)
    whole = torch.empty_like(wanted)
    parts, choices = whole.split(8, 1), []
    parts[3].copy_(x.detach())
    for level in (2, 1, 0):
        choices.append(pools.max_pool(parts[level + 1], 5, out=parts[level])[1])
    gradient = random(wanted.shape, seed=1)
    wanted.backward(gradient)
    slices = gradient.split(8, 1)
    found = slices[0]
    for level, choice in zip((1, 2, 3), reversed(choices), strict=True):
        found = pools.max_pool_gradient([found], choice, 5, plus=[slices[level]])
    assert whole.equal(wanted) and torch.allclose(found, x.grad, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_upsample(shape):
    x = random(shape, torch.float16).requires_grad_()
    wanted = functional.interpolate(x, scale_factor=2, mode="nearest")
    out, copy = (sliced(random(wanted.shape, torch.float16)) for _ in range(2))
    assert pools.upsample(sliced(x.detach()), out, copy).equal(wanted) and copy.equal(wanted)
    assert pools.upsample(x.detach()).equal(wanted)
    pieces = [sliced(random(wanted.shape, torch.float16, seed=n)) for n in (1, 2)]
    plus = random(shape, torch.float16, seed=3)
    exact = functional.avg_pool2d(sum(piece.double() for piece in pieces), 2) * 4
    for given, total in (([], exact), ([plus], exact + plus.double())):
        found = pools.upsample_gradient(pieces, plus=given)
        assert (found.double() - total).abs().max() <= total.abs().max() * 2**-11  # one rounding to half


def test_what_cannot_be_done_is_said():
    x = random((1, 8, 6, 6))
    for window, stride in ((4, 1), (17, 1), (3, 2)):
        with pytest.raises(ValueError, match="give an odd window"):
            pools.max_pool(x, window, stride)
    with pytest.raises(ValueError, match="cannot be written into"):
        pools.upsample(x, out=torch.empty(1, 8, 12, 12, device=DEVICE))  # channels first
    with pytest.raises(ValueError, match="cannot be written into"):
        pools.max_pool(x, 5, copy=random((1, 8, 6, 5)))
    for pieces in ([x] * 4, [x, x[:, :4]], []):
        with pytest.raises(AssertionError, match="up to three alike"):
            pools.upsample_gradient(pieces)


def test_maps_that_are_laid_out_otherwise_are_copied():
    x = random((2, 6, 5, 4)).contiguous()
    y, choice = pools.max_pool(x, 3)
    wanted, gradient_of = torch_pool(x, 3, 1)
    gradient = torch.ones_like(wanted).contiguous()
    assert y.equal(wanted) and pools.max_pool_gradient([gradient], choice, 3).equal(gradient_of(gradient))


def as_fractions(images):
    """Bytes as float32 in 0..1, divided by a CPU: a GPU multiplies with the inverse of a number instead."""
    return (images.cpu().float() / 255).to(images.device)


def bytes_of(shape, channels_last):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, shape, generator=generator, dtype=torch.uint8).to(DEVICE)
    return images.contiguous(memory_format=torch.channels_last) if channels_last else images


@pytest.mark.parametrize(("colours", "outputs", "size", "stride", "block", "activation"), [
    (3, 32, (9, 7), 2, 1, nn.LeakyReLU(0.1)), (3, 24, (6, 8), 1, 1, nn.SiLU()), (1, 8, (1, 2), 1, 1, nn.Identity()),
    (3, 40, (8, 6), 1, 2, nn.SiLU()), (4, 16, (7, 5), 2, 1, nn.SiLU()),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32] + [torch.float16, torch.bfloat16] * (DEVICE == "cuda"))
@pytest.mark.parametrize("source", ["bytes", "floats", "channels last"])
def test_the_stem_equals_convolution_norm_and_activation(
    colours, outputs, size, stride, block, activation, dtype, source
):
    torch.manual_seed(0)
    images = bytes_of((2, colours, *size), source == "channels last")
    exact_images = as_fractions(images).to(dtype).double()
    images = as_fractions(images) if source == "floats" else images
    conv = nn.Conv2d(colours * block**2, outputs, 3, stride, 1, bias=False).to(DEVICE)
    norm = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03).to(DEVICE)
    nn.init.uniform_(norm.weight, 0.5, 1.5), nn.init.normal_(norm.bias)
    exact = nn.Sequential(ReOrg() if block == 2 else nn.Identity(), deepcopy(conv), deepcopy(norm), activation).double()
    exact[1].weight.data = conv.weight.detach().to(dtype).double()
    wanted = exact(exact_images)
    places = [sliced(torch.zeros(wanted.shape, device=DEVICE, dtype=dtype)) for _ in range(2)]
    kind = kind_of(activation)
    kept = stem.forward(images, conv, norm, *kind, block, dtype, places)
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert all(distance([place], [wanted]) < limit for place in places)
    assert distance([norm.running_mean, norm.running_var], [exact[2].running_mean, exact[2].running_var]) < limit
    pieces = [sliced(random(wanted.shape, dtype, seed=n)) for n in (1, 2)]
    wanted.backward(sum(piece.double() for piece in pieces))
    of_weight, of_bias = (torch.empty(outputs, device=DEVICE) for _ in range(2))
    found = stem.gradient(pieces, kept, conv, *kind, of_weight, of_bias)
    pairs = [(found, exact[1].weight.grad), (of_weight, exact[2].weight.grad), (of_bias, exact[2].bias.grad)]
    assert all(a.shape == b.shape and distance([a], [b]) < 2 * limit for a, b in pairs)


def test_reorg_needs_even_sides():
    with pytest.raises(ValueError, match="7 x 6: give even sides"):
        stem.output_size(torch.zeros(1, 3, 7, 6), nn.Conv2d(12, 8, 3), 2)
