"""utils/data/fast/worker_pool.py in use: accidents and ends of all kinds leave one message and nothing behind."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from itertools import product
from pathlib import Path

import pytest
from tqdm import tqdm

from tests import forked
from tests.forked import Forked
from tests.loader_cases import make_loader
from utils.data.fast import worker_pool
from utils.data.fast.worker_pool import WorkerPool
from utils.data.worker_errors import LoaderError, about
from utils.datasets import LoadImagesAndLabels


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
    """A loader for whose image number 8 something happens."""
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
    raise ValueError("the image changed its size")


def crash():
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # else pytest writes a long dump
    os.kill(os.getpid(), signal.SIGSEGV)


ACCIDENTS = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), r"was killed by SIGKILL \(out of memory\?.* worked on "),
    "crashed": (crash, "was killed by SIGSEGV while it worked on "),
    "left": (lambda: os._exit(3), "ended by itself with status 3 while it worked on "),
    "memory": (out_of_memory, "out of memory"),
    "refused": (refuse, "the image changed its size"),
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
    os.kill(loader.pool.processes[0].pid, signal.SIGSTOP)
    with pytest.raises(LoaderError, match="delivered nothing for 1 s"):
        for _ in range(10):
            list(loader)


def test_idle_worker_that_is_killed_is_noticed(folder, no_orphans):
    loader, _ = make_loader(folder, worker_tensor=True)
    list(loader)
    os.kill(loader.pool.processes[0].pid, signal.SIGKILL)
    with pytest.raises(LoaderError, match="was killed by SIGKILL"):
        for _ in range(10):
            list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_error_in_a_torch_worker(workers, folder, monkeypatch):
    sample = LoadImagesAndLabels.__getitem__
    monkeypatch.setattr(LoadImagesAndLabels, "__getitem__", lambda d, i: refuse() if i == 8 else sample(d, i))
    loader, dataset = make_loader(folder, workers, prefetch_factor=1)
    with pytest.raises(LoaderError, match="the image changed its size") as caught:
        list(loader)
    assert dataset.img_files[8] in str(caught.value) and "\n" not in str(caught.value)


def test_an_error_names_its_file_once():
    assert about("a/b.png", "out of memory") == "a/b.png: out of memory"
    assert about("a/b.png", "a/b.png: cannot be opened") == "a/b.png: cannot be opened"
    assert about("a\nb.png", "a\\nb.png: cannot be opened") == "a\\nb.png: cannot be opened"


def resources():
    gc.collect()
    shared = sum("/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), threading.active_count(), shared, len(children())


def resources_after(epochs, folder, **options):
    loader, _ = make_loader(folder, worker_tensor=True, **options)
    seen = []
    for _ in range(epochs):
        for _ in loader:
            pass
        seen.append(resources())
    return seen


def endure(folder, epochs):
    os.cpu_count = lambda: 4
    tqdm.monitor_interval = 0  # no thread that watches progress bars
    resources_after(1, folder)  # what the first loader of a process sets up for all
    for image_weights, persistent_workers in product((False, True), repeat=2):
        outside = resources()
        seen = resources_after(epochs, folder, image_weights=image_weights, persistent_workers=persistent_workers)
        assert seen == seen[:1] * epochs, "open files, threads, mappings, processes stay the same"
        assert resources() == outside


def test_ten_epochs_leak_nothing(folder, tmp_path):
    ended = forked.run(tmp_path, endure, folder, 10)
    assert ended.status == 0, ended.text


def read_for_ever(folder, connection):
    os.setsid()
    os.cpu_count = lambda: 4
    loader, _ = make_loader(folder, workers=3, worker_tensor=True)
    connection.send([process.pid for process in loader.pool.processes])
    while True:
        list(loader)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_end_of_the_main_process_ends_the_workers(number, folder, tmp_path):
    workers, program = started(tmp_path, read_for_ever, folder)
    assert len(workers) == 3 and all(map(is_running, workers))
    (os.killpg if number == signal.SIGINT else os.kill)(program.pid, number)
    assert program.end(10).status not in (0, None)
    assert_ended(workers)


def started(tmp_path, body, *args):
    """(the process ids that a program sends when it has started, the program)."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    program = Forked(tmp_path / "program.txt", body, *args, sender)
    sender.close()
    return receiver.recv(), program


def assert_ended(pids):
    deadline = time.monotonic() + 10
    while (alive := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive


class Answers:
    """A job whose answers to (number, bytes) have that many bytes."""

    def enter(self):
        pass

    def __call__(self, task, doing):
        doing[:] = task[0], 0
        return bytes(task[1])

    def describe(self, number, _):
        return f"task {number}"


def test_more_tasks_and_answers_than_the_pipes_hold(no_orphans):
    """Nobody reads an answer until all tasks are queued: neither side may wait for the other."""
    pool, tasks = WorkerPool(Answers(), 2, timeout=30), [(k, 100) for k in range(5000)]
    for task in tasks:
        pool.submit(task)
    assert pool.waiting, "all fit, so this is no test"
    found = []
    while len(found) < len(tasks):
        found += pool.answers()
    assert sorted(task for task, _ in found) == tasks and {len(answer) for _, answer in found} == {100}
    pool.close()


def test_an_answer_larger_than_a_pipe(no_orphans):
    pool = WorkerPool(Answers(), 2, timeout=30)
    for number in range(4):
        pool.submit((number, 1_000_000))
    found = []
    while len(found) < 4:  # one call may give several
        found += pool.answers()
    assert sorted(task for task, _ in found) == [(number, 1_000_000) for number in range(4)]
    pool.close()


def test_worker_stopped_in_the_middle_of_an_answer(no_orphans):
    """Half of an answer is there; to wait for the rest of it would be for ever."""
    pool = WorkerPool(Answers(), 1, timeout=1)
    pool.submit((3, 1_000_000))
    time.sleep(0.5)  # the pipe is full
    os.kill(pool.processes[0].pid, signal.SIGSTOP)
    with pytest.raises(LoaderError, match="delivered nothing for 1 s .*busy with task 3"):
        pool.answers()


def wait_for_a_reader(means, connection):
    if means == "pipes alone":
        worker_pool.enter_child = lambda parent: None
    pools = [WorkerPool(Answers(), 2, timeout=30) for _ in range(2)]
    for pool in pools:
        for number in range(2):
            pool.submit((number, 1_000_000))
    time.sleep(0.5)
    connection.send([process.pid for pool in pools for process in pool.processes])
    time.sleep(60)


@pytest.mark.parametrize("means", ["pipes alone", "the kernel too"])
def test_workers_that_wait_for_a_reader_end_with_the_main_process(means, tmp_path):
    workers, program = started(tmp_path, wait_for_a_reader, means)
    assert len(workers) == 4 and all(map(is_running, workers))
    program.kill()
    program.join(10)
    assert_ended(workers)


def test_a_pool_made_in_a_thread_outlives_it(no_orphans):
    """The kernel counts the thread that forked as the parent."""
    made = []
    thread = threading.Thread(target=lambda: made.append(WorkerPool(Answers(), 1, timeout=5)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    made[0].submit((1, 10))
    assert made[0].answers() == [((1, 10), bytes(10))]
    made[0].close()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
