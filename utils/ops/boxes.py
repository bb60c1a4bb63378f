"""Box arithmetic: formats, overlaps, and the way back from network pixels to image pixels.

Boxes carry their format in the name: `xyxy` are corners in pixels, `xywh` centre and size, a trailing `n` means
normalised to 0..1. The converters accept NumPy arrays and torch tensors and never modify their input.
"""

import math
from functools import cache

import numpy as np
import torch


def _like(boxes):
    """A copy of `boxes` that may be written to; keeps type and dtype."""
    return boxes.clone() if isinstance(boxes, torch.Tensor) else np.array(boxes, copy=True)


def xyxy2xywh(boxes_xyxy):
    """Corners [n x 4+] to centre and size; further columns pass through."""
    boxes = _like(boxes_xyxy)
    boxes[:, 0:2] = (boxes_xyxy[:, 0:2] + boxes_xyxy[:, 2:4]) / 2
    boxes[:, 2:4] = boxes_xyxy[:, 2:4] - boxes_xyxy[:, 0:2]
    return boxes


def xywh2xyxy(boxes_xywh):
    """Centre and size [n x 4+] to corners; further columns pass through."""
    boxes = _like(boxes_xywh)
    half = boxes_xywh[:, 2:4] / 2
    boxes[:, 0:2] = boxes_xywh[:, 0:2] - half
    boxes[:, 2:4] = boxes_xywh[:, 0:2] + half
    return boxes


def xywhn2xyxy(boxes_xywhn, w=640, h=640, padw=0, padh=0):
    """Normalised centre boxes [n x 4] to corners in pixels of a `w` x `h` image that sits at (padw, padh)."""
    boxes = _like(boxes_xywhn)
    for axis, (size, pad) in enumerate(((w, padw), (h, padh))):
        centre, half = boxes_xywhn[:, axis], boxes_xywhn[:, axis + 2] / 2
        boxes[:, axis] = size * (centre - half) + pad
        boxes[:, axis + 2] = size * (centre + half) + pad
    return boxes


def segment2box(segment, width=640, height=640):
    """Bounding box [4, xyxy, float64] of the points of `segment` [m x 2] inside the image; zeros if none has x != 0."""
    x, y = segment.T
    inside = (x >= 0) & (y >= 0) & (x <= width) & (y <= height)
    x, y = x[inside], y[inside]
    return np.array([x.min(), y.min(), x.max(), y.max()]) if x.any() else np.zeros(4)


def segments2boxes(segments):
    """Bounding boxes [n x 4, xywh, float32 when the points are] of a list of polygons [m x 2]."""
    corners = [(*points.min(0), *points.max(0)) for points in segments]
    return xyxy2xywh(np.array(corners))


def resample_segments(segments, n=1000):
    """Each polygon [m x 2], closed, as `n` points at equal steps of the vertex index; [num x n x 2] float64."""
    resampled = np.empty((len(segments), n, 2))
    for row, points in zip(resampled, segments, strict=True):
        closed = np.empty((len(points) + 1, 2))
        closed[:-1], closed[-1] = points, points[0]
        # x and y as real and imaginary part: NumPy interpolates both at once, with the same arithmetic
        row.view(np.complex128)[:, 0] = np.interp(*_steps(len(closed), n), closed.view(np.complex128)[:, 0])
    return resampled


@cache
def _steps(num_vertices, n):
    return np.linspace(0, num_vertices - 1, n), np.arange(num_vertices)


def bbox_ioa(box_xyxy, boxes_xyxy):
    """Share of each of `boxes_xyxy` [n x 4] that lies under `box_xyxy` [4]: intersection / area of *boxes*; [n]."""
    left_top, right_bottom = boxes_xyxy[:, :2], boxes_xyxy[:, 2:4]
    common = np.minimum(right_bottom, box_xyxy[2:4]) - np.maximum(left_top, box_xyxy[:2])
    width, height = np.maximum(common, 0, out=common).T  # clip and prod take longer than all of this
    full_width, full_height = (right_bottom - left_top).T
    return width * height / (full_width * full_height + 1e-16)


def box_iou(boxes1_xyxy, boxes2_xyxy):
    """Plain IoU of every pair, [n x 4], [m x 4] -> [n x m] (torch, no epsilon)."""
    return paired_iou(boxes1_xyxy[:, None], boxes2_xyxy[None])


