"""Random states: taken, put back, through a file, and streams that never repeat."""

import random

import numpy as np
import pytest
import torch

from utils.engine.checkpoint import save
from utils.engine.checkpoint_reader import read_checkpoint
from utils.engine.trainer import Progress
from utils.system import random_state
from utils.system.distributed import Ranks

SINGLE = Ranks()


def draws():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()


def seed_all(seed=0):
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def generators_restored():
    with random_state.kept():
        yield


def test_streams_go_on_after_a_file(tmp_path):
    seed_all()
    draws()  # leaves half of a pair of normal numbers in Python's and NumPy's generators
    save({"model": {"w": torch.ones(1)}, "states": [random_state.capture()]}, tmp_path / "a.pt")
    expected = draws()
    seed_all(1)
    random_state.restore(read_checkpoint(tmp_path / "a.pt").extra["states"][0])
    assert draws() == expected


def test_kept():
    seed_all()
    expected = draws()
    seed_all()
    with pytest.raises(KeyError), random_state.kept():
        draws()
        raise KeyError
    assert draws() == expected


@pytest.mark.parametrize("damaged", [{}, None, {"python": 5, "numpy": {}}])
def test_damaged_state(damaged):
    with pytest.raises(ValueError, match="random states of the checkpoint cannot be used"):
        random_state.restore(damaged)


def progress(states, start_epoch=3):
    return Progress(9, maps=np.zeros(2), start_epoch=start_epoch, random_states=states)


def test_resume_takes_the_state_of_its_rank():
    states = []
    for seed in range(2):
        seed_all(seed)
        states.append(random_state.capture())
    for rank in range(2):
        seed_all(rank)
        expected = draws()
        random_state.resume(progress(states), Ranks(rank, rank, 2))
        assert draws() == expected
    assert len(random_state.of_all_ranks(SINGLE)) == 1


def test_a_fresh_run_is_left_alone():
    seed_all()
    expected = draws()
    seed_all()
    random_state.resume(progress(None, start_epoch=0), SINGLE)
    assert draws() == expected


def test_without_a_fitting_state_nothing_is_drawn_twice():
    """Neither the stream of the beginning, nor that of another epoch or rank, but the same each time."""
    seen = []
    for states, ranks, epoch in (
        (None, SINGLE, 0),
        ([], SINGLE, 3),
        ([], SINGLE, 4),
        ([{}], Ranks(0, 0, 2), 3),
        ([{}], Ranks(1, 1, 2), 3),
    ):
        seed_all(2 + ranks.rank)
        random_state.resume(progress(states, epoch), ranks)
        seen.append(draws())
    for numbers in zip(*seen, strict=True):
        assert len(set(map(str, numbers))) == len(seen)
    seed_all(1)
    random_state.resume(progress([], 3), SINGLE)
    assert draws() == seen[1]


def test_generators_go_on_after_an_error():
    random.seed(1)
    expected = random.random()
    random.seed(1)
    with pytest.raises(ValueError), random_state.generators_kept():
        random.random()
        raise ValueError
    assert random.random() == expected


def test_seed_of_an_epoch():
    random_state.seed_epoch(7, 1)
    first = random.random(), np.random.rand()
    random_state.seed_epoch(7, 2)
    assert random.random() != first[0]
    random_state.seed_epoch(7, 1)
    assert (random.random(), np.random.rand()) == first
    state = random.getstate()
    random_state.seed_epoch(None, 1)
    assert random.getstate() == state


def test_generators_are_seeded_from_all_numbers():
    """Equal ones give equal draws, of whatever type they are; others give others."""
    drawn = []
    for numbers in [(0, 0), (0, 0, 0), (1, 11), (11, 1), (111,), (2**32, 1), (2**70, 5)]:
        random_state.seed_generators(*numbers)
        drawn.append((random.random(), np.random.random()))
    assert len(set(drawn)) == len({one for one, _ in drawn}) == len({other for _, other in drawn}) == len(drawn)
    random_state.seed_generators(*np.array([1, 11]))
    assert (random.random(), np.random.random()) == drawn[2]


@pytest.mark.parametrize("numbers", [(-1, 3), (3, -(2**40))])
def test_a_negative_seed(numbers):
    with pytest.raises(ValueError, match="negative"):
        random_state.seed_generators(*numbers)
