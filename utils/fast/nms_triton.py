"""The suppression of boxes for nms.py: one kernel (Triton), of which a program goes through the boxes of an image."""

import torch
import triton
import triton.language as tl

BLOCK = 64  # candidates, and kept boxes, that are compared at a time


@triton.jit
def _boxes(rows, number, exists, OFFSET: tl.constexpr):
    """x1, y1, x2, y2 of the `rows` of those numbers, the boxes of each class on a plane of their own."""
    plane = tl.load(rows + number * 6 + 5, mask=exists, other=0.0) * OFFSET
    x1 = tl.load(rows + number * 6, mask=exists, other=0.0) + plane
    y1 = tl.load(rows + number * 6 + 1, mask=exists, other=0.0) + plane
    x2 = tl.load(rows + number * 6 + 2, mask=exists, other=0.0) + plane
    return x1, y1, x2, tl.load(rows + number * 6 + 3, mask=exists, other=0.0) + plane


@triton.jit
def _overlap(left, top, right, bottom, x1, y1, x2, y2, limit):
    """[n x m] whether the IoU of boxes [n] and [m] is above `limit`, rounded as that of utils/ops/boxes.py."""
    width = tl.minimum(right[:, None], x2[None, :]) - tl.maximum(left[:, None], x1[None, :])
    height = tl.minimum(bottom[:, None], y2[None, :]) - tl.maximum(top[:, None], y1[None, :])
    intersection = tl.maximum(width, 0.0) * tl.maximum(height, 0.0)
    areas = ((right - left) * (bottom - top))[:, None] + ((x2 - x1) * (y2 - y1))[None, :]
    return tl.div_rn(intersection, areas - intersection) > limit


@triton.jit
def _kernel(candidates, firsts, counts, kept, kept_counts, limit, MOST: tl.constexpr, OFFSET: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """kept [images x MOST + 1 x 6]: what no better one overlaps, best first; kept_counts [images]."""
    image = tl.program_id(0)
    candidates += tl.load(firsts + image) * 6
    count = tl.load(counts + image)
    kept += image.to(tl.int64) * (MOST + 1) * 6
    place, num_kept, start = tl.arange(0, BLOCK), 0, 0
    while (start < count) & (num_kept < MOST):
        number = start + place
        alive = number < count
        x1, y1, x2, y2 = _boxes(candidates, number, alive, OFFSET)
        for begin in range(0, num_kept, BLOCK):
            is_kept = begin + place < num_kept
            left, top, right, bottom = _boxes(kept, begin + place, is_kept, OFFSET)
            hit = _overlap(left, top, right, bottom, x1, y1, x2, y2, limit) & is_kept[:, None]
            alive = alive & (tl.max(hit.to(tl.int32), 0) == 0)
        overlaps = _overlap(x1, y1, x2, y2, x1, y1, x2, y2, limit) & (place[:, None] < place[None, :])
        overlaps = overlaps.to(tl.int32)
        # What a box does depends on better ones only. So after i rounds the first i at least are settled, and when
        # nothing changes all are: chains of boxes that suppress each other are short.
        keep, changed = alive.to(tl.int32), 1
        while changed > 0:
            settled = tl.where(tl.max(overlaps * keep[:, None], 0) > 0, 0, alive.to(tl.int32))
            changed = tl.max(tl.abs(settled - keep), 0)
            keep = settled
        slot = tl.minimum(num_kept + tl.cumsum(keep, 0) - 1, MOST)  # the last one is nobody's
        for column in tl.static_range(6):
            value = tl.load(candidates + number * 6 + column, mask=keep > 0, other=0.0)
            tl.store(kept + slot * 6 + column, value, mask=keep > 0)
        tl.debug_barrier()  # the other threads read them in the next round
        num_kept = tl.minimum(num_kept + tl.sum(keep, 0), MOST)
        start += BLOCK
    tl.store(kept_counts + image, num_kept)


def suppress(rows, first, count, iou_thres, most, offset):
    """The rows that no better one overlaps [images x most x 6], 0 where there is none, and how many [images].

    rows [n x 6: x1, y1, x2, y2, confidence, class] float32, image after image, best first: `count` [images] from
    `first` [images] on. `offset` is the distance of the planes of two classes in pixels.
    """
    kept = torch.zeros(len(count), most + 1, 6, device=rows.device)
    kept_counts = torch.zeros_like(count)
    if len(rows):
        _kernel[(len(count),)](rows, first, count, kept, kept_counts, iou_thres, MOST=most, OFFSET=offset, BLOCK=BLOCK,
                               num_warps=4, enable_fp_fusion=False)  # fmt: skip
    return kept[:, :most], kept_counts
