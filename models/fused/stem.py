"""What the first convolution reads: images with as many channels as tensor cores like, straight from the bytes.

A convolution 3x3 with stride 2 and padding 1 equals one of 2x2 with stride 1 on blocks of 2x2 pixels (space to depth):
row -1 + u of its window lies in block (u + 1) // 2 - 1, row (u + 1) % 2 of it. So four times the channels, a quarter of
the pixels, and 16 taps of which the 7 outside of the 3x3 are zero.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional

TILE = 2048  # numbers that a program writes


@triton.jit
def _images_kernel(images, result, num_pixels, height, width, rows, columns, image_stride, colour_stride, row_stride,
                   column_stride, BYTES: tl.constexpr, COLOURS: tl.constexpr, BLOCK: tl.constexpr,
                   BORDER: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """result [n x rows x columns x CHANNELS]: the BLOCK x BLOCK pixels of a block side by side, column by column."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, CHANNELS)
    above = pixel // columns
    row = ((above % rows - BORDER) * BLOCK)[:, None] + (channel // COLOURS % BLOCK)[None, :]
    column = ((pixel % columns - BORDER) * BLOCK)[:, None] + (channel // (COLOURS * BLOCK))[None, :]
    inside = (pixel < num_pixels)[:, None] & (channel < COLOURS * BLOCK * BLOCK)[None, :]
    inside &= (row >= 0) & (row < height) & (column >= 0) & (column < width)
    start = images + (above // rows).to(tl.int64)[:, None] * image_stride + (channel % COLOURS * colour_stride)[None, :]
    value = tl.load(start + row * row_stride + column * column_stride, mask=inside, other=0).to(tl.float32)
    if BYTES:
        value = tl.div_rn(value, 255.0)
    place = pixel.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(result + place, value.to(result.dtype.element_ty), mask=(pixel < num_pixels)[:, None])


def padded_images(images, channels=8, dtype=torch.float16):
    """Images [n x c x h x w] as [n x channels x h x w] channels-last of `dtype`; the channels after the c are zeros.

    Bytes become 0..1, as `.float() / 255` does, floats stay; any strides. `channels` is a power of two.
    """
    return _rearranged(images, dtype, 1, 0, channels)


def depth_images(images, dtype=torch.float16, border=1):
    """Images [n x c x h x w] as blocks [n x 4c.. x ceil(h / 2) + border x ceil(w / 2) + border], channels-last.

    Channels are filled up with zeros to a power of two. The border, of zeros, lies above and on the left; with it
    `conv2d(depth_images(images), depth_weight(weight))` is `conv2d(images, weight, stride=2, padding=1)`. Without it
    the first 4c channels are those of ReOrg. Bytes become 0..1.
    """
    return _rearranged(images, dtype, 2, border, triton.next_power_of_2(4 * images.shape[1]))


def _rearranged(images, dtype, block, border, channels):
    batch, colours, height, width = images.shape
    if colours * block * block > channels or channels != triton.next_power_of_2(channels):
        raise ValueError(f"{colours * block * block} channels cannot be filled up to {channels}: give a power of two")
    rows, columns = triton.cdiv(height, block) + border, triton.cdiv(width, block) + border
    result = torch.empty((batch, channels, rows, columns), dtype=dtype, device=images.device,
                         memory_format=torch.channels_last)  # fmt: skip
    pixels = batch * rows * columns
    _images_kernel[(triton.cdiv(pixels, TILE // channels),)](
        images, result, pixels, height, width, rows, columns, *images.stride(), images.dtype == torch.uint8, colours,
        block, border, TILE // channels, channels, num_warps=4,
    )  # fmt: skip
    return result


def padded_weight(weight, channels=8, dtype=torch.float16):
    """Weight [o x c x k x k] with zeros for the channels that `padded_images` adds; its gradient: the first c."""
    weight = functional.pad(weight.to(dtype), (0, 0, 0, 0, 0, channels - weight.shape[1]))
    return weight.contiguous(memory_format=torch.channels_last)


def depth_weight(weight, dtype=torch.float16):
    """Weight [o x c x 3 x 3] of stride 2 as the one for `depth_images`: [o x 4c.. x 2 x 2], channels-last."""
    outputs, colours = weight.shape[:2]
    taps = functional.pad(weight.to(dtype), (1, 0, 1, 0)).reshape(outputs, colours, 2, 2, 2, 2)
    taps = taps.permute(0, 5, 3, 1, 2, 4).reshape(outputs, 4 * colours, 2, 2)
    return padded_weight(taps, triton.next_power_of_2(4 * colours), dtype)


def depth_weight_gradient(gradient, colours=3):
    """The gradient of `weight` [o x c x 3 x 3] from that of `depth_weight(weight)`; that of its zeros is left out."""
    taps = gradient[:, : 4 * colours].reshape(-1, 2, 2, colours, 2, 2).permute(0, 3, 4, 2, 5, 1)
    return taps.reshape(-1, colours, 4, 4)[:, :, 1:, 1:].contiguous()
