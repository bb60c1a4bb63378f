"""Boxes of the raw maps of a detection layer, as `DetectionLayer._decode_all` makes them: one kernel (Triton) a level.

Operations of torch read and write all predictions five times. Here each is read once, where the convolution has put it,
and written once, where non-maximum suppression reads it. Each step is rounded to the type of the maps, as torch's.
"""

import torch
import triton
import triton.language as tl

TILE = 2048  # elements that a program holds at a time
SIZES = ("num_rows", "height", "width", "rows_of_image", "first_row")  # other values need no new compilation


@triton.jit
def _rounded(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def _decode_kernel(maps, anchors, boxes, num_rows, num_columns, num_anchors, height, width, image_stride, anchor_stride,
                   line_stride, pixel_stride, rows_of_image, first_row, stride, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr):  # fmt: skip
    """From the map of one level: each image's rows of `boxes` [b x rows_of_image x columns], from `first_row` on."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows)[:, None] & (column < num_columns)
    x, line = row % width, row // width
    y, plane = line % height, line // height
    anchor, image = plane % num_anchors, (plane // num_anchors).to(tl.int64)
    source = image * image_stride + anchor * anchor_stride + y * line_stride + x * pixel_stride
    value = tl.load(maps + source[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    share = _rounded(tl.sigmoid(value), maps)
    double = share * 2.0
    cell = tl.where(column == 0, x[:, None], y[:, None]).to(tl.float32)
    centre = (_rounded(double - 0.5, maps) + cell) * stride
    is_side = (column == 2) | (column == 3)
    side = tl.load(anchors + anchor[:, None] * 2 + (column - 2), mask=is_side & inside, other=0.0).to(tl.float32)
    side = _rounded(double * double, maps) * side
    value = tl.where(column < 2, centre, tl.where(is_side, side, share))
    place = image * rows_of_image + first_row + row % (num_anchors * height * width)
    tl.store(boxes + place[:, None] * num_columns + column, value.to(boxes.dtype.element_ty), mask=inside)


def decode_all(head, maps):
    """The boxes [b x n x no: xywh in pixels, then probabilities] of one map [b x na x ny x nx x no] per level.

    The columns of a map have to lie side by side. `head` gives strides and anchors.
    """
    sizes = [level.shape[1:4].numel() for level in maps]
    batch, num_anchors, *_, num_columns = maps[0].shape
    boxes = torch.empty((batch, sum(sizes), num_columns), dtype=maps[0].dtype, device=maps[0].device)
    columns = triton.next_power_of_2(num_columns)
    rows = max(TILE // columns, 1)
    for level, (raw, size) in enumerate(zip(maps, sizes, strict=True)):
        _decode_kernel[(triton.cdiv(batch * size, rows),)](
            raw, head.anchor_grid[level], boxes, batch * size, num_columns, num_anchors, *raw.shape[2:4],
            *raw.stride()[:4], sum(sizes), sum(sizes[:level]), float(head.stride[level]), ROWS=rows, COLUMNS=columns,
            enable_fp_fusion=False,
        )  # fmt: skip
    return boxes
