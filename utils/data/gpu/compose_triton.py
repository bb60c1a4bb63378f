"""Batches from recipes (recipes.py) and the images of an ImageStore: one kernel of Triton."""

import torch
import triton
import triton.language as tl

from utils.data.fast import deferred
from utils.data.fast.device_augment_triton import from_hsv, mixed, to_hsv
from utils.data.gpu import recipes as layout

# Pixels that a program makes at once, how often it does, and its warps: among the fastest of thirty forms on an H200.
ROWS, COLUMNS, PARTS, WARPS = 4, 64, 4, 4


@triton.jit
def _rounded(number):
    """The int32 nearest to a float64, halves to even: a sum that large has no bits left for fractions."""
    return ((number + 6755399441055744.0) - 6755399441055744.0).to(tl.int32)  # 1.5 * 2**52


@triton.jit
def _axis(back, FLOATING: tl.constexpr):
    """How far one moves along an axis of the canvas by a column and by a row of the image, and where one starts."""
    per_column, per_row, start = tl.load(back), tl.load(back + 1), tl.load(back + 2)
    if FLOATING:
        return per_column.to(tl.float32), per_row.to(tl.float32), start.to(tl.float32)
    else:  # noqa: RET505 (without it Triton compiles what follows in both cases)
        return per_column, per_row, start


@triton.jit
def _positions(per_column, per_row, start, row, column, like, FLOATING: tl.constexpr, PRECISION: tl.constexpr,
               FRACTION: tl.constexpr):  # fmt: skip
    """Along one axis of the canvas: the first of the two pixels between which each position lies, and the distance."""
    if FLOATING:
        of_row = row.to(tl.float32) * per_row + start  # rounded twice, see deferred.py
        column, of_row = tl.broadcast_to(column.to(tl.float32), like.shape), tl.broadcast_to(of_row, like.shape)
        position = tl.fma(column, per_column, of_row)
        first = tl.floor(position)
        return first.to(tl.int32), position - first
    else:  # noqa: RET505 (as above)
        SCALE: tl.constexpr = 1 << PRECISION
        HALF: tl.constexpr = 1 << (PRECISION - FRACTION - 1)
        of_column = _rounded(per_column * column.to(tl.float64) * SCALE)
        of_row = _rounded((per_row * row.to(tl.float64) + start) * SCALE)
        position = (of_column + of_row + HALF) >> (PRECISION - FRACTION)
        return position >> FRACTION, position & ((1 << FRACTION) - 1)


@triton.jit
def _bounds(per_column, per_row, start, row, column, rows, columns):
    """Along one axis of the canvas: between what positions a block from (row, column) on lies, but for rounding."""
    corner = (per_column * column + per_row * row + start).to(tl.float32)
    down, across = (per_row * rows).to(tl.float32), (per_column * columns).to(tl.float32)
    lowest = corner + tl.minimum(down, 0.0) + tl.minimum(across, 0.0)
    return lowest, corner + tl.maximum(down, 0.0) + tl.maximum(across, 0.0)


@triton.jit
def _shows(tile, is_tile, left, right, top, bottom):
    """Of a block between these positions: whether it reads pixels of a tile, and whether it reads no others."""
    x1, y1 = tl.load(tile + 3, mask=is_tile).to(tl.float32), tl.load(tile + 4, mask=is_tile).to(tl.float32)
    x2, y2 = tl.load(tile + 5, mask=is_tile).to(tl.float32), tl.load(tile + 6, mask=is_tile).to(tl.float32)
    touches = (left < x2 + 1) & (right >= x1 - 2) & (top < y2 + 1) & (bottom >= y1 - 2)
    return touches, (left >= x1 + 1) & (right < x2 - 2) & (top >= y1 + 1) & (bottom < y2 - 2)


