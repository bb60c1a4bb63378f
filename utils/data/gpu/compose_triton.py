"""Batches from recipes (recipes.py) and the images of an ImageStore: one kernel of Triton."""

import torch
import triton
import triton.language as tl

from utils.data.fast import deferred
from utils.data.fast.device_augment_triton import from_hsv, mixed, to_hsv
from utils.data.gpu import recipes as layout

ROWS, COLUMNS, WARPS = 4, 64, 4  # pixels and warps of a program: the fastest of seven forms on an H200


@triton.jit
def _rounded(number):
    """The int32 nearest to a float64, halves to even: a sum that large has no bits left for fractions."""
    return ((number + 6755399441055744.0) - 6755399441055744.0).to(tl.int32)  # 1.5 * 2**52


@triton.jit
def _positions(back, row, column, like, FLOATING: tl.constexpr, PRECISION: tl.constexpr, FRACTION: tl.constexpr):
    """Along one axis of the canvas: the first of the two pixels between which each position lies, and the distance."""
    if FLOATING:
        per_column, per_row = tl.load(back).to(tl.float32), tl.load(back + 1).to(tl.float32)
        of_row = row.to(tl.float32) * per_row + tl.load(back + 2).to(tl.float32)  # rounded twice, see deferred.py
        column, of_row = tl.broadcast_to(column.to(tl.float32), like.shape), tl.broadcast_to(of_row, like.shape)
        position = tl.fma(column, per_column, of_row)
        first = tl.floor(position)
        return first.to(tl.int32), position - first
    else:  # noqa: RET505 (without it Triton compiles what follows in both cases)
        SCALE: tl.constexpr = 1 << PRECISION
        HALF: tl.constexpr = 1 << (PRECISION - FRACTION - 1)
        of_column = _rounded(tl.load(back) * column.to(tl.float64) * SCALE)
        of_row = _rounded((tl.load(back + 1) * row.to(tl.float64) + tl.load(back + 2)) * SCALE)
        position = (of_column + of_row + HALF) >> (PRECISION - FRACTION)
        return position >> FRACTION, position & ((1 << FRACTION) - 1)


@triton.jit
def _bounds(back, row, column, rows, columns):
    """Along one axis of the canvas: the lowest and the highest pixel that a block from (row, column) on may read."""
    per_column, per_row = tl.load(back).to(tl.float32), tl.load(back + 1).to(tl.float32)
    corner = per_column * column + per_row * row + tl.load(back + 2).to(tl.float32)
    down, across = per_row * rows, per_column * columns
    lowest = corner + tl.minimum(down, 0.0) + tl.minimum(across, 0.0)
    highest = corner + tl.maximum(down, 0.0) + tl.maximum(across, 0.0)
    return tl.floor(lowest).to(tl.int32) - 1, tl.floor(highest).to(tl.int32) + 2


@triton.jit
def _look_up(source, hit):
    """blue + 256 * green + 65536 * red of the pixel at `source` where `hit`, elsewhere 0."""
    blue = tl.load(source, mask=hit, other=0).to(tl.int32)
    green = tl.load(source + 1, mask=hit, other=0).to(tl.int32)
    red = tl.load(source + 2, mask=hit, other=0).to(tl.int32)
    return blue | green << 8 | red << 16


@triton.jit
def _pair(words, byte, left, right, before_left, before_right):
    """As `_look_up` the pixel at `byte` where `left`, and the next one where `right`; elsewhere what was there before.

    Their 6 bytes lie in two or three words. Only words of which a byte is wanted are read: others may be outside of the
    store. Shifting twice stands for a shift by 32 - shift, which is undefined for 32.
    """
    place, shift = words + (byte >> 2), ((byte & 3) * 8).to(tl.uint32)
    one = tl.load(place, mask=left | right & (shift == 0), other=0).to(tl.uint32, bitcast=True)
    two = tl.load(place + 1, mask=right | left & (shift > 8), other=0).to(tl.uint32, bitcast=True)
    three = tl.load(place + 2, mask=right & (shift == 24), other=0).to(tl.uint32, bitcast=True)
    low, high = one >> shift | two << (31 - shift) << 1, two >> shift | three << (31 - shift) << 1
    here, behind = low & 0xFFFFFF, low >> 24 | (high & 0xFFFF) << 8
    return tl.where(left, here.to(tl.int32), before_left), tl.where(right, behind.to(tl.int32), before_right)


