"""OTA on NumPy matrices against the reference matcher's steps."""

import numpy as np
import pytest
import torch

from utils.loss import assign_by_image, assigner
from utils.ops import boxes


def xyxy_rows(corners):
    """[5 x n]: the corners [n x 4] and the area, each in a row."""
    area = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
    return torch.cat((corners.T, area[None])).contiguous().numpy()


def test_overlaps_equal_box_iou():
    draw = torch.rand(2, 40, 4, generator=torch.manual_seed(0)) * 10
    true, mine = (torch.cat((part[:, :2], part[:, :2] + part[:, 2:]), 1) for part in draw)
    mine[3, 2:] = mine[3, :2]  # without area
    true[5] = mine[3]
    expected = boxes.box_iou(true, mine).nan_to_num(0.0)
    found = assign_by_image.overlaps(xyxy_rows(true)[:, :, None], xyxy_rows(mine))
    assert np.array_equal(found, expected.numpy())
    assert found[5, 3] == 0


@pytest.mark.parametrize("number", [1, 3, 10, 50])
def test_num_wanted_equals_dynamic_k(number):
    iou = torch.rand(30, number, generator=torch.manual_seed(number))
    iou[iou < 0.4] = 0
    assert assign_by_image.num_wanted(iou.numpy(), 10).tolist() == assigner.dynamic_k(iou, 10).tolist()


def owners_by_reference(cost, wanted):
    candidate, target = assigner.match(torch.from_numpy(cost), torch.from_numpy(wanted))
    owner = np.full(cost.shape[1], -1)
    owner[candidate.numpy()] = target.numpy()
    return owner


@pytest.mark.parametrize("levels", [2, 5, 1000])  # of costs: nearly everything is tied, or nearly nothing
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (4, 3), (7, 40), (30, 200)])
def test_match_equals_the_reference(levels, shape):
    generator = np.random.default_rng(levels)
    for _ in range(20):
        cost = generator.integers(0, levels, shape).astype(np.float32)
        wanted = generator.integers(1, min(10, shape[1]) + 1, shape[0])
        found = assign_by_image.match(cost, wanted, 10, first_target=100)
        expected = owners_by_reference(cost, wanted)
        assert found.tolist() == np.where(expected < 0, -1, expected + 100).tolist()


def test_match_by_hand():
    cost = np.array([[1, 2, 2, 2], [0, 2, 3, 4]], dtype=np.float32)
    # the first takes 0, 1 and the lowest of the tied, 1; the second takes 0, which is cheaper for it
    assert assign_by_image.match(cost, np.array([2, 1]), 10, 0).tolist() == [1, 0, -1, -1]
    assert assign_by_image.match(cost, np.array([3, 1]), 10, 0).tolist() == [1, 0, 0, -1]
    # both take 1, at equal cost: the first has it
    assert assign_by_image.match(cost, np.array([2, 2]), 10, 0).tolist() == [1, 0, -1, -1]


def test_costs_equal_the_reference():
    generator = torch.manual_seed(0)
    background, logits = torch.rand(9, generator=generator) * 5, torch.randn(9, 4, generator=generator)
    iou, classes = torch.rand(3, 9, generator=generator), torch.tensor([2, 0, 2])
    iou[0, :4] = 0
    expected = background - logits.T[classes] + assigner.overlap_cost(iou)
    found = assign_by_image.costs(iou.numpy(), background.numpy(), logits.numpy(), classes.numpy())
    assert np.array_equal(found, expected.numpy())
