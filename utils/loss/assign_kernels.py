"""Candidates and OTA assignment of a batch on a GPU: kernels (Triton). `on_gpu` launches them.

The targets of an image lie in a row, and so do its candidates, in the order of `assigner.ota`: by layer, neighbour,
anchor, target. A target can have so many candidates at most (`slots` = layers * neighbours * anchors); this is the room
that the candidates of its image have for it, of which they use the beginning. So nothing has to be counted on the
host, and an image's candidates are found without looking at other images.

The arithmetic is that of `assigner`, operation by operation and without fused multiply-adds: costs are equal to the
last bit, and so are ties. Among equal costs the lowest candidate comes first, as there.

Names in all kernels:

    targets   [t x 6: image, class, x, y, w, h normalised] float32 by image; image -1 is padding
    first     [images + 1] where the targets of each image begin
    integers  [layers x 4: ny, nx, cells of an image in the layers before, cells of the batch in the layers before]
    numbers   [layers x 2 + 2 * anchors: stride, weight of a cell's objectness; width and height of the anchors]
    m0 .. m4  the maps of the layers [rows x columns], in the layout that CHANNELS_LAST says
    gap       numbers between the rows of one pixel and those of the next, in channels-last maps; 0 in others
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from utils.loss import assigner

NUM_STEPS = tl.constexpr(len(assigner.NEIGHBOUR_STEPS))
IOU_WEIGHT = tl.constexpr(assigner.IOU_WEIGHT)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
LARGEST = tl.constexpr(2**63 - 1)


# --- where things are ------------------------------------------------------------------------------------------------


@triton.jit
def place_of(cell, integers, numbers, L: tl.constexpr, A: tl.constexpr):
    """Layer, anchor, y, x, and the layer's rows of `integers` and `numbers`, of `cell`s counted through an image."""
    layer = cell * 0
    for i in tl.static_range(1, L):
        layer += (cell >= tl.load(integers + i * 4 + 2)).to(tl.int32)
    own_integers, own_numbers = integers + layer * 4, numbers + layer * (2 + 2 * A)
    ny, nx = tl.load(own_integers), tl.load(own_integers + 1)
    rest = cell - tl.load(own_integers + 2)
    return layer, rest // (nx * ny), rest // nx % ny, rest % nx, own_integers, own_numbers


