"""Batches composed by the kernel against the reference loader, on a GPU or interpreted on a CPU.

Run by test_compose.py in a process of its own: Triton reads TRITON_INTERPRET when it is imported.
YOLOV7FAST_EPOCHS=67 compares 200 batches of each configuration.
"""

import ctypes
import mmap
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.data.gpu.configurations import CONFIGURATIONS, ON_THE_HOST, dataset_of, drawn_weights, open_loader, store_of
from utils.data.affine import Affine
from utils.data.fast import deferred
from utils.data.fast.device_augment import conversion_tables
from utils.data.fast.device_augment_triton import has_formula
from utils.data.gpu import compose, compose_triton
from utils.data.gpu.compose import ComposedBatch, composes, open_composing, written
from utils.data.gpu.recipes import DrawnImage
from utils.data.gpu.store import ImageStore
from utils.data.mosaic import Mosaic, Tile, draw_mosaic4
from utils.system.random_state import seed_generators

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_EPOCHS = int(os.environ.get("YOLOV7FAST_EPOCHS", "2"))


@pytest.fixture(autouse=True)
def many_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Larger blocks, for each costs the interpreter as much; and its fused multiplication is to round once."""
    if DEVICE == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def fma(self, x, y, z):
        exact = x.data.astype(np.float64) * y.data + z.data
        return TensorHandle(exact.astype(x.data.dtype), z.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fma", fma)
    monkeypatch.setattr(compose_triton, "ROWS", 32)
    monkeypatch.setattr(compose_triton, "PARTS", 2)


def room():
    """A new tensor each time."""
    return lambda number, shape: torch.empty(shape, dtype=torch.uint8, device=DEVICE)


def read(folder, changes, options, compose=None):
    """NUM_EPOCHS of batches: (images, targets, paths, shapes, how many samples were drawn only)."""
    flags = {"worker_tensor": True, "compose": compose} if compose else {}
    loader, dataset = open_loader(folder, changes, **options, **flags)
    batches = []
    for epoch in range(NUM_EPOCHS):
        if options.get("image_weights"):
            drawn_weights(dataset, epoch)
        for images, targets, paths, shapes in loader:
            num_drawn = 0
            if isinstance(images, ComposedBatch):
                num_drawn = int((images.recipes.view(torch.int32)[:, 0] > 0).sum())
                images = images.on_device(room())
            batches.append((images.cpu().clone(), targets.clone(), paths, tuple(shapes), num_drawn))
    return batches


def with_store(dataset, workers, with_groups):
    """What a run does: it fills the store, then asks."""
    dataset.image_store = store_of(dataset, DEVICE)
    return open_composing(dataset, with_groups)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("name", [*CONFIGURATIONS, *ON_THE_HOST])
def test_the_batches_of_the_reference(name, folder, monkeypatch):
    changes, options = (CONFIGURATIONS | ON_THE_HOST)[name]
    if DEVICE == "cpu" and name != "everything":  # one is enough, where it takes seconds
        monkeypatch.setattr(compose, "composes", lambda dataset: True)
    found, wanted = read(folder, changes, options, with_store), read(folder, changes, options)
    assert len(found) == len(wanted)
    for (images, targets, *rest, _), (others, rows, *more, _) in zip(found, wanted, strict=True):
        assert images.equal(others) and targets.equal(rows) and rest == more
    assert any(num_drawn for *_, num_drawn in found) == (name in CONFIGURATIONS)


def on_the_device(dataset):
    dataset.image_store.pixels = dataset.image_store.pixels.to(DEVICE)
    return dataset


@pytest.mark.parametrize("mode", [deferred.FIXED, deferred.FLOATING])
def test_both_ways_to_round(mode, folder, monkeypatch):
    """Whichever of them the OpenCV here has: a straight warp is that of deferred.py on the host."""
    monkeypatch.setattr(compose, "rounding_mode", lambda width: mode)
    dataset = on_the_device(dataset_of(folder, {}))
    seed_generators(4)
    canvas, affine = (
        draw_mosaic4(dataset, 0),
        Affine(np.array([[1.3, 0, -41.3], [0, 1.3, -52.7], [0, 0, 1]]), 1.3, 64, 64, False),
    )
    place, grid = np.empty((2 * 64, 64, 3), np.uint8), np.empty(deferred.HEADER + 4 * 64, np.int32)
    assert deferred.DeferredAffine(canvas, affine).write(place, grid, mode)
    found = (
        written([DrawnImage(canvas, affine)], dataset.image_store).on_device(room())[0].permute(1, 2, 0).cpu().numpy()
    )
    assert len(np.unique(found)) > 100
    assert np.array_equal(found[..., ::-1], deferred.warp_with_grid(place, grid, mode))


def test_a_kernel_that_does_not_agree_is_not_used(folder, monkeypatch, caplog):
    dataset = on_the_device(dataset_of(folder, {}))
    caplog.clear()
    assert composes(dataset) and not caplog.text
    other = deferred.FIXED if deferred.rounding_mode(64) == deferred.FLOATING else deferred.FLOATING
    monkeypatch.setattr(compose, "rounding_mode", lambda width: other)
    assert open_composing(dataset, False) is None
    assert "composed on the GPU but by the loader's workers; on this GPU, it makes other pixels" in caplog.text


def test_colours_by_formula_and_from_the_table(folder, monkeypatch):
    """The table is for an OpenCV that computes in another way, of which one number is enough."""
    tables = conversion_tables(torch.device(DEVICE))
    monkeypatch.setattr(compose, "conversion_tables", lambda device: tables._replace(has_formula=False))
    assert composes(on_the_device(dataset_of(folder, {})))
    colours = tables.colours.clone()
    colours[7_654_321] ^= 1
    assert not has_formula(colours)


def guarded(data, at_end):
    """A tensor of the bytes `data`, its first or last word beside a page that nobody may read; and what holds it."""
    page, room = mmap.PAGESIZE, -(-data.size // mmap.PAGESIZE) * mmap.PAGESIZE
    held = mmap.mmap(-1, room + 2 * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(held))
    for address in (begin, begin + page + room):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), 0) == 0
    start = page + (room - -(-data.size // 4) * 4 if at_end else 0)
    pixels = np.frombuffer(held, np.uint8)[start : start + data.size]
    pixels[:] = data
    return torch.from_numpy(pixels), held


@pytest.mark.skipif(DEVICE == "cuda", reason="guards the memory of the host")
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("width", [4, 5, 6, 7])
def test_no_word_beyond_the_images_is_read(width, at_end):
    """A read beside them would end this process."""
    img = np.random.default_rng(0).integers(0, 256, (5, width, 3)).astype(np.uint8)
    pixels, _held = guarded(img.ravel(), at_end)
    one = SimpleNamespace(img_size=64, imgs=[img], shapes=np.array([[width, 5]]))
    canvas = Mosaic(one, [Tile(0, 10, 20, width, 5)])
    image = DrawnImage(canvas, Affine(np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]]), 1, 64, 64, False))
    found = written([image], ImageStore(pixels, [img.shape[:2]])).on_device(room())[0].permute(1, 2, 0).numpy()
    assert np.array_equal(found[..., ::-1], np.asarray(image))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [320, 640])
def test_large_images(size, folder):
    assert composes(on_the_device(dataset_of(folder, {}, img_size=size)))


@pytest.mark.gpu
def test_page_locked_memory(folder):
    """The kernel reads the images where the host has them."""
    from utils.data.gpu.host_memory import HostMemory

    dataset = dataset_of(folder, {})
    store = dataset.image_store
    memory = HostMemory(store.pixels.numel())
    memory.bytes[:] = store.pixels.numpy()
    assert memory.lock(torch.device("cuda")) is None
    store.pixels = memory.on_device(torch.device("cuda"))
    assert composes(dataset)
    store.pixels = None
    torch.cuda.synchronize()
    memory.free()
