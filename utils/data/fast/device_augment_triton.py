"""`finishing` on a GPU: one kernel (Triton) from the pictures of the workers to the images of the network."""

import torch
import triton
import triton.language as tl

from utils.data.fast.deferred import FLOATING, FRACTION, HEADER, OUTSIDE
from utils.data.fast.recipe import MIRRORED, RECIPE, RECOLOURED, UNWARPED, UPSIDE_DOWN

BLOCK = 1024  # pixels that a program finishes


@triton.jit
def _pixel(picture, row, column, height, width, inside, OUTSIDE: tl.constexpr):
    """Blue, green and red at (row, column) of a picture of `height` x `width` pixels."""
    inside &= (row >= 0) & (row < height) & (column >= 0) & (column < width)
    source = picture + (row * width + column) * 3
    blue = tl.load(source, mask=inside, other=OUTSIDE).to(tl.int32)
    green = tl.load(source + 1, mask=inside, other=OUTSIDE).to(tl.int32)
    red = tl.load(source + 2, mask=inside, other=OUTSIDE).to(tl.int32)
    return blue, green, red


@triton.jit
def _mixed(one, two, three, four, across, down, FLOATING: tl.constexpr, FRACTION: tl.constexpr):
    """One colour of the output, from four neighbours and the distances from the first: see late_warp."""
    if FLOATING:
        one, two, three, four = one.to(tl.float32), two.to(tl.float32), three.to(tl.float32), four.to(tl.float32)
        top, bottom = tl.fma(across, two - one, one), tl.fma(across, four - three, three)
        mixed = tl.fma(down, bottom - top, top)
        return ((mixed + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2**23: what is added rounds to a whole number
    else:  # noqa: RET505 (without it Triton compiles what follows in both cases)
        ONE: tl.constexpr = 1 << FRACTION
        HALF: tl.constexpr = 1 << (2 * FRACTION - 1)
        top, bottom = one * (ONE - across) + two * across, three * (ONE - across) + four * across
        return (top * (ONE - down) + bottom * down + HALF) >> (2 * FRACTION)


@triton.jit
def _warped(picture, grid, distances, row, column, height, width, inside, FLOATING: tl.constexpr,
            HEADER: tl.constexpr, FRACTION: tl.constexpr, OUTSIDE: tl.constexpr):  # fmt: skip
    """Blue, green and red at (row, column) of the output, from the part of a mosaic that lies in `picture`."""
    part_width, part_height = tl.load(grid), tl.load(grid + 1)
    x = tl.load(grid + HEADER + column, mask=inside, other=0)
    y = tl.load(grid + HEADER + width + row, mask=inside, other=0)
    across = tl.load(distances + HEADER + width + height + column, mask=inside, other=0)
    down = tl.load(distances + HEADER + 2 * width + height + row, mask=inside, other=0)
    blue1, green1, red1 = _pixel(picture, y, x, part_height, part_width, inside, OUTSIDE)
    blue2, green2, red2 = _pixel(picture, y, x + 1, part_height, part_width, inside, OUTSIDE)
    blue3, green3, red3 = _pixel(picture, y + 1, x, part_height, part_width, inside, OUTSIDE)
    blue4, green4, red4 = _pixel(picture, y + 1, x + 1, part_height, part_width, inside, OUTSIDE)
    blue = _mixed(blue1, blue2, blue3, blue4, across, down, FLOATING, FRACTION)
    green = _mixed(green1, green2, green3, green4, across, down, FLOATING, FRACTION)
    red = _mixed(red1, red2, red3, red4, across, down, FLOATING, FRACTION)
    return blue, green, red


@triton.jit
def _kernel(pictures, rows, recipes, grids, distances, recipe_bytes, divisions, colours, images, height, width,
            FLOATING: tl.constexpr, RECIPE: tl.constexpr, RECOLOURED: tl.constexpr, UPSIDE_DOWN: tl.constexpr,
            MIRRORED: tl.constexpr, UNWARPED: tl.constexpr, HEADER: tl.constexpr, FRACTION: tl.constexpr,
            OUTSIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    number = tl.program_id(1).to(tl.int64)
    recipe, place_of_grid = recipes + number * recipe_bytes, (number * recipe_bytes + RECIPE) // 4
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < height * width
    row, column = place // width, place % width
    row = tl.where(tl.load(recipe + UPSIDE_DOWN) != 0, height - 1 - row, row)
    column = tl.where(tl.load(recipe + MIRRORED) != 0, width - 1 - column, column)
    picture = pictures + number * rows * width * 3
    if tl.load(recipe + UNWARPED) != 0:
        blue, green, red = _warped(picture, grids + place_of_grid, distances + place_of_grid, row, column, height,
                                   width, inside, FLOATING, HEADER, FRACTION, OUTSIDE)  # fmt: skip
    else:
        blue, green, red = _pixel(picture, row, column, height, width, inside, OUTSIDE)
    rgb = red | green << 8 | blue << 16
    if tl.load(recipe + RECOLOURED) != 0:
        value = tl.maximum(tl.maximum(red, green), blue)
        spread = value - tl.minimum(tl.minimum(red, green), blue)
        saturation = (spread * tl.load(divisions + value) + 2048) >> 12
        hue = tl.where(
            value == red, green - blue, tl.where(value == green, blue - red + 2 * spread, red - green + 4 * spread)
        )
        hue = (hue * tl.load(divisions + 256 + spread) + 2048) >> 12
        hue = tl.where(hue < 0, hue + 180, hue)
        hue = tl.load(recipe + hue, mask=inside, other=0).to(tl.int32)
        saturation = tl.load(recipe + 256 + saturation, mask=inside, other=0).to(tl.int32)
        value = tl.load(recipe + 512 + value, mask=inside, other=0).to(tl.int32)
        rgb = tl.load(colours + (hue * 65536 + saturation * 256 + value), mask=inside, other=0)
    target = images + (number * height * width + place) * 3
    tl.store(target, (rgb & 255).to(tl.uint8), mask=inside)
    tl.store(target + 1, (rgb >> 8 & 255).to(tl.uint8), mask=inside)
    tl.store(target + 2, (rgb >> 16 & 255).to(tl.uint8), mask=inside)


def finish(pictures, recipes, tables, way, images):
    """Write the `images` [b x h x w x 3: RGB] of `pictures` [b x rows x w x 3: BGR] and their `recipes`, all uint8.

    `way` is how to warp, as `late_warp.way_of_warping` tells.
    """
    batch, height, width, _ = images.shape
    is_floating, grids = way == FLOATING, recipes.view(torch.int32)
    _kernel[triton.cdiv(height * width, BLOCK), batch](
        pictures, pictures.shape[1], recipes, grids, grids.view(torch.float32) if is_floating else grids,
        recipes.shape[1], tables.divisions, tables.colours, images, height, width, is_floating,
        RECIPE, RECOLOURED, UPSIDE_DOWN, MIRRORED, UNWARPED, HEADER, FRACTION, OUTSIDE, BLOCK, num_warps=4,
    )  # fmt: skip
