"""Memory that the processes of a machine share: one copy, nothing left of it, page-locked where there is a GPU."""

import errno
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import golden_data
from tests.data.gpu.store_cases import CPU, assert_holds, open_set, simulate
from tests.rank_cases import run_ranks
from utils.data.gpu import filling, host_memory, placing
from utils.data.gpu.host_memory import HostMemory
from utils.system import distributed
from utils.system.files import PROJECT_ROOT


def in_shared_memory():
    """Names in /dev/shm, but for semaphores: those of other tests stay until the process ends that runs them."""
    names = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    return {name for name in names if not name.startswith("sem.")}


def is_left_as(before):
    """Whether /dev/shm holds nothing more; what other programs of this machine put there goes some time."""
    more, end = in_shared_memory() - before, time.monotonic() + 30
    while more & in_shared_memory() and time.monotonic() < end:
        time.sleep(0.1)
    return not more & in_shared_memory()


def test_forked_workers_see_what_is_written():
    memory = HostMemory(5000)
    child = os.fork()
    if not child:
        memory.bytes[:] = 77
        os._exit(0)
    os.waitpid(child, 0)
    assert memory.bytes.all()
    memory.free()
    assert not memory.bytes.any()


def use_one_copy(rank):
    memory = HostMemory(50_000, is_shared=True)
    memory.bytes[rank::2] = 7 + rank
    assert host_memory.machine_mates() == [0, 1]
    assert memory.bytes[:4].tolist() == [7, 8, 7, 8]


def test_two_processes_share_one_copy(tmp_path):
    before = in_shared_memory()
    assert [ended.status for ended in run_ranks(use_one_copy, tmp_path)] == [0, 0]
    assert is_left_as(before)


def fail_to_share(rank):
    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(os, "memfd_create", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            HostMemory(50_000, is_shared=True)


def test_a_copy_that_cannot_be_shared_is_known_to_all(tmp_path):
    assert [ended.status for ended in run_ranks(fail_to_share, tmp_path)] == [0, 0]


def share_the_decoding(where, folder, rank):
    read, decode = [], filling.load_scanned
    with pytest.MonkeyPatch.context() as patch:
        simulate(patch, on_card=0 if where == "host" else 10**12)
        patch.setattr(filling, "PIECE_BYTES", 30_000)
        patch.setattr(placing, "workers_read", lambda dataset: where != "card")
        patch.setattr(filling, "load_scanned", lambda *args: (read.append(args[1]), decode(*args))[1])
        dataset = open_set(folder)
        store = placing.open_store(dataset, CPU, None, is_shared=True)[0]
        assert 0 < len(read) < 12 and (store.host is None) == (where == "card")
        assert_holds(store, dataset, folder)
        store.close()


@pytest.mark.parametrize("where", ["card", "card and host", "host"])
def test_two_processes_share_the_decoding(where, tmp_path):
    folder = golden_data.copy_dataset(tmp_path)
    open_set(folder)  # the label cache
    ended = run_ranks(partial(share_the_decoding, where, folder), tmp_path)
    assert [end.status for end in ended] == [0, 0], ended[0].text + ended[1].text


def agree_on_the_place(folder, rank):
    """The card of one has no room, the other one's gets full while it reads."""

    def full(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "PIECE_BYTES", 30_000)
        simulate(patch, on_card=0 if rank else 10**12)
        assert placing.open_store(open_set(folder), CPU, None, is_shared=True)[0].host is not None
        simulate(patch)
        if rank:
            patch.setattr(filling.Filler, "_staging", full)
        assert placing.open_store(open_set(folder), CPU, None, is_shared=True)[0].host is not None
        simulate(patch, on_card=0, refusal="refused" if rank else None)
        assert placing.open_store(open_set(folder), CPU, None, is_shared=True)[0] is None
        simulate(patch)
        dataset = open_set(folder)  # --workers may differ
        assert placing.open_images(dataset, rank, False, device=CPU, step_cost=None, is_shared=True) is None
        assert dataset.memory_cache is not None and distributed.gather_everywhere(rank) == [0, 1]


def test_processes_agree_on_the_place(tmp_path):
    folder = golden_data.copy_dataset(tmp_path)
    open_set(folder)
    ended = run_ranks(partial(agree_on_the_place, folder), tmp_path)
    assert [end.status for end in ended] == [0, 0], ended[0].text + ended[1].text


READING = """
import sys, time
from tests.data.gpu.store_cases import *
from utils.data.gpu import filling, placing
import pytest
with pytest.MonkeyPatch.context() as patch:
    simulate(patch, on_card=0)
    decode = filling.load_scanned
    def slow(*args):
        print("reading", flush=True)
        time.sleep(0.5)
        return decode(*args)
    patch.setattr(filling, "load_scanned", slow)
    from pathlib import Path
    placing.open_store(open_set(Path(sys.argv[1])), CPU, None)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_ends_while_it_reads(number, tmp_path):
    folder, before = golden_data.copy_dataset(tmp_path), in_shared_memory()
    line = [sys.executable, "-c", READING, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(line, cwd=PROJECT_ROOT, env=environment, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout.readline() == b"reading\n"
    process.send_signal(number)
    started = time.monotonic()
    assert process.wait(timeout=60) != 0 and time.monotonic() - started < 30
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # its whole session is gone
    assert is_left_as(before)


# ---- with a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpu_reads_locked_memory():
    device, memory = torch.device("cuda", 0), HostMemory(3_000_000)
    assert memory.lock(device) is None
    memory.bytes[:] = np.arange(3_000_000) % 251
    there = memory.on_device(device)
    assert there.is_cuda and torch.equal((there + 1).cpu(), torch.from_numpy(memory.bytes + 1))
    child = os.fork()
    if not child:  # a worker, which reads it
        os._exit(int(memory.bytes[250] != 250))
    assert os.waitpid(child, 0)[1] == 0
    torch.cuda.synchronize()
    memory.free()


@pytest.mark.gpu
def test_a_refusal_leaves_the_gpu_in_order():
    device, memory = torch.device("cuda", 0), HostMemory(1_000_000)
    assert memory.lock(device) is None
    again = HostMemory(1_000_000)
    again.bytes = memory.bytes  # which CUDA refuses to lock twice
    assert "refused to page-lock so much (CUDA: " in again.lock(device)
    assert torch.ones(3, device=device).sum().item() == 3
    memory.free()


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["card", "host"])
def test_images_on_a_gpu(where, tmp_path, monkeypatch):
    folder, device = golden_data.copy_dataset(tmp_path), torch.device("cuda", 0)
    monkeypatch.setattr(placing, "room_on_card", lambda *_: (10**12 if where == "card" else 0, "simulated"))
    dataset = open_set(folder)
    store = placing.open_store(dataset, device, None)[0]
    assert store.pixels.is_cuda and (store.host is None) == (where == "card")
    assert_holds(store, dataset, folder)
    store.close()