@triton.jit
def row_of(image, anchor, y, x, own_integers, A: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """The row of a layer's map, in memory."""
    ny, nx = tl.load(own_integers), tl.load(own_integers + 1)
    if CHANNELS_LAST:
        return ((image * ny + y) * nx + x) * A + anchor
    return ((image * A + anchor) * ny + y) * nx + x


@triton.jit
def start_of(row, num_columns, gap, A: tl.constexpr):
    """Where a `row` of a layer's map begins."""
    return row.to(tl.int64) * num_columns + (row // A).to(tl.int64) * gap


@triton.jit
def map_of(layer, m0, m1, m2, m3, m4, L: tl.constexpr):
    """The address of the map of `layer`."""
    address = tl.where(layer == 0, m0, m1) if L > 1 else m0 + layer * 0
    if L > 2:
        address = tl.where(layer == 2, m2, address)
    if L > 3:
        address = tl.where(layer == 3, m3, address)
    if L > 4:
        address = tl.where(layer == 4, m4, address)
    return address


@triton.jit
def image_of(slot, num_slots, room, targets, first, counts):
    """Image, its first slot, and whether the slot is in use, of slots of which each target has `room`."""
    image = tl.load(targets + slot // room * 6).to(tl.int32)
    exists = (image >= 0) & (slot < num_slots)
    image = tl.maximum(image, 0)
    start = tl.load(first + image) * room
    return image, start, exists & (slot - start < tl.load(counts + image))


@triton.jit
def share_of_target(target, room, targets, first, counts):
    """Image, first slot and number of slots in use of a target's image; number of the target, number of targets there.

    Programs of the image's targets share the slots in use: each takes one, then the next but as many as they are.
    """
    image = tl.load(targets + target * 6).to(tl.int32)
    count = tl.where(image < 0, 0, tl.load(counts + tl.maximum(image, 0)))
    image = tl.maximum(image, 0)
    start = tl.load(first + image)
    num_targets = tl.load(first + image + 1) - start
    return image, start * room, count, target - start, tl.maximum(num_targets, 1)


@triton.jit
def sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + libdevice.exp(-x))


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - libdevice.log1p(libdevice.exp(-tl.abs(x)))


# --- candidates ------------------------------------------------------------------------------------------------------


@triton.jit
def candidates_kernel(targets, first, integers, numbers, cells, owners, counts, per_layer, threshold, reach,
                      L: tl.constexpr, A: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The candidates of an image: their `cells`, counted through its layers, and the targets that they lie near.

    per_layer [L]  how many candidates there are in the batch
    """
    image = tl.program_id(0)
    start = tl.load(first + image)
    num_targets = tl.load(first + image + 1) - start
    base, num_slots = start * (L * NUM_STEPS * A), num_targets * (L * NUM_STEPS * A)
    found = 0
    for begin in range(0, num_slots, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        inside = slot < num_slots
        target, rest = start + slot % num_targets, slot // num_targets
        anchor, step = rest % A, rest // A % NUM_STEPS
        layer = tl.minimum(rest // (A * NUM_STEPS), L - 1)
        own_integers, own_numbers = integers + layer * 4, numbers + layer * (2 + 2 * A)
        ny, nx = tl.load(own_integers), tl.load(own_integers + 1)
        box = targets + target * 6
        x = tl.load(box + 2, mask=inside, other=0.0) * nx.to(tl.float32)
        y = tl.load(box + 3, mask=inside, other=0.0) * ny.to(tl.float32)
        width = tl.load(box + 4, mask=inside, other=0.0) * nx.to(tl.float32)
        height = tl.load(box + 5, mask=inside, other=0.0) * ny.to(tl.float32)

        wider = tl.div_rn(width, tl.load(own_numbers + 2 + 2 * anchor))
        taller = tl.div_rn(height, tl.load(own_numbers + 3 + 2 * anchor))
        one = tl.full(wider.shape, 1.0, tl.float32)
        similar = (wider < threshold) & (taller < threshold)
        similar = similar & (tl.div_rn(one, wider) < threshold) & (tl.div_rn(one, taller) < threshold)

        step_x = (step == 1).to(tl.int32) - (step == 3).to(tl.int32)
        step_y = (step == 2).to(tl.int32) - (step == 4).to(tl.int32)
        coordinate = tl.where(step_y == 0, x, y)
        limit = tl.where(step_y == 0, nx, ny).to(tl.float32)
        distance = tl.where(step > 2, limit - coordinate, coordinate)
        joins = (step == 0) | ((distance - tl.floor(distance) < reach) & (distance > 1))
        x = tl.minimum(tl.maximum((x - step_x.to(tl.float32) * reach).to(tl.int32), 0), nx - 1)
        y = tl.minimum(tl.maximum((y - step_y.to(tl.float32) * reach).to(tl.int32), 0), ny - 1)

        chosen = inside & similar & joins
        position = base + found + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(cells + position, tl.load(own_integers + 2) + (anchor * ny + y) * nx + x, mask=chosen)
        tl.store(owners + position, target, mask=chosen)
        found += tl.sum(chosen.to(tl.int32), 0)
        for i in tl.static_range(L):
            tl.atomic_add(per_layer + i, tl.sum((chosen & (layer == i)).to(tl.int32), 0))
    tl.store(counts + image, found)


# --- what they predict -----------------------------------------------------------------------------------------------


@triton.jit
def predictions_kernel(targets, first, counts, integers, numbers, cells, m0, m1, m2, m3, m4, boxes, log_rests, logits,
                       num_slots, num_classes, gap, L: tl.constexpr, A: tl.constexpr, CHANNELS_LAST: tl.constexpr,
                       ROWS: tl.constexpr, CLASSES: tl.constexpr):  # fmt: skip
    """What the candidates predict, as Cells of `assigner`.

    boxes [4 x num_slots: x1, y1, x2, y2] in pixels; logits [num_slots x classes] of the joint scores; log_rests the
    same, logarithms of 1 - score, whose negative sum is the background cost
    """
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    image, _, exists = image_of(slot, num_slots, L * NUM_STEPS * A, targets, first, counts)
    if tl.max(exists.to(tl.int32), 0) > 0:
        cell = tl.load(cells + slot, mask=exists, other=0)
        layer, anchor, y, x, own_integers, own_numbers = place_of(cell, integers, numbers, L, A)
        row = row_of(image, anchor, y, x, own_integers, A, CHANNELS_LAST)
        source = map_of(layer, m0, m1, m2, m3, m4, L) + start_of(row, 5 + num_classes, gap, A)
        stride = tl.load(own_numbers)
        for axis in tl.static_range(2):
            corner = (x if axis == 0 else y).to(tl.float32)
            centre = sigmoid(tl.load(source + axis, mask=exists, other=0.0).to(tl.float32)) * 2 - 0.5
            centre = (centre + corner) * stride
            side = sigmoid(tl.load(source + 2 + axis, mask=exists, other=0.0).to(tl.float32)) * 2
            half = side * side * tl.load(own_numbers + 2 + axis + 2 * anchor) * stride * 0.5
            tl.store(boxes + axis * num_slots + slot, centre - half, mask=exists)
            tl.store(boxes + (2 + axis) * num_slots + slot, centre + half, mask=exists)

        of_object = log_sigmoid(tl.load(source + 4, mask=exists, other=0.0).to(tl.float32))
        result = slot.to(tl.int64) * num_classes
        for begin in range(0, num_classes, CLASSES):
            column = begin + tl.arange(0, CLASSES)
            inside = exists[:, None] & (column < num_classes)[None, :]
            of_class = tl.load(source[:, None] + 5 + column[None, :], mask=inside, other=0.0).to(tl.float32)
            log_score = tl.minimum((log_sigmoid(of_class) + of_object[:, None]) * 0.5, -TINY)
            log_rest = libdevice.log(-libdevice.expm1(log_score))
            tl.store(log_rests + result[:, None] + column[None, :], log_rest, mask=inside)
            tl.store(logits + result[:, None] + column[None, :], log_score - log_rest, mask=inside)


# --- overlap and cost ------------------------------------------------------------------------------------------------


@triton.jit
def true_corners(target, targets, width, height, exists):
    """x1, y1, x2, y2 of a target in pixels, as `boxes.xywh2xyxy` has them."""
    box = targets + target * 6
    x, y = tl.load(box + 2, mask=exists, other=0.0) * width, tl.load(box + 3, mask=exists, other=0.0) * height
    half_width = tl.load(box + 4, mask=exists, other=0.0) * width * 0.5
    half_height = tl.load(box + 5, mask=exists, other=0.0) * height * 0.5
    return x - half_width, y - half_height, x + half_width, y + half_height


@triton.jit
def overlap_of(x1, y1, x2, y2, slot, boxes, num_slots, exists):
    """IoU of a true box with what candidates predict, as `boxes.paired_iou`; 0 of two boxes without area."""
    left, top = tl.load(boxes + slot, mask=exists, other=0.0), tl.load(boxes + num_slots + slot, mask=exists, other=0.0)
    right = tl.load(boxes + 2 * num_slots + slot, mask=exists, other=0.0)
    bottom = tl.load(boxes + 3 * num_slots + slot, mask=exists, other=0.0)
    shared = tl.maximum(tl.minimum(x2, right) - tl.maximum(x1, left), 0.0)
    shared *= tl.maximum(tl.minimum(y2, bottom) - tl.maximum(y1, top), 0.0)
    both = (x2 - x1) * (y2 - y1) + (right - left) * (bottom - top)
    iou = tl.div_rn(shared, both - shared)
    return tl.where(iou == iou, iou, 0.0)


@triton.jit
def cost_of(iou, category, slot, log_rest_sums, logits, num_classes, exists):
    """`assigner.matching_cost` as an integer (int64) in the same order."""
    logit = tl.load(logits + slot.to(tl.int64) * num_classes + category, mask=exists, other=0.0)
    cost = -tl.load(log_rest_sums + slot, mask=exists, other=0.0) - logit
    cost += libdevice.log(iou + 1e-8) * -IOU_WEIGHT
    bits = cost.to(tl.int32, bitcast=True)
    return (((bits >> 31) & 0x7FFFFFFF) ^ bits).to(tl.int64)


@triton.jit
def overlap_keys(begin, count, start, x1, y1, x2, y2, boxes, num_slots, BLOCK: tl.constexpr):
    """Overlap * 2^32 + number of candidates, all distinct; -1 beyond `count`."""
    candidate = begin + tl.arange(0, BLOCK)
    inside = candidate < count
    iou = overlap_of(x1, y1, x2, y2, start + candidate, boxes, num_slots, inside)
    return tl.where(inside, (iou.to(tl.int32, bitcast=True).to(tl.int64) << 32) | candidate, -1)


@triton.jit
def best_overlaps_kernel(targets, first, counts, boxes, best, num_slots, width, height, room,
                         NUM_IOUS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """best [t x NUM_IOUS]: the largest overlaps of a target with the candidates of its image, 0 beyond their number."""
    target = tl.program_id(0)
    _, start, count, _, _ = share_of_target(target, room, targets, first, counts)
    x1, y1, x2, y2 = true_corners(target, targets, width, height, True)
    keys = overlap_keys(0, count, start, x1, y1, x2, y2, boxes, num_slots, BLOCK)  # of most images all there are
    previous = tl.full((), LARGEST, tl.int64)
    for place in range(NUM_IOUS):
        largest = tl.where(keys < previous, keys, -1)
        for begin in range(BLOCK, count, BLOCK):
            more = overlap_keys(begin, count, start, x1, y1, x2, y2, boxes, num_slots, BLOCK)
            largest = tl.maximum(largest, tl.where(more < previous, more, -1))
        previous = tl.max(largest, 0)
        iou = (previous >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(best + target * NUM_IOUS + place, tl.where(previous < 0, 0.0, iou))


@triton.jit
def cost_keys(begin, count, start, x1, y1, x2, y2, category, boxes, log_rest_sums, logits, num_slots, num_classes,
              BLOCK: tl.constexpr):  # fmt: skip
    """Cost * 2^32 + number of candidates, all distinct; LARGEST beyond `count`."""
    candidate = begin + tl.arange(0, BLOCK)
    inside, slot = candidate < count, start + candidate
    iou = overlap_of(x1, y1, x2, y2, slot, boxes, num_slots, inside)
    cost = cost_of(iou, category, slot, log_rest_sums, logits, num_classes, inside)
    return tl.where(inside, (cost << 32) | candidate, LARGEST)


@triton.jit
def thresholds_kernel(targets, first, counts, boxes, log_rest_sums, logits, num_wanted, thresholds, num_slots,
                      num_classes, width, height, room, BLOCK: tl.constexpr):  # fmt: skip
    """thresholds [t]: the key of the last of the `num_wanted` [t] cheapest candidates of a target."""
    target = tl.program_id(0)
    _, start, count, _, _ = share_of_target(target, room, targets, first, counts)
    category = tl.load(targets + target * 6 + 1).to(tl.int32)
    x1, y1, x2, y2 = true_corners(target, targets, width, height, True)
    keys = cost_keys(0, count, start, x1, y1, x2, y2, category, boxes, log_rest_sums, logits, num_slots, num_classes,
                     BLOCK)  # fmt: skip
    previous = tl.full((), -LARGEST - 1, tl.int64)
    for _ in range(tl.load(num_wanted + target)):
        smallest = tl.where(keys > previous, keys, LARGEST)
        for begin in range(BLOCK, count, BLOCK):
            more = cost_keys(begin, count, start, x1, y1, x2, y2, category, boxes, log_rest_sums, logits, num_slots,
                             num_classes, BLOCK)  # fmt: skip
            smallest = tl.minimum(smallest, tl.where(more > previous, more, LARGEST))
        previous = tl.min(smallest, 0)
    tl.store(thresholds + target, previous)


@triton.jit
def assign_kernel(targets, first, counts, boxes, log_rest_sums, logits, thresholds, assigned, num_slots, num_classes,
                  width, height, room, BLOCK: tl.constexpr):  # fmt: skip
    """assigned [num_slots]: the target of each candidate, -1 for none. See `assigner.resolve_conflicts`."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image, start, exists = image_of(slot, num_slots, room, targets, first, counts)
    first_target = tl.load(first + image)
    num_targets = tl.where(exists, tl.load(first + image + 1) - first_target, 0)
    num_selecting = tl.zeros((BLOCK,), tl.int32)
    selecting = tl.full((BLOCK,), -1, tl.int32)
    cheapest = tl.full((BLOCK,), -1, tl.int32)
    lowest = tl.full((BLOCK,), LARGEST, tl.int64)
    for number in range(tl.max(num_targets, 0)):
        target, inside = first_target + number, number < num_targets
        x1, y1, x2, y2 = true_corners(target, targets, width, height, inside)
        category = tl.load(targets + target * 6 + 1, mask=inside, other=0.0).to(tl.int32)
        iou = overlap_of(x1, y1, x2, y2, slot, boxes, num_slots, inside)
        cost = cost_of(iou, category, slot, log_rest_sums, logits, num_classes, inside)
        threshold = tl.load(thresholds + target, mask=inside, other=0)
        selected = inside & (((cost << 32) | (slot - start)) <= threshold)
        num_selecting += selected.to(tl.int32)
        selecting = tl.where(selected, target, selecting)
        cheaper = inside & (cost < lowest)
        cheapest = tl.where(cheaper, target, cheapest)
        lowest = tl.where(cheaper, cost, lowest)
    tl.store(assigned + slot, tl.where(num_selecting > 1, cheapest, selecting), mask=slot < num_slots)


@triton.jit
def matches_kernel(first, counts, integers, numbers, cells, assigned, match_cells, match_targets, match_counts,
                   per_layer, room, match_room, L: tl.constexpr, A: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The candidates of an image that are assigned, moved together; per_layer [L] their number in the batch."""
    image = tl.program_id(0)
    start, count, found = tl.load(first + image), tl.load(counts + image), 0
    for begin in range(0, count, BLOCK):
        candidate = begin + tl.arange(0, BLOCK)
        slot, inside = start * room + candidate, candidate < count
        target = tl.load(assigned + slot, mask=inside, other=-1)
        cell = tl.load(cells + slot, mask=inside, other=0)
        layer, _, _, _, _, _ = place_of(cell, integers, numbers, L, A)
        chosen = target >= 0
        position = start * match_room + found + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(match_cells + position, cell, mask=chosen)
        tl.store(match_targets + position, target, mask=chosen)
        found += tl.sum(chosen.to(tl.int32), 0)
        for i in tl.static_range(L):
            tl.atomic_add(per_layer + i, tl.sum((chosen & (layer == i)).to(tl.int32), 0))
    tl.store(match_counts + image, found)
