import numpy as np
import pytest
import torch

from tests.loss_cases import random_case, rows
from utils.loss import assigner, batched_assigner
from utils.loss.candidates import Sizes, _round_up, _stable_order, prepare

ANCHORS = torch.tensor([[[2.0, 2.0]], [[2.0, 2.0]]])
SHAPES = [(3, 1, 8, 8, 7), (3, 1, 4, 4, 7)]
# image 2 before image 0; the second box is a neighbour's, too; image 1 has none
TARGETS = torch.tensor([[2.0, 1, 20 / 64, 28 / 64, 16 / 64, 16 / 64], [0, 0, 18 / 64, 28 / 64, 16 / 64, 16 / 64]])


def plan_for(targets, **options):
    return prepare(targets, SHAPES, ANCHORS, [8, 16], (64, 64), anchor_threshold=1.5, **options)


def test_a_plan_by_hand():
    plan = plan_for(TARGETS, padded=False)
    layout = plan.layout
    assert plan.target_rows.tolist() == [1, 0]  # by image
    assert layout.target_class.tolist() == [0, 1]
    assert layout.target_xyxy[0].tolist() == [10, 20, 26, 36, 256]
    assert plan.sizes == Sizes(targets=2, cells=(3, 0), candidates=3, pairs=3)
    # image 0: own cell (2, 3) at x 2.25 and its left neighbour; image 2: the centre is in the middle of a cell
    assert layout.corner.tolist() == [[1, 3], [2, 3], [2, 3]]
    assert layout.cell_index.tolist() == [25, 26, 2 * 64 + 26]
    assert layout.cell_of_candidate.tolist() == [1, 0, 2]
    assert layout.proposer.tolist() == [0, 0, 1]
    assert layout.num_candidates.tolist() == [2, 1]
    assert layout.first_candidate.tolist() == [0, 2]
    assert layout.stride.flatten().tolist() == [8.0] * 3 and layout.grid_size[0].tolist() == [8, 8]
    assert [tuple(block) for block in plan.blocks()] == [(0, 1, 0, 2), (1, 1, 2, 1)]


@pytest.mark.parametrize("kind", ["ordinary", "borders", "duplicates", "empty images", "crowded"])
def test_candidates_are_those_of_the_plain_matcher(kind):
    """By image, and within it in the order of `assign.plain`, layer by layer; for both reaches."""
    for seed in range(12):
        case = random_case(seed, kind)
        predictions, targets, anchors, strides, size = case.matching_inputs()
        shapes, reach = [prediction.shape for prediction in predictions], (0.5, 1.0)[seed % 2]
        plan = prepare(targets, shapes, anchors, strides, size, reach=reach, padded=False)
        found = rows(batched_assigner.matches(plan, plan.layout.proposer, anchors))
        expected = rows(assigner.plain(predictions, targets, anchors, reach=reach))
        order = np.lexsort((np.arange(len(expected)), targets[expected[:, 5], 0].numpy(), expected[:, 0]))
        assert found.tolist() == expected[order].tolist()


def test_padding_is_nobody():
    plan = plan_for(TARGETS)
    layout, sizes = plan.layout, plan.sizes
    assert sizes == Sizes(64, (64, 64), 64, 64)
    assert layout.num_candidates.sum() == 3 and layout.num_pairs.sum() == sizes.pairs
    assert (layout.proposer[3:] == -1).all() and (layout.cell_of_candidate[3:] == 0).all()
    assert (layout.first_candidate[2:] == sizes.candidates - 1).all()
    assert layout.cell_of_candidate[:3].tolist() == [1, 0, 2]


@pytest.mark.parametrize("targets", [TARGETS, TARGETS[:0]])
@pytest.mark.parametrize("padded", [True, False])
def test_nothing_in_the_buffer_is_left_unwritten(targets, padded, monkeypatch):
    plan, empty = plan_for(targets, padded=padded), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(123_456_789_123))
    assert plan_for(targets, padded=padded).buffer.equal(plan.buffer)


def test_without_targets_all_is_padding():
    plan = plan_for(torch.zeros(0, 6))
    assert plan.blocks() == [] and (plan.layout.proposer == -1).all()
    assert plan_for(torch.zeros(0, 6), padded=False).sizes == Sizes(0, (0, 0), 0, 0)


@pytest.mark.parametrize(
    "count, rounded", [(0, 64), (1, 64), (65, 128), (512, 512), (513, 640), (1000, 1024), (1025, 1280)]
)
def test_round_up(count, rounded):
    assert _round_up(count) == rounded


def test_one_buffer_holds_all_parts():
    plan = plan_for(TARGETS)
    plan.buffer.fill_(0)
    assert not any(part.any() for part in plan.layout)
    copied = plan.copy_(plan_for(TARGETS))
    assert copied is plan and plan.layout.num_candidates[:3].tolist() == [2, 1, 0]
    assert plan.to(torch.device("cpu")) is plan


def test_sizes_grow_to_at_least_the_given_ones():
    large = Sizes(128, (64, 256), 64, 4096)
    assert plan_for(TARGETS, at_least=large).sizes == large.or_more(Sizes(64, (64, 64), 64, 64))


def test_stable_order():
    numbers = np.array([3, 1, 3, 0, 1])
    assert _stable_order(numbers).tolist() == [3, 1, 4, 0, 2]
    assert _stable_order(numbers * 100_000).tolist() == [3, 1, 4, 0, 2]
    assert _stable_order(numbers[:0]).tolist() == []