@triton.jit
def _only_tile(numbers, left, right, top, bottom, LAYER: tl.constexpr, TILE: tl.constexpr):
    """The number of the tile in which a block between these positions lies, or -1."""
    number = tl.arange(0, 16)  # there are fewer, and all are looked at at once
    is_tile, tile = number < tl.load(numbers + LAYER // 4 - 2), numbers + LAYER // 4 + number * (TILE // 4)
    _, holds = _shows(tile, is_tile, left, right, top, bottom)
    return tl.max(tl.where(holds & is_tile, number, -1), 0)


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

    Their last 8 bits mean nothing. Their 6 bytes lie in two or three words. Only words of which a byte is wanted are
    read: others may be outside of the store.
    """
    place, shift = words + (byte >> 2), ((byte & 3) * 8).to(tl.uint32)
    one = tl.load(place, mask=left | right & (shift == 0), other=0).to(tl.uint32, bitcast=True)
    two = tl.load(place + 1, mask=right | left & (shift > 8), other=0).to(tl.uint32, bitcast=True)
    three = tl.load(place + 2, mask=right & (shift == 24), other=0).to(tl.uint32, bitcast=True)
    low = ((two.to(tl.uint64) << 32 | one) >> shift).to(tl.uint32)
    high = ((three.to(tl.uint64) << 32 | two) >> shift).to(tl.uint32)
    behind = ((high.to(tl.uint64) << 32 | low) >> 24).to(tl.uint32)
    return tl.where(left, low.to(tl.int32), before_left), tl.where(right, behind.to(tl.int32), before_right)


@triton.jit
def _neighbours(words, numbers, longs, x, y, inside, only, left, right, top, bottom, OUTSIDE: tl.constexpr,
                LAYER: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """The pixels at (x, y) of a canvas, those behind them, below them, and both; see `_pair`."""
    one = tl.zeros_like(x) + OUTSIDE * 0x010101  # in all three bytes
    two, three, four = one, one, one
    if only < 0:
        only = _only_tile(numbers, left, right, top, bottom, LAYER, TILE)
    if only >= 0:
        place = LAYER + only * TILE
        start, width = tl.load(longs + place // 8), tl.load(numbers + place // 4 + 2)
        of_tile, byte = words + (start >> 2), (start & 3).to(tl.int32) + (y * width + x) * 3
        always = tl.full(x.shape, 1, tl.int1)
        one, two = _pair(of_tile, byte, always, always, one, two)
        three, four = _pair(of_tile, byte + 3 * width, always, always, three, four)
    else:
        for number in range(tl.load(numbers + LAYER // 4 - 2)):
            place = LAYER + number * TILE
            tile = numbers + place // 4
            touches, _ = _shows(tile, None, left, right, top, bottom)
            if touches:
                start, width = tl.load(longs + place // 8), tl.load(tile + 2)
                x1, y1, x2, y2 = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5), tl.load(tile + 6)
                of_tile, byte = words + (start >> 2), (start & 3).to(tl.int32) + (y * width + x) * 3
                here, behind = inside & (x >= x1) & (x < x2), inside & (x >= x1 - 1) & (x < x2 - 1)
                above, below = (y >= y1) & (y < y2), (y >= y1 - 1) & (y < y2 - 1)
                one, two = _pair(of_tile, byte, above & here, above & behind, one, two)
                three, four = _pair(of_tile, byte + 3 * width, below & here, below & behind, three, four)
    return one, two, three, four


@triton.jit
def _layer(words, numbers, longs, x_column, x_row, x_start, y_column, y_row, y_start, row, column, inside, only,
           first_row, first_column, rows, columns, FLOATING: tl.constexpr, PRECISION: tl.constexpr,
           FRACTION: tl.constexpr, OUTSIDE: tl.constexpr, LAYER: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Blue, green and red of the layer at which `numbers` (int32) and `longs` (int64) begin; `_axis` for x and y.

    `only` is the number of the tile in which the block lies, -1 if that is not known.
    """
    x, across = _positions(x_column, x_row, x_start, row, column, inside, FLOATING, PRECISION, FRACTION)
    y, down = _positions(y_column, y_row, y_start, row, column, inside, FLOATING, PRECISION, FRACTION)
    left, right = _bounds(x_column, x_row, x_start, first_row, first_column, rows, columns)
    top, bottom = _bounds(y_column, y_row, y_start, first_row, first_column, rows, columns)
    one, two, three, four = _neighbours(words, numbers, longs, x, y, inside, only, left, right, top, bottom, OUTSIDE,
                                        LAYER, TILE)  # fmt: skip
    blue = mixed(one & 255, two & 255, three & 255, four & 255, across, down, FLOATING, FRACTION)
    one, two, three, four = one >> 8, two >> 8, three >> 8, four >> 8
    green = mixed(one & 255, two & 255, three & 255, four & 255, across, down, FLOATING, FRACTION)
    one, two, three, four = one >> 8, two >> 8, three >> 8, four >> 8
    red = mixed(one & 255, two & 255, three & 255, four & 255, across, down, FLOATING, FRACTION)
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
def _recoloured(blue, green, red, of_hue, of_saturation, of_value, divisions, colours, inside, FORMULA: tl.constexpr):
    """red + 256 * green + 65536 * blue of pixels, their hue, saturation and value times these factors."""
    hue, saturation, value = to_hsv(blue, green, red, divisions)
    hue = (hue.to(tl.float64) * of_hue).to(tl.int32)
    hue = tl.where(hue >= 180, hue - 180, hue)  # a factor is at most 2
    saturation, value = _scaled(saturation, of_saturation), _scaled(value, of_value)
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
            ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    words, sample = store.to(tl.pointer_type(tl.int32)), tl.program_id(2).to(tl.int64)
    numbers += sample * (recipe // 4)
    longs += sample * (recipe // 8)
    doubles += sample * (recipe // 8)
    images += sample * (height * width * 3)
    num_layers, start, num_objects = tl.load(numbers), tl.load(longs + START // 8), tl.load(numbers + 4)
    is_recoloured, factors = tl.load(numbers + 1) != 0, doubles + HEADER // 8 - 4
    of_hue, of_saturation, of_value = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)
    is_upside_down, is_mirrored = tl.load(numbers + 2) != 0, tl.load(numbers + 3) != 0
    out_column, out_row = tl.program_id(0) * COLUMNS, tl.program_id(1) * (ROWS * PARTS)
    out_columns = (out_column + tl.arange(0, COLUMNS))[None, :]
    column, first_column, columns = _flipped(out_columns, out_column, COLUMNS, width, is_mirrored)
    x_column, x_row, x_start = _axis(doubles + HEADER // 8, FLOATING)
    y_column, y_row, y_start = _axis(doubles + HEADER // 8 + 3, FLOATING)
    _, first_row, rows = _flipped(out_row, out_row, ROWS * PARTS, height, is_upside_down)
    left, right = _bounds(x_column, x_row, x_start, first_row, first_column, rows, columns)
    top, bottom = _bounds(y_column, y_row, y_start, first_row, first_column, rows, columns)
    only = _only_tile(numbers + HEADER // 4, left, right, top, bottom, LAYER, TILE)
    for part in range(PARTS):
        first = out_row + part * ROWS
        out_rows = (first + tl.arange(0, ROWS))[:, None]
        inside = (out_rows < height) & (out_columns < width)
        row, first_row, rows = _flipped(out_rows, first, ROWS, height, is_upside_down)
        if num_layers == 0:
            made = _look_up(pixels + start + (row * width + column) * 3, inside)
            blue, green, red = made & 255, made >> 8 & 255, made >> 16
        else:
            blue, green, red = _layer(words, numbers + HEADER // 4, longs + HEADER // 8, x_column, x_row, x_start,
                                      y_column, y_row, y_start, row, column, inside, only, first_row, first_column,
                                      rows, columns, FLOATING, PRECISION, FRACTION, OUTSIDE, LAYER, TILE)  # fmt: skip
        SECOND: tl.constexpr = HEADER + LAYER_BYTES
        if num_layers == 2:
            x2_column, x2_row, x2_start = _axis(doubles + SECOND // 8, FLOATING)
            y2_column, y2_row, y2_start = _axis(doubles + SECOND // 8 + 3, FLOATING)
            blue2, green2, red2 = _layer(words, numbers + SECOND // 4, longs + SECOND // 8, x2_column, x2_row, x2_start,
                                         y2_column, y2_row, y2_start, row, column, inside, -1, first_row, first_column,
                                         rows, columns, FLOATING, PRECISION, FRACTION, OUTSIDE, LAYER,
                                         TILE)  # fmt: skip
            ratio = tl.load(doubles + HEADER // 8 - 1)
            blue, green, red = _blended(blue, blue2, ratio), _blended(green, green2, ratio), _blended(red, red2, ratio)
        rgb = red | green << 8 | blue << 16
        if is_recoloured:
            rgb = _recoloured(blue, green, red, of_hue, of_saturation, of_value, divisions, colours, inside, FORMULA)
        place = start
        for _ in range(num_objects):
            rgb, size = _pasted(rgb, pixels + place, pixel_numbers + place // 4, row, column, inside, OBJECT)
            place += (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        target = images + (out_rows * width + out_columns) * 3
        tl.store(target, (rgb & 255).to(tl.uint8), mask=inside)
        tl.store(target + 1, (rgb >> 8 & 255).to(tl.uint8), mask=inside)
        tl.store(target + 2, (rgb >> 16 & 255).to(tl.uint8), mask=inside)


def compose(store, recipes, pixels, tables, mode, images):
    """Write `images` [b x h x w x 3: RGB] from the bytes of a `store`, `recipes` [b x RECIPE] and `pixels` [bytes].

    All are uint8; the `store` begins at a multiple of 4. `mode` is how to round, as `deferred.rounding_mode` tells.
    """
    batch, height, width, _ = images.shape
    grid = triton.cdiv(width, COLUMNS), triton.cdiv(height, ROWS * PARTS), batch
    _kernel[grid](
        store, recipes.shape[1], recipes.view(torch.int32), recipes.view(torch.int64), recipes.view(torch.float64),
        pixels, pixels.view(torch.int32), tables.divisions, tables.colours, images, height, width, tables.has_formula,
        mode == deferred.FLOATING, deferred.PRECISION, deferred.FRACTION, deferred.OUTSIDE, layout.HEADER.size,
        layout.LAYER.size, layout.TILE.size, layout.LAYER_BYTES, layout.START, layout.OBJECT.size, layout.ALIGNMENT,
        ROWS, COLUMNS, PARTS, num_warps=WARPS, enable_fp_fusion=False,  # only tl.fma rounds a product and a sum at once
    )  # fmt: skip
