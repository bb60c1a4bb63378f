"""Randomness that depends on what is drawn, not on who draws it (--seed).

The draws of a training sample derive from (seed, epoch, position in the data set), those of a group of --quad from its
first sample, the order of an epoch from (seed, epoch). So the batches are the same for any number of workers, with or
without the faster loaders, and after a restart; several ranks share the batches of one.
"""

from contextlib import nullcontext

import numpy as np
import torch
from torch.utils.data import Dataset

from utils.system.memory import shared_array
from utils.system.random_state import GROUP, SAMPLE, generators_kept, seed_generators


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
        with nullcontext() if self.in_worker else generators_kept():  # nothing else draws in a worker
            seed_generators(self.seed, *numbers)
            return function(argument)

    def path(self, key):
        """The file of the image that `key` means."""
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
