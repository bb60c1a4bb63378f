"""Max pooling and nearest up-sampling for training on a GPU: kernels (Triton), forward and backward, plain functions.

Maps are laid out as in kernels.py: the channels of a pixel side by side, pixels further apart where the map is a
slice of a concatenation. Results may be written into such a slice (`out`), into two places at once (`copy`), and
gradients are read from several maps (`pieces`) and added as float32 in the kernel: nothing is copied or added before or
after. Sums have a fixed order: the same input gives the same output.
"""

import math

import torch
import triton
import triton.language as tl

from models.fused.kernels import by_pixels, load_sum, of_three, pixel_stride

MAX_WINDOW = 15  # a place in it is a byte
SWEPT = 5, 1  # the window and stride of the pyramids: by sweeps, 2 to 3 times as fast as the kernels for any window
TILE = 1024  # elements that a program holds at a time
# Arguments that a kernel is not compiled anew for, as in kernels.py. How many channels there are, and how far apart
# pixels lie, tells the compiler how many numbers to move at once; these tell it nothing.
SIZES = ("num_pixels", "num_lines", "height", "width", "pooled_height", "pooled_width", "rows", "columns")


@triton.jit
def _place(num_pixels, num_channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """The pixels [ROWS] and channels [CHANNELS] of a program, and which of them exist."""
    pixel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return pixel, channel, pixel < num_pixels, (channel < num_channels)[None, :]


@triton.jit
def _read(x, pixel, channel, stride, inside, other):
    return tl.load(x + pixel.to(tl.int64)[:, None] * stride + channel[None, :], mask=inside, other=other)


@triton.jit
def _write(y, pixel, channel, stride, inside, value):
    tl.store(y + pixel.to(tl.int64)[:, None] * stride + channel[None, :], value.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _max_pool_kernel(x, y, copy, choice, num_pixels, num_channels, height, width, pooled_height, pooled_width,
                     x_stride, y_stride, copy_stride, WINDOW: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
                     COPY: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """y: the largest of each window; choice: its place there, the first among equals. `num_pixels` are those of y."""
    pixel, channel, exists, is_channel = _place(num_pixels, num_channels, ROWS, CHANNELS)
    rows_before = pixel // pooled_width
    top = rows_before % pooled_height * STRIDE - PAD
    left = pixel % pooled_width * STRIDE - PAD
    corner = (rows_before // pooled_height * height + top) * width + left
    best = tl.full((ROWS, CHANNELS), float("-inf"), x.dtype.element_ty)
    chosen = tl.zeros((ROWS, CHANNELS), tl.int32) + (tl.maximum(-top, 0) * WINDOW + tl.maximum(-left, 0))[:, None]
    for down in range(WINDOW):  # unrolled as well it takes seconds to compile
        for right in tl.static_range(WINDOW):
            row, column = top + down, left + right
            here = exists & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            there = corner + (down * width + right)
            value = _read(x, there, channel, x_stride, here[:, None] & is_channel, float("-inf"))
            better = (value > best) | (value != value)
            best = tl.where(better, value, best)
            chosen = tl.where(better, down * WINDOW + right, chosen)
    inside = exists[:, None] & is_channel
    _write(y, pixel, channel, y_stride, inside, best)
    _write(choice, pixel, channel, num_channels, inside, chosen)
    if COPY:
        _write(copy, pixel, channel, copy_stride, inside, best)


@triton.jit(do_not_specialize=SIZES)
def _gather_kernel(one, two, three, choice, plus, more, result, num_pixels, num_channels, height, width, stride1,
                   stride2, stride3, plus_stride, more_stride, WINDOW: tl.constexpr,
                   PIECES: tl.constexpr, PLUS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """Stride 1: each pixel collects from all windows around it that chose it."""
    pixel, channel, exists, is_channel = _place(num_pixels, num_channels, ROWS, CHANNELS)
    top, left = pixel // width % height - WINDOW // 2, pixel % width - WINDOW // 2
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for down in range(WINDOW):
        for right in tl.static_range(WINDOW):
            row, column = top + down, left + right
            here = exists & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            here = here[:, None] & is_channel
            there = pixel + ((down - WINDOW // 2) * width + right - WINDOW // 2)
            chosen = _read(choice, there, channel, num_channels, here, 255)
            value = load_sum(one, two, three, there, channel, here, stride1, stride2, stride3, PIECES)
            total += tl.where(chosen == WINDOW * WINDOW - 1 - down * WINDOW - right, value, 0.0)
    inside = exists[:, None] & is_channel
    if PLUS > 0:
        total += load_sum(plus, more, more, pixel, channel, inside, plus_stride, more_stride, more_stride, PLUS)
    _write(result, pixel, channel, num_channels, inside, total)


@triton.jit(do_not_specialize=SIZES)
def _spread_kernel(one, two, three, choice, plus, more, result, num_pixels, num_channels, height, width, pooled_height,
                   pooled_width, rows, columns, stride1, stride2, stride3, plus_stride, more_stride,
                   WINDOW: tl.constexpr, PIECES: tl.constexpr, PLUS: tl.constexpr, ROWS: tl.constexpr,
                   CHANNELS: tl.constexpr):  # fmt: skip
    """Windows side by side: each gives its gradient to the pixel it chose. `rows` x `columns` windows cover all."""
    window, channel, exists, is_channel = _place(num_pixels, num_channels, ROWS, CHANNELS)
    above, column = window // columns, window % columns
    image, row = above // rows, above % rows
    pooled = (image * pooled_height + row) * pooled_width + column
    inside = (exists & (row < pooled_height) & (column < pooled_width))[:, None] & is_channel
    chosen = _read(choice, pooled, channel, num_channels, inside, 255)
    value = load_sum(one, two, three, pooled, channel, inside, stride1, stride2, stride3, PIECES)
    for number in tl.static_range(WINDOW * WINDOW):
        down, right = row * WINDOW + number // WINDOW, column * WINDOW + number % WINDOW
        here = (exists & (down < height) & (right < width))[:, None] & is_channel
        there = (image * height + down) * width + right
        part = tl.where(chosen == number, value, 0.0)
        if PLUS > 0:
            part += load_sum(plus, more, more, there, channel, here, plus_stride, more_stride, more_stride, PLUS)
        _write(result, there, channel, num_channels, here, part)


@triton.jit(do_not_specialize=SIZES)
def _sweep_kernel(x, y, copy, choice, num_lines, num_channels, height, width, x_stride, y_stride, copy_stride,
                  COPY: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """Windows 5x5, stride 1, as _max_pool_kernel: down a column, the largest of five in a row goes to five windows.

    Windows 0 to 3 lie around the rows from row - 2 on. Values only move up the windows after they were compared: some
    compilers merge variables that start alike and only take each other's value.
    """
    line, channel, exists, is_channel = _place(num_lines, num_channels, ROWS, CHANNELS)
    column = line % width
    start = line // width * height * width + column
    lowest = tl.full((ROWS, CHANNELS), float("-inf"), x.dtype.element_ty)
    first = tl.full((ROWS, CHANNELS), 0, tl.int32) + tl.maximum(2 - column, 0)[:, None]
    best0, best1, best2, best3 = lowest, lowest, lowest, lowest
    chosen0, chosen1, chosen2, chosen3 = first, first, first + 10, first + 5
    for row in range(height + 2):
        best, chosen = lowest, first
        for right in tl.static_range(5):
            here = exists & (row < height) & (column + right >= 2) & (column + right < width + 2)
            there = start + (row * width + right - 2)
            value = _read(x, there, channel, x_stride, here[:, None] & is_channel, float("-inf"))
            better = (value > best) | (value != value)
            best = tl.where(better, value, best)
            chosen = tl.where(better, right, chosen)
        best0, chosen0 = _larger(best0, chosen0, best, chosen + 20)
        best1, chosen1 = _larger(best1, chosen1, best, chosen + 15)
        best2, chosen2 = _larger(best2, chosen2, best, chosen + 10)
        best3, chosen3 = _larger(best3, chosen3, best, chosen + 5)
        there, inside = start + (row - 2) * width, (exists & (row >= 2))[:, None] & is_channel
        _write(y, there, channel, y_stride, inside, best0)
        _write(choice, there, channel, num_channels, inside, chosen0)
        if COPY:
            _write(copy, there, channel, copy_stride, inside, best0)
        best0, best1, best2, best3 = best1, best2, best3, best
        chosen0, chosen1, chosen2, chosen3 = chosen1, chosen2, chosen3, chosen


@triton.jit
def _larger(best, chosen, value, number):
    """The larger of two values, with its number; the first if they are equal."""
    better = (value > best) | (value != value)
    return tl.where(better, value, best), tl.where(better, number, chosen)


@triton.jit(do_not_specialize=SIZES)
def _gradient_sweep_kernel(one, two, three, choice, plus, more, result, num_lines, num_channels, height, width,
                           stride1, stride2, stride3, plus_stride, more_stride, PIECES: tl.constexpr,
                           PLUS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """Windows 5x5, stride 1, as _gather_kernel: down a column, each row of windows gives to the five rows around it."""
    line, channel, exists, is_channel = _place(num_lines, num_channels, ROWS, CHANNELS)
    column = line % width
    start = line // width * height * width + column
    zeros = tl.full((ROWS, CHANNELS), 0.0, tl.float32)
    total0, total1, total2, total3 = zeros, zeros, zeros, zeros
    for row in range(height + 2):
        total4 = zeros
        for right in tl.static_range(5):
            here = exists & (row < height) & (column + right >= 2) & (column + right < width + 2)
            here = here[:, None] & is_channel
            there = start + (row * width + right - 2)
            chosen = _read(choice, there, channel, num_channels, here, 255)
            value = load_sum(one, two, three, there, channel, here, stride1, stride2, stride3, PIECES)
            total0 += tl.where(chosen == 4 - right, value, 0.0)
            total1 += tl.where(chosen == 9 - right, value, 0.0)
            total2 += tl.where(chosen == 14 - right, value, 0.0)
            total3 += tl.where(chosen == 19 - right, value, 0.0)
            total4 += tl.where(chosen == 24 - right, value, 0.0)
        there, inside = start + (row - 2) * width, (exists & (row >= 2))[:, None] & is_channel
        if PLUS > 0:
            total0 += load_sum(plus, more, more, there, channel, inside, plus_stride, more_stride, more_stride, PLUS)
        _write(result, there, channel, num_channels, inside, total0)
        total0, total1, total2, total3 = total1, total2, total3, total4


@triton.jit(do_not_specialize=SIZES)
def _upsample_kernel(x, y, copy, num_pixels, num_channels, width, x_stride, y_stride, copy_stride,
                     COPY: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """Each pixel of x, `width` in a row, becomes four of y."""
    pixel, channel, exists, is_channel = _place(num_pixels, num_channels, ROWS, CHANNELS)
    inside = exists[:, None] & is_channel
    value = _read(x, pixel, channel, x_stride, inside, 0.0)
    corner = pixel // width * (4 * width) + pixel % width * 2
    for number in tl.static_range(4):
        there = corner + (number // 2 * 2 * width + number % 2)
        _write(y, there, channel, y_stride, inside, value)
        if COPY:
            _write(copy, there, channel, copy_stride, inside, value)


@triton.jit(do_not_specialize=SIZES)
def _sum_of_four_kernel(one, two, three, plus, more, result, num_pixels, num_channels, width, stride1, stride2,
                        stride3, plus_stride, more_stride, PIECES: tl.constexpr, PLUS: tl.constexpr,
                        ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """The gradient of what was up-sampled; `num_pixels` and `width` are those of the result."""
    pixel, channel, exists, is_channel = _place(num_pixels, num_channels, ROWS, CHANNELS)
    inside = exists[:, None] & is_channel
    corner = pixel // width * (4 * width) + pixel % width * 2
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for number in tl.static_range(4):
        there = corner + (number // 2 * 2 * width + number % 2)
        total += load_sum(one, two, three, there, channel, inside, stride1, stride2, stride3, PIECES)
    if PLUS > 0:
        total += load_sum(plus, more, more, pixel, channel, inside, plus_stride, more_stride, more_stride, PLUS)
    _write(result, pixel, channel, num_channels, inside, total)


def max_pool(x, window, stride=1, out=None, copy=None):
    """(y, choice): max pooling of x [b x c x h x w], with what its gradient needs: a byte for each number of y.

    Stride 1 keeps the size (odd windows only); a stride as large as the window leaves out what fills no window. Raises
    ValueError for another stride, for windows beyond 15, and for an `out` or `copy` of another shape or layout.
    """
    _check_window(window, stride)
    x, x_stride = by_pixels(x)
    batch, channels, height, width = x.shape
    pooled = (height, width) if stride == 1 else (height // window, width // window)
    y, y_stride = _target(out, (batch, channels, *pooled), x)
    second, second_stride = (y, y_stride) if copy is None else _target(copy, y.shape, x)
    choice = _packed(y.shape, x, torch.uint8)
    if (window, stride) == SWEPT:
        kernel, number, pooled, constants = _sweep_kernel, batch * width, (), {}
    else:
        kernel, number = _max_pool_kernel, batch * math.prod(pooled)
        constants = {"WINDOW": window, "STRIDE": stride, "PAD": window // 2 if stride == 1 else 0}
    grid, tile = _tiles(number, channels)
    kernel[grid](
        x, y, second, choice, number, channels, height, width, *pooled, x_stride, y_stride, second_stride,
        COPY=copy is not None, **constants, **tile,
    )  # fmt: skip
    return y, choice


def max_pool_gradient(pieces, choice, window, stride=1, size=None, plus=()):
    """The gradient of x [b x c x h x w] from that of y, which is the sum of 1 to 3 `pieces`.

    `size` is (h, w) where windows do not fill x. `plus`: up to two other gradients of x, added before the rounding.
    Raises ValueError as `max_pool`.
    """
    _check_window(window, stride)
    pieces, strides, num_pieces = of_three(pieces)
    plus, plus_strides, num_plus = _up_to_two(plus, pieces[0])
    batch, channels, *pooled = choice.shape
    height, width = size or (pooled[0] * stride, pooled[1] * stride)
    result = _packed((batch, channels, height, width), pieces[0], pieces[0].dtype)
    constants, windows = {"PIECES": num_pieces, "PLUS": num_plus}, ()
    if (window, stride) == SWEPT:
        kernel, number = _gradient_sweep_kernel, batch * width
    else:
        kernel, number = _gather_kernel, batch * height * width
        constants["WINDOW"] = window
    if stride > 1:
        rows, columns = triton.cdiv(height, window), triton.cdiv(width, window)
        kernel, number, windows = _spread_kernel, batch * rows * columns, (*pooled, rows, columns)
    grid, tile = _tiles(number, channels)
    kernel[grid](
        *pieces, choice, *plus, result, number, channels, height, width, *windows, *strides, *plus_strides,
        **constants, **tile,
    )  # fmt: skip
    return result


def upsample(x, out=None, copy=None):
    """x [b x c x h x w] with each pixel four times: [b x c x 2h x 2w]. Raises ValueError as `max_pool`."""
    x, x_stride = by_pixels(x)
    batch, channels, height, width = x.shape
    y, y_stride = _target(out, (batch, channels, 2 * height, 2 * width), x)
    second, second_stride = (y, y_stride) if copy is None else _target(copy, y.shape, x)
    grid, tile = _tiles(batch * height * width, channels)
    _upsample_kernel[grid](
        x, y, second, batch * height * width, channels, width, x_stride, y_stride, second_stride,
        COPY=copy is not None, **tile,
    )  # fmt: skip
    return y


def upsample_gradient(pieces, plus=()):
    """The gradient of x [b x c x h x w] from that of its up-sampled form; arguments as in `max_pool_gradient`."""
    pieces, strides, num_pieces = of_three(pieces)
    plus, plus_strides, num_plus = _up_to_two(plus, pieces[0])
    batch, channels, height, width = pieces[0].shape
    height, width = height // 2, width // 2
    result = _packed((batch, channels, height, width), pieces[0], pieces[0].dtype)
    grid, tile = _tiles(batch * height * width, channels)
    _sum_of_four_kernel[grid](
        *pieces, *plus, result, batch * height * width, channels, width, *strides, *plus_strides,
        PIECES=num_pieces, PLUS=num_plus, **tile,
    )  # fmt: skip
    return result


def _check_window(window, stride):
    if window > MAX_WINDOW or stride not in (1, window) or (stride == 1 and window % 2 == 0):
        raise ValueError(
            f"max pooling with a window of {window} and a stride of {stride} has no kernel: give an odd window and "
            f"stride 1, or a stride as large as the window, up to {MAX_WINDOW}"
        )


def _tiles(num_pixels, num_channels):
    """How a map is divided among programs: (grid, what the kernel is told)."""
    channels = min(triton.next_power_of_2(num_channels), 64)
    rows = TILE // channels
    grid = triton.cdiv(num_pixels, rows), triton.cdiv(num_channels, channels)
    return grid, {"ROWS": rows, "CHANNELS": channels, "num_warps": 4}


def _packed(shape, like, dtype):
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def _target(out, shape, like):
    """(the map to write, its pixel stride): `out`, or a new one of the kind of `like`."""
    if out is None:
        return _packed(shape, like, like.dtype), shape[1]
    stride = pixel_stride(out)
    if stride is None or out.shape != torch.Size(shape):
        raise ValueError(
            f"a result of shape {list(shape)} cannot be written into {list(out.shape)} with strides "
            f"{list(out.stride())}: give a channels-last map of that shape, or a slice of channels of one"
        )
    return out, stride


def _up_to_two(maps, filler):
    """As `of_three`, of two maps, one, or none: then it is the filler that does not count."""
    filled, strides, count = of_three(maps or [filler])
    return filled[:2], strides[:2], count if maps else 0
