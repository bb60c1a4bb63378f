"""CPU, GPU and memory of a run: hand-made samples, real processes, a made-up NVML."""

import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from utils.loggers import monitor
from utils.loggers.monitor import ResourceMonitor, ResourceSample, Usage, summarise
from utils.system.files import PROJECT_ROOT


def sample(time, main=0.0, workers=None, gpu=None, gpu_memory=None, memory=None):
    return ResourceSample(time, main, workers or {}, gpu, gpu_memory, memory)


def test_usage_by_hand():
    usage = summarise(
        [
            sample(10.0, 1.0, {1: 4.0, 2: 0.0, 3: 7.0}, 0.5, 2.0, 1.0),
            sample(12.0, 1.5, {1: 5.0, 2: 1.0, 3: 7.0}, 1.0, 3.0, 4.0),
            sample(14.0, 2.0, {2: 1.0, 3: 7.0, 4: 3.0}, 0.9, 1.0, 2.0),
        ]
    )
    # 1 ended after one more second of work, 2 did one, 3 nothing, 4 began in between and did three: 5 / 3 workers / 4 s
    assert usage == Usage(4.0, 0.25, pytest.approx(5 / 12), 3, pytest.approx(0.95), 3.0, 4.0)


@pytest.mark.parametrize("samples", [[], [sample(1.0)]])
def test_nothing_is_known_of_fewer_than_two_samples(samples):
    assert summarise(samples) == Usage()


def test_what_was_not_measured_is_none():
    usage = summarise([sample(0.0, None), sample(1.0, 0.5)])
    assert usage == Usage(seconds=1.0)


def test_usage_of_a_part():
    monitored = ResourceMonitor()
    monitored.samples = [sample(0.0, 0.0), sample(1.0, 0.9), sample(2.0, 1.0), sample(4.0, 1.4)]
    assert monitored.usage(1.0, 4.0).main_cpu == pytest.approx(0.5 / 3)
    assert monitored.usage(end=1.0).main_cpu == pytest.approx(0.9)
    monitored.restart()
    assert len(monitored.samples) == 1 and monitored.samples[0].time > 4.0
    monitored.sample()
    newest = monitored.samples[-1]
    monitored.restart()
    assert monitored.samples == [newest]  # it is of this moment


def test_memory_that_takes_long_to_measure_is_measured_rarely(monkeypatch):
    monkeypatch.setattr(monitor, "proportional_memory", lambda processes: time.sleep(0.05) or 1.0)
    with ResourceMonitor(interval=0.01, memory=True) as monitored:
        time.sleep(0.6)
    assert [sample.memory for sample in monitored.samples[:2]] == [1.0, None]
    assert sum(sample.memory is not None for sample in monitored.samples) <= 2
    assert all(0 < sample.anonymous < 100 for sample in monitored.samples) and monitored.usage().memory == 1.0


ANONYMOUS = """
import mmap, psutil, numpy as np
from utils.loggers.monitor import anonymous_memory
from utils.system.memory import shared_array

process = psutil.Process()
before = anonymous_memory([process])
shared_array((10**8,), np.uint8)[:] = 1
shared = anonymous_memory([process])
own = mmap.mmap(-1, 10**8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for _ in range(100):
    own.write(bytes(10**6))
print(before, shared, anonymous_memory([process, process]))
"""


def test_anonymous_memory():
    """In a process in which nothing else takes memory or gives it back."""
    answer = subprocess.run([sys.executable, "-c", ANONYMOUS], cwd=PROJECT_ROOT, capture_output=True, text=True)
    before, shared, twice = map(float, answer.stdout.split())
    assert shared == pytest.approx(before, abs=0.02)
    assert twice == pytest.approx(2 * before + 0.2, abs=0.04)


def test_main_and_workers_of_another_process():
    """A process that sleeps has a child that computes; the child is the worker, Python's tracker is none."""
    busy = "import time; end = time.time() + 90\nwhile time.time() < end: pass"
    code = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {busy!r}]); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            deadline = time.monotonic() + 60
            while not psutil.Process(process.pid).children() and time.monotonic() < deadline:
                time.sleep(0.05)
            with ResourceMonitor(process.pid, interval=0.1, memory=True) as monitored:
                while len(monitored.samples) < 8 and time.monotonic() < deadline:
                    time.sleep(0.05)
            usage = monitored.usage()
        finally:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()
    assert usage.num_workers == 1 and usage.worker_cpu > 0.02  # of a core that others use too
    assert usage.main_cpu < usage.worker_cpu
    assert 0.001 < usage.memory < 1
    assert len(monitored.samples) > 3


def test_a_search_waits_for_other_children(monkeypatch):
    """Those that have begun beside others that stay, and those that have gone."""
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    monitored, searches = ResourceMonitor(), []
    search = monitored._search
    monkeypatch.setattr(monitored, "_search", lambda known: searches.append(1) or search(known))

    def found(*processes):
        monitored.sample()
        return {process.pid for process in processes} <= set(monitored.samples[-1].workers)

    with subprocess.Popen(sleeper) as first:
        assert found(first) and found(first) and len(searches) == 1
        with subprocess.Popen(sleeper) as second:
            assert found(first, second) and found(first, second) and len(searches) == 2
            first.kill()
            first.wait()
            assert found(second) and not found(first) and len(searches) == 3
            monkeypatch.setattr(monitor, "children_of", lambda pid: None)
            assert found(second) and found(second) and len(searches) == 5
            second.kill()


def test_a_process_that_has_ended_is_no_error():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        monitored = ResourceMonitor(process.pid)
    monitored.sample()
    monitored.sample()
    assert monitored.usage().main_cpu is None


class FakeNvml:
    """Two cards; the second is busier."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, broken=False):
        self.broken = broken

    def nvmlInit(self):
        if self.broken:
            raise self.NVMLError("no driver")

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, name):
        return {"GPU-abc": 1}[name]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=50 + 40 * handle)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=(1 + handle) * 10**9)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, (0.5, 1.0)), ("1,0", (0.9, 2.0)), ("GPU-abc", (0.9, 2.0)), ("", None), ("-1", None)],
)
def test_the_first_visible_card_is_watched(monkeypatch, visible, expected):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    read = monitor.open_gpu()
    assert (read and read()) == expected


@pytest.mark.parametrize("module", [None, FakeNvml(broken=True)])
def test_no_gpu_or_no_library_means_not_measured(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert monitor.open_gpu() is None


@pytest.mark.gpu
def test_a_busy_gpu():
    import torch

    pytest.importorskip("pynvml")
    matrix = torch.rand(8192, 8192, device="cuda")
    with ResourceMonitor(interval=0.1) as monitored:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            matrix @ matrix
            torch.cuda.synchronize()
    assert monitored.usage().gpu > 0.5
