"""`device_augment` on a GPU: one kernel (Triton) from what the workers wrote to the images of the network."""

import torch
import triton
import triton.language as tl

from utils.data.fast import deferred

BLOCK = 1024  # pixels that a program makes


@triton.jit
def _pixel(image, row, column, height, width, inside, OUTSIDE: tl.constexpr):
    """Blue, green and red at (row, column) of an image of `height` x `width` pixels."""
    inside &= (row >= 0) & (row < height) & (column >= 0) & (column < width)
    source = image + (row * width + column) * 3
    blue = tl.load(source, mask=inside, other=OUTSIDE).to(tl.int32)
    green = tl.load(source + 1, mask=inside, other=OUTSIDE).to(tl.int32)
    red = tl.load(source + 2, mask=inside, other=OUTSIDE).to(tl.int32)
    return blue, green, red


@triton.jit
def _above(byte):
    """2**23 + a byte, as float32: its last bits are those of the byte, so that nothing is converted, which is slow."""
    return (byte | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def mixed(one, two, three, four, across, down, FLOATING: tl.constexpr, FRACTION: tl.constexpr):
    """One colour of the output, from four neighbours and the distances from the first: see deferred.py."""
    if FLOATING:
        one, two, three, four = _above(one), _above(two), _above(three), _above(four)
        top = tl.fma(across, two - one, one - 8388608.0)
        bottom = tl.fma(across, four - three, three - 8388608.0)
        above = tl.fma(down, bottom - top, top) + 8388608.0  # which rounds to a whole number
        return above.to(tl.int32, bitcast=True) & 255
    else:  # noqa: RET505 (without it Triton compiles what follows in both cases)
        ONE: tl.constexpr = 1 << FRACTION
        HALF: tl.constexpr = 1 << (2 * FRACTION - 1)
        top, bottom = one * (ONE - across) + two * across, three * (ONE - across) + four * across
        return (top * (ONE - down) + bottom * down + HALF) >> (2 * FRACTION)


@triton.jit
def _warped(image, grid, distances, row, column, height, width, inside, FLOATING: tl.constexpr,
            HEADER: tl.constexpr, FRACTION: tl.constexpr, OUTSIDE: tl.constexpr):  # fmt: skip
    """Blue, green and red at (row, column) of the output, from the part of a mosaic that lies in `image`."""
    part_width, part_height = tl.load(grid), tl.load(grid + 1)
    x = tl.load(grid + HEADER + column, mask=inside, other=0)
    y = tl.load(grid + HEADER + width + row, mask=inside, other=0)
    across = tl.load(distances + HEADER + width + height + column, mask=inside, other=0)
    down = tl.load(distances + HEADER + 2 * width + height + row, mask=inside, other=0)
    blue1, green1, red1 = _pixel(image, y, x, part_height, part_width, inside, OUTSIDE)
    blue2, green2, red2 = _pixel(image, y, x + 1, part_height, part_width, inside, OUTSIDE)
    blue3, green3, red3 = _pixel(image, y + 1, x, part_height, part_width, inside, OUTSIDE)
    blue4, green4, red4 = _pixel(image, y + 1, x + 1, part_height, part_width, inside, OUTSIDE)
    blue = mixed(blue1, blue2, blue3, blue4, across, down, FLOATING, FRACTION)
    green = mixed(green1, green2, green3, green4, across, down, FLOATING, FRACTION)
    red = mixed(red1, red2, red3, red4, across, down, FLOATING, FRACTION)
    return blue, green, red


@triton.jit
def to_hsv(blue, green, red, divisions):
    """Hue, saturation and value as OpenCV has them."""
    value = tl.maximum(tl.maximum(red, green), blue)
    spread = value - tl.minimum(tl.minimum(red, green), blue)
    saturation = (spread * tl.load(divisions + value) + 2048) >> 12
    hue = tl.where(
        value == red, green - blue, tl.where(value == green, blue - red + 2 * spread, red - green + 4 * spread)
    )
    hue = (hue * tl.load(divisions + 256 + spread) + 2048) >> 12
    return tl.where(hue < 0, hue + 180, hue), saturation, value


@triton.jit
def from_hsv(hue, saturation, value):
    """red + 256 * green + 65536 * blue as OpenCV computes them, in float32; see `has_formula`."""
    angle, share = hue.to(tl.float32) * (6 / 180), saturation.to(tl.float32) * (1 / 255)
    value = value.to(tl.float32) * (1 / 255)
    sector = angle.to(tl.int32)
    part, one = tl.abs(angle - (sector | 1).to(tl.float32)), tl.full(angle.shape, 1.0, tl.float32)
    most, least = (value * 255.0).to(tl.int32), (value * (1.0 - share) * 255.0).to(tl.int32)
    middle = (value * tl.fma(-share, part, one) * 255.0).to(tl.int32)
    # Where each of them goes, 5 bits for a sector: 0, 8, 8, 16, 16, 0 and 8, 0, 16, 8, 0, 16.
    for_most, for_middle = 0x1082100 >> sector * 5 & 24, 0x20044008 >> sector * 5 & 24
    return most << for_most | middle << for_middle | least << (24 - for_most - for_middle)


@triton.jit
def _count_other_colours(colours, counts, SIZE: tl.constexpr):
    """Count in each part of the table `colours` the numbers that `from_hsv` computes otherwise."""
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    rgb = from_hsv(place >> 16, place >> 8 & 255, place & 255)
    tl.store(counts + tl.program_id(0), tl.sum((rgb != tl.load(colours + place)).to(tl.int32)))


def has_formula(colours):
    """Whether `from_hsv` gives every number of the table `colours` (ConversionTables) of this OpenCV."""
    size = 2048 if colours.is_cuda else 65536  # for the interpreter few large programs take less time
    counts = colours.new_empty(len(colours) // size)
    _count_other_colours[(len(counts),)](colours, counts, size, enable_fp_fusion=False)
    return not counts.any().item()


@triton.jit
def _kernel(pixels, rows, all_steps, grids, distances, steps_bytes, divisions, colours, images, height, width,
            FLOATING: tl.constexpr, STEPS: tl.constexpr, RECOLOURED: tl.constexpr, UPSIDE_DOWN: tl.constexpr,
            MIRRORED: tl.constexpr, AFFINE: tl.constexpr, HEADER: tl.constexpr, FRACTION: tl.constexpr,
            OUTSIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    number = tl.program_id(1).to(tl.int64)
    steps, place_of_grid = all_steps + number * steps_bytes, (number * steps_bytes + STEPS) // 4
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < height * width
    row, column = place // width, place % width
    row = tl.where(tl.load(steps + UPSIDE_DOWN) != 0, height - 1 - row, row)
    column = tl.where(tl.load(steps + MIRRORED) != 0, width - 1 - column, column)
    image = pixels + number * rows * width * 3
    if tl.load(steps + AFFINE) != 0:
        blue, green, red = _warped(image, grids + place_of_grid, distances + place_of_grid, row, column, height,
                                   width, inside, FLOATING, HEADER, FRACTION, OUTSIDE)  # fmt: skip
    else:
        blue, green, red = _pixel(image, row, column, height, width, inside, OUTSIDE)
    rgb = red | green << 8 | blue << 16
    if tl.load(steps + RECOLOURED) != 0:
        hue, saturation, value = to_hsv(blue, green, red, divisions)
        hue = tl.load(steps + hue, mask=inside, other=0).to(tl.int32)
        saturation = tl.load(steps + 256 + saturation, mask=inside, other=0).to(tl.int32)
        value = tl.load(steps + 512 + value, mask=inside, other=0).to(tl.int32)
        rgb = tl.load(colours + (hue * 65536 + saturation * 256 + value), mask=inside, other=0)
    target = images + (number * height * width + place) * 3
    tl.store(target, (rgb & 255).to(tl.uint8), mask=inside)
    tl.store(target + 1, (rgb >> 8 & 255).to(tl.uint8), mask=inside)
    tl.store(target + 2, (rgb >> 16 & 255).to(tl.uint8), mask=inside)


def augment(pixels, steps, tables, mode, images):
    """Write `images` [b x h x w x 3: RGB] from `pixels` [b x rows x w x 3: BGR] and their deferred `steps`, all uint8.

    `mode` is how to round, as `deferred.rounding_mode` tells.
    """
    batch, height, width, _ = images.shape
    is_floating, grids = mode == deferred.FLOATING, steps.view(torch.int32)
    _kernel[triton.cdiv(height * width, BLOCK), batch](
        pixels, pixels.shape[1], steps, grids, grids.view(torch.float32) if is_floating else grids, steps.shape[1],
        tables.divisions, tables.colours, images, height, width, is_floating, deferred.STEPS, deferred.RECOLOURED,
        deferred.UPSIDE_DOWN, deferred.MIRRORED, deferred.AFFINE, deferred.HEADER, deferred.FRACTION, deferred.OUTSIDE,
        BLOCK, num_warps=4,
    )  # fmt: skip
