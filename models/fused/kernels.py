"""Kernels (Triton) of batch norm with its activation, for training on a GPU.

A convolution in half precision is followed by batch norm and an activation, which together read or write each element
five times forward and eight times backward, and wait for memory all the while. Here it is three times (statistics;
result) and five times (sums; gradient).

Maps are [pixels x channels], the channels of a pixel side by side (channels-last); pixels may lie further apart than
their channels, as in a slice of a concatenation. So a result is written to where it is needed, even twice, and a
gradient is read in its pieces (1 to 3 maps whose sum it is), and no slice is copied. Arithmetic is in float32, each
number is rounded once, sums have a fixed order: the same input gives the same output.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

IDENTITY, LEAKY_RELU, SILU = range(3)
# What was fastest of several on an H200. Elements that a program holds at a time:
TILE = 2048
SUMS = {"tile": 2048, "num_warps": 2}  # of sums over pixels
MAX_PARTIAL_SUMS = 1056  # programs that share the pixels of a statistic
STAGES: tl.constexpr = tl.constexpr(3)  # tiles that are on their way at a time, where programs sum up pixels
# Arguments that a kernel is not compiled anew for: another batch or image size changes them.
SIZES = ("num_pixels", "num_partial", "pixels_each")


@triton.jit
def activate(z, slope, KIND: tl.constexpr):
    if KIND == 1:
        z = tl.where(z > 0, z, z * slope)
    if KIND == 2:
        z = z * tl.sigmoid(z)
    return z


@triton.jit
def slope_of_activation(z, slope, KIND: tl.constexpr):
    """The derivative at `z`."""
    one = tl.full(z.shape, 1.0, tl.float32)
    if KIND == 1:
        one = tl.where(z > 0, one, slope)
    if KIND == 2:
        share = tl.sigmoid(z)
        one = share * (1 + z * (1 - share))
    return one


@triton.jit(do_not_specialize=SIZES)
def _sum_kernel(x, pivot, partial, num_pixels, num_channels, x_stride, pixels_each,
                ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """partial [programs x 2 x channels]: sums of x - pivot and of its square; the pivot keeps the numbers small."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < num_channels
    middle = tl.load(pivot + channel, mask=exists, other=0.0)
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    start = tl.program_id(0) * pixels_each
    stop = tl.minimum(start + pixels_each, num_pixels)
    for begin in tl.range(start, stop, ROWS, num_stages=STAGES):
        pixel = (begin + tl.arange(0, ROWS)).to(tl.int64)
        inside = (pixel < stop)[:, None] & exists[None, :]
        value = tl.load(x + pixel[:, None] * x_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - middle[None, :], 0.0)
        first += value
        second += value * value
    here = partial + tl.program_id(0) * 2 * num_channels + channel
    tl.store(here, tl.sum(first, 0), mask=exists)
    tl.store(here + num_channels, tl.sum(second, 0), mask=exists)


