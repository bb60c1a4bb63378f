"""A driver that is started before torch: for which command lines, and that a missing one is no fault."""

import os
import subprocess
import sys

import pytest

from utils.system import driver
from utils.system.files import PROJECT_ROOT


class Library:
    """Stands for libcuda: `status` of its functions, in the order of their calls."""

    def __init__(self, *status):
        self.status, self.calls = list(status), []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(name) or self.status.pop(0)


def test_a_context_is_made_and_kept():
    library = Library(0, 0, 0)
    assert driver.open_first_gpu(lambda name: library)
    assert library.calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.mark.parametrize("status", [(100,), (0, 101), (0, 0, 2)])
def test_what_fails_ends_it(status):
    library = Library(*status)
    assert not driver.open_first_gpu(lambda name: library) and len(library.calls) == len(status)


def test_without_a_driver_nothing_happens():
    def load(name):
        raise OSError(f"{name}: cannot open shared object file")

    assert not driver.open_first_gpu(load)


def test_what_a_process_has_on_its_gpus_is_given_back():
    library = Library(0, 0, 0, 101)

    def two(count):
        count._obj.value = 2
        return library.calls.append("cuDeviceGetCount")

    library.cuDeviceGetCount = two
    driver.give_back_gpus(lambda name: library)
    assert library.calls == [
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDevicePrimaryCtxReset_v2",
        "cuDeviceGet",
        "cuDevicePrimaryCtxReset_v2",
    ]


@pytest.mark.parametrize(
    ("line", "environment", "is_started"),
    [
        ("--fast --epochs 3", {}, True),
        ("--fast-step", {}, True),
        ("--cuda-graph", {}, True),
        ("--epochs 3", {}, False),
        ("--fast --device cpu", {}, False),
        ("--fast --device=1", {}, False),
        ("--fast --dev 1", {}, False),
        ("--fast --devi=1", {}, False),
        ("--fast --data set.yaml --weights= --cfg a", {}, True),
        ("--fast --weights  --cfg a", {}, True),
        ("--resume --fast", {}, False),
        ("--fast --help", {}, False),
        ("--fast", {"RANK": "0"}, False),
    ],
)
def test_only_fast_runs_on_the_first_gpu_start_it(line, environment, is_started, monkeypatch):
    opened = []
    monkeypatch.setattr(driver, "open_first_gpu", lambda: opened.append(1))
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")  # of the user
    thread = driver.start_ahead(line.split(" "), environment)
    if thread:
        thread.join()
    assert bool(opened) == is_started == bool(thread) and os.environ["CUDA_MODULE_LOADING"] == "EAGER"


def test_it_waits_for_the_libraries_of_torch(monkeypatch):
    opened = []
    monkeypatch.setattr(driver, "open_first_gpu", lambda: opened.append(1))
    monkeypatch.setattr(driver, "LIBRARIES", "not.yet")
    thread = driver.start_ahead(["--fast"], {})
    assert thread.is_alive() and not opened
    monkeypatch.setitem(sys.modules, "not.yet", None)
    thread.join()
    assert opened


def test_a_program_that_ends_without_torch_is_not_held_up():
    program = "from utils.system import driver; assert driver.start_ahead(['--fast'], {})"
    subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, check=True, timeout=60)


def test_nothing_of_torch_is_needed():
    program = "import sys; import utils.system.driver; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "numpy"} & set(run.stdout.split())


@pytest.mark.gpu
def test_torch_uses_the_context_that_was_made():
    program = """
import sys
from utils.system.driver import open_first_gpu
assert open_first_gpu()
import torch
assert torch.ones(3, device="cuda").sum().item() == 3
"""
    subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, check=True, timeout=300)
