"""`finishing` on a GPU: one kernel (Triton) from the pictures of the workers to the images of the network."""

import torch
import triton
import triton.language as tl

from utils.finishing import MIRRORED, RECIPE, RECOLOURED, UNWARPED, UPSIDE_DOWN
from utils.late_warp import FRACTION, HEADER, OUTSIDE

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
def _weighted(first, second, share, ONE: tl.constexpr):
    return first * (ONE - share) + second * share


@triton.jit
def _warped(picture, grid, row, column, width, inside, HEADER: tl.constexpr, FRACTION: tl.constexpr,
            OUTSIDE: tl.constexpr):  # fmt: skip
    """Blue, green and red at (row, column) of the output, from the part of a mosaic that lies in `picture`."""
    part_width, part_height = tl.load(grid), tl.load(grid + 1)
    x = tl.load(grid + HEADER + column, mask=inside, other=0)
    y = tl.load(grid + HEADER + width + row, mask=inside, other=0)
    ONE: tl.constexpr = 1 << FRACTION
    HALF: tl.constexpr = 1 << (2 * FRACTION - 1)
    share_x, share_y = x & (ONE - 1), y & (ONE - 1)
    x, y = x >> FRACTION, y >> FRACTION
    blue1, green1, red1 = _pixel(picture, y, x, part_height, part_width, inside, OUTSIDE)
    blue2, green2, red2 = _pixel(picture, y, x + 1, part_height, part_width, inside, OUTSIDE)
    blue3, green3, red3 = _pixel(picture, y + 1, x, part_height, part_width, inside, OUTSIDE)
    blue4, green4, red4 = _pixel(picture, y + 1, x + 1, part_height, part_width, inside, OUTSIDE)
    blue = _weighted(_weighted(blue1, blue2, share_x, ONE), _weighted(blue3, blue4, share_x, ONE), share_y, ONE)
    green = _weighted(_weighted(green1, green2, share_x, ONE), _weighted(green3, green4, share_x, ONE), share_y, ONE)
    red = _weighted(_weighted(red1, red2, share_x, ONE), _weighted(red3, red4, share_x, ONE), share_y, ONE)
    return (blue + HALF) >> (2 * FRACTION), (green + HALF) >> (2 * FRACTION), (red + HALF) >> (2 * FRACTION)


@triton.jit
def _kernel(pictures, rows, recipes, grids, recipe_bytes, divisions, colours, images, height, width,
            RECIPE: tl.constexpr, RECOLOURED: tl.constexpr, UPSIDE_DOWN: tl.constexpr, MIRRORED: tl.constexpr,
            UNWARPED: tl.constexpr, HEADER: tl.constexpr, FRACTION: tl.constexpr, OUTSIDE: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    number = tl.program_id(1).to(tl.int64)
    recipe, grid = recipes + number * recipe_bytes, grids + (number * recipe_bytes + RECIPE) // 4
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < height * width
    row, column = place // width, place % width
    row = tl.where(tl.load(recipe + UPSIDE_DOWN) != 0, height - 1 - row, row)
    column = tl.where(tl.load(recipe + MIRRORED) != 0, width - 1 - column, column)
    picture = pictures + number * rows * width * 3
    if tl.load(recipe + UNWARPED) != 0:
        blue, green, red = _warped(picture, grid, row, column, width, inside, HEADER, FRACTION, OUTSIDE)
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


def finish(pictures, recipes, tables, images):
    """Write the `images` [b x h x w x 3: RGB] of `pictures` [b x rows x w x 3: BGR] and their `recipes`, all uint8."""
    batch, height, width, _ = images.shape
    _kernel[triton.cdiv(height * width, BLOCK), batch](
        pictures, pictures.shape[1], recipes, recipes.view(torch.int32), recipes.shape[1],
        tables.divisions, tables.colours, images, height, width,
        RECIPE, RECOLOURED, UPSIDE_DOWN, MIRRORED, UNWARPED, HEADER, FRACTION, OUTSIDE, BLOCK, num_warps=4,
    )  # fmt: skip
