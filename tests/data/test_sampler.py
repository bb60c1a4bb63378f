"""utils/data/sampler.py: weights by hand, the draw of an epoch's images, orders, and epochs of at most N batches."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from utils.data.sampler import (
    EpochOrder,
    Positions,
    ShortEpochs,
    draw_image_indices,
    labels_to_class_weights,
    labels_to_image_weights,
)


def rows(*classes):
    """[n x 5] labels of an image with boxes of these classes."""
    labels = np.full((len(classes), 5), 0.5, np.float32)
    labels[:, 0] = classes
    return labels


LABELS = [rows(0, 0, 1), rows(), rows(0, 2), rows(0)]


def test_class_weights_by_hand():
    weights = labels_to_class_weights(LABELS, 4)  # counts 4, 1, 1, none: as one
    assert weights.dtype == torch.float64
    assert weights.tolist() == pytest.approx([0.25 / 3.25, 1 / 3.25, 1 / 3.25, 1 / 3.25])


@pytest.mark.parametrize("labels", [[], [rows()], [rows(), rows()]])
def test_without_boxes_all_classes_weigh_the_same(labels):
    assert labels_to_class_weights(labels, 2).tolist() == [0.5, 0.5]


def test_image_weights_by_hand():
    weights = labels_to_image_weights(LABELS, 3, torch.tensor([0.1, 1.0, 10.0]))
    assert weights.tolist() == pytest.approx([1.2, 0.0, 10.1, 0.1])
    assert labels_to_image_weights([], 3, np.ones(3)).shape == (0,)
    assert labels_to_image_weights([rows()], 1, np.ones(1)).tolist() == [0.0]


def test_draw_uses_the_weights_by_hand():
    class_weights, maps = torch.tensor([0.3, 1.2, 1.5]), np.array([0.5, 0.0, 0.9])
    poor = [0.3 * 0.25 / 3, 1.2 / 3, 1.5 * 0.01 / 3]
    weights = [2 * poor[0] + poor[1], 0, poor[0] + poor[2], poor[0]]
    random.seed(4)
    expected = [random.choices(range(4), weights=weights, k=4) for _ in range(50)]
    after = random.getstate()
    random.seed(4)
    assert [draw_image_indices(LABELS, class_weights, maps) for _ in range(50)] == expected
    assert random.getstate() == after, "one draw from Python's generator an image"


def test_images_without_boxes_and_with_perfect_classes_are_not_drawn():
    random.seed(0)
    drawn = {i for _ in range(50) for i in draw_image_indices(LABELS, np.ones(3), np.array([1.0, 1.0, 0.0]))}
    assert drawn == {2}, "only the image with class 2"


def test_no_labelled_image():
    random.seed(0)
    drawn = [draw_image_indices([rows()] * 5, np.ones(2), np.zeros(2)) for _ in range(30)]
    assert all(len(indices) == 5 for indices in drawn) and {i for indices in drawn for i in indices} == set(range(5))
    everything_perfect = draw_image_indices(LABELS, np.ones(3), np.ones(3))
    assert len(everything_perfect) == 4 and set(everything_perfect) <= set(range(4))


# the order of an epoch


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
    second = EpochOrder(7, seed=7, rank=1, world_size=2, blocks=blocks)
    assert second.positions(0) == [3, 4, 5, 0, 1, 2]
    positions = Positions(second)
    assert len(positions) == 6 and [list(positions), list(positions)] == [[3, 4, 5, 0, 1, 2]] * 2


# epochs of at most N batches: together they run through the data set


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
