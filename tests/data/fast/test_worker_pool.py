"""utils/data/fast/worker_pool.py in use: accidents and ends of all kinds leave one message and nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.loader_cases import make_loader
from utils.data.worker_errors import LoaderError, about
from utils.datasets import LoadImagesAndLabels

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def many_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)


def children():
    """Processes that this one has started and that are still there."""
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in found}


@pytest.fixture
def no_orphans():
    before = children()
    yield
    deadline = time.monotonic() + 5
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not children() - before


def broken_loader(folder, monkeypatch, accident, **options):
    """A loader for whose picture number 8 something happens."""
    sample = LoadImagesAndLabels.__getitem__

    def getitem(dataset, index):
        if dataset.indices[index] == 8:
            accident()
        return sample(dataset, index)

    monkeypatch.setattr(LoadImagesAndLabels, "__getitem__", getitem)
    loader, dataset = make_loader(folder, worker_tensor=True, **options)
    return loader, dataset.img_files[8]


def out_of_memory():
    raise MemoryError


def refuse():
    raise ValueError("the picture changed its size")


def crash():
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # else pytest writes a long dump
    os.kill(os.getpid(), signal.SIGSEGV)


ACCIDENTS = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), r"was killed by SIGKILL \(out of memory\?.* worked on "),
    "crashed": (crash, "was killed by SIGSEGV while it worked on "),
    "left": (lambda: os._exit(3), "ended by itself with status 3 while it worked on "),
    "memory": (out_of_memory, "out of memory"),
    "refused": (refuse, "the picture changed its size"),
    "error": (lambda: 1 // 0, "ZeroDivisionError: integer"),
}


@pytest.mark.parametrize("name", ACCIDENTS)
def test_accident_in_a_worker_is_one_error_that_names_the_sample(name, folder, monkeypatch, no_orphans):
    accident, message = ACCIDENTS[name]
    loader, path = broken_loader(folder, monkeypatch, accident)
    start = time.monotonic()
    with pytest.raises(LoaderError, match=message) as caught:
        list(loader)
    assert path in str(caught.value)
    assert time.monotonic() - start < 5


def test_stuck_worker_is_given_up(folder, monkeypatch, no_orphans):
    loader, path = broken_loader(folder, monkeypatch, lambda: time.sleep(60), timeout=1)
    with pytest.raises(LoaderError, match="delivered nothing for 1 s") as caught:
        list(loader)
    assert path in str(caught.value)


def test_stopped_worker_is_given_up(folder, no_orphans):
    loader, _ = make_loader(folder, workers=1, worker_tensor=True, timeout=1)
    os.kill(loader.workers.processes[0].pid, signal.SIGSTOP)
    with pytest.raises(LoaderError, match="delivered nothing for 1 s"):
        for _ in range(10):
            list(loader)


def test_idle_worker_that_is_killed_is_noticed(folder, no_orphans):
    loader, _ = make_loader(folder, worker_tensor=True)
    list(loader)
    os.kill(loader.workers.processes[0].pid, signal.SIGKILL)
    with pytest.raises(LoaderError, match="was killed by SIGKILL"):
        for _ in range(10):
            list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_error_in_a_torch_worker(workers, folder, monkeypatch):
    sample = LoadImagesAndLabels.__getitem__
    monkeypatch.setattr(LoadImagesAndLabels, "__getitem__", lambda d, i: refuse() if i == 8 else sample(d, i))
    loader, dataset = make_loader(folder, workers, prefetch_factor=1)
    with pytest.raises(LoaderError, match="the picture changed its size") as caught:
        list(loader)
    assert dataset.img_files[8] in str(caught.value) and "\n" not in str(caught.value)


def test_an_error_names_its_file_once():
    assert about("a/b.png", "out of memory") == "a/b.png: out of memory"
    assert about("a/b.png", "a/b.png: cannot be opened") == "a/b.png: cannot be opened"
    assert about("a\nb.png", "a\\nb.png: cannot be opened") == "a\\nb.png: cannot be opened"


ENDURANCE = """
import gc, json, os, sys, threading
from pathlib import Path
from tqdm import tqdm
from tests.loader_cases import make_loader

def resources():
    gc.collect()
    shared = sum("/dev/shm/" in line for line in open("/proc/self/maps"))
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), shared, len(children)

def seen_in(epochs, **options):
    loader, _ = make_loader(Path(sys.argv[1]), worker_tensor=True, **options)
    seen = []
    for _ in range(epochs):
        for _ in loader:
            pass
        seen.append(resources())
    return seen

os.cpu_count = lambda: 4
tqdm.monitor_interval = 0  # no thread that watches progress bars
seen_in(1)  # what the first loader of a process sets up for all
for image_weights in (False, True):
    for persistent_workers in (False, True):
        outside = resources()
        seen = seen_in(20, image_weights=image_weights, persistent_workers=persistent_workers)
        print(json.dumps([outside, seen, resources()]))
"""


def test_twenty_epochs_leak_nothing(folder):
    program = subprocess.run([sys.executable, "-c", ENDURANCE, str(folder)], cwd=ROOT, text=True, capture_output=True)
    assert program.returncode == 0, program.stderr
    variants = [json.loads(line) for line in program.stdout.splitlines()]
    assert len(variants) == 4
    for outside, seen, after in variants:
        assert len(seen) == 20 and seen == seen[:1] * 20, "open files, threads, mappings, processes stay the same"
        assert after == outside


PROGRAM = """
import os, sys, time
from types import SimpleNamespace
os.cpu_count = lambda: 4
from tests import golden_data
from utils.datasets import create_dataloader
loader, _ = create_dataloader(sys.argv[1], 64, 4, 32, SimpleNamespace(single_cls=False), augment=True,
                              hyp=golden_data.ALL_AUGMENTATIONS, workers=3, worker_tensor=True)
print(*(process.pid for process in loader.workers.processes), flush=True)
while True:
    list(loader)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_end_of_the_main_process_ends_the_workers(number, folder):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder / "all.txt")], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    workers = [int(pid) for pid in program.stdout.readline().split()]
    assert len(workers) == 3
    os.killpg(program.pid, number) if number == signal.SIGINT else program.send_signal(number)
    assert program.wait(10) != 0
    deadline = time.monotonic() + 10
    while (alive := [pid for pid in workers if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
