"""The last steps of a sample: at once, and later for a whole batch, give the same bytes."""

import os
import subprocess
import sys
from types import SimpleNamespace

import cv2
import numpy as np
import psutil
import pytest
import torch

from tests import golden_data
from utils.data.fast import deferred, device_augment
from utils.data.fast import loader as fast_loader
from utils.data.fast.deferred import STEPS, TABLES, DeferredDataset
from utils.data.fast.device_augment import DeferredBatch
from utils.data.transforms import Colours
from utils.datasets import LoadImagesAndLabels, create_dataloader
from utils.system.files import PROJECT_ROOT

AT_ONCE = LoadImagesAndLabels.__new__(LoadImagesAndLabels)  # its steps need no data


def image(height=32, width=64, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def sample(finish, img, colours, axes, now=False):
    finish.recolour(img, colours, now)
    for axis in axes:
        img = finish.flip(img, axis)
    return finish.pixels(img)


CASES = [(Colours(1.01, 0.5, 1.3), (), False), (Colours(0.99, 1.7, 0.6), (0,), False), (Colours(1, 1, 1), (1,), False),
         (Colours(1.02, 1.2, 1.4), (0, 1), True), (Colours(1.0, 0.3, 0.7), (0, 1), False)]  # fmt: skip


def both_ways(shape=(32, 64)):
    """Images [5 x 3 x h x w] finished at once, and the same as a DeferredBatch."""
    wanted = [sample(AT_ONCE, image(*shape, k), *case) for k, case in enumerate(CASES)]
    later, steps = DeferredDataset(AT_ONCE), np.full((len(CASES), STEPS), 77, np.uint8)
    pixels = []
    for k, case in enumerate(CASES):
        later.begin(steps[k])
        pixels.append(sample(later, image(*shape, k), *case))
    return torch.from_numpy(np.stack(wanted)), DeferredBatch(*map(torch.from_numpy, (np.stack(pixels), steps)))


def test_a_batch_augmented_later_on_the_host():
    wanted, batch = both_ways()
    assert len(batch) == len(CASES) and batch.augmented().equal(wanted)
    room = torch.empty_like(batch.pixels)
    assert batch.augmented(room).equal(wanted) and room[0, ..., 1].equal(wanted[0, 1])


def test_at_once_by_hand():
    img = np.array([[[10, 20, 30], [0, 0, 0]]], np.uint8)  # blue, green, red; black
    planes = sample(AT_ONCE, img, Colours(1, 1, 1), (1,))
    assert planes[:, 0, 0].tolist() == [0, 0, 0]
    assert np.abs(planes[:, 0, 1].astype(int) - [30, 20, 10]).max() <= 1  # the way to HSV and back loses something


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32, 64), (320, 320), (7, 96)])
def test_a_batch_augmented_on_the_gpu(shape):
    wanted, batch = both_ways(shape)
    found = DeferredBatch(*(part.cuda() for part in batch)).augmented()
    assert found.is_contiguous(memory_format=torch.channels_last) and found.cpu().equal(wanted)


@pytest.mark.gpu
def test_every_colour_on_the_gpu():
    blue, green, red = np.meshgrid(*[np.arange(256, dtype=np.uint8)] * 3, indexing="ij")
    img = np.stack((blue, green, red), -1).reshape(4096, 4096, 3)
    later, steps = DeferredDataset(AT_ONCE), np.zeros((1, STEPS), np.uint8)
    colours = Colours(1.013, 1.4, 0.7)
    later.begin(steps[0])
    pixels = torch.from_numpy(sample(later, img, colours, (1,)))[None].cuda()
    found = DeferredBatch(pixels, torch.from_numpy(steps).cuda()).augmented()[0].cpu().numpy()
    assert np.array_equal(found, sample(AT_ONCE, img, colours, (1,)))


