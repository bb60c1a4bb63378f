"""The opt-in loaders: the same batches as the reference whatever the flags, in buffers that nobody overwrites."""

import itertools
import multiprocessing
import os
import pickle
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from tests import forked
from tests.loader_cases import BATCH, HYP, OPT, assert_same, copied, make_loader, read, same
from utils import datasets
from utils.data.fast import loader as fast_loader
from utils.data.fast.shm_batches import BatchRing, BatchWriter, SharedMemoryLoader, choose_micro_batch, ring_length
from utils.data.keyed_dataset import KeyedDataset
from utils.data.worker_errors import LoaderError
from utils.datasets import LoadImagesAndLabels, create_dataloader
from utils.system import memory


@pytest.fixture(autouse=True)
def many_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)


# equality

FLAGS = [{"persistent_workers": p, "worker_tensor": t} for p, t in itertools.product((False, True), repeat=2)]
MODES = [{}, {"rect": True}, {"quad": True}]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_same_batches_for_all_flags_and_workers(mode, folder):
    reference = read(folder, workers=0, **mode)
    assert not same(reference[0], reference[1]), "epochs differ"
    for flags, workers in itertools.product(FLAGS, (1, 4) if mode else (1, 2, 4)):
        assert_same(read(folder, workers=workers, **flags, **mode), reference)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_same_batches_for_eight_workers(folder):
    reference = read(folder, epochs=2, batch=9, workers=0)
    for flags in FLAGS[1:]:
        assert_same(read(folder, epochs=2, batch=9, workers=8, **flags), reference)


def test_samples_are_written_into_their_slot(folder):
    """No copy between: the image of a sample already lies where the batch wants it."""
    _, dataset = make_loader(folder, workers=0)
    source, ring = KeyedDataset(dataset, seed=7), BatchRing(2, BATCH * 3 * 64 * 64, BATCH)
    expected = [source[0, k][0].numpy() for k in range(BATCH)]
    ring.keys[1] = [(0, k) for k in range(BATCH)]
    writer = BatchWriter(source, ring)
    writer.enter()
    writer.current = 1, 2
    image = source[0, 4][0]
    assert image.data_ptr() == ring.place(1, 2, image.shape).ctypes.data
    writer((1, 0, BATCH), np.zeros(2, int))
    assert np.array_equal(ring.images(1, BATCH, (3, 64, 64)).numpy(), expected)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_same_batches_for_all_micro_batches(mode, micro_batch_size, folder):
    options = {"worker_tensor": True, "micro_batch_size": micro_batch_size, "prefetch_factor": 3}
    assert_same(read(folder, epochs=2, **options, **mode), read(folder, epochs=2, workers=0, **mode))


def test_quad_of_few_images(folder):
    for batch in (1, 3, 4, 11):
        reference = read(folder, epochs=1, workers=0, batch=batch, quad=True)
        assert_same(read(folder, epochs=1, batch=batch, quad=True, worker_tensor=True), reference)


def draw(epoch, dataset):
    """Weighted indices of an epoch."""
    dataset.indices = [(epoch + k * k) % 12 for k in range(12)]


WEIGHTED = {"image_weights": True, "before_epoch": draw}


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_weighted_indices_reach_the_workers(flags, folder):
    reference = read(folder, workers=0, **WEIGHTED)
    assert len({paths for *_, paths, _ in itertools.chain(*reference)}) > 3
    assert_same(read(folder, **WEIGHTED, **flags), reference)


def test_passes_that_are_left_early(folder):
    """Endless loaders go on where they were left, those with weighted indices start their next epoch."""
    reference = read(folder, epochs=2, workers=0)
    loader, _ = make_loader(folder, worker_tensor=True)
    first = copied(next(iter(loader)))
    rest = [copied(batch) for batch in loader]
    assert same([first, *rest], [*reference[0], reference[1][0]])
    loader, _ = make_loader(folder, worker_tensor=True, persistent_workers=True, image_weights=True)
    next(iter(loader))
    assert same([copied(batch) for batch in loader], reference[1])


