"""The parts of the detection loss and their gradients, in closed form.

A loss is one number, so its gradients can be computed along with it; the backward pass only has to scale them. That
takes a fraction of the operations which autograd would record and replay.
"""

import math

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from utils.loss.criterion import FOCAL_ALPHA, MIN_MISS


def binary_loss(logits, label, positive_weight=1.0, focal_gamma=0.0):
    """`criterion.binary_loss` and its gradient for each of `logits` (float32); `label` is a number or like these."""
    value, score = F.softplus(logits), logits.sigmoid()  # cross-entropy against 0; its gradient is the score
    gradient = score
    if isinstance(label, torch.Tensor) or label != 0:
        by_label, gradient_by_label = _by_label(logits, positive_weight)
        value, gradient = value + label * by_label, gradient + label * gradient_by_label
    return (value, gradient) if focal_gamma <= 0 else _focal(value, gradient, score, label, focal_gamma)


def binary_loss_change(logits, label, before, positive_weight=1.0, focal_gamma=0.0):
    """How `binary_loss` and its gradient change when the label `before` becomes `label`, numbers or tensors."""
    if focal_gamma <= 0:
        step = label - before
        return tuple(step * by_label for by_label in _by_label(logits, positive_weight))
    new, old = (binary_loss(logits, which, positive_weight, focal_gamma) for which in (label, before))
    return new[0] - old[0], new[1] - old[1]


def _by_label(logits, positive_weight):
    """Cross-entropy and its gradient are linear in the label; these are the factors, tensors or numbers."""
    if positive_weight == 1:
        return -logits, -1.0
    against_0, score = F.softplus(logits), logits.sigmoid()
    return positive_weight * (against_0 - logits) - against_0, (positive_weight - 1) * score - positive_weight


def _focal(value, gradient, score, label, gamma):
    """Both times alpha * (1 - p)^gamma, where p is the probability of the label."""
    miss = (label + score - 2 * label * score).clamp(min=MIN_MISS)  # 1 - p
    miss_gradient = (1 - 2 * label) * score * (1 - score)
    factor = (label * FOCAL_ALPHA + (1 - label) * (1 - FOCAL_ALPHA)) * miss**gamma
    return value * factor, factor * (gradient + value * gamma * miss_gradient / miss)


def complete_iou(centres, sizes, eps=1e-7):
    """`boxes.complete_iou` [n] of boxes with true boxes, and its gradients [n x 2] by twice the centre and by the size.

    centres, sizes [2 x n x 2] of the boxes, then of the true boxes. Where two edges coincide each gets half of the
    gradient, as autograd does it; boxes that only touch do not overlap, which versions of torch see differently.
    """
    half = sizes / 2
    low, high = centres - half, centres + half
    sides = high - low  # rounded as the edges are
    gap = high.amin(0) - low.amax(0)  # negative when apart
    enclosing = sides.sum(0) - gap
    sides[..., 1] += eps
    overlap = gap.clamp(min=0)
    intersection = overlap[:, 0] * overlap[:, 1]
    union = (sides[..., 0] * sides[..., 1]).sum(0).sub_(intersection).add_(eps)
    iou = intersection / union

    diagonal2 = (enclosing * enclosing).sum(1).add_(eps)
    shift = centres[1] - centres[0]
    distance = (shift * shift).sum(1).div_(diagonal2)

    tall = sides[..., 1] + eps
    angles = torch.atan2(sides[..., 0], tall)
    turn = angles[1] - angles[0]
    aspect = (turn * turn).mul_(4 / math.pi**2)
    alpha = aspect / (aspect - iou).add_(1 + eps)

    stretch = enclosing * (distance / diagonal2)[:, None]  # half the gradient of -distance by `enclosing`
    by_gap = (overlap.flip(1) * (gap > 0)).mul_(((iou + 1) / union)[:, None]).sub_(stretch, alpha=2)
    at_high, at_low = torch.sign(high[1] - high[0]), torch.sign(low[0] - low[1])  # 1 where our edge is the inner one
    by_centre = (by_gap * (at_high - at_low) / 4).add_(shift / diagonal2[:, None])
    by_size = (by_gap * at_high.add_(at_low).add_(2)).mul_(0.25).add_(stretch, alpha=2)
    by_size.sub_(sides[0].flip(1) * (iou / union)[:, None])
    width, tall = sides[0, :, 0], tall[0]
    per_turn = alpha * turn / torch.addcmul(width * width, tall, tall)
    by_size.addcmul_(torch.stack((tall, -width), 1), per_turn[:, None], value=8 / math.pi**2)
    return (iou - distance).sub_(aspect * alpha), by_centre, by_size


class KnownGradients(torch.autograd.Function):
    """(loss [1], cells [u], rows [u x 5+nc], objectness [cells of all layers], *predictions) -> the loss.

    Its gradient by the predictions is known: `rows` for the `cells`, counted through all layers, and in addition
    `objectness`. It is as large as the predictions, so it is written once, when it is asked for.
    """

    @staticmethod
    def forward(ctx, loss, cells, rows, objectness, *predictions):
        ctx.save_for_backward(cells, rows, objectness)
        ctx.shapes, ctx.dtype = [prediction.shape for prediction in predictions], predictions[0].dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):
        cells, rows, objectness = ctx.saved_tensors
        gradient = rows.new_zeros((len(objectness), rows.shape[1]), dtype=ctx.dtype)
        gradient[:, 4] = objectness * scale
        gradient.index_add_(0, cells, (rows * scale).to(ctx.dtype))  # scaled first: small float16 values would be 0
        layers = gradient.split([math.prod(shape[:4]) for shape in ctx.shapes])
        return None, None, None, None, *(layer.view(shape) for layer, shape in zip(layers, ctx.shapes, strict=True))
