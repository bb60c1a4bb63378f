"""Randomness that depends on what is drawn, not on who draws it (--seed).

The draws of a training sample derive from (seed, epoch, position in the data set), those of a group of --quad from its
first sample, the order of an epoch from (seed, epoch). So the batches are the same for any number of workers, with or
without the faster loaders, and after a restart; several ranks share the batches of one.
"""

import random
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from utils.system.memory import shared_array

# What a stream is for; the first part of what it is derived from after the seed.
SAMPLE, GROUP, ORDER, EPOCH = range(4)


def seed_generators(*numbers):
    """Seed Python's and NumPy's global generators from non-negative integers."""
    state = np.random.SeedSequence(numbers).generate_state(8)
    random.seed(state.tobytes())
    np.random.seed(state)


@contextmanager
def generators_kept():
    """Whatever the body draws, the global generators go on afterwards as if it had not."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def seed_epoch(seed, epoch):
    """At the start of an epoch: what the main process draws itself (--image-weights, --multi-scale). None: nothing."""
    if seed is not None:
        seed_generators(seed, EPOCH, epoch)


class EpochOrder(Sampler):
    """Keys (epoch, position) of one epoch after the other; each pass is the next epoch, beginning with `first_epoch`.

    With a `seed` each epoch is shuffled by it. Without one it has stock's order: that of the data set, or with several
    ranks the order that DistributedSampler draws for the epoch. A rank takes every `world_size`-th key of one common
    order, which is filled up from its beginning until it divides.

    `blocks` [n] gives the batch of each position where batches are fixed (--rect): these keep their pictures, and the
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


class KeyedDataset(Dataset):
    """Samples of `dataset` by key (epoch, position); with a `seed` their randomness derives from it."""

    def __init__(self, dataset, seed=None):
        self.dataset, self.seed = dataset, seed
        self.in_worker, self.shared_indices = False, None

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, key):
        return self._drawn((SAMPLE, *key), self.dataset.__getitem__, key[1])

    def collate_group(self, collate, key, samples):
        """`collate` for a group of samples of which the first one has `key`."""
        return self._drawn((GROUP, *key), collate, samples)

    def _drawn(self, numbers, function, argument):
        if self.seed is None:
            return function(argument)
        if self.in_worker:  # nothing else draws there
            seed_generators(self.seed, *numbers)
            return function(argument)
        with generators_kept():
            seed_generators(self.seed, *numbers)
            return function(argument)

    def path(self, key):
        """The file of the picture that `key` means."""
        return self.dataset.img_files[self.dataset.indices[key[1]]]

    def share_indices(self):
        """Let workers that stay see what is written to `dataset.indices` later; call it before they start."""
        self.shared_indices = shared_array((len(self.dataset),), np.int64)

    def publish_indices(self):
        """Pass `dataset.indices` on to the workers; none of them may be working."""
        if self.shared_indices is not None:
            self.shared_indices[:] = self.dataset.indices

    def enter_worker(self, worker_id=0):
        """To be called once in each worker process."""
        self.in_worker = True
        if self.shared_indices is not None:
            self.dataset.indices = self.shared_indices


class WithKeys(Dataset):
    """(key, sample) of a KeyedDataset, for a collation that needs the keys."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, key):
        return key, self.source[key]


class SeededQuad:
    """stock's `collate_fn4` over (key, sample) pairs, with a draw for each group that derives from its first key."""

    def __init__(self, source, collate_fn4):
        self.source, self.collate_fn4 = source, collate_fn4

    def __call__(self, pairs):
        keys, samples = zip(*pairs, strict=True)
        big_images, targets = [], []
        for position, start in enumerate(range(0, 4 * max(len(samples) // 4, 1), 4)):
            group = samples[start : start + 4]
            images, rows, _, _ = self.source.collate_group(self.collate_fn4, keys[start], group)
            rows[:, 0] = position
            big_images.append(images)
            targets.append(rows)
        _, _, paths, shapes = zip(*samples[: len(big_images)], strict=True)
        return torch.cat(big_images), torch.cat(targets), paths, shapes
