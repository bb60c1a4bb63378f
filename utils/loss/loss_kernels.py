"""Losses and their gradients for a batch on a GPU: kernels (Triton). `on_gpu` launches them.

The formulas are those of `gradients`. A map is read as it lies, in its own type; arithmetic is in float32. Gradients of
a map are written once, in its type and layout. All sums have a fixed order: the same input gives the same output.

Names are those of `assign_kernels`; a match is a candidate with the target that it is trained on.
"""

import math

import triton
import triton.language as tl
from triton.language.extra import libdevice

from utils.loss import criterion
from utils.loss.assign_kernels import map_of, place_of, row_of, share_of_target, sigmoid, start_of

EPS = tl.constexpr(1e-7)  # of `boxes.complete_iou`
PI = tl.constexpr(math.pi)
FOCAL_ALPHA = tl.constexpr(criterion.FOCAL_ALPHA)
MIN_MISS = tl.constexpr(criterion.MIN_MISS)


# --- the terms -------------------------------------------------------------------------------------------------------


@triton.jit
def binary_loss(logit, label, positive_weight, gamma, FOCAL: tl.constexpr):
    """`gradients.binary_loss`: cross-entropy with `label` and its gradient, or the focal loss and its."""
    small = libdevice.exp(-tl.abs(logit))
    rest, whole = libdevice.log1p(small), 1 + small
    score, opposite = tl.where(logit >= 0, 1.0, small) / whole, tl.where(logit >= 0, small, 1.0) / whole
    value = (1 - label) * (tl.maximum(logit, 0.0) + rest) + label * positive_weight * (tl.maximum(-logit, 0.0) + rest)
    gradient = (1 - label) * score - label * positive_weight * opposite
    if FOCAL:
        miss = tl.maximum(label + score - 2 * label * score, MIN_MISS)  # 1 - probability of the label
        miss_gradient = (1 - 2 * label) * score * opposite
        factor = (label * FOCAL_ALPHA + (1 - label) * (1 - FOCAL_ALPHA)) * tl.exp2(gamma * tl.log2(miss))
        gradient = factor * (gradient + value * gamma * miss_gradient / miss)
        value = value * factor
    return value, gradient


@triton.jit
def _sign(x):
    return (x > 0).to(tl.float32) - (x < 0).to(tl.float32)


@triton.jit
def complete_iou(x, y, width, height, true_x, true_y, true_width, true_height):
    """`gradients.complete_iou`: the overlap, its gradients by twice the centre (x, y) and by the size."""
    left, top, right, bottom = x - width / 2, y - height / 2, x + width / 2, y + height / 2
    true_left, true_top = true_x - true_width / 2, true_y - true_height / 2
    true_right, true_bottom = true_x + true_width / 2, true_y + true_height / 2
    width, height, true_width = right - left, bottom - top, true_right - true_left  # rounded as the edges are
    true_height = true_bottom - true_top
    gap_x = tl.minimum(right, true_right) - tl.maximum(left, true_left)  # negative when apart
    gap_y = tl.minimum(bottom, true_bottom) - tl.maximum(top, true_top)
    enclosing_x, enclosing_y = width + true_width - gap_x, height + true_height - gap_y
    height, true_height = height + EPS, true_height + EPS
    overlap_x, overlap_y = tl.maximum(gap_x, 0.0), tl.maximum(gap_y, 0.0)
    intersection = overlap_x * overlap_y
    union = width * height + true_width * true_height - intersection + EPS
    iou = intersection / union

    diagonal2 = enclosing_x * enclosing_x + enclosing_y * enclosing_y + EPS
    shift_x, shift_y = true_x - x, true_y - y
    distance = (shift_x * shift_x + shift_y * shift_y) / diagonal2
    tall = height + EPS
    turn = libdevice.atan(true_width / (true_height + EPS)) - libdevice.atan(width / tall)
    aspect = turn * turn * (4 / (PI * PI))
    alpha = aspect / (aspect - iou + (1 + EPS))

    stretch = distance / diagonal2
    by_gap = (iou + 1) / union
    by_gap_x = tl.where(gap_x > 0, overlap_y * by_gap, 0.0) - 2 * stretch * enclosing_x
    by_gap_y = tl.where(gap_y > 0, overlap_x * by_gap, 0.0) - 2 * stretch * enclosing_y
    high_x, low_x = _sign(true_right - right), _sign(left - true_left)  # 1 where our edge is the inner one
    high_y, low_y = _sign(true_bottom - bottom), _sign(top - true_top)
    per_turn = 8 / (PI * PI) * alpha * turn / (width * width + tall * tall)
    by_width = by_gap_x * (high_x + low_x + 2) / 4 + 2 * stretch * enclosing_x - height * iou / union + per_turn * tall
    by_height = by_gap_y * (high_y + low_y + 2) / 4 + 2 * stretch * enclosing_y - width * iou / union - per_turn * width
    by_x = by_gap_x * (high_x - low_x) / 4 + shift_x / diagonal2
    by_y = by_gap_y * (high_y - low_y) / 4 + shift_y / diagonal2
    return iou - distance - aspect * alpha, by_x, by_y, by_width, by_height