def read_without_flags(folder, workers):
    """Two epochs of weighted indices from the reference loader."""
    loader, dataset = create_dataloader(f"{folder}/all.txt", 64, BATCH, 32, OPT, workers=workers, image_weights=True)
    passes = []
    for epoch in range(2):
        draw(epoch, dataset)
        passes.append([copied(batch) for batch in loader])
    return passes


def read_with(method, folder, epochs, result):
    """Write what all loaders read where `method` starts processes into `result`."""
    os.cpu_count = lambda: 16
    sys.modules["__main__"] = ModuleType("__main__")  # or each new process would import pytest
    multiprocessing.set_forkserver_preload(["utils.datasets"])  # once, not in each process
    multiprocessing.set_start_method(method, force=True)
    found = [[read(folder, epochs, workers=1, **mode, **flags) for flags in FLAGS] for mode in ({}, WEIGHTED)]
    result.write_bytes(pickle.dumps((found, read_without_flags(folder, workers=1))))


def test_same_batches_whatever_starts_processes_by_default(folder, tmp_path):
    """Loaders with flags fork."""
    ended = forked.run(tmp_path, read_with, "forkserver", folder, 2, tmp_path / "batches")
    assert ended.status == 0, ended.text
    found, without_flags = pickle.loads((tmp_path / "batches").read_bytes())
    assert_same(without_flags, read_without_flags(folder, workers=0))
    for mode, variants in zip(({}, WEIGHTED), found, strict=True):
        reference = read(folder, epochs=2, workers=0, **mode)
        for batches in variants:
            assert_same(batches, reference)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_restart_at_an_epoch(flags, folder):
    assert_same(read(folder, epochs=1, first_epoch=2, **flags), read(folder, workers=0)[2:])


