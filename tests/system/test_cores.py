"""How many cores may be used: affinity and the limits of a container."""

import os

import numpy as np
import pytest
import torch

from utils.engine import autoanchor
from utils.system import cores, memory


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
    assert cores.container_limit(tmp_path, tmp_path / "none") == limit


@pytest.mark.parametrize(
    ("own", "free", "cores_left"),
    [
        ("0::/slice/job/step\n", 150, 2.5),  # version 2: as Slurm and systemd make them
        ("9:name=systemd:/\n4:memory:/slice/job\n2:cpu,cpuacct:/slice/job\n0::/\n", 150, 2.5),  # version 1
        ("0::/slice/job/\xff\n", 150, 2.5),  # a byte that is no text
        ("0::/../elsewhere\n", None, None),
        ("0::/\n", None, None),
    ],
)
def test_limits_of_the_group_that_a_process_is_in(own, free, cores_left, tmp_path):
    """They are not at the top, where those of a container with a view of its own are."""
    (tmp_path / "own").write_bytes(own.encode("latin1"))
    version_1 = {
        "memory/slice/job": {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "900",
                             "memory.stat": "total_inactive_file 50"},
        "memory/slice": {"memory.limit_in_bytes": "9000", "memory.usage_in_bytes": "900",
                         "memory.stat": "total_inactive_file 50"},
        "cpu/slice/job": {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"},
    }  # fmt: skip
    version_2 = {
        "slice/job": {"memory.max": "1000", "memory.current": "900", "memory.stat": "inactive_file 50",
                      "cpu.max": "250000 100000"},
        "slice/job/step": {"memory.max": "max", "cpu.max": "max 100000"},
    }  # fmt: skip
    for folder, files in (version_1 if "memory:" in own else version_2).items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / folder / name).write_text(f"{text}\n")
    found = memory.available_memory(tmp_path, tmp_path / "own")
    assert found == free if free else found is None or found > 1e6
    assert cores.container_limit(tmp_path, tmp_path / "own") == cores_left


def test_the_smaller_of_affinity_and_limit_counts(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    for limit, expected in ((None, 6), (3.5, 4), (32.0, 6), (0.1, 1)):
        monkeypatch.setattr(cores, "container_limit", lambda limit=limit: limit)
        assert cores.usable_cores() == expected


def test_long_work_has_the_threads_of_before(monkeypatch):
    monkeypatch.setattr(cores, "_usual_threads", {})
    threads, seen = [3], []
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    with cores.usual_threads():
        assert threads == [3], "nothing is set where nothing was"
    cores.one_thread()
    monkeypatch.setattr(autoanchor, "_evolve", lambda anchors, *_: seen.append(threads[-1]) or anchors)
    sizes = np.random.default_rng(0).uniform(10, 200, (60, 2))
    monkeypatch.setattr(autoanchor, "box_sizes", lambda *_: sizes)
    autoanchor.kmean_anchors(None, n=4)
    assert seen == [3] and threads == [3, 1, 3, 1]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with cores.usual_threads():
        assert threads == [3, 1, 3, 1], "a forked process would wait for threads that it does not have"
