"""The first convolution, 3x3, straight from the images, with its batch norm and activation, for training on a GPU.

Tensor cores want many channels, and images have three. Here the numbers under a window, 27 for three colours,
are gathered as a row of a matrix and multiplied in registers; the images have a border of zeros for it. The statistics
of batch norm are summed where the result is made. Images need no gradient, so that of the result goes no further: it is
made where the gradient of the weight reads it, and never written.

A ReOrg in front is part of the gathering: its channels are the pixels of blocks of 2x2.
"""

import torch
import triton
import triton.language as tl

from models.fused import kernels
from models.fused.kernels import load_sum, slope_of_activation

SIDE = 3  # of the window, with a padding of 1
PROGRAMS = 1024  # that share the pixels
# What was fastest of several on an H200. Numbers of the result that a program holds at a time, forward and backward:
TILE, GRADIENT_TILE = 4096, 2048
LINE = 1024  # numbers where lines are copied
WARPS = 2
SIZES = ("num_pixels", "pixels_each", "rows", "columns", "height", "width", "lines", "line", "image_stride",
         "colour_stride", "row_stride", "column_stride")  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def _frame_kernel(images, result, height, width, lines, line, image_stride, colour_stride, row_stride, column_stride,
                  COLOURS: tl.constexpr, BORDER: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """result [n x lines x line]: the images with a border of zeros; a line holds pixels of COLOURS numbers."""
    row, image = tl.program_id(0) % lines - BORDER, tl.program_id(0) // lines
    place = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    column, colour = place // COLOURS - BORDER, place % COLOURS
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    start = images + image.to(tl.int64) * image_stride + row * row_stride
    value = tl.load(start + column * column_stride + colour * colour_stride, mask=inside, other=0).to(tl.float32)
    if images.dtype.element_ty == tl.uint8:
        value = tl.div_rn(value, 255.0)
    value = value.to(result.dtype.element_ty)
    tl.store(result + tl.program_id(0).to(tl.int64) * line + place, value, mask=place < line)


@triton.jit
def _windows(framed, pixel, num_pixels, tap, rows, columns, lines, line, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
             COLOURS: tl.constexpr):  # fmt: skip
    """[pixels x taps]: the numbers under the windows of the result's pixels; a `line` of the images holds so many.

    The taps are counted by row, column and channel of the window. Where a number lies is a sum of two places: that of
    the pixel and that of the tap.
    """
    channel, place = tap % (COLOURS * BLOCK * BLOCK), tap // (COLOURS * BLOCK * BLOCK)
    row, column = place // 3 * BLOCK + channel // COLOURS % BLOCK, place % 3 * BLOCK + channel // (COLOURS * BLOCK)
    tap_at = row * line + column * COLOURS + channel % COLOURS
    pixel = tl.where(pixel < num_pixels, pixel, 0)
    above = pixel // columns
    line_at = (above // rows).to(tl.int64) * lines + above % rows * (STRIDE * BLOCK)
    pixel_at = line_at * line + pixel % columns * (STRIDE * BLOCK * COLOURS)
    return tl.load(framed + pixel_at[:, None] + tap_at[None, :], mask=(place < 9)[None, :], other=0.0)


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(framed, weight, y, pivot, partial, num_pixels, num_outputs, pixels_each, rows, columns,
                    lines, line, STRIDE: tl.constexpr, BLOCK: tl.constexpr, COLOURS: tl.constexpr, TAPS: tl.constexpr,
                    CHUNK: tl.constexpr, PIXELS: tl.constexpr, OUTPUTS: tl.constexpr):  # fmt: skip
    """y [pixels x outputs], and the partial sums of kernels._sum_kernel. weight [outputs x 9 * channels]."""
    output = tl.arange(0, OUTPUTS)
    exists = output < num_outputs
    middle = tl.load(pivot + output, mask=exists, other=0.0)
    first = tl.zeros((PIXELS, OUTPUTS), tl.float32)
    second = tl.zeros((PIXELS, OUTPUTS), tl.float32)
    start = tl.program_id(0) * pixels_each
    stop = tl.minimum(start + pixels_each, num_pixels)
    for begin in range(start, stop, PIXELS):
        pixel = begin + tl.arange(0, PIXELS)
        total = tl.zeros((PIXELS, OUTPUTS), tl.float32)
        for chunk in tl.static_range(0, TAPS, CHUNK):
            tap = chunk + tl.arange(0, CHUNK)
            window = _windows(framed, pixel, num_pixels, tap, rows, columns, lines, line, STRIDE, BLOCK, COLOURS)
            is_one = (tap < 9 * COLOURS * BLOCK * BLOCK)[:, None] & exists[None, :]
            factor = tl.load(weight + output[None, :] * (9 * COLOURS * BLOCK * BLOCK) + tap[:, None], is_one, other=0.0)
            total = tl.dot(window, factor.to(window.dtype), total, input_precision="ieee")
        value = total.to(y.dtype.element_ty)
        inside = (pixel < stop)[:, None] & exists[None, :]
        tl.store(y + pixel.to(tl.int64)[:, None] * num_outputs + output[None, :], value, mask=inside)
        value = tl.where(inside, value.to(tl.float32) - middle[None, :], 0.0)
        first += value
        second += value * value
    here = partial + tl.program_id(0) * 2 * num_outputs + output
    tl.store(here, tl.sum(first, 0), mask=exists)
    tl.store(here + num_outputs, tl.sum(second, 0), mask=exists)


@triton.jit(do_not_specialize=SIZES)
def _gradient_kernel(first, second, third, y, saved, plane, framed, partial, num_pixels, num_outputs, pixels_each,
                     first_stride, second_stride, third_stride, rows, columns, lines, line, slope, KIND: tl.constexpr,
                     PIECES: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, COLOURS: tl.constexpr,
                     TAPS: tl.constexpr, CHUNK: tl.constexpr, PIXELS: tl.constexpr,
                     OUTPUTS: tl.constexpr):  # fmt: skip
    """partial [programs x TAPS x outputs]: the gradient of the weight; that of y is kernels._gradient_kernel's."""
    output = tl.arange(0, OUTPUTS)
    exists = output < num_outputs
    tap = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    scale = tl.load(saved + 2 * num_outputs + output, mask=exists, other=0.0)[None, :]
    shift = tl.load(saved + 3 * num_outputs + output, mask=exists, other=0.0)[None, :]
    of_x = tl.load(plane + output, mask=exists, other=0.0)[None, :]
    of_one = tl.load(plane + num_outputs + output, mask=exists, other=0.0)[None, :]
    total = tl.zeros((CHUNK, OUTPUTS), tl.float32)
    start = tl.program_id(0) * pixels_each
    stop = tl.minimum(start + pixels_each, num_pixels)
    for begin in range(start, stop, PIXELS):
        pixel = begin + tl.arange(0, PIXELS)
        inside = (pixel < stop)[:, None] & exists[None, :]
        far = pixel.to(tl.int64)
        value = tl.load(y + far[:, None] * num_outputs + output[None, :], mask=inside, other=0.0).to(tl.float32)
        change = load_sum(first, second, third, far, output, inside, first_stride, second_stride, third_stride, PIECES)
        change *= slope_of_activation(value * scale + shift, slope, KIND)
        change = tl.where(inside, scale * change + of_x * value + of_one, 0.0).to(y.dtype.element_ty)
        window = _windows(framed, pixel, stop, tap, rows, columns, lines, line, STRIDE, BLOCK, COLOURS)
        total = tl.dot(tl.trans(window), change, total, input_precision="ieee")
    here = partial + (tl.program_id(0) * TAPS + tap)[:, None] * num_outputs + output[None, :]
    tl.store(here, total, mask=exists[None, :])


def output_size(images, conv, block):
    """(height, width) of conv(images); `block` 2 with a ReOrg in front, else 1."""
    if any(side % block for side in images.shape[2:]):
        raise ValueError("ReOrg cannot divide images of {} x {}: give even sides".format(*images.shape[2:]))
    return [(side // block - 1) // conv.stride[axis] + 1 for axis, side in enumerate(images.shape[2:])]


class Geometry:
    """How `conv` reads `images` [n x c x h x w], through blocks of `block` pixels, and how programs share the work."""

    def __init__(self, images, conv, block):
        batch, colours, height, width = images.shape
        rows, columns = output_size(images, conv, block)
        num_outputs = conv.out_channels
        self.shape = batch, num_outputs, rows, columns
        self.framed = batch, height + 2 * block, width + 2 * block, colours
        self.num_pixels, self.taps = batch * rows * columns, SIDE * SIDE * colours * block * block
        chunk = 32 if self.taps <= 32 else 64
        outputs = max(triton.next_power_of_2(num_outputs), 16)
        pixels = TILE // outputs
        self.pixels_each = triton.cdiv(triton.cdiv(self.num_pixels, PROGRAMS), pixels) * pixels
        self.programs, self.chunks = triton.cdiv(self.num_pixels, self.pixels_each), triton.cdiv(self.taps, chunk)
        self.sizes = rows, columns, height + 2 * block, (width + 2 * block) * colours
        self.tile = {"STRIDE": conv.stride[0], "BLOCK": block, "COLOURS": colours, "TAPS": self.chunks * chunk,
                     "CHUNK": chunk, "PIXELS": pixels, "OUTPUTS": outputs}  # fmt: skip
        self.gradient_tile = {**self.tile, "PIXELS": GRADIENT_TILE // outputs}


def framed_images(images, geometry, dtype):
    """[n x lines x columns x c] of `dtype`: the images with a border of zeros; bytes become 0..1."""
    result = torch.empty(geometry.framed, dtype=dtype, device=images.device)
    batch, lines, columns, colours = geometry.framed
    _frame_kernel[batch * lines, triton.cdiv(columns * colours, LINE)](
        images, result, *images.shape[2:], lines, columns * colours, *images.stride(), colours, geometry.tile["BLOCK"],
        LINE,
    )  # fmt: skip
    return result


def forward(images, conv, norm, kind, slope, block, dtype, places, known=None):
    """Write activation(norm(conv(images))) to one or two `places`; the running statistics move.

    Images [n x c x h x w] of any strides, bytes (which become 0..1) or floats; `conv` an nn.Conv2d 3x3 with padding 1,
    `norm` an nn.BatchNorm2d; `block` 2 with a ReOrg in front, else 1; `known` as in kernels.norm_activation. Returns
    what `gradient` needs.
    """
    geometry = Geometry(images, conv, block)
    framed = framed_images(images, geometry, dtype)
    y = torch.empty(geometry.shape, dtype=dtype, device=images.device, memory_format=torch.channels_last)
    partial = torch.empty((geometry.programs, 2, conv.out_channels), device=images.device)
    weight = conv.weight.detach().permute(0, 2, 3, 1).contiguous()
    _forward_kernel[(geometry.programs,)](
        framed, weight, y, norm.running_mean, partial, geometry.num_pixels, conv.out_channels, geometry.pixels_each,
        *geometry.sizes, **geometry.tile, num_warps=WARPS,
    )  # fmt: skip
    saved = kernels.finish_statistics(partial, norm, geometry.num_pixels) if known is None else known
    kernels.apply(y, saved, kind, slope, places)
    return geometry, framed, y, saved


def gradient(pieces, kept, conv, kind, slope, of_weight, of_bias):
    """The gradient [o x c x 3 x 3] of the convolution's weight; those of the norm go to of_weight and of_bias [o].

    The gradient of what `forward` wrote is the sum of 1 to 3 `pieces`; `kept` is what it returned.
    """
    geometry, framed, y, saved = kept
    plane = kernels.parameter_gradients(pieces, y, saved, kind, slope, of_weight, of_bias)
    pieces, strides, count = kernels.of_three(pieces)
    partial = torch.empty((geometry.programs, geometry.tile["TAPS"], conv.out_channels), device=framed.device)
    _gradient_kernel[geometry.programs, geometry.chunks](
        *pieces, y, saved, plane, framed, partial, geometry.num_pixels, conv.out_channels, geometry.pixels_each,
        *strides, *geometry.sizes, slope, KIND=kind, PIECES=count, **geometry.gradient_tile, num_warps=WARPS,
    )  # fmt: skip
    taps = partial.sum(0)[: geometry.taps].view(SIDE, SIDE, -1, conv.out_channels)
    return taps.permute(3, 2, 0, 1)