@pytest.mark.parametrize("with_affine", [False, True])
def test_a_gpu_that_does_not_agree_is_not_used(with_affine, monkeypatch, caplog):
    monkeypatch.setattr(device_augment, "why_no_kernels", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the host in the role of the GPU
    agrees, whole, calls = device_augment._gpu_agrees.__wrapped__, device_augment.DeferredBatch.augmented, []
    assert agrees(32, with_affine) and not caplog.text

    def wrong_at_first(batch, out=None):
        calls.append(batch)
        return whole(batch) + (len(calls) == 1)

    monkeypatch.setattr(device_augment.DeferredBatch, "augmented", wrong_at_first)
    assert not agrees(32, with_affine)
    assert "stay with the loader's workers; on this GPU, it makes other pixels than the host" in caplog.text
    monkeypatch.setattr(device_augment.DeferredBatch, "augmented", lambda batch: 1 // 0)
    assert not agrees(32, with_affine)
    assert "ZeroDivisionError" in caplog.text


def test_the_synthetic_batch_has_every_step():
    batch = device_augment.synthetic_batch(32, True)
    assert batch.image_shape == (4, 32, 32, 3) and len(torch.unique(batch.augmented())) > 200
    steps = batch.steps[:, TABLES:STEPS].tolist()
    assert steps == [[1, 0, 0, 0], [1, 1, 0, 1], [1, 0, 1, 1], [0, 1, 1, 1]]


@pytest.mark.gpu
@pytest.mark.parametrize("with_affine", [False, True])
def test_this_gpu_agrees(with_affine):
    assert device_augment.gpu_agrees(64, with_affine)


def test_divisions_lead_to_opencvs_hsv():
    rng = np.random.default_rng(0)
    img = rng.integers(0, 256, (200, 320, 3)).astype(np.uint8)
    img[:50] //= 64  # dark and grey ones, where the hue is undefined
    blue, green, red = cv2.split(img.astype(np.int32))
    value = img.max(-1).astype(np.int32)
    spread = value - img.min(-1)
    table = device_augment.divisions()
    hue = np.where(
        value == red, green - blue, np.where(value == green, blue - red + 2 * spread, red - green + 4 * spread)
    )
    hue = (hue * table[1][spread] + 2048) >> 12
    found = cv2.merge([hue + 180 * (hue < 0), (spread * table[0][value] + 2048) >> 12, value])
    assert np.array_equal(found, cv2.cvtColor(img, cv2.COLOR_BGR2HSV))


@pytest.mark.parametrize("width", [64, 320])
def test_whole_vectors_agree_with_the_table(width):
    assert device_augment.agrees_with_table(width)
    hsv = np.random.default_rng(1).integers(0, 180, (99, width, 3)).astype(np.uint8)
    hue, saturation, value = cv2.split(hsv.astype(np.int32))
    red, green, blue = cv2.split(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB).astype(np.int32))
    table = device_augment.colours_of_hsv()
    assert np.array_equal(table[hue << 16 | saturation << 8 | value], red | green << 8 | blue << 16)


def test_disagreement_is_noticed(monkeypatch):
    convert = cv2.cvtColor

    def wrong_at_the_end_of_a_row(hsv, code):
        rgb = convert(hsv, code)
        rgb[:, 310:] += 1
        return rgb

    monkeypatch.setattr(cv2, "cvtColor", wrong_at_the_end_of_a_row)
    assert device_augment.agrees_with_table(256) and not device_augment.agrees_with_table(320)


@pytest.mark.parametrize(("probability", "degrees"), [(0.0, 0), (0.5, 0), (0.5, 10), (1.0, 10)])
def test_loader_that_finishes_later(probability, degrees, folder, monkeypatch):
    """Every augmentation, with objects pasted in for some, all or none of the samples; only straight warps can wait."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    hyp = golden_data.ALL_AUGMENTATIONS | {"paste_in": probability, "degrees": degrees, "shear": degrees}

    def batches(**flags):
        loader, _ = create_dataloader(str(folder / "all.txt"), 64, 5, 32, SimpleNamespace(single_cls=False), hyp=hyp,
                                      augment=True, workers=2, seed=3, **flags)  # fmt: skip
        for images, targets, paths, _ in loader:
            yield (
                (images.augmented() if isinstance(images, DeferredBatch) else images).clone(),
                targets,
                paths,
                type(images),
            )

    wanted, found = list(batches()), list(batches(worker_tensor=True, defer_steps=True))
    assert {kind for *_, kind in found} == {DeferredBatch} and len(found) == 3
    for (images, targets, paths, _), (others, rows, names, _) in zip(wanted, found, strict=True):
        assert images.equal(others) and targets.equal(rows) and paths == names


def test_validation_and_groups_are_augmented_at_once(folder, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    for options in ({"augment": False}, {"augment": True, "quad": True}, {"augment": True, "rect": True}):
        loader, _ = create_dataloader(str(folder / "all.txt"), 64, 4, 32, SimpleNamespace(single_cls=False),
                                      hyp=golden_data.ALL_AUGMENTATIONS, workers=2, worker_tensor=True,
                                      defer_steps=True, **options)  # fmt: skip
        assert isinstance(next(iter(loader))[0], torch.Tensor)


def test_a_loader_whose_gpu_does_not_agree_begins_again(folder, monkeypatch):
    """Found out when the workers are at work already: of them and of their memory nothing stays."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(fast_loader, "gpu_agrees", lambda size, with_affine: False)

    def batches(**flags):
        """The batches, the workers' shared memory in bytes, and the next draw of torch's generator."""
        torch.manual_seed(0)
        loader, _ = create_dataloader(str(folder / "all.txt"), 64, 5, 32, SimpleNamespace(single_cls=False),
                                      hyp=golden_data.ALL_AUGMENTATIONS, augment=True, workers=2, seed=3,
                                      **flags)  # fmt: skip
        workers = [worker for worker in psutil.Process().children() if worker.pid not in before]
        memory = [part.size for worker in workers for part in worker.memory_maps() if "/dev/zero" in part.path]
        found = [(images.clone(), targets, paths) for images, targets, paths, _ in loader]
        return found, len(workers), sum(memory), torch.rand(1)

    before = {process.pid for process in psutil.Process().children()}
    (wanted, *_), (host, *state), (found, *again) = (
        batches(**flags) for flags in ({}, {"worker_tensor": True}, {"worker_tensor": True, "defer_steps": True})
    )
    for (images, targets, paths), *others in zip(wanted, host, found, strict=True):
        for more_images, rows, names in others:
            assert images.equal(more_images) and targets.equal(rows) and paths == names
    assert again == state


@pytest.mark.parametrize("warps", [True, False])
def test_colours_stay_on_a_gpu_that_only_warps_otherwise(warps, folder, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(fast_loader, "gpu_agrees", lambda size, with_affine: warps or not with_affine)
    monkeypatch.setattr(fast_loader, "rounding_mode", lambda size: deferred.FIXED)
    loader, _ = create_dataloader(str(folder / "all.txt"), 64, 5, 32, SimpleNamespace(single_cls=False),
                                  hyp=golden_data.ALL_AUGMENTATIONS, augment=True, workers=2, worker_tensor=True,
                                  defer_steps=True)  # fmt: skip
    images, *_ = next(iter(loader))
    assert isinstance(images, DeferredBatch) and (images.steps.shape[1] > STEPS) == warps


def test_a_run_may_end_while_the_gpu_is_asked():
    """Python ends a daemon thread inside of torch in a way that aborts the process."""
    program = """
import sys, time, torch
from utils.data.fast import device_augment
def agrees(size):
    end = time.monotonic() + 1
    while time.monotonic() < end:
        torch.rand(300, 300) @ torch.rand(300, 300)
device_augment.agrees_with_table = agrees
device_augment.ask_ahead(64, torch.device("cpu"))
sys.exit(2)
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (2, "")
