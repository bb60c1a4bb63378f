"""Batch norm with its activation, and 2x2 max pooling, for training on a GPU: kernels (Triton) and gradients.

A convolution in half precision is followed by batch norm and an activation, which together read or write each element
five times forward and eight times backward, and wait for memory all the while. Here it is three times (statistics;
result) and five times (sums; gradient).

Maps are [pixels x channels], the channels of a pixel side by side (channels-last); pixels may lie further apart than
their channels, as in a slice of a concatenation, so that no slice is copied. Arithmetic is in float32, each number is
rounded once, sums have a fixed order: the same input gives the same output.
"""

import torch
import triton
import triton.language as tl

IDENTITY, LEAKY_RELU, SILU = range(3)
TILE = 4096  # elements that a program holds at a time
MAX_PARTIAL_SUMS = 512  # programs that share the pixels of a statistic


@triton.jit
def _activation(z, slope, KIND: tl.constexpr):
    if KIND == 1:
        z = tl.where(z > 0, z, z * slope)
    if KIND == 2:
        z = z * tl.sigmoid(z)
    return z


@triton.jit
def _slope_of_activation(z, slope, KIND: tl.constexpr):
    """The derivative at `z`."""
    one = tl.full(z.shape, 1.0, tl.float32)
    if KIND == 1:
        one = tl.where(z > 0, one, slope)
    if KIND == 2:
        share = tl.sigmoid(z)
        one = share * (1 + z * (1 - share))
    return one


