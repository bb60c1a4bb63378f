"""--cache-images: the same images as without; on disk made once, and anew when an image changes."""

import ctypes
import os
import shutil
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from tests import golden_data
from utils.data import image_cache
from utils.data.images import load_image
from utils.datasets import LoadImagesAndLabels
from utils.system import memory

OPTIONS = {"img_size": 64, "batch_size": 4, "hyp": golden_data.ALL_AUGMENTATIONS}


@pytest.fixture
def folder(tmp_path):
    return golden_data.copy_dataset(tmp_path)


def open_set(folder, cache="disk", **options):
    return LoadImagesAndLabels(str(folder / "all.txt"), cache_images=cache, **(OPTIONS | options))


def files(folder):
    return sorted(path for path in folder.rglob("*.pixels.cache"))


@pytest.mark.parametrize("cache", ["disk", "ram"])
@pytest.mark.parametrize("options", [{}, {"augment": True}, {"rect": True}, {"img_size": 96}], ids=str)
def test_images_equal_those_of_the_files(options, cache, folder):
    cached, plain = open_set(folder, cache, **options), open_set(folder, cache=False, **options)
    assert len(cached) == 12
    for i in range(12):
        (img, size, shape), (expected, *sizes) = load_image(cached, i), load_image(plain, i)
        assert np.array_equal(img, expected) and [size, shape] == sizes
        assert not img.flags.writeable
    num_bytes = sum(img.nbytes for img in cached.imgs)
    assert [path.stat().st_size for path in files(folder)] == ([num_bytes] if cache == "disk" else [])


def test_training_samples_equal_those_of_the_files(folder):
    samples = []
    for cache in ("disk", "ram", False):
        dataset = open_set(folder, cache, augment=True)
        golden_data.seed_both(5)
        samples.append([dataset[i][:2] for i in range(12)])
    for (a, b), (c, d), (image, targets) in zip(*samples, strict=True):
        assert a.equal(image) and c.equal(image) and b.equal(targets) and d.equal(targets)


def test_processes_share_the_memory(folder):
    img, _, _ = load_image(open_set(folder, "ram"), 0)
    address = img.__array_interface__["data"][0]
    child = os.fork()
    if not child:  # an image that only this process changed would have become its own
        ctypes.memset(address, 77, 1)
        os._exit(0)
    os.waitpid(child, 0)
    assert img.flat[0] == 77


def test_too_little_memory_is_said(folder, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(ValueError, match="--cache-images needs 0.1 MB, and 0.0 MB .* free; --cache-images disk"):
        open_set(folder, "ram")


def test_too_little_memory_for_a_later_size_is_said(folder, monkeypatch):
    dataset = open_set(folder, "ram")
    needed = 3 * sum(128 * w * 128 * h // max(w, h) ** 2 for w, h in dataset.shapes) - dataset.memory_cache.nbytes
    monkeypatch.setattr(memory, "available_memory", lambda: needed + 5000)
    image_cache.check_memory_for(dataset, 128)
    monkeypatch.setattr(memory, "available_memory", lambda: needed - 5000)
    with pytest.raises(ValueError, match="--cache-images needs .* MB more when the images have 128 px"):
        image_cache.check_memory_for(dataset, 128)


def test_memory_can_be_given_back_while_another_process_maps_it(folder):
    dataset = open_set(folder, "ram")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:  # it would hold the pages until it ends
        os.read(reader, 1)
        os._exit(int(dataset.memory_cache.any()))
    assert dataset.memory_cache.any()
    image_cache.give_back_memory(dataset)
    os.write(writer, b"x")
    assert os.waitpid(child, 0)[1] == 0 and not dataset.memory_cache.any()
    image_cache.give_back_memory(open_set(folder, False))


@pytest.mark.parametrize("cache", ["disk", "ram"])
def test_an_image_that_changed_its_size_is_named(cache, folder, monkeypatch):
    monkeypatch.setattr(image_cache, "resized_shape", lambda height, width, size: (size, size))
    with pytest.raises(ValueError, match=r"\.\w+: the picture changed its size since the labels were scanned"):
        open_set(folder, cache)


def test_made_once(folder, monkeypatch):
    open_set(folder)
    monkeypatch.setattr(image_cache, "_make", None)
    open_set(folder)


@pytest.mark.parametrize("change", ["image", "cut off"])
def test_made_anew_when_something_changed(change, folder):
    dataset = open_set(folder)
    (path,) = files(folder)
    if change == "image":
        image = dataset.img_files[3]
        cv2.imwrite(image, 255 - cv2.imread(image))
        os.utime(image, ns=(1, 1))
    else:
        os.truncate(path, 100)
    del dataset
    cached, plain = open_set(folder), open_set(folder, cache=False)
    assert all(np.array_equal(load_image(cached, i)[0], load_image(plain, i)[0]) for i in range(12))


def test_labels_may_change(folder, monkeypatch):
    dataset = open_set(folder)
    os.utime(dataset.label_files[0], ns=(1, 1))
    monkeypatch.setattr(image_cache, "_make", None)
    open_set(folder)


def test_full_disk_is_said(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match="needs 0.0 GB in .*, where 0.0 GB are free"):
        open_set(folder)
    assert not files(folder)


def test_nothing_is_left_of_an_attempt_that_failed(folder, monkeypatch):
    def fail(*args):
        raise ValueError("broken image")

    monkeypatch.setattr(image_cache, "load_scanned", fail)
    with pytest.raises(ValueError, match="broken image"):
        open_set(folder)
    assert not [path for path in folder.rglob("*") if "pixels" in path.name]
