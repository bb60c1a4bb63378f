"""Padding for CUDA graphs, and replays of a captured body; on a CPU with a stand-in for the graph."""

from dataclasses import dataclass

import pytest
import torch

from utils.ops import cuda_graph
from utils.ops.cuda_graph import Captured, PaddedSizes


@dataclass
class Size:
    work: int

    @property
    def is_too_large(self):
        return self.work > 10**7

    def with_spare(self):
        return Size(self.work + self.work // 4)


def test_padded_sizes():
    padded = PaddedSizes()
    assert padded.sizes is None and not padded.fits([Size(64)])
    assert not padded.is_crowded([Size(10**6)])
    padded.grow([Size(800), Size(400)])
    assert padded.sizes == [Size(1000), Size(500)] and padded.fits([Size(1000), Size(500)])
    assert not padded.fits([Size(1000), Size(501)])


def test_a_batch_is_crowded_at_one_and_a_half_times_the_work():
    padded = PaddedSizes()
    padded.grow([Size(800)])
    assert not padded.is_crowded([Size(1500)]) and padded.is_crowded([Size(1501)])
    assert padded.num_crowded == 1


def test_no_graph_gets_too_large():
    padded = PaddedSizes()
    assert padded.is_crowded([Size(64), Size(10**7 + 1)]) and not padded.is_crowded([Size(10**7)])
    padded.grow([Size(64), Size(10**7)])
    assert padded.sizes == [Size(64), Size(10**7)], "there is no room for spare"


def test_many_crowded_batches_are_none():
    padded = PaddedSizes()
    padded.grow([Size(800)])
    assert [padded.is_crowded([Size(2000)]) for _ in range(cuda_graph.MAX_CROWDED + 1)][-2:] == [True, False]
    padded.grow([Size(2000)])
    assert padded.num_crowded == 0


class Doubling:
    """A stand-in for a graph that doubles `numbers` into `result`."""

    def __init__(self, numbers, result):
        self.numbers, self.result = numbers, result

    def replay(self):
        self.result.copy_(self.numbers * 2)


def test_a_replay_reads_new_inputs_and_writes_the_same_outputs():
    numbers, result = torch.zeros(3), torch.zeros(3)
    captured = Captured(lambda body: (Doubling(numbers, body()), result), lambda: result, [numbers])
    assert captured.replay([torch.tensor([1.0, 2, 3])]) is result
    assert result.tolist() == [2, 4, 6] and numbers.tolist() == [1, 2, 3]
    with pytest.raises(ValueError):
        captured.replay([])


@pytest.mark.gpu
def test_on_cuda():
    numbers = torch.zeros(3, dtype=torch.uint8, device="cuda")
    counts = torch.zeros(2, dtype=torch.long, device="cuda")
    captured = Captured(cuda_graph.record, lambda: (numbers * 2, counts + 1), [numbers, counts])
    new = torch.tensor([1, 2, 3], dtype=torch.uint8).pin_memory(), torch.tensor([5, 6], device="cuda")
    doubled, more = captured.replay(new)
    assert doubled.tolist() == [2, 4, 6] and more.tolist() == [6, 7]
