"""utils/data/keyed_dataset.py: draws that derive from seed, epoch and position only."""

import random

import numpy as np
import torch

from utils.data.keyed_dataset import KeyedDataset


class Draws:
    """A data set whose samples are their draws."""

    indices = range(5)
    img_files = [f"{i}.png" for i in range(5)]

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return index, random.random(), np.random.rand()


def test_sample_depends_on_seed_epoch_and_position_only():
    source = KeyedDataset(Draws(), seed=7)
    first = source[2, 3]
    random.seed(99), np.random.seed(99)
    source[0, 0]
    assert source[2, 3] == first
    others = [source[2, 4], source[1, 3], KeyedDataset(Draws(), seed=8)[2, 3]]
    assert len({sample[1:] for sample in (first, *others)}) == 4


def test_sample_disturbs_no_other_draw():
    random.seed(1), np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1), np.random.seed(1)
    KeyedDataset(Draws(), seed=7)[0, 0]
    assert (random.random(), np.random.rand()) == expected


def test_without_seed_the_global_generators_are_used():
    random.seed(1), np.random.seed(1)
    sample = KeyedDataset(Draws())[0, 2]
    random.seed(1), np.random.seed(1)
    assert sample == (2, random.random(), np.random.rand())


def test_workers_see_indices_that_are_published():
    source = KeyedDataset(Draws(), seed=7)
    source.share_indices()
    worker = KeyedDataset(Draws(), seed=7)  # stands for the copy in the worker
    worker.shared_indices = source.shared_indices
    worker.enter_worker()
    source.dataset.indices = [4, 4, 1, 0, 2]
    source.publish_indices()
    assert list(worker.dataset.indices) == [4, 4, 1, 0, 2]
    assert worker.path((0, 2)) == "1.png" and torch.tensor(worker.dataset.indices).sum() == 11
