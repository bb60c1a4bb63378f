"""Validation batches that are remembered: the ones of the loader, every time, and no workers after the first."""

import logging
from functools import partial

import pytest
import torch

from tests import golden_data
from tests.data.gpu.store_cases import CPU
from tests.loader_cases import OPT, copied, same
from utils.data.gpu import kept_batches
from utils.data.gpu.host_memory import HostMemory
from utils.data.gpu.kept_batches import KeptBatches, keep
from utils.datasets import create_dataloader

FORMS = {
    "torch": {},
    "shared memory": {"worker_tensor": True, "persistent_workers": True},
    "share": {"worker_tensor": True, "share": (1, 2)},
    "square": {"rect": False},
}


@pytest.fixture
def validation(folder, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    options = {"rect": True, "pad": 0.5, "workers": 2, "augment": False, "hyp": golden_data.ALL_AUGMENTATIONS}
    return lambda **more: create_dataloader(str(folder / "all.txt"), 64, 5, 32, OPT, **(options | more))[0]


def simulate(monkeypatch, on_card=0, on_host=0, refusal=None):
    monkeypatch.setattr(kept_batches, "room_on_card", lambda *_: (on_card, f"the GPU has {on_card}"))
    monkeypatch.setattr(kept_batches, "room_on_host", lambda: on_host)
    monkeypatch.setattr(HostMemory, "lock", lambda memory, device: refusal)


kept = partial(keep, device=CPU, step_cost=None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("on_card", [10**9, 0])
def test_equal_batches_every_time(form, on_card, validation, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    simulate(monkeypatch, on_card, 10**9)
    expected = [copied(batch) for batch in validation(**FORMS[form])]
    loader = validation(**FORMS[form])
    remembering = kept(loader)
    assert ("stay on the GPU" if on_card else "stay in page-locked memory") in caplog.text
    passes = [list(remembering) for _ in range(3)]
    for batches in passes:
        assert len(remembering) == len(batches) and same(list(map(copied, batches)), expected)
    assert [batch[0].data_ptr() for batch in passes[0]] == [batch[0].data_ptr() for batch in passes[1]]
    last = passes[0][-1][0]
    assert last.data_ptr() + last.numel() == remembering.pixels.data_ptr() + len(remembering.pixels), "it is full"
    assert remembering.loader is None and remembering.dataset.img_size == 64
    assert getattr(loader, "pool", None) is None, "no worker is left"


@pytest.mark.parametrize("case", ["no room", "refused", "full", "driver"])
def test_batches_that_cannot_stay(case, validation, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    simulate(monkeypatch, 10**9 * (case in ("full", "driver")), 10**9 * (case == "refused"), "ulimit -l is 8.0 MB")

    def full(*_, **options):
        if case == "driver":
            raise RuntimeError("CUDA error: out of memory\nmore")
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nmore")

    loader = validation()
    if case in ("full", "driver"):
        monkeypatch.setattr(kept_batches.torch, "empty", full)
    assert kept(loader) is loader
    said = {"no room": "the GPU has 0", "refused": "the GPU has 0; ulimit -l is 8.0 MB",
            "full": "the GPU has 1000000000; OutOfMemoryError: CUDA out of memory.",
            "driver": "the GPU has 1000000000; RuntimeError: CUDA error: out of memory"}  # fmt: skip
    assert caplog.messages[-1] == f"val: batches: 0.3 MB are made anew each time: {said[case]}"


def test_unasked_they_take_a_share_of_the_memory(validation, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    loader = validation()
    num_bytes = kept_batches.bytes_of_batches(loader.dataset)

    def keep_with(on_card, on_host):
        simulate(monkeypatch, 10**12, on_host)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**12, on_card))
        return kept(loader, is_asked=False)

    assert keep_with(49 * num_bytes, 3 * num_bytes) is loader
    assert isinstance(keep_with(49 * num_bytes, 4 * num_bytes), KeptBatches)
    assert "stay in page-locked memory" in caplog.messages[-1] and "without --cache-images gpu" in caplog.messages[-1]
    assert isinstance(keep_with(51 * num_bytes, 0), KeptBatches) and "stay on the GPU" in caplog.messages[-1]


def test_processes_share_the_memory_of_the_host(validation, monkeypatch):
    loader = validation(**FORMS["share"])
    assert (loader.dataset.n, loader.dataset.total) == (2, 12)
    num_bytes = kept_batches.bytes_of_batches(loader.dataset)
    simulate(monkeypatch, 0, 5 * num_bytes)
    assert kept(loader) is loader
    simulate(monkeypatch, 0, 7 * num_bytes)
    assert isinstance(kept(loader), KeptBatches)


@pytest.mark.gpu
@pytest.mark.parametrize("on_card", [10**9, 0])
def test_on_a_gpu(on_card, validation, monkeypatch):
    monkeypatch.setattr(kept_batches, "room_on_card", lambda *_: (on_card, "simulated"))
    expected = [copied(batch) for batch in validation()]
    remembering = keep(validation(**FORMS["shared memory"]), device=torch.device("cuda", 0), step_cost=None)
    assert isinstance(remembering, KeptBatches)
    for _ in range(2):
        there = [(images.cuda(non_blocking=True).cpu(), *rest) for images, *rest in remembering]
        assert same(list(map(copied, there)), expected)