@triton.jit
def round_to(x, like):
    """`x` as the type that `like` points to would hold it, float32."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def decode_centre(logit):
    """A coordinate of the centre from the corner of its cell, and the doubled sigmoid that it is made of; both of
    `decode_boxes` and `BatchedLoss._box_term` of the torch form, float16 rounded as there."""
    doubled = sigmoid(logit.to(tl.float32)) * 2
    return (doubled.to(logit.dtype).to(tl.float32) - 0.5).to(logit.dtype).to(tl.float32), doubled


@triton.jit
def decode_side(logit, anchor_side):
    """The same of a side."""
    doubled = sigmoid(logit.to(tl.float32)) * 2
    rounded = doubled.to(logit.dtype).to(tl.float32)
    return rounded * rounded * anchor_side, doubled


# --- objectness of all cells -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("num_cells",))  # another batch or image size compiles nothing anew
def objectness_kernel(integers, numbers, m0, m1, m2, m3, m4, gradients, sums, num_cells, num_columns, gap, gain,
                      positive_weight, gamma, L: tl.constexpr, A: tl.constexpr, FOCAL: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    """gradients [cells of all layers]: `gain` times those without any object; sums [programs] of the weighted loss."""
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = cell < num_cells
    layer = cell * 0
    for i in tl.static_range(1, L):
        layer += (cell >= tl.load(integers + i * 4 + 3)).to(tl.int32)
    row = cell - tl.load(integers + layer * 4 + 3)
    source = map_of(layer, m0, m1, m2, m3, m4, L) + start_of(row, num_columns, gap, A) + 4
    logit = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    weight = tl.load(numbers + layer * (2 + 2 * A) + 1)
    value, gradient = binary_loss(logit, 0.0, positive_weight, gamma, FOCAL)
    tl.store(gradients + cell, gradient * (weight * gain), mask=exists)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(exists, value * weight, 0.0), 0))


# --- matches ---------------------------------------------------------------------------------------------------------


@triton.jit
def others_in_cell(match, cell, match_cells, start, count, BLOCK: tl.constexpr):
    """How many matches of the image before `match` have the same cell, and which is the last that has."""
    num_earlier, last = 0, match
    for begin in range(start, start + count, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        same = tl.load(match_cells + other, mask=other < start + count, other=-1) == cell
        num_earlier += tl.sum((same & (other < match)).to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(same, other, -1), 0))
    return num_earlier, last


@triton.jit
def box_terms(source, anchor_sides, x, y, nx, ny, match, last, cell, targets, match_cells, match_targets, result, gain):
    """The sum of 1 - overlap over the matches of a cell, the overlap of the last; writes `gain` times the gradients."""
    centre_x, share_x = decode_centre(tl.load(source))
    centre_y, share_y = decode_centre(tl.load(source + 1))
    width, share_w = decode_side(tl.load(source + 2), tl.load(anchor_sides))
    height, share_h = decode_side(tl.load(source + 3), tl.load(anchor_sides + 1))
    by_x, by_y, by_w, by_h, overlap, missed = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for other in range(match, last + 1):
        if tl.load(match_cells + other) == cell:
            target = targets + tl.load(match_targets + other) * 6
            overlap, more_x, more_y, more_w, more_h = complete_iou(
                centre_x, centre_y, width, height, tl.load(target + 2) * nx - x, tl.load(target + 3) * ny - y,
                tl.load(target + 4) * nx, tl.load(target + 5) * ny)  # fmt: skip
            by_x, by_y, by_w, by_h = by_x + more_x, by_y + more_y, by_w + more_w, by_h + more_h
            missed += 1 - overlap
    tl.store(result, by_x * share_x * (2 - share_x) * -gain)
    tl.store(result + 1, by_y * share_y * (2 - share_y) * -gain)
    tl.store(result + 2, by_w * width * (2 - share_w) * -gain)
    tl.store(result + 3, by_h * height * (2 - share_h) * -gain)
    return missed, overlap


@triton.jit
def class_terms(source, num_classes, match, last, cell, targets, match_cells, match_targets, result, gain, positive,
                negative, weight, gamma, FOCAL: tl.constexpr, CLASSES: tl.constexpr):  # fmt: skip
    """The sum of the class losses over the matches of a cell and all classes; writes `gain` times the gradients."""
    column = tl.arange(0, CLASSES)
    inside = column < num_classes
    logit = tl.load(source + 5 + column, mask=inside, other=0.0).to(tl.float32)
    values, gradients = tl.zeros((CLASSES,), tl.float32), tl.zeros((CLASSES,), tl.float32)
    if num_classes > 1:
        for other in range(match, last + 1):
            if tl.load(match_cells + other) == cell:
                category = tl.load(targets + tl.load(match_targets + other) * 6 + 1).to(tl.int32)
                label = tl.where(column == category, positive, negative)
                value, gradient = binary_loss(logit, label, weight, gamma, FOCAL)
                values += value
                gradients += gradient
    tl.store(result + 5 + column, gradients * gain, mask=inside)
    return tl.sum(tl.where(inside, values, 0.0), 0)


@triton.jit
def matches_loss_kernel(targets, first, counts, per_layer, integers, numbers, match_cells, match_targets,
                        m0, m1, m2, m3, m4, terms, rows, gradients, num_classes, gap, room, box_gain, object_gain,
                        class_gain, positive, negative, object_weight, class_weight, gamma, ratio, L: tl.constexpr,
                        A: tl.constexpr, CHANNELS_LAST: tl.constexpr, FOCAL: tl.constexpr, CLASSES: tl.constexpr,
                        BLOCK: tl.constexpr):  # fmt: skip
    """Loss and gradients of the cells with matches. A program for each target takes its share of the image's matches;
    the first match of a cell stands for all of them.

    terms      [3 x t] box loss, what objects add to the objectness loss, class loss, before gains
    rows       [matches] of the cell, counted through the maps of all layers; -1 if the match is not the first
    gradients  [matches x columns] in that row
    """
    image, start, count, number, num_targets = share_of_target(tl.program_id(0), room, targets, first, counts)
    box_term, object_term, class_term = 0.0, 0.0, 0.0
    for match in range(start + number, start + count, num_targets):
        cell = tl.load(match_cells + match)
        num_earlier, last = others_in_cell(match, cell, match_cells, start, count, BLOCK)
        all_rows = -1
        if num_earlier == 0:
            layer, anchor, y, x, own_integers, own_numbers = place_of(cell, integers, numbers, L, A)
            row = row_of(image, anchor, y, x, own_integers, A, CHANNELS_LAST)
            all_rows = row + tl.load(own_integers + 3)
            source = map_of(layer, m0, m1, m2, m3, m4, L) + start_of(row, 5 + num_classes, gap, A)
            result = gradients + (start.to(tl.int64) + (match - start)) * (5 + num_classes)
            weight = 1.0 / tl.maximum(tl.load(per_layer + layer), 1).to(tl.float32)
            nx, ny = tl.load(own_integers + 1).to(tl.float32), tl.load(own_integers).to(tl.float32)
            missed, overlap = box_terms(source, own_numbers + 2 + 2 * anchor, x.to(tl.float32), y.to(tl.float32),
                                        nx, ny, match, last, cell, targets, match_cells, match_targets, result,
                                        box_gain * weight)  # fmt: skip
            of_classes = class_terms(source, num_classes, match, last, cell, targets, match_cells, match_targets,
                                     result, class_gain * weight / num_classes, positive, negative, class_weight,
                                     gamma, FOCAL, CLASSES)  # fmt: skip
            # the overlap of the last match is wanted of the objectness, rounded as the predictions are
            wanted = round_to((1 - ratio) + ratio * tl.maximum(overlap, 0.0), m0)
            logit, share = tl.load(source + 4).to(tl.float32), tl.load(own_numbers + 1)
            value, gradient = binary_loss(logit, wanted, object_weight, gamma, FOCAL)
            without, _ = binary_loss(logit, wanted * 0, object_weight, gamma, FOCAL)
            tl.store(result + 4, gradient * (object_gain * share))
            box_term += missed * weight
            object_term += (value - without) * share
            class_term += of_classes * (weight / num_classes)
        tl.store(rows + match, all_rows)
    num_terms = tl.num_programs(0)
    tl.store(terms + tl.program_id(0), box_term)
    tl.store(terms + num_terms + tl.program_id(0), object_term)
    tl.store(terms + 2 * num_terms + tl.program_id(0), class_term)


@triton.jit(do_not_specialize=("num_sums",))
def items_kernel(terms, object_sums, items, num_sums, box_gain, object_gain, class_gain, batch_size,
                 BLOCK: tl.constexpr):  # fmt: skip
    """items [5]: box, objectness and class loss, their sum, and that times the batch size; terms [3]."""
    added = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, num_sums, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        added += tl.load(object_sums + place, mask=place < num_sums, other=0.0)
    of_box = tl.load(terms) * box_gain
    of_object = (tl.load(terms + 1) + tl.sum(added, 0)) * object_gain
    of_class = tl.load(terms + 2) * class_gain
    total = of_box + of_object + of_class
    tl.store(items, of_box)
    tl.store(items + 1, of_object)
    tl.store(items + 2, of_class)
    tl.store(items + 3, total)
    tl.store(items + 4, total * batch_size)


# --- the gradients of the maps ---------------------------------------------------------------------------------------


@triton.jit  # for the sizes as well: several numbers are stored at once if they are multiples of 16
def dense_kernel(objectness, scale, result, size, A: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """result [size] of a map: `objectness` [rows] times `scale` [1] in column 4 of each row, 0 elsewhere.

    Every STEP numbers hold A rows of COLUMNS, then the gap.
    """
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    place = begin + tl.arange(0, BLOCK)
    # counted from the step that the block begins in: division of 64 bits takes long
    local = (begin % STEP).to(tl.int32) + tl.arange(0, BLOCK)
    row, column = local % STEP // COLUMNS, local % STEP % COLUMNS
    is_objectness = (column == 4) & (row < A) & (place < size)
    source = objectness + (begin // STEP + local // STEP) * A + row
    value = tl.load(source, mask=is_objectness, other=0.0) * tl.load(scale)
    tl.store(result + place, value.to(result.dtype.element_ty), mask=place < size)


@triton.jit
def rows_kernel(targets, first, counts, integers, rows, gradients, scale, m0, m1, m2, m3, m4, num_columns, gap,
                room, L: tl.constexpr, A: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Write the `gradients` of cells with matches, times `scale` [1], into their `rows` of the maps."""
    _, start, count, number, num_targets = share_of_target(tl.program_id(0), room, targets, first, counts)
    for match in range(start + number, start + count, num_targets):
        row = tl.load(rows + match)
        if row >= 0:
            layer = row * 0
            for i in tl.static_range(1, L):
                layer += (row >= tl.load(integers + i * 4 + 3)).to(tl.int32)
            row -= tl.load(integers + layer * 4 + 3)
            column = tl.arange(0, COLUMNS)
            inside = column < num_columns
            source = gradients + (start.to(tl.int64) + (match - start)) * num_columns
            value = tl.load(source + column, mask=inside, other=0.0)
            result = map_of(layer, m0, m1, m2, m3, m4, L) + start_of(row, num_columns, gap, A)
            tl.store(result + column, (value * tl.load(scale)).to(m0.dtype.element_ty), mask=inside)
