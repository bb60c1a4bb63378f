"""The judgement of a soak: what grows is noticed, what only wavers is not."""

import subprocess
import time

import numpy as np
import psutil
import pytest

from tests import soak


def samples(growth_of=None, by=0.0):
    """100 samples that waver by 1 %; one quantity grows by a share of itself, evenly."""
    rng = np.random.default_rng(0)
    rows = np.concatenate(([np.arange(100.0)], [np.full(100, value) for value in (800, 400, 10, 60, 20, 4)])).T
    rows[:, 1:4] *= rng.uniform(0.99, 1.01, (100, 3))
    if growth_of is not None:
        rows[:, 1 + growth_of] *= np.linspace(1, 1 + by, 100)
    return rows


def grown(rows):
    return [quantity for quantity, (_, _, is_flat) in soak.growth(rows).items() if not is_flat]


def test_what_wavers_is_flat():
    assert grown(samples()) == []
    start = samples()
    start[:20, 1] *= np.linspace(0.3, 1, 20)
    assert grown(start) == [], "the warm-up is not judged"


@pytest.mark.parametrize(("number", "by"), [(0, 0.2), (1, 0.4), (2, 1.0), (3, 0.1), (4, 0.2), (5, 2.0)])
def test_what_grows_is_noticed(number, by):
    assert grown(samples(number, by)) == [soak.QUANTITIES[number]]
    assert soak.growth(samples())[soak.QUANTITIES[3]] == (60.0, 60.0, True)


def test_a_sample_of_this_process(tmp_path):
    ended = subprocess.Popen(["true"])
    time.sleep(0.1)
    tries = (soak.sample(psutil.Process()) for _ in range(100))  # others may end meanwhile
    values = next(found for found in tries if found)
    ended.wait()
    main, workers, _, files, threads, processes = values
    assert main > 10 and workers >= 0 and files >= 3 and threads >= 1 and processes >= 1
    soak.plot({"a": samples(), "b": samples(0, 1)}, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").stat().st_size > 1000
