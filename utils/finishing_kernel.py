"""`finishing` on a GPU: one kernel (Triton) from the pictures of the workers to the images of the network."""

import triton
import triton.language as tl

from utils.finishing import MIRRORED, RECIPE, RECOLOURED, UPSIDE_DOWN

BLOCK = 1024  # pixels that a program finishes


@triton.jit
def _kernel(pictures, recipes, divisions, colours, images, height, width,
            RECIPE: tl.constexpr, RECOLOURED: tl.constexpr, UPSIDE_DOWN: tl.constexpr, MIRRORED: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    number = tl.program_id(1).to(tl.int64)
    recipe = recipes + number * RECIPE
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < height * width
    row, column = place // width, place % width
    row = tl.where(tl.load(recipe + UPSIDE_DOWN) != 0, height - 1 - row, row)
    column = tl.where(tl.load(recipe + MIRRORED) != 0, width - 1 - column, column)
    source = pictures + (number * height * width + row * width + column) * 3
    blue = tl.load(source, mask=inside, other=0).to(tl.int32)
    green = tl.load(source + 1, mask=inside, other=0).to(tl.int32)
    red = tl.load(source + 2, mask=inside, other=0).to(tl.int32)
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
    """Write the finished `images` [b x h x w x 3: RGB] of `pictures` [b x h x w x 3: BGR] and `recipes`, all uint8."""
    batch, height, width, _ = pictures.shape
    _kernel[triton.cdiv(height * width, BLOCK), batch](
        pictures, recipes, tables.divisions, tables.colours, images, height, width,
        RECIPE, RECOLOURED, UPSIDE_DOWN, MIRRORED, BLOCK, num_warps=4,
    )  # fmt: skip
