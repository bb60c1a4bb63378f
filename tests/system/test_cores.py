"""How many cores may be used: affinity and the limits of a container."""

import os

import pytest

from utils.system import cores


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"cpu.max": "350000 100000\n"}, 3.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "what is this"}, None),
        ({}, None),
    ],
)
def test_limits_of_both_versions_of_cgroup(files, limit, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores.container_limit(tmp_path) == limit


def test_the_smaller_of_affinity_and_limit_counts(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    for limit, expected in ((None, 6), (3.5, 4), (32.0, 6), (0.1, 1)):
        monkeypatch.setattr(cores, "container_limit", lambda limit=limit: limit)
        assert cores.usable_cores() == expected