@triton.jit
def _sum_kernel(x, pivot, partial, num_pixels, num_channels, x_stride, pixels_each,
                ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """partial [programs x 2 x channels]: sums of x - pivot and of its square; the pivot keeps the numbers small."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < num_channels
    middle = tl.load(pivot + channel, mask=exists, other=0.0)
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    start = tl.program_id(0).to(tl.int64) * pixels_each
    stop = tl.minimum(start + pixels_each, num_pixels)
    for begin in range(start, stop, ROWS):
        pixel = begin + tl.arange(0, ROWS)
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


@triton.jit
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
def _apply_kernel(x, saved, y, num_pixels, num_channels, x_stride, slope,
                  KIND: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """y = activation(x * scale + shift)."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < num_channels
    pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (pixel < num_pixels)[:, None] & exists[None, :]
    scale = tl.load(saved + 2 * num_channels + channel, mask=exists, other=0.0)
    shift = tl.load(saved + 3 * num_channels + channel, mask=exists, other=0.0)
    value = tl.load(x + pixel[:, None] * x_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    value = _activation(value * scale[None, :] + shift[None, :], slope, KIND)
    tl.store(y + pixel[:, None] * num_channels + channel[None, :], value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_sum_kernel(gradient, x, saved, partial, num_pixels, num_channels, gradient_stride, x_stride, pixels_each,
                         slope, KIND: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """partial [programs x 2 x channels]: sums of the gradient before the activation, alone and times normalised x."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < num_channels
    mean = tl.load(saved + channel, mask=exists, other=0.0)[None, :]
    inverse = tl.load(saved + num_channels + channel, mask=exists, other=0.0)[None, :]
    scale = tl.load(saved + 2 * num_channels + channel, mask=exists, other=0.0)[None, :]
    shift = tl.load(saved + 3 * num_channels + channel, mask=exists, other=0.0)[None, :]
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    start = tl.program_id(0).to(tl.int64) * pixels_each
    stop = tl.minimum(start + pixels_each, num_pixels)
    for begin in range(start, stop, ROWS):
        pixel = begin + tl.arange(0, ROWS)
        inside = (pixel < stop)[:, None] & exists[None, :]
        value = tl.load(x + pixel[:, None] * x_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        change = tl.load(gradient + pixel[:, None] * gradient_stride + channel[None, :], mask=inside, other=0.0)
        change = change.to(tl.float32) * _slope_of_activation(value * scale + shift, slope, KIND)
        first += change
        second += change * (value - mean) * inverse
    here = partial + tl.program_id(0) * 2 * num_channels + channel
    tl.store(here, tl.sum(first, 0), mask=exists)
    tl.store(here + num_channels, tl.sum(second, 0), mask=exists)


@triton.jit
def _parameter_gradient_kernel(partial, saved, parameters, plane, num_partial, num_pixels, num_channels,
                               PARTS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """parameters [2 x channels]: gradients of weight and bias; plane [2 x channels]: what x and 1 add to that of x."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < num_channels
    first, second = _add_partial(partial, num_partial, num_channels, channel, exists, PARTS, CHANNELS)
    mean = tl.load(saved + channel, mask=exists, other=0.0)
    inverse = tl.load(saved + num_channels + channel, mask=exists, other=0.0)
    scale = tl.load(saved + 2 * num_channels + channel, mask=exists, other=0.0)
    tl.store(parameters + channel, second, mask=exists)
    tl.store(parameters + num_channels + channel, first, mask=exists)
    of_x = -scale * inverse * second / num_pixels
    tl.store(plane + channel, of_x, mask=exists)
    tl.store(plane + num_channels + channel, -scale * first / num_pixels - mean * of_x, mask=exists)


@triton.jit
def _gradient_kernel(gradient, x, saved, plane, result, num_pixels, num_channels, gradient_stride, x_stride, slope,
                     KIND: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """The gradient of x."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < num_channels
    pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (pixel < num_pixels)[:, None] & exists[None, :]
    scale = tl.load(saved + 2 * num_channels + channel, mask=exists, other=0.0)[None, :]
    shift = tl.load(saved + 3 * num_channels + channel, mask=exists, other=0.0)[None, :]
    of_x = tl.load(plane + channel, mask=exists, other=0.0)[None, :]
    of_one = tl.load(plane + num_channels + channel, mask=exists, other=0.0)[None, :]
    value = tl.load(x + pixel[:, None] * x_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    change = tl.load(gradient + pixel[:, None] * gradient_stride + channel[None, :], mask=inside, other=0.0)
    change = change.to(tl.float32) * _slope_of_activation(value * scale + shift, slope, KIND)
    value = scale * change + of_x * value + of_one
    tl.store(result + pixel[:, None] * num_channels + channel[None, :], value.to(result.dtype.element_ty), mask=inside)


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


class _Shape:
    """How a map [b x c x h x w] is divided among programs."""

    def __init__(self, x):
        self.num_channels = x.shape[1]
        self.num_pixels = x.numel() // self.num_channels
        self.channels = min(triton.next_power_of_2(self.num_channels), 128)
        self.rows = TILE // self.channels
        columns = triton.cdiv(self.num_channels, self.channels)
        self.every_tile = triton.cdiv(self.num_pixels, self.rows), columns
        shares = max(min(self.every_tile[0], MAX_PARTIAL_SUMS // columns), 1)
        self.pixels_each = triton.cdiv(triton.cdiv(self.num_pixels, shares), self.rows) * self.rows
        self.sums = triton.cdiv(self.num_pixels, self.pixels_each), columns
        self.by_channel = (triton.cdiv(self.num_channels, 8),)

    @property
    def tile(self):
        return {"ROWS": self.rows, "CHANNELS": self.channels, "num_warps": 4}


PARTS = {"PARTS": 128, "CHANNELS": 8, "num_warps": 4}


class NormActivation(torch.autograd.Function):
    """activation(batch_norm(x)) with the statistics of the batch; moves the running statistics.

    x [b x c x h x w]; weight, bias, running_mean, running_var float32 [c]; `kind` of activation, `slope` of LeakyReLU.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, running_mean, running_var, momentum, eps, kind, slope):
        x, x_stride = by_pixels(x)
        shape = _Shape(x)
        sizes = shape.num_pixels, shape.num_channels
        partial = x.new_empty((shape.sums[0], 2, shape.num_channels), dtype=torch.float32)
        saved = x.new_empty((4, shape.num_channels), dtype=torch.float32)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        _sum_kernel[shape.sums](x, running_mean, partial, *sizes, x_stride, shape.pixels_each, **shape.tile)
        _statistics_kernel[shape.by_channel](
            partial, running_mean, running_var, weight, bias, saved, shape.sums[0], *sizes, momentum, eps, **PARTS
        )
        _apply_kernel[shape.every_tile](x, saved, y, *sizes, x_stride, slope, KIND=kind, **shape.tile)
        ctx.save_for_backward(x, saved)
        ctx.kind, ctx.slope = kind, slope
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        x, saved = ctx.saved_tensors
        (x, x_stride), (gradient, stride) = by_pixels(x), by_pixels(gradient)
        shape = _Shape(x)
        sizes = shape.num_pixels, shape.num_channels
        partial = x.new_empty((shape.sums[0], 2, shape.num_channels), dtype=torch.float32)
        parameters, plane = (torch.empty_like(saved[:2]) for _ in range(2))
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        _gradient_sum_kernel[shape.sums](
            gradient, x, saved, partial, *sizes, stride, x_stride, shape.pixels_each, ctx.slope,
            KIND=ctx.kind, **shape.tile,
        )  # fmt: skip
        _parameter_gradient_kernel[shape.by_channel](partial, saved, parameters, plane, shape.sums[0], *sizes, **PARTS)
        _gradient_kernel[shape.every_tile](
            gradient, x, saved, plane, result, *sizes, stride, x_stride, ctx.slope, KIND=ctx.kind, **shape.tile
        )
        return result, parameters[0], parameters[1], None, None, None, None, None, None


@triton.jit
def _pool_kernel(x, y, choice, num_pixels, num_channels, height, width, x_stride,
                 ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """y: the largest of four; choice: which one, the first among equals. `height` and `width` are those of y."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (pixel < num_pixels)[:, None] & (channel < num_channels)[None, :]
    row, column = pixel // width, pixel % width  # row: of all images below one another
    corner = x + ((row * 2 * width * 2 + column * 2) * x_stride)[:, None] + channel[None, :]
    best = tl.load(corner, mask=inside, other=0.0)
    chosen = tl.zeros(best.shape, tl.uint8)
    for number in tl.static_range(1, 4):
        offset = (number // 2 * width * 2 + number % 2) * x_stride
        value = tl.load(corner + offset, mask=inside, other=0.0)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        chosen = tl.where(better, number, chosen).to(tl.uint8)
    place = pixel[:, None] * num_channels + channel[None, :]
    tl.store(y + place, best, mask=inside)
    tl.store(choice + place, chosen, mask=inside)


@triton.jit
def _pool_gradient_kernel(gradient, choice, result, num_pixels, num_channels, height, width, stride,
                          ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """The gradient goes to the chosen one of four, the others get 0."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (pixel < num_pixels)[:, None] & (channel < num_channels)[None, :]
    row, column = pixel // width, pixel % width
    corner = result + ((row * 2 * width * 2 + column * 2) * num_channels)[:, None] + channel[None, :]
    value = tl.load(gradient + pixel[:, None] * stride + channel[None, :], mask=inside, other=0.0)
    chosen = tl.load(choice + pixel[:, None] * num_channels + channel[None, :], mask=inside, other=0)
    for number in tl.static_range(4):
        offset = (number // 2 * width * 2 + number % 2) * num_channels
        tl.store(corner + offset, tl.where(chosen == number, value, 0.0).to(result.dtype.element_ty), mask=inside)


class HalvingPool(torch.autograd.Function):
    """Max pooling 2x2 with stride 2 of x [b x c x h x w], h and w even."""

    @staticmethod
    def forward(ctx, x):
        x, x_stride = by_pixels(x)
        batch, channels, height, width = x.shape
        y = torch.empty((batch, channels, height // 2, width // 2), dtype=x.dtype, device=x.device,
                        memory_format=torch.channels_last)  # fmt: skip
        choice = torch.empty_like(y, dtype=torch.uint8)
        shape = _Shape(y)
        _pool_kernel[shape.every_tile](
            x, y, choice, shape.num_pixels, channels, height // 2, width // 2, x_stride, **shape.tile
        )
        ctx.save_for_backward(choice)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        (choice,) = ctx.saved_tensors
        gradient, stride = by_pixels(gradient)
        shape = _Shape(gradient)
        batch, channels, height, width = gradient.shape
        result = torch.empty((batch, channels, height * 2, width * 2), dtype=gradient.dtype, device=gradient.device,
                             memory_format=torch.channels_last)  # fmt: skip
        _pool_gradient_kernel[shape.every_tile](
            gradient, choice, result, shape.num_pixels, channels, height, width, stride, **shape.tile
        )
        return result