@triton.jit
def _layer(words, numbers, longs, doubles, row, column, inside, first_row, first_column, rows, columns,
           FLOATING: tl.constexpr, PRECISION: tl.constexpr, FRACTION: tl.constexpr, OUTSIDE: tl.constexpr,
           LAYER: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Blue, green and red of the layer at which `numbers` (int32), `longs` (int64) and `doubles` (float64) begin."""
    x, across = _positions(doubles, row, column, inside, FLOATING, PRECISION, FRACTION)
    y, down = _positions(doubles + 3, row, column, inside, FLOATING, PRECISION, FRACTION)
    lowest_x, highest_x = _bounds(doubles, first_row, first_column, rows, columns)
    lowest_y, highest_y = _bounds(doubles + 3, first_row, first_column, rows, columns)
    one = tl.zeros_like(x) + OUTSIDE * 0x010101  # in all three bytes
    two, three, four = one, one, one
    for number in range(tl.load(numbers + LAYER // 4 - 2)):
        place = LAYER + number * TILE
        tile = numbers + place // 4
        width, x1, y1, x2, y2 = (tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5),
                                 tl.load(tile + 6))  # fmt: skip
        if (lowest_x < x2) & (highest_x >= x1) & (lowest_y < y2) & (highest_y >= y1):
            start = tl.load(longs + place // 8)
            of_tile, byte = words + (start >> 2), (start & 3).to(tl.int32) + (y * width + x) * 3
            left, right = inside & (x >= x1) & (x < x2), inside & (x >= x1 - 1) & (x < x2 - 1)
            top, bottom = (y >= y1) & (y < y2), (y >= y1 - 1) & (y < y2 - 1)
            one, two = _pair(of_tile, byte, top & left, top & right, one, two)
            three, four = _pair(of_tile, byte + 3 * width, bottom & left, bottom & right, three, four)
    blue = mixed(one & 255, two & 255, three & 255, four & 255, across, down, FLOATING, FRACTION)
    green = mixed(one >> 8 & 255, two >> 8 & 255, three >> 8 & 255, four >> 8 & 255, across, down, FLOATING, FRACTION)
    red = mixed(one >> 16, two >> 16, three >> 16, four >> 16, across, down, FLOATING, FRACTION)
    return blue, green, red


@triton.jit
def _blended(one, two, ratio):
    """See pixel_ops.blended: in float64, then truncated."""
    return (one.to(tl.float64) * ratio + two.to(tl.float64) * (1 - ratio)).to(tl.int32)


@triton.jit
def _scaled(level, factor):
    """A saturation or value times a factor, truncated, as Colours.tables has it."""
    return tl.minimum(tl.maximum((level.to(tl.float64) * factor).to(tl.int32), 0), 255)


@triton.jit
def _recoloured(blue, green, red, factors, divisions, colours, inside, FORMULA: tl.constexpr):
    """red + 256 * green + 65536 * blue of pixels, their hue, saturation and value times `factors`."""
    hue, saturation, value = to_hsv(blue, green, red, divisions)
    hue = (hue.to(tl.float64) * tl.load(factors)).to(tl.int32)
    hue = tl.where(hue >= 180, hue - 180, hue)  # a factor is at most 2
    saturation, value = _scaled(saturation, tl.load(factors + 1)), _scaled(value, tl.load(factors + 2))
    if FORMULA:
        return from_hsv(hue, saturation, value)
    else:  # noqa: RET505 (as above)
        return tl.load(colours + (hue * 65536 + saturation * 256 + value), mask=inside, other=0)


@triton.jit
def _pasted(rgb, pixels, numbers, row, column, inside, OBJECT: tl.constexpr):
    """`rgb` with the object over it at which `pixels` (uint8) and `numbers` (int32) begin; and the object's bytes."""
    x, y, w, h = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    hit = inside & (row >= y) & (row < y + h) & (column >= x) & (column < x + w)
    pasted = _look_up(pixels + OBJECT + ((row - y) * w + column - x) * 3, hit)
    blue, green, red = (pasted & 0xFF) << 16, pasted & 0xFF00, pasted >> 16
    rgb = tl.where(blue > 0, rgb & 0x00FFFF | blue, rgb)
    rgb = tl.where(green > 0, rgb & 0xFF00FF | green, rgb)
    rgb = tl.where(red > 0, rgb & 0xFFFF00 | red, rgb)
    return rgb, OBJECT + w * h * 3


@triton.jit
def _flipped(numbers, first, count, size, is_flipped):
    """Row (column) numbers, the first one, and the signed way to the last of `count`; all mirrored if `is_flipped`."""
    return (
        tl.where(is_flipped, size - 1 - numbers, numbers),
        tl.where(is_flipped, size - 1 - first, first),
        tl.where(is_flipped, 1 - count, count - 1),
    )


@triton.jit
def _kernel(store, recipe, numbers, longs, doubles, pixels, pixel_numbers, divisions, colours, images, height, width,
            FORMULA: tl.constexpr, FLOATING: tl.constexpr, PRECISION: tl.constexpr, FRACTION: tl.constexpr,
            OUTSIDE: tl.constexpr, HEADER: tl.constexpr, LAYER: tl.constexpr, TILE: tl.constexpr,
            LAYER_BYTES: tl.constexpr, START: tl.constexpr, OBJECT: tl.constexpr, ALIGNMENT: tl.constexpr,
            ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    words, sample = store.to(tl.pointer_type(tl.int32)), tl.program_id(2).to(tl.int64)
    numbers += sample * (recipe // 4)
    longs += sample * (recipe // 8)
    doubles += sample * (recipe // 8)
    first_row, first_column = tl.program_id(1) * ROWS, tl.program_id(0) * COLUMNS
    out_row, out_column = (first_row + tl.arange(0, ROWS))[:, None], (first_column + tl.arange(0, COLUMNS))[None, :]
    inside = (out_row < height) & (out_column < width)
    row, first_row, rows = _flipped(out_row, first_row, ROWS, height, tl.load(numbers + 2) != 0)
    column, first_column, columns = _flipped(out_column, first_column, COLUMNS, width, tl.load(numbers + 3) != 0)
    num_layers, start = tl.load(numbers), tl.load(longs + START // 8)
    if num_layers == 0:
        made = _look_up(pixels + start + (row * width + column) * 3, inside)
        blue, green, red = made & 255, made >> 8 & 255, made >> 16
    else:
        blue, green, red = _layer(words, numbers + HEADER // 4, longs + HEADER // 8, doubles + HEADER // 8, row, column,
                                  inside, first_row, first_column, rows, columns, FLOATING, PRECISION, FRACTION,
                                  OUTSIDE, LAYER, TILE)  # fmt: skip
    SECOND: tl.constexpr = HEADER + LAYER_BYTES
    if num_layers == 2:
        blue2, green2, red2 = _layer(words, numbers + SECOND // 4, longs + SECOND // 8, doubles + SECOND // 8, row,
                                     column, inside, first_row, first_column, rows, columns, FLOATING, PRECISION,
                                     FRACTION, OUTSIDE, LAYER, TILE)  # fmt: skip
        ratio = tl.load(doubles + HEADER // 8 - 1)
        blue, green, red = _blended(blue, blue2, ratio), _blended(green, green2, ratio), _blended(red, red2, ratio)
    rgb = red | green << 8 | blue << 16
    if tl.load(numbers + 1) != 0:
        rgb = _recoloured(blue, green, red, doubles + HEADER // 8 - 4, divisions, colours, inside, FORMULA)
    for _ in range(tl.load(numbers + 4)):
        rgb, size = _pasted(rgb, pixels + start, pixel_numbers + start // 4, row, column, inside, OBJECT)
        start += (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    target = images + ((sample * height + out_row) * width + out_column) * 3
    tl.store(target, (rgb & 255).to(tl.uint8), mask=inside)
    tl.store(target + 1, (rgb >> 8 & 255).to(tl.uint8), mask=inside)
    tl.store(target + 2, (rgb >> 16 & 255).to(tl.uint8), mask=inside)


def compose(store, recipes, pixels, tables, mode, images):
    """Write `images` [b x h x w x 3: RGB] from the bytes of a `store`, `recipes` [b x RECIPE] and `pixels` [bytes].

    All are uint8; the `store` begins at a multiple of 4. `mode` is how to round, as `deferred.rounding_mode` tells.
    """
    batch, height, width, _ = images.shape
    grid = triton.cdiv(width, COLUMNS), triton.cdiv(height, ROWS), batch
    _kernel[grid](
        store, recipes.shape[1], recipes.view(torch.int32), recipes.view(torch.int64), recipes.view(torch.float64),
        pixels, pixels.view(torch.int32), tables.divisions, tables.colours, images, height, width, tables.has_formula,
        mode == deferred.FLOATING, deferred.PRECISION, deferred.FRACTION, deferred.OUTSIDE, layout.HEADER.size,
        layout.LAYER.size, layout.TILE.size, layout.LAYER_BYTES, layout.START, layout.OBJECT.size, layout.ALIGNMENT,
        ROWS, COLUMNS, num_warps=WARPS, enable_fp_fusion=False,  # only tl.fma rounds a product and a sum at once
    )  # fmt: skip