@pytest.mark.parametrize("mode", [{}, {"rect": True}], ids=str)
def test_two_ranks_share_the_batches_of_one(mode, folder, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ranks = [read(folder, epochs=2, batch=3, rank=rank, world_size=2, worker_tensor=True, **mode)
                 for rank in (0,)]  # fmt: skip
    finally:
        torch.distributed.destroy_process_group()
    source = LoadImagesAndLabels(str(folder / "all.txt"), 64, 3, augment=True, hyp=HYP, **mode)
    options = fast_loader.LoaderOptions(worker_tensor=True, seed=7)
    second = fast_loader.build_loader(source, 3, 2, options, rank=1, world_size=2, collate_fn=None)
    ranks.append([[copied(batch) for batch in second] for _ in range(2)])
    batch = 3 if mode else 6
    whole = read(folder, epochs=2, workers=0, batch=batch, **mode)
    for epoch in range(2):
        images = {
            path: image for images, _, paths, _ in whole[epoch] for path, image in zip(paths, images, strict=True)
        }
        shared = [(path, image) for rank in ranks for images, _, paths, _ in rank[epoch]
                  for path, image in zip(paths, images, strict=True)]  # fmt: skip
        assert sorted(path for path, _ in shared) == sorted(images)
        assert all(np.array_equal(image, images[path]) for path, image in shared)
    if not mode:
        batches = [sorted(a[2] + b[2]) for a, b in zip(*(rank[0] for rank in ranks), strict=True)]
        assert batches == [sorted(entry[2]) for entry in whole[0]]


@pytest.mark.parametrize("flags", [f for f in FLAGS if any(f.values())], ids=str)
def test_without_seed_validation_equals_the_reference(flags, folder):
    options = {"rect": True, "augment": False, "seed": None}
    loader, _ = create_dataloader(str(folder / "all.txt"), 64, BATCH, 32, OPT, rect=True, pad=0.5, workers=0)
    reference = [[copied(batch) for batch in loader]]
    assert_same(read(folder, epochs=1, pad=0.5, **options, **flags), reference)


def test_without_seed_samples_differ_from_run_to_run_by_torchs_seed(folder):
    def first(seed):
        torch.manual_seed(seed)
        return read(folder, epochs=1, workers=1, seed=None, worker_tensor=True)

    assert_same(first(1), first(1))
    assert not same(first(1)[0], first(2)[0])


# buffers


def overwritten(loader, passes=2):
    """Whether any batch changed while its consumer was slow: everything that the workers have to do gets done first."""
    changed = False
    for _ in range(passes):
        for images, *_ in loader:
            before = images.clone()
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline and (loader.pool.doing[:, 0] >= 0).any():
                time.sleep(0.01)
            time.sleep(0.1)
            changed |= not torch.equal(images, before)
    return changed


class HastyLoader(SharedMemoryLoader):
    """Wrong on purpose: gives a slot back before its batch is used, and keeps nothing in reserve."""

    def _next_batch(self):
        self.ring.release = lambda slot, stream: None
        batch, slot = super()._next_batch()
        self.ring.free.appendleft(slot)
        self._hand_out()
        return batch, slot


def test_no_batch_is_overwritten_while_it_is_used(folder, monkeypatch):
    assert not overwritten(make_loader(folder, batch=3, worker_tensor=True)[0])
    monkeypatch.setattr(fast_loader, "SharedMemoryLoader", HastyLoader)
    assert overwritten(make_loader(folder, batch=3, worker_tensor=True)[0]), "this test would see it"


def test_a_batch_is_a_view_of_the_ring(folder):
    loader, _ = make_loader(folder, worker_tensor=True)
    low = loader.ring.pixels.ctypes.data
    for images, *_ in loader:
        assert low <= images.data_ptr() < low + loader.ring.pixels.nbytes


def test_passes_that_hold_all_buffers_are_no_hang(folder):
    loader, _ = make_loader(folder, worker_tensor=True)
    held = [iter(loader) for _ in range(loader.ring.count)]
    for batches in held:
        next(batches)
    with pytest.raises(LoaderError, match="held by passes"):
        next(iter(loader))


def test_an_error_without_words_is_named_by_its_kind(folder, monkeypatch):
    def full(samples):
        raise MemoryError

    monkeypatch.setattr(datasets, "collate_fn", full)
    loader, _ = make_loader(folder, workers=0)
    with pytest.raises(LoaderError, match="^MemoryError$"):
        next(iter(loader))


class Event:
    """A CUDA event whose time has come when somebody says so."""

    done = False

    def record(self, stream):
        self.stream = stream

    def query(self):
        return self.done

    def synchronize(self):
        self.done = True


def test_a_slot_waits_for_its_copy_to_the_device(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.append(Event()) or events[-1])
    ring = BatchRing(2, 16, 2)
    ring.is_locked = True
    first, second = ring.take(), ring.take()
    ring.release(first, "stream"), ring.release(second, "stream")
    assert ring.take() is None
    events[0].done = True
    assert ring.take() == first and ring.take() is None
    assert ring.take(wait=True) == second and events[1].done and events[1].stream == "stream"


class Cudart:
    """Locks pages when it is allowed to, with `status`, and notes on which device."""

    def __init__(self, status):
        self.status, self.may, self.registered, self.device = status, threading.Event(), [], None

    def cudaHostRegister(self, address, num_bytes, flags):
        assert self.may.wait(10)
        if isinstance(self.status, Exception):
            raise self.status
        self.registered.append((address, num_bytes, self.device))
        return self.status

    def cudaHostUnregister(self, address):
        self.registered = [entry for entry in self.registered if entry[0] != address]


def test_pages_that_cannot_be_locked_only_cost_speed(monkeypatch, caplog):
    cudart = Cudart(RuntimeError("no driver"))
    cudart.may.set()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    ring = BatchRing(2, 16, 2)
    ring.lock_pages()
    ring.unlock_pages()
    assert not ring.is_locked and "could not be page-locked (no driver)" in caplog.text


@pytest.mark.parametrize("status", [0, 2])
def test_pages_are_locked_by_a_thread(status, monkeypatch, caplog):
    cudart = Cudart(status)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(cudart, "device", device))
    ring = BatchRing(2, 16, 2)
    ring.lock_pages()
    assert ring.is_locked and not cudart.registered, "a copy of this moment has to be waited for"
    cudart.may.set()
    ring.locking.join()
    assert cudart.registered == [(ring.pixels.ctypes.data, 32, 3)]
    assert ring.is_locked == (not status) and ("could not be page-locked" in caplog.text) == bool(status)
    ring.unlock_pages()
    assert not ring.is_locked and bool(cudart.registered) == bool(status)


