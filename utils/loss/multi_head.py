"""Losses of a model with several detection heads: each box goes to the head of its class.

Every head has a loss object of its own, the same as a model with one head (`criterion`, `batched`), that sees only its
predictions and only its boxes, with class ids counted within the head. Their sum, weighted by head, is the loss. A head
without boxes learns that there is nothing.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

LossAndItems = tuple[Tensor, Tensor]  # loss [1], with gradient; items [4: box, objectness, class, total], without


class LossOfModel:
    """What every loss reads of a model, wrapped for parallel training or not.

    hyp  gains, scaled already to the number of layers, classes and pixels
    gr   how much of the overlap the objectness target is: 1 in training
    head the last layer, looked up at every use: it may move, or get other anchors
    """

    def __init__(self, model):
        bare = getattr(model, "module", model)
        self.layers = bare.model
        self.hyp = model.hyp if hasattr(model, "hyp") else bare.hyp
        self.gr = model.gr if hasattr(model, "gr") else bare.gr

    @property
    def head(self):
        return self.layers[-1]


class OneHead:
    """A head of a MultiHeadDetect as the detection layer that a loss expects: nl, na, nc, anchors and stride."""

    def __init__(self, layer, head):
        self.layer = layer
        self.nl, self.na, self.nc = layer.nl, layer.na, layer.head_nc[head]

    @property
    def anchors(self):
        return self.layer.anchors

    @property
    def stride(self):
        return self.layer.stride


class HeadsLoss(LossOfModel):
    """The weighted sum of one loss per head; `make_loss(model)` makes each of them.

    Called as the losses of `criterion`, with predictions per head and level.
    """

    def __init__(self, model, make_loss):
        super().__init__(model)
        layer = self.head
        self.losses = [
            make_loss(SimpleNamespace(model=[OneHead(layer, head)], hyp=self.hyp, gr=self.gr))
            for head in range(layer.num_heads)
        ]
        self.weights = list(layer.head_weights)
        self.route = Route(layer)
        self.columns = None  # per head [5 + head_nc], those of its own classes
        if layer.full_head:
            self.columns = [torch.tensor([0, 1, 2, 3, 4, *layer.class_columns(h)]) for h in range(layer.num_heads)]

    def __call__(
        self, predictions: Sequence[Sequence[Tensor]], targets: Tensor, images: Tensor | None = None
    ) -> LossAndItems:
        """predictions: per head and level [batch x na x ny x nx x head_no], raw; targets as for ComputeLoss."""
        heads = zip(self.losses, self.own_columns(predictions), self.route(targets), strict=True)
        return self.total([compute(maps, own, images) for compute, maps, own in heads])

    def own_columns(self, predictions):
        """The predictions per head and level without the classes of other heads, in local order."""
        if self.columns is None:
            return predictions
        self.columns = [own.to(predictions[0][0].device) for own in self.columns]  # a copy at the first call only
        heads = zip(predictions, self.columns, strict=True)
        return [[level.index_select(-1, own) for level in maps] for maps, own in heads]

    def total(self, results):
        """The weighted sum of (loss, items) over the heads."""
        losses, items = zip(*results, strict=True)
        return sum(map(torch.mul, losses, self.weights)), sum(map(torch.mul, items, self.weights))


class Route:
    """Divides targets [N x 6: image, class, x, y, w, h] among heads, in their order, with class ids of the head."""

    def __init__(self, layer):
        self.num_heads = layer.num_heads
        table = torch.zeros(2, layer.nc, dtype=torch.long)  # of each class: its head, its place there
        for head, classes in enumerate(layer.head_classes):
            table[0, classes], table[1, classes] = head, torch.arange(len(classes))
        self.table = table

    def __call__(self, targets):
        self.table = self.table.to(targets.device)
        head, place = self.table[:, targets[:, 1].long()]
        local = targets.clone()
        local[:, 1] = place.to(targets.dtype)
        return [local[head == h] for h in range(self.num_heads)]


def level_shapes(maps):
    """The shapes of the maps of one head, from those of a layer with one head or several."""
    return [level.shape for level in (maps[0] if isinstance(maps[0], list) else maps)]


def in_float32(maps):
    """The maps of a detection layer, per level or per head and level, in single precision."""
    return [in_float32(part) if isinstance(part, list) else part.float() for part in maps]


def has_several_heads(model):
    """Whether the last layer of `model` is a MultiHeadDetect."""
    return hasattr(getattr(model, "module", model).model[-1], "head_classes")