def box_area(boxes_xyxy):
    """Areas [...] of corners [... x 4] (torch)."""
    return (boxes_xyxy[..., 2] - boxes_xyxy[..., 0]) * (boxes_xyxy[..., 3] - boxes_xyxy[..., 1])


def paired_iou(boxes1_xyxy, boxes2_xyxy, area1=None, area2=None):
    """Plain IoU of boxes [... x 4] with their partners [... x 4], shapes broadcast (torch, no epsilon).

    `area1`, `area2` [...] spare computing them, where a box has many partners.
    """
    area1 = box_area(boxes1_xyxy) if area1 is None else area1
    area2 = box_area(boxes2_xyxy) if area2 is None else area2
    sides = torch.min(boxes1_xyxy[..., 2:4], boxes2_xyxy[..., 2:4])
    sides.sub_(torch.max(boxes1_xyxy[..., :2], boxes2_xyxy[..., :2])).clamp_(min=0)
    intersection = sides[..., 0] * sides[..., 1]
    return intersection.div_((area1 + area2).sub_(intersection))


def complete_iou(predicted_xywh, target_xywh, eps=1e-7):
    """CIoU of box pairs [n x 4] -> [n], differentiable in both.

    Source: Zheng et al. 2020 (arXiv 1911.08287); stock behaviour: `eps` sits on the heights, on the union
    and on the squared diagonal.
    """
    left_top1, right_bottom1 = _corners(predicted_xywh)
    left_top2, right_bottom2 = _corners(target_xywh)
    width1, height1 = _sides(left_top1, right_bottom1, eps)
    width2, height2 = _sides(left_top2, right_bottom2, eps)

    overlap = (torch.min(right_bottom1, right_bottom2) - torch.max(left_top1, left_top2)).clamp(min=0)
    intersection = overlap[:, 0] * overlap[:, 1]
    iou = intersection / (width1 * height1 + width2 * height2 - intersection + eps)

    enclosing = torch.max(right_bottom1, right_bottom2) - torch.min(left_top1, left_top2)
    diagonal2 = enclosing[:, 0] ** 2 + enclosing[:, 1] ** 2 + eps
    shift = (left_top2 + right_bottom2) - (left_top1 + right_bottom1)  # twice the distance of the centres
    distance2 = (shift[:, 0] ** 2 + shift[:, 1] ** 2) / 4

    aspect = (4 / math.pi**2) * (torch.atan(width2 / (height2 + eps)) - torch.atan(width1 / (height1 + eps))) ** 2
    with torch.no_grad():
        alpha = aspect / (aspect - iou + (1 + eps))
    return iou - (distance2 / diagonal2 + aspect * alpha)


def _corners(boxes_xywh):
    half = boxes_xywh[:, 2:4] / 2
    return boxes_xywh[:, :2] - half, boxes_xywh[:, :2] + half


def _sides(left_top, right_bottom, eps):
    size = right_bottom - left_top
    return size[:, 0], size[:, 1] + eps


def clip_coords(boxes_xyxy, image_shape):
    """Clip corners [n x 4+] in place to an image of shape (height, width)."""
    height, width = image_shape[:2]
    for column, limit in enumerate((width, height, width, height)):
        boxes_xyxy[:, column] = boxes_xyxy[:, column].clip(0, limit)


def scale_coords(network_shape, coords, image_shape, ratio_pad=None):
    """Corners [n x 4+] in pixels of the network input, in place, to pixels of the original image, clipped to it.

    `ratio_pad` is ((height ratio, width ratio), (pad x, pad y)) as the letterbox returned it; without it the pad is
    taken to be symmetric. stock behaviour: the height ratio serves both axes.
    """
    if ratio_pad is None:
        gain = min(network_shape[0] / image_shape[0], network_shape[1] / image_shape[1])
        pad_x = (network_shape[1] - image_shape[1] * gain) / 2
        pad_y = (network_shape[0] - image_shape[0] * gain) / 2
    else:
        gain = ratio_pad[0][0]
        pad_x, pad_y = ratio_pad[1]
    coords[:, [0, 2]] -= pad_x
    coords[:, [1, 3]] -= pad_y
    coords[:, :4] /= gain
    clip_coords(coords, image_shape)
    return coords
