"""Losses of a model with several detection heads: each box goes to the head of its class.

Every head has a loss object of its own, the same as a model with one head (`loss`, `loss_batched`), that sees only its
predictions and only its boxes, with class ids counted within the head. Their sum, weighted by head, is the loss. A head
without boxes learns that there is nothing.
"""

from types import SimpleNamespace

import torch


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


class HeadsLoss:
    """The weighted sum of one loss per head; `make_loss(model)` makes each of them.

    Called as the losses of `loss`, with predictions per head and level.
    """

    def __init__(self, model, make_loss):
        bare = getattr(model, "module", model)
        self.layers = bare.model
        self.hyp = model.hyp if hasattr(model, "hyp") else bare.hyp
        self.gr = model.gr if hasattr(model, "gr") else bare.gr
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

    @property
    def head(self):
        """The detection layer."""
        return self.layers[-1]

    def __call__(self, predictions, targets, images=None):
        """predictions: per head and level [batch x na x ny x nx x head_no], raw; targets as for `loss.ComputeLoss`."""
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


class BatchedHeadsLoss(HeadsLoss):
    """The same of losses that prepare plans on the host and compute with them, as those of `loss_batched` do."""

    def prepare(self, targets, shapes, image_size=None, padded=True, at_least=None):
        """The plans of all heads in a row, on the host; arguments as for `BatchedLoss.prepare`.

        `shapes` (batch, na, ny, nx, any) of the levels; `at_least` has one entry for each plan.
        """
        at_least = self._by_head(at_least) if at_least else [None] * len(self.losses)
        plans = []
        for compute, own, sizes in zip(self.losses, self.route(targets.cpu()), at_least, strict=True):
            levels = [(*shape[:4], 5 + compute.head.nc) for shape in shapes]
            plans += compute.prepare(own, levels, image_size, padded, sizes)
        return plans

    def compute(self, predictions, plans):
        """Loss [1] and items [4] of `predictions` with the `plans` of all heads on their device."""
        heads = zip(self.losses, self.own_columns(predictions), self._by_head(plans), strict=True)
        return self.total([compute.compute(maps, own) for compute, maps, own in heads])

    def _by_head(self, values):
        """A list with one entry for each plan, cut into a list for each head."""
        share = len(values) // len(self.losses)
        return [values[start : start + share] for start in range(0, len(values), share)]


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


def route_losses(model, make_loss):
    """The loss of a model with several heads, of losses that `make_loss(model)` makes."""
    routed = HeadsLoss(model, make_loss)
    if all(hasattr(own, "prepare") for own in routed.losses):
        routed = BatchedHeadsLoss(model, make_loss)
    return routed
