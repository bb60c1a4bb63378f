"""The fused model and its kernels against torch, on a GPU or interpreted on a CPU.

Run by test_network.py in a process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

from copy import deepcopy

import pytest
import torch
from torch import nn

from models.fused import boxes, kernels, sums
from models.fused.plan import kind_of
from models.yolo import Detect
from tests.models.fused.small_models import DEVICE, compare, compare_evaluation, distance, random_model, small_cfg

# channels that are no multiple of 8, odd sides, more channels than a program takes
SHAPES = [(2, 5, 7, 3), (1, 130, 4, 4)]


def whole(like, before=3, after=3):
    """Random numbers and a slice of their channels with the shape of `like`."""
    batch, channels, height, width = like.shape
    all_of_it = torch.randn(batch, before + channels + after, height, width, device=DEVICE, dtype=like.dtype)
    all_of_it = all_of_it.to(memory_format=torch.channels_last)
    return all_of_it, all_of_it[:, before : before + channels]


# float32: sums of another order. Half: every number is rounded once, by up to 2^-11 of itself
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3}
DTYPES = [torch.float32] + [torch.float16] * (DEVICE == "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "activation", "num_pieces", "num_places"), [
    (SHAPES[0], nn.Identity(), 1, 2), (SHAPES[1], nn.LeakyReLU(0.1), 2, 1), (SHAPES[0], nn.SiLU(), 3, 2),
])  # fmt: skip
def test_norm_and_activation_in_slices(shape, activation, num_pieces, num_places, dtype):
    norm = nn.BatchNorm2d(shape[1], eps=1e-3, momentum=0.03).to(DEVICE)
    nn.init.uniform_(norm.weight), nn.init.normal_(norm.bias)
    other = deepcopy(norm).double()
    _, x = whole(torch.empty(shape, dtype=dtype))
    x.mul_(3).add_(1)
    exact = x.double().requires_grad_()
    wanted = activation(other(exact))

    around, place = whole(x)
    before, places = around.clone(), [torch.empty_like(x, memory_format=torch.channels_last), place]
    saved = kernels.norm_activation(x, norm, *kind_of(activation), places[-num_places:])
    limit = LIMITS[dtype]
    assert all(distance([y], [wanted]) < limit for y in places[-num_places:])
    assert around[:, :3].equal(before[:, :3]) and around[:, -3:].equal(before[:, -3:])  # nothing beside it
    running = [norm.running_mean, norm.running_var], [other.running_mean, other.running_var]
    assert distance(*running) < 1e-5

    pieces = [whole(x)[1] for _ in range(num_pieces)]
    wanted.backward(sum(piece.double() for piece in pieces))
    around, result = whole(x)
    of_weight, of_bias = (torch.empty(shape[1], device=DEVICE) for _ in range(2))
    kernels.norm_activation_gradient(pieces, x, saved, *kind_of(activation), result, of_weight, of_bias)
    pairs = [(result, exact.grad), (of_weight, other.weight.grad), (of_bias, other.bias.grad)]
    assert all(distance([a], [b]) < limit for a, b in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "activation"), [(2, nn.Identity()), (3, nn.SiLU())])
def test_sums_of_slices(count, activation, dtype):
    terms = [whole(torch.empty(SHAPES[0], dtype=dtype))[1] for _ in range(count)]
    total = sum(term.double() for term in terms).requires_grad_()
    wanted = activation(total)
    places = [whole(terms[0])[1] for _ in range(2)]
    sums.add_activation(terms, *kind_of(activation), places)
    assert all(distance([y], [wanted]) < LIMITS[dtype] for y in places)
    pieces = [whole(terms[0])[1] for _ in range(count)]
    wanted.backward(sum(piece.double() for piece in pieces))
    found = sums.add_activation_gradient(pieces, terms, *kind_of(activation))
    assert distance([found], [total.grad]) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_boxes(dtype):
    """As the layer decodes them, of maps that are views of what a convolution puts out."""
    head = Detect(5, [[10, 13, 16, 30], [30, 61, 62, 45]], [16, 16]).to(DEVICE, dtype)
    head.stride, maps = torch.tensor([8.0, 16.0]), []
    for height, width in ((6, 9), (3, 5)):
        rows = 4 * torch.randn(3, height, width, 24, device=DEVICE).to(dtype)
        maps.append(rows[..., :20].unflatten(3, (2, 10)).permute(0, 3, 1, 2, 4))
    found, wanted = boxes.decode_all(head, maps), head._decode_all(maps)
    assert found.dtype == dtype and found.shape == wanted.shape == (3, 2 * (54 + 15), 10)
    torch.testing.assert_close(found, wanted, rtol=1e-6 if dtype == torch.float32 else 2e-3, atol=1e-6)
    assert dtype == torch.float32 or (found == wanted).float().mean() > 0.99


@pytest.mark.parametrize("first", [["Conv", [8, 3, 2]], ["ReOrg", []]])
def test_a_network_of_every_layer(first):
    model, images = random_model(small_cfg([-1, 1, *first])), torch.rand(2, 3, 48, 32, device=DEVICE)
    compare(model, images, torch.float32, 10)
    compare_evaluation(model, images)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cfg", ["yolov7-tiny", "yolov7", "yolov7-w6"])
def test_the_family(cfg, dtype):
    images = torch.rand(8, 3, 256, 256, device=DEVICE).to(memory_format=torch.channels_last)
    model = random_model(f"cfg/training/{cfg}.yaml", nc=3)
    compare(model, images, dtype, 10 if dtype == torch.float32 else 1.2)
    compare_evaluation(model.to(dtype), images.to(dtype), 1e-5 if dtype == torch.float32 else 0.02)
