"""Epochs of at most N batches: together they run through the data set, and a resumed run goes on where it was."""

import pytest
from torch.utils.data import BatchSampler

from utils.data.keyed_dataset import EpochOrder
from utils.data.short_epochs import ShortEpochs


def epochs(max_batches, num_epochs, first_epoch=0, seed=None, num_samples=7, batch_size=2):
    batches = BatchSampler(EpochOrder(num_samples, seed), batch_size, drop_last=False)
    short = ShortEpochs(batches, max_batches, first_epoch)
    return [list(short) for _ in range(num_epochs)]


def test_passes_follow_each_other():
    first, second, third = epochs(3, 3)
    assert first == [[(0, 0), (0, 1)], [(0, 2), (0, 3)], [(0, 4), (0, 5)]]
    assert second == [[(0, 6)], [(1, 0), (1, 1)], [(1, 2), (1, 3)]]
    assert third == [[(1, 4), (1, 5)], [(1, 6)], [(2, 0), (2, 1)]]


def test_a_limit_beyond_the_data_set_changes_nothing():
    whole = BatchSampler(EpochOrder(7, seed=3), 2, drop_last=False)
    assert epochs(9, 2, seed=3) == [list(whole), list(whole)]
    assert len(ShortEpochs(whole, 9)) == 4 and len(ShortEpochs(whole, 3)) == 3


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("max_batches", [1, 3, 4])
@pytest.mark.parametrize("first_epoch", [1, 2, 5])
def test_resumed(first_epoch, max_batches, seed):
    whole = epochs(max_batches, 8, seed=seed)
    assert epochs(max_batches, 8 - first_epoch, first_epoch, seed) == whole[first_epoch:]
