import numpy as np
import pytest
import torch

from tests.loss_cases import as_matches, candidates_of, random_case, rows
from utils.loss import assigner
from utils.loss.candidates import Sizes, _stable_order, find_candidates, round_up

ANCHORS = torch.tensor([[[2.0, 2.0]], [[2.0, 2.0]]])
SHAPES = [(3, 1, 8, 8, 7), (3, 1, 4, 4, 7)]
# image 2 before image 0; the second box is a neighbour's, too; image 1 has none
TARGETS = torch.tensor([[2.0, 1, 20 / 64, 28 / 64, 16 / 64, 16 / 64], [0, 0, 18 / 64, 28 / 64, 16 / 64, 16 / 64]])


def candidates_for(targets, **options):
    return find_candidates(targets, SHAPES, ANCHORS, [8, 16], (64, 64), anchor_threshold=1.5, **options)


def test_candidates_by_hand():
    candidates = candidates_for(TARGETS)
    tensors = candidates.tensors
    assert tensors.target_class[:2].tolist() == [0, 1]  # by image
    assert tensors.target_xyxy[0].tolist() == [10, 20, 26, 36, 256]
    # image 0: own cell (2, 3) at x 2.25 and its left neighbour; image 2: the centre is in the middle of a cell
    assert tensors.corner[:3].tolist() == [[1, 3], [2, 3], [2, 3]]
    assert tensors.cell_index[:3].tolist() == [25, 26, 2 * 64 + 26]
    assert tensors.cell_of_candidate[:3].tolist() == [1, 0, 2]
    assert tensors.target_of_candidate[:3].tolist() == [0, 0, 1]
    assert tensors.num_candidates[:2].tolist() == candidates.pairs_of_target.tolist() == [2, 1]
    assert tensors.first_candidate[:2].tolist() == [0, 2] and tensors.first_pair[:2].tolist() == [0, 2]
    assert tensors.stride[:3].flatten().tolist() == [8.0] * 3 and tensors.grid_size[0].tolist() == [8, 8]


@pytest.mark.parametrize("kind", ["ordinary", "borders", "duplicates", "empty images", "crowded"])
def test_candidates_are_those_of_the_plain_assigner(kind):
    """By image, and within it in the order of `assigner.plain`, layer by layer; for both reaches."""
    for seed in range(12):
        inputs, reach = random_case(seed, kind).matching_inputs(), (0.5, 1.0)[seed % 2]
        predictions, targets, anchors, *_ = inputs
        candidates = candidates_of(inputs, reach)
        found = rows(as_matches(candidates, candidates.tensors.target_of_candidate, inputs))
        expected = rows(assigner.plain(predictions, targets, anchors, reach=reach))
        order = np.lexsort((np.arange(len(expected)), targets[expected[:, 5], 0].numpy(), expected[:, 0]))
        assert found.tolist() == expected[order].tolist()


def test_padding_belongs_to_nothing():
    candidates = candidates_for(TARGETS)
    tensors, sizes = candidates.tensors, candidates.sizes
    assert sizes == Sizes(64, (64, 64), 64, 64)
    assert tensors.num_candidates.sum() == 3 and tensors.num_pairs.sum() == sizes.pairs
    assert (tensors.target_of_candidate[3:] == -1).all() and (tensors.cell_of_candidate[3:] == 0).all()
    assert (tensors.first_candidate[2:] == sizes.candidates - 1).all()


@pytest.mark.parametrize("targets", [TARGETS, TARGETS[:0]])
def test_nothing_in_the_buffer_is_left_unwritten(targets, monkeypatch):
    candidates, empty = candidates_for(targets), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(123_456_789_123))
    assert candidates_for(targets).buffer.equal(candidates.buffer)


def test_without_targets_all_is_padding():
    candidates = candidates_for(torch.zeros(0, 6))
    assert candidates.sizes == Sizes(64, (64, 64), 64, 64) and len(candidates.pairs_of_target) == 0
    assert (candidates.tensors.target_of_candidate == -1).all()


@pytest.mark.parametrize(
    "count, rounded", [(0, 64), (1, 64), (65, 128), (512, 512), (513, 640), (1000, 1024), (1025, 1280)]
)
def test_round_up(count, rounded):
    assert round_up(count) == rounded


def test_one_buffer_holds_all_parts():
    candidates = candidates_for(TARGETS)
    candidates.buffer.fill_(0)
    assert not any(part.any() for part in candidates.tensors)
    copied = candidates.copy_(candidates_for(TARGETS))
    assert copied is candidates and candidates.tensors.num_candidates[:3].tolist() == [2, 1, 0]
    assert candidates.to(torch.device("cpu")) is candidates


def test_sizes():
    large, small = Sizes(128, (64, 256), 64, 4096), Sizes(64, (64, 64), 64, 64)
    assert candidates_for(TARGETS).sizes == small
    assert candidates_for(TARGETS, at_least=large).sizes == large == small.or_more(large)
    assert Sizes(128, (64, 100), 64, 512).padded() == Sizes(192, (64, 128), 128, 640)  # cells need no padding
    assert Sizes(64, (64, 64), 64, 800).with_spare() == Sizes(128, (128, 128), 128, 1024)  # a quarter more
    assert large.work == 4096


def test_stable_order():
    numbers = np.array([3, 1, 3, 0, 1])
    assert _stable_order(numbers).tolist() == [3, 1, 4, 0, 2]
    assert _stable_order(numbers * 100_000).tolist() == [3, 1, 4, 0, 2]
    assert _stable_order(numbers[:0]).tolist() == []