@triton.jit
def _add_partial(partial, num_partial, num_channels, channel, exists, PARTS: tl.constexpr, CHANNELS: tl.constexpr):
    """Both sums [channels], added over the programs."""
    first = tl.zeros((PARTS, CHANNELS), tl.float32)
    second = tl.zeros((PARTS, CHANNELS), tl.float32)
    for begin in range(0, num_partial, PARTS):
        part = begin + tl.arange(0, PARTS)
        inside = (part < num_partial)[:, None] & exists[None, :]
        here = partial + part[:, None] * 2 * num_channels + channel[None, :]
        first += tl.load(here, mask=inside, other=0.0)
        second += tl.load(here + num_channels, mask=inside, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit(do_not_specialize=SIZES)
def _statistics_kernel(partial, running_mean, running_var, weight, bias, saved, num_partial, num_pixels, num_channels,
                       momentum, eps, PARTS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """saved [4 x channels]: mean, inverse deviation, scale and shift of the normalisation; running statistics move."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < num_channels
    first, second = _add_partial(partial, num_partial, num_channels, channel, exists, PARTS, CHANNELS)
    old_mean = tl.load(running_mean + channel, mask=exists, other=0.0)
    old_var = tl.load(running_var + channel, mask=exists, other=0.0)
    from_pivot = first / num_pixels
    mean = old_mean + from_pivot
    var = tl.maximum(second / num_pixels - from_pivot * from_pivot, 0.0)
    unbiased = var * (num_pixels / (num_pixels - 1.0))
    tl.store(running_mean + channel, old_mean + momentum * (mean - old_mean), mask=exists)
    tl.store(running_var + channel, old_var + momentum * (unbiased - old_var), mask=exists)
    inverse = 1.0 / tl.sqrt(var + eps)
    scale = inverse * tl.load(weight + channel, mask=exists, other=0.0)
    shift = tl.load(bias + channel, mask=exists, other=0.0) - mean * scale
    tl.store(saved + channel, mean, mask=exists)
    tl.store(saved + num_channels + channel, inverse, mask=exists)
    tl.store(saved + 2 * num_channels + channel, scale, mask=exists)
    tl.store(saved + 3 * num_channels + channel, shift, mask=exists)


@triton.jit
def _load(x, pixel, channel, inside, stride):
    """[pixels x channels] float32, 0 outside."""
    place = pixel.to(tl.int64)[:, None] * stride + channel[None, :]
    return tl.load(x + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_sum(first, second, third, pixel, channel, inside, first_stride, second_stride, third_stride,
             PIECES: tl.constexpr):  # fmt: skip
    """The sum of the first PIECES maps."""
    value = _load(first, pixel, channel, inside, first_stride)
    if PIECES > 1:
        value += _load(second, pixel, channel, inside, second_stride)
    if PIECES > 2:
        value += _load(third, pixel, channel, inside, third_stride)
    return value


@triton.jit
def store(value, y, copy, pixel, channel, inside, y_stride, copy_stride, PLACES: tl.constexpr):
    """To y, and to `copy` if there are two PLACES."""
    value = value.to(y.dtype.element_ty)
    tl.store(y + pixel[:, None] * y_stride + channel[None, :], value, mask=inside)
    if PLACES > 1:
        tl.store(copy + pixel[:, None] * copy_stride + channel[None, :], value, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _apply_kernel(x, saved, y, copy, num_pixels, num_channels, x_stride, y_stride, copy_stride, slope,
                  KIND: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """y = activation(x * scale + shift)."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < num_channels
    pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (pixel < num_pixels)[:, None] & exists[None, :]
    scale = tl.load(saved + 2 * num_channels + channel, mask=exists, other=0.0)
    shift = tl.load(saved + 3 * num_channels + channel, mask=exists, other=0.0)
    value = _load(x, pixel, channel, inside, x_stride)
    value = activate(value * scale[None, :] + shift[None, :], slope, KIND)
    store(value, y, copy, pixel, channel, inside, y_stride, copy_stride, PLACES)


@triton.jit(do_not_specialize=SIZES)
def _gradient_sum_kernel(first, second, third, x, saved, partial, num_pixels, num_channels, first_stride, second_stride,
                         third_stride, x_stride, pixels_each, slope, KIND: tl.constexpr, PIECES: tl.constexpr,
                         ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """partial [programs x 2 x channels]: sums of the gradient before the activation, alone and times normalised x."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < num_channels
    mean = tl.load(saved + channel, mask=exists, other=0.0)
    inverse = tl.load(saved + num_channels + channel, mask=exists, other=0.0)
    scale = tl.load(saved + 2 * num_channels + channel, mask=exists, other=0.0)[None, :]
    shift = tl.load(saved + 3 * num_channels + channel, mask=exists, other=0.0)[None, :]
    alone = tl.zeros((ROWS, CHANNELS), tl.float32)
    product = tl.zeros((ROWS, CHANNELS), tl.float32)
    start = tl.program_id(0) * pixels_each
    stop = tl.minimum(start + pixels_each, num_pixels)
    for begin in tl.range(start, stop, ROWS, num_stages=STAGES):
        pixel = (begin + tl.arange(0, ROWS)).to(tl.int64)
        inside = (pixel < stop)[:, None] & exists[None, :]
        value = _load(x, pixel, channel, inside, x_stride)
        change = load_sum(first, second, third, pixel, channel, inside, first_stride, second_stride, third_stride,
                          PIECES)  # fmt: skip
        change *= slope_of_activation(value * scale + shift, slope, KIND)
        alone += change
        product += change * (value - mean[None, :])
    here = partial + tl.program_id(0) * 2 * num_channels + channel
    tl.store(here, tl.sum(alone, 0), mask=exists)
    tl.store(here + num_channels, tl.sum(product, 0) * inverse, mask=exists)


@triton.jit(do_not_specialize=SIZES)
def _parameter_gradient_kernel(partial, saved, of_weight, of_bias, plane, num_partial, num_pixels, num_channels,
                               PARTS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """of_weight, of_bias [channels]: their gradients; plane [2 x channels]: what x and 1 add to that of x."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < num_channels
    alone, product = _add_partial(partial, num_partial, num_channels, channel, exists, PARTS, CHANNELS)
    mean = tl.load(saved + channel, mask=exists, other=0.0)
    inverse = tl.load(saved + num_channels + channel, mask=exists, other=0.0)
    scale = tl.load(saved + 2 * num_channels + channel, mask=exists, other=0.0)
    tl.store(of_weight + channel, product, mask=exists)
    tl.store(of_bias + channel, alone, mask=exists)
    of_x = -scale * inverse * product / num_pixels
    tl.store(plane + channel, of_x, mask=exists)
    tl.store(plane + num_channels + channel, -scale * alone / num_pixels - mean * of_x, mask=exists)


@triton.jit(do_not_specialize=SIZES)
def _gradient_kernel(first, second, third, x, saved, plane, result, num_pixels, num_channels, first_stride,
                     second_stride, third_stride, x_stride, result_stride, slope, KIND: tl.constexpr,
                     PIECES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """The gradient of x."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < num_channels
    pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (pixel < num_pixels)[:, None] & exists[None, :]
    scale = tl.load(saved + 2 * num_channels + channel, mask=exists, other=0.0)[None, :]
    shift = tl.load(saved + 3 * num_channels + channel, mask=exists, other=0.0)[None, :]
    of_x = tl.load(plane + channel, mask=exists, other=0.0)[None, :]
    of_one = tl.load(plane + num_channels + channel, mask=exists, other=0.0)[None, :]
    value = _load(x, pixel, channel, inside, x_stride)
    change = load_sum(first, second, third, pixel, channel, inside, first_stride, second_stride, third_stride, PIECES)
    change *= slope_of_activation(value * scale + shift, slope, KIND)
    value = scale * change + of_x * value + of_one
    store(value, result, result, pixel, channel, inside, result_stride, result_stride, 1)


def pixel_stride(x):
    """Elements from one pixel of a map [b x c x h x w] to the next, or None if the map is not laid out by pixels."""
    batch, channels, height, width = x.shape
    if channels > 1 and x.stride(1) != 1:
        return None
    stride = x.stride(3) if width > 1 else x.stride(2) if height > 1 else x.stride(0) if batch > 1 else channels
    wanted = ((width, 3, stride), (height, 2, stride * width), (batch, 0, stride * width * height))
    return stride if all(size == 1 or x.stride(axis) == step for size, axis, step in wanted) else None


def by_pixels(x):
    """(x, its pixel stride); copied only if it has another layout."""
    stride = pixel_stride(x)
    if stride is None:
        x = x.contiguous(memory_format=torch.channels_last)
        stride = x.shape[1]
    return x, stride


PARTS = {"PARTS": 256, "CHANNELS": 8, "num_warps": 8}


class Tiles(NamedTuple):
    """How a map of `num_pixels` x `num_channels` is divided among programs."""

    sizes: tuple  # num_pixels, num_channels
    every: tuple  # grid with a program for each tile
    tile: dict  # what the kernel is told about it
    sums: tuple  # grid with programs that sum up `pixels_each` pixels, and their tile
    pixels_each: int
    sum_tile: dict


def tiles_of(x):
    """The Tiles of a map [b x c x h x w]."""
    return _divide(x.numel() // x.shape[1], x.shape[1])


@cache
def _divide(num_pixels, num_channels):
    channels = min(triton.next_power_of_2(num_channels), 128)
    columns = triton.cdiv(num_channels, channels)
    rows, sum_rows = TILE // channels, SUMS["tile"] // channels
    shares = max(min(triton.cdiv(num_pixels, sum_rows), MAX_PARTIAL_SUMS // columns), 1)
    pixels_each = triton.cdiv(triton.cdiv(num_pixels, shares), sum_rows) * sum_rows
    return Tiles(
        sizes=(num_pixels, num_channels),
        every=(triton.cdiv(num_pixels, rows), columns),
        tile={"ROWS": rows, "CHANNELS": channels, "num_warps": 4},
        sums=(triton.cdiv(num_pixels, pixels_each), columns),
        pixels_each=pixels_each,
        sum_tile={"ROWS": sum_rows, "CHANNELS": channels, "num_warps": SUMS["num_warps"]},
    )


def by_channel(num_channels):
    """The grid of kernels with the tile PARTS."""
    return (triton.cdiv(num_channels, PARTS["CHANNELS"]),)


def of_three(maps):
    """Three maps, three pixel strides, and how many of them count; the others are the first of the list `maps`."""
    assert 1 <= len(maps) <= 3 and all(x.shape == maps[0].shape for x in maps), "a kernel adds up to three alike"
    laid_out = [by_pixels(x) for x in maps]
    filled = laid_out + laid_out[:1] * (3 - len(laid_out))
    return [x for x, _ in filled], [stride for _, stride in filled], len(laid_out)


def of_two(places):
    """Two maps to write to, their pixel strides, and how many of them count."""
    strides = [pixel_stride(x) for x in places]
    assert None not in strides, "a result is written by pixels only"
    return [places[0], places[-1]], [strides[0], strides[-1]], len(places)


def norm_activation(x, norm, kind, slope, places, known=None):
    """Write activation(norm(x)), with the statistics of the batch, to one or two `places`; moves the running ones.

    x and the places [b x c x h x w], `norm` an nn.BatchNorm2d, `slope` that of LeakyReLU. Returns what the gradient
    needs: float32 [4 x c]. That, if `known`, takes the place of the batch's (see `running_statistics`).
    """
    x, x_stride = by_pixels(x)
    saved = known
    if saved is None:
        tiles = tiles_of(x)
        partial = x.new_empty((tiles.sums[0], 2, x.shape[1]), dtype=torch.float32)
        _sum_kernel[tiles.sums](
            x, norm.running_mean, partial, *tiles.sizes, x_stride, tiles.pixels_each, **tiles.sum_tile
        )
        saved = finish_statistics(partial, norm, tiles.sizes[0])
    apply(x, saved, kind, slope, places)
    return saved


def running_statistics(norms):
    """For each of the nn.BatchNorm2d `norms` what `finish_statistics` returns, from its running mean and variance."""
    sizes = [norm.num_features for norm in norms]
    mean, var, weight, bias = (
        torch.cat([getattr(norm, name).detach() for norm in norms]).float()
        for name in ("running_mean", "running_var", "weight", "bias")
    )
    # numbers go along with the kernels: nothing is copied from the host, which a CUDA graph could not repeat
    inverse = torch.cat(torch._foreach_add(var.split(sizes), [norm.eps for norm in norms])).rsqrt()
    scale = weight * inverse
    rows = zip(*(row.split(sizes) for row in (mean, inverse, scale, bias - mean * scale)), strict=True)
    flat = torch.cat([part for parts in rows for part in parts])
    return [part.view(4, -1) for part in flat.split([4 * size for size in sizes])]


def finish_statistics(partial, norm, num_pixels):
    """Mean, inverse deviation, scale and shift [4 x c] from the sums `partial` [programs x 2 x c]; see _sum_kernel."""
    num_partial, _, num_channels = partial.shape
    saved = partial.new_empty((4, num_channels))
    _statistics_kernel[by_channel(num_channels)](
        partial, norm.running_mean, norm.running_var, norm.weight.detach(), norm.bias.detach(), saved, num_partial,
        num_pixels, num_channels, norm.momentum, norm.eps, **PARTS,
    )  # fmt: skip
    return saved


def apply(x, saved, kind, slope, places):
    """Write activation(scale * x + shift) to one or two `places`."""
    x, x_stride = by_pixels(x)
    tiles = tiles_of(x)
    targets, strides, count = of_two(places)
    _apply_kernel[tiles.every](
        x, saved, *targets, *tiles.sizes, x_stride, *strides, slope, KIND=kind, PLACES=count, **tiles.tile
    )


def norm_activation_gradient(pieces, x, saved, kind, slope, result, of_weight, of_bias):
    """Write the gradients of x, weight and bias of `norm_activation` to result [as x], of_weight and of_bias [c].

    The gradient of its output is the sum of 1 to 3 `pieces`. `saved` is what `norm_activation` returned; of_weight,
    of_bias are float32.
    """
    x, x_stride = by_pixels(x)
    tiles = tiles_of(x)
    plane = parameter_gradients(pieces, x, saved, kind, slope, of_weight, of_bias)
    pieces, strides, count = of_three(pieces)
    (result, _), (result_stride, _), _ = of_two([result])
    _gradient_kernel[tiles.every](
        *pieces, x, saved, plane, result, *tiles.sizes, *strides, x_stride, result_stride, slope,
        KIND=kind, PIECES=count, **tiles.tile,
    )  # fmt: skip


def parameter_gradients(pieces, x, saved, kind, slope, of_weight, of_bias):
    """The first half of `norm_activation_gradient`. Returns [2 x c]: what x and 1 add to the gradient of x."""
    x, x_stride = by_pixels(x)
    tiles = tiles_of(x)
    pieces, strides, count = of_three(pieces)
    partial = x.new_empty((tiles.sums[0], 2, x.shape[1]), dtype=torch.float32)
    plane = torch.empty_like(saved[:2])
    _gradient_sum_kernel[tiles.sums](
        *pieces, x, saved, partial, *tiles.sizes, *strides, x_stride, tiles.pixels_each, slope,
        KIND=kind, PIECES=count, **tiles.sum_tile,
    )  # fmt: skip
    _parameter_gradient_kernel[by_channel(x.shape[1])](
        partial, saved, of_weight, of_bias, plane, tiles.sums[0], *tiles.sizes, **PARTS
    )
    return plane


def why_not_on(device):
    """What keeps these kernels from running on `device`, found out by trying; None if nothing does.

    Triton may be there and refuse the GPU (before compute capability 7.0), or find its compiler broken.
    """
    try:
        maps = torch.zeros((1, 64, 1, 2), dtype=torch.float16, device=device)  # a form that most models need anyway
        place = torch.empty_like(maps, memory_format=torch.channels_last)
        apply(maps, torch.zeros((4, 64), device=device), SILU, 0.0, [place])  # one kernel: it takes time to compile
    except Exception as error:  # compilers fail in any way; the model itself needs none
        return f"Triton does not work here ({' '.join(str(error).split())[:200]})"
    return None
