"""utils/data/keyed_dataset.py: draws and orders that derive from seed, epoch and position only."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

from utils.data.keyed_dataset import EpochOrder, KeyedDataset, generators_kept, seed_epoch


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


def test_generators_go_on_after_an_error():
    random.seed(1)
    expected = random.random()
    random.seed(1)
    with pytest.raises(ValueError), generators_kept():
        random.random()
        raise ValueError
    assert random.random() == expected


def test_without_seed_the_global_generators_are_used():
    random.seed(1), np.random.seed(1)
    sample = KeyedDataset(Draws())[0, 2]
    random.seed(1), np.random.seed(1)
    assert sample == (2, random.random(), np.random.rand())


def test_seed_of_an_epoch():
    seed_epoch(7, 1)
    first = random.random(), np.random.rand()
    seed_epoch(7, 2)
    assert random.random() != first[0]
    seed_epoch(7, 1)
    assert (random.random(), np.random.rand()) == first
    state = random.getstate()
    seed_epoch(None, 1)
    assert random.getstate() == state


def test_each_pass_is_the_next_epoch_and_a_restart_joins_in():
    order = EpochOrder(9, seed=7)
    passes = [list(order) for _ in range(3)]
    assert [{epoch for epoch, _ in keys} for keys in passes] == [{0}, {1}, {2}]
    assert all(sorted(position for _, position in keys) == list(range(9)) for keys in passes)
    assert len({tuple(p for _, p in keys) for keys in passes}) == 3
    assert list(EpochOrder(9, seed=7, first_epoch=2)) == passes[2]


def test_ranks_share_the_batches_of_one():
    whole = EpochOrder(10, seed=7).positions(1)
    shares = [EpochOrder(10, seed=7, rank=rank, world_size=2).positions(1) for rank in (0, 1)]
    for start in range(0, 10, 4):
        both = shares[0][start // 2 : start // 2 + 2] + shares[1][start // 2 : start // 2 + 2]
        assert sorted(both) == sorted(whole[start : start + 4])
    assert [len(EpochOrder(9, seed=7, rank=rank, world_size=2)) for rank in (0, 1)] == [5, 5]
    assert [EpochOrder(1, rank=rank, world_size=3).positions(0) for rank in range(3)] == [[0], [0], [0]]


@pytest.mark.parametrize("num_samples", [8, 7])
def test_without_seed_ranks_have_stocks_order(num_samples):
    for rank in (0, 1):
        stock = DistributedSampler(range(num_samples), num_replicas=2, rank=rank)
        stock.set_epoch(3)
        assert EpochOrder(num_samples, rank=rank, world_size=2).positions(3) == list(stock)
    assert EpochOrder(4).positions(3) == [0, 1, 2, 3]


def test_ranks_take_turns_with_fixed_batches():
    blocks = np.array([0, 0, 0, 1, 1, 1, 2])
    assert EpochOrder(7, seed=7, blocks=blocks).positions(0) == list(range(7))
    assert EpochOrder(7, seed=7, rank=0, world_size=2, blocks=blocks).positions(0) == [0, 1, 2, 6]
    assert EpochOrder(7, seed=7, rank=1, world_size=2, blocks=blocks).positions(0) == [3, 4, 5, 0, 1, 2]


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
