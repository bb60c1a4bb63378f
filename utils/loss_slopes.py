"""The parts of the detection loss with their derivatives, in closed form.

A loss is one number, so the gradient of everything in it can be computed along with it and only has to be scaled when
the backward pass comes. That takes a fraction of the operations which autograd would record and replay.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from utils.loss import FOCAL_ALPHA


class BinaryLoss:
    """`loss.binary_loss` of `logits` (float32, any shape), element by element."""

    def __init__(self, logits, positive_weight=1.0, focal_gamma=0.0):
        self.logits, self.weight, self.gamma = logits, positive_weight, focal_gamma
        self.if_negative, self.score = F.softplus(logits), logits.sigmoid()

    def at(self, label):
        """Loss and slope for `label`, a number or a tensor of the logits' shape."""
        value, slope = self.if_negative, self.score  # for the label 0
        if isinstance(label, torch.Tensor) or label != 0:
            by_label, slope_by_label = self._by_label()
            value, slope = value + label * by_label, slope + label * slope_by_label
        return (value, slope) if self.gamma <= 0 else self._focal(value, slope, label)

    def change(self, label, before=0.0):
        """How loss and slope change when the label `before`, a number, becomes `label`."""
        if self.gamma <= 0:
            return tuple((label - before) * by_label for by_label in self._by_label())
        return tuple(new - old for new, old in zip(self.at(label), self.at(before), strict=True))

    def _by_label(self):
        """Cross-entropy and its slope are linear in the label; these are the factors."""
        if_positive = self.if_negative - self.logits
        return self.weight * if_positive - self.if_negative, (self.weight - 1) * self.score - self.weight

    def _focal(self, value, slope, label):
        """Both times alpha * (1 - p)^gamma, where p is the probability of the label."""
        miss = (label + self.score - 2 * label * self.score).clamp(min=1e-30)  # 1 - p
        miss_slope = (1 - 2 * label) * self.score * (1 - self.score)
        factor = (label * FOCAL_ALPHA + (1 - label) * (1 - FOCAL_ALPHA)) * miss**self.gamma
        return value * factor, factor * (slope + value * self.gamma * miss_slope / miss)


def complete_iou(centre, size, true_centre, true_size, eps=1e-7):
    """`boxes.complete_iou` [n] of boxes by centre and size [n x 2 each], and its slopes [n x 2] by centre and by size.

    Where two edges coincide each gets half of the slope, as autograd does it.
    """
    low, high = centre - size / 2, centre + size / 2
    true_low, true_high = true_centre - true_size / 2, true_centre + true_size / 2
    size, true_size = high - low, true_high - true_low  # rounded as the edges are
    gap = torch.min(high, true_high) - torch.max(low, true_low)  # negative when apart
    overlap = gap.clamp(min=0)
    intersection = overlap[:, 0] * overlap[:, 1]
    width, height = size[:, 0], size[:, 1] + eps
    true_width, true_height = true_size[:, 0], true_size[:, 1] + eps
    union = width * height + true_width * true_height - intersection + eps
    iou = intersection / union

    enclosing = size + true_size - gap
    diagonal2 = (enclosing * enclosing).sum(1) + eps
    shift = true_centre - centre
    distance = (shift * shift).sum(1) / diagonal2

    tall = height + eps
    turn = torch.atan2(true_width, true_height + eps) - torch.atan2(width, tall)
    aspect = (4 / math.pi**2) * turn * turn
    alpha = aspect / (aspect - iou + (1 + eps))

    by_enclosing = enclosing * (2 * distance / diagonal2)[:, None]  # slope of -distance
    by_gap = overlap.flip(1) * (gap >= 0) * ((1 + iou) / union)[:, None] - by_enclosing
    at_high, at_low = torch.sign(true_high - high), torch.sign(low - true_low)  # 1 where our edge is the inner one
    by_centre = 2 * shift / diagonal2[:, None] + by_gap * (at_high - at_low) / 2
    by_area = torch.stack((height, width), 1) * (iou / union)[:, None]
    by_turn = torch.stack((tall, -width), 1) * (alpha * turn * (8 / math.pi**2) / (width * width + tall * tall))[:, None]
    by_size = by_enclosing + by_gap * (2 + at_high + at_low) / 4 - by_area + by_turn
    return iou - (distance + aspect * alpha), by_centre, by_size


class KnownSlopes(torch.autograd.Function):
    """(loss [1], cell_index [u], sizes, rows [u x 5+nc], objectness [cells of all layers], *predictions) -> the loss.

    Its gradient in the predictions is known: `rows` for the cells `cell_index`, of which each layer has one of `sizes`,
    and in addition `objectness`. It is as large as the predictions, so it is written once, when it is asked for.
    """

    @staticmethod
    def forward(ctx, loss, cell_index, sizes, rows, objectness, *predictions):
        ctx.save_for_backward(cell_index, rows, objectness)
        ctx.sizes = sizes
        ctx.shapes, ctx.dtypes = [p.shape for p in predictions], [p.dtype for p in predictions]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):
        cell_index, rows, objectness = ctx.saved_tensors
        rows, objectness = rows * scale, objectness * scale
        counts = [math.prod(shape[:4]) for shape in ctx.shapes]
        parts = zip(cell_index.split(ctx.sizes), rows.split(ctx.sizes), objectness.split(counts), strict=True)
        gradients = []
        for shape, dtype, (index, row, dense) in zip(ctx.shapes, ctx.dtypes, parts, strict=True):
            gradient = zeros((len(dense), shape[-1]), dtype, rows.device)
            gradient[:, 4] = dense
            gradients.append(gradient.index_add_(0, index, row.to(dtype)).view(shape))
        return None, None, None, None, None, *gradients


def zeros(shape, dtype, device):
    """A tensor of zeros. On a CPU from NumPy, which asks for large pages: those are zero from the start, and few."""
    if device.type == "cpu" and dtype == torch.float32 and not torch.compiler.is_compiling():
        return torch.from_numpy(np.zeros(shape, dtype=np.float32))
    return torch.zeros(shape, dtype=dtype, device=device)
