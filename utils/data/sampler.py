"""Which images an epoch has, in which order and batches.

--image-weights draws images by class frequency and by how badly a class scores. EpochOrder is the order of an epoch;
EndlessBatches and ShortEpochs (--max-iter) are batch samplers over another one.
"""

import random
from itertools import chain, islice, repeat

import numpy as np
import torch
from torch.utils.data import Sampler

from utils.system.random_state import ORDER


def labels_to_class_weights(labels, num_classes):
    """Inverse class frequency, normalised to sum 1; a class without boxes counts as one box. [nc] float64 tensor.

    `labels` is the list of [n x 5: class, x, y, w, h] of all images.
    """
    classes = np.concatenate([rows[:, 0] for rows in labels]).astype(np.int64) if len(labels) else np.zeros(0, np.int64)
    counts = np.maximum(np.bincount(classes, minlength=num_classes), 1)
    return torch.from_numpy((1 / counts) / (1 / counts).sum())


def labels_to_image_weights(labels, num_classes, class_weights):
    """Sum over an image's boxes of the weight of their class, for every image; [num images]."""
    counts = [np.bincount(rows[:, 0].astype(np.int64), minlength=num_classes) for rows in labels]
    return (np.asarray(class_weights).reshape(1, -1) * np.array(counts).reshape(-1, num_classes)).sum(1)


def draw_image_indices(labels, class_weights, maps):
    """Indices of one epoch under --image-weights: n draws from n images, poor classes first.

    `class_weights` [nc] as attached to the model, `maps` [nc] the AP of each class in the last validation. Draws from
    Python's generator. Without any labelled image every image weighs the same.
    """
    num_classes = len(maps)
    poor = np.asarray(class_weights) * (1 - np.asarray(maps)) ** 2 / num_classes
    weights = labels_to_image_weights(labels, num_classes, poor)
    everything = range(len(labels))
    return random.choices(everything, weights=weights if weights.sum() > 0 else None, k=len(labels))


class EpochOrder(Sampler):
    """Keys (epoch, position) of one epoch after the other; each pass is the next epoch, beginning with `first_epoch`.

    With a `seed` each epoch is shuffled by it. Without one it has stock's order: that of the data set, or with several
    ranks the order that DistributedSampler draws for the epoch. A rank takes every `world_size`-th key of one common
    order, which is filled up from its beginning until it divides.

    `blocks` [n] gives the batch of each position where batches are fixed (--rect): these keep their images, and the
    ranks take turns with whole batches.
    """

    def __init__(self, num_samples, seed=None, shuffle=True, rank=-1, world_size=1, first_epoch=0, blocks=None):
        self.num_samples, self.seed, self.shuffle, self.epoch = num_samples, seed, shuffle, first_epoch
        self.rank, self.world_size = max(rank, 0), world_size if rank != -1 else 1
        self.is_distributed = rank != -1
        self.blocks = blocks

    def __len__(self):
        return len(self.positions(0))

    def __iter__(self):
        epoch, self.epoch = self.epoch, self.epoch + 1
        return iter([(epoch, position) for position in self.positions(epoch)])

    def set_epoch(self, epoch):
        """Nothing to do: the passes count themselves, those that are prefetched as well."""

    def positions(self, epoch):
        """What this rank reads in `epoch`, as a list of integers."""
        if self.blocks is None:
            return self._share(self._order(epoch))
        starts = np.flatnonzero(np.diff(self.blocks, prepend=-1))
        batches = np.split(np.arange(self.num_samples), starts[1:])
        return np.concatenate([batches[b] for b in self._share(list(range(len(batches))))]).tolist()

    def _order(self, epoch):
        if self.seed is not None and self.shuffle:
            return np.random.default_rng((self.seed, ORDER, epoch)).permutation(self.num_samples).tolist()
        if self.is_distributed and self.shuffle:
            return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(epoch)).tolist()
        return list(range(self.num_samples))

    def _share(self, order):
        length = -(-len(order) // self.world_size) * self.world_size
        filled = (order * self.world_size)[:length]
        return filled[self.rank :: self.world_size]


class Positions(Sampler):
    """The positions of an EpochOrder without their epochs, for torch's own loader."""

    def __init__(self, order):
        self.order = order

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return iter([position for _, position in self.order])

    def set_epoch(self, epoch):
        self.order.set_epoch(epoch)


class EndlessBatches:
    """The batches of a batch sampler, epoch after epoch; its length is one epoch."""

    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler

    def __len__(self):
        return len(self.batch_sampler)

    def __iter__(self):
        return chain.from_iterable(repeat(self.batch_sampler))


class ShortEpochs:
    """A batch sampler over another one: each pass takes up to `max_batches` more of its endlessly repeated batches.

    `first_epoch` passes are taken as past, so that a resumed run goes on in the middle of the data set.
    """

    def __init__(self, batches, max_batches, first_epoch=0):
        self.batches, self.max_batches, self.first_epoch = batches, max_batches, first_epoch
        self.sampler, self.stream = batches.sampler, None

    def __len__(self):
        return min(len(self.batches), self.max_batches)

    def __iter__(self):
        if self.stream is None:
            passes, position = divmod(self.first_epoch * len(self), len(self.batches))
            if hasattr(self.sampler, "epoch"):  # it counts its passes, this one of whole data sets
                self.sampler.epoch = passes
            self.stream = islice(EndlessBatches(self.batches), position, None)
        return islice(self.stream, len(self))