def test_pages_are_locked_once_and_not_before_the_first_pass(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    locked = []
    monkeypatch.setattr(BatchRing, "lock_pages", lambda ring: locked.append(ring) or setattr(ring, "locking", True))
    monkeypatch.setattr(BatchRing, "unlock_pages", lambda ring: None)
    loader, _ = make_loader(folder, worker_tensor=True)
    assert not locked
    for _ in range(2):
        assert list(loader)
    assert locked == [loader.ring]


@pytest.mark.gpu
@pytest.mark.parametrize("patient", [True, False])
def test_copies_on_a_busy_gpu_are_those_of_the_reference(patient, folder, monkeypatch):
    if not patient:  # the same without waiting for the copies: this test would see it
        monkeypatch.setattr(BatchRing, "release", lambda ring, slot, stream=None: ring.free.appendleft(slot))
    loader, _ = make_loader(folder, batch=3, worker_tensor=True)
    for images, *_ in loader:
        loader.ring.locking.join()
        assert images.is_pinned()
        break
    loader, _ = make_loader(folder, batch=3, worker_tensor=True)
    on_device = []
    for _ in range(3):
        for images, *_ in loader:
            torch.cuda._sleep(200_000_000)  # about 0.1 s: the host runs ahead
            on_device.append(images.to("cuda", non_blocking=True))
            time.sleep(0.02)
    reference = [images for batches in read(folder, workers=0, batch=3) for images, *_ in batches]
    equal = [np.array_equal(a.cpu().numpy(), b) for a, b in zip(on_device, reference, strict=True)]
    assert all(equal) == patient


def test_a_short_validation_has_few_workers(folder):
    loader, dataset = make_loader(folder, worker_tensor=True, workers=16, batch=64, augment=False)
    assert len(dataset) == 12 and loader.micro_batch == 8 and len(loader.pool.processes) == 2
    loader.begin()
    assert len(loader.pending) == loader.ring.count, "before the first pass"
    assert [len(images) for images, *_ in loader] == [12]
    training, _ = make_loader(folder, worker_tensor=True, workers=16, batch=64)
    assert len(training.pool.processes) == 12, "one for each sample, which go on with later epochs"


def test_sizes():
    assert choose_micro_batch(64, 16) == 8 and choose_micro_batch(384, 16) == 24 and choose_micro_batch(5, 4) == 5
    assert choose_micro_batch(384, 2) == 32
    assert ring_length(16, 2, 8, 64) == 6 and ring_length(2, 2, 8, 64) == 4
    with pytest.raises(ValueError, match="larger than those of its batch"):
        BatchRing(1, 12, 1).place(0, 0, (3, 2, 3))


# what cannot be done


def test_no_workers_is_one_warning(folder, caplog):
    make_loader(folder, workers=0, worker_tensor=True, persistent_workers=True)
    make_loader(folder, workers=0, worker_tensor=True, persistent_workers=True, augment=False)
    (record,) = [record for record in caplog.records if record.name == "utils.data.fast.loader"]
    assert "--persistent-workers --worker-tensor: there are no loader workers" in record.getMessage()


def test_too_little_memory_is_said_before(folder, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(ValueError, match="needs .* MB for its batch buffers, and 0.0 MB of memory are free"):
        make_loader(folder, worker_tensor=True)


def test_too_little_shared_memory_is_said_before(folder, monkeypatch, caplog):
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    make_loader(folder, persistent_workers=True)
    assert "of /dev/shm, and 0.0 GB are free" in caplog.text
