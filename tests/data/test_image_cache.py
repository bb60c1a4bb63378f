"""--cache-images: the same images as without; on disk made once, and anew when an image changes."""

import ctypes
import errno
import os
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from tests import golden_data
from utils.data import image_cache
from utils.data.training_size import load_image
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
    with pytest.raises(ValueError, match=r"\.\w+: the image changed its size since the labels were scanned"):
        open_set(folder, cache)


def test_made_once(folder, monkeypatch):
    open_set(folder)
    monkeypatch.setattr(image_cache, "_make", None)
    open_set(folder)


@pytest.mark.parametrize("change", ["image", "cut off", "not copied in whole", "damaged"])
def test_made_anew_when_something_changed(change, folder, caplog):
    dataset = open_set(folder)
    (path,) = files(folder)
    if change == "image":
        image = dataset.img_files[3]
        cv2.imwrite(image, 255 - cv2.imread(image))
        os.utime(image, ns=(1, 1))
    elif change == "cut off":
        os.truncate(path, 100)
    else:  # of the right size still
        size, kept = path.stat().st_size, path.read_bytes()[:-5000] if change == "not copied in whole" else b""
        path.write_bytes(kept.ljust(size, b"\0"))
    del dataset
    cached, plain = open_set(folder), open_set(folder, cache=False)
    assert ("does not hold what the images give" in caplog.text) == (change in ("not copied in whole", "damaged"))
    assert all(np.array_equal(load_image(cached, i)[0], load_image(plain, i)[0]) for i in range(12))


@pytest.mark.parametrize(("levels", "rows", "is_made"), [(3, 999, False), (60, 2, True)])
def test_what_another_version_of_opencv_made_is_used(levels, rows, is_made, folder, caplog):
    dataset = open_set(folder)
    (path,) = files(folder)
    with path.open("r+b") as file:  # of the first image
        pixels = np.frombuffer(file.read(dataset.imgs[0].nbytes), np.uint8).reshape(dataset.imgs[0].shape).copy()
        pixels[:rows] += np.where(pixels[:rows] < 128, levels, -levels).astype(np.uint8)
        file.seek(0)
        file.write(pixels.tobytes())
    del dataset
    open_set(folder)
    assert ("does not hold what the images give" in caplog.text) == is_made


def test_a_damaged_file_needs_no_room_beside_the_new_one(folder, monkeypatch):
    open_set(folder)
    (path,) = files(folder)
    path.write_bytes(bytes(path.stat().st_size))
    there = []
    monkeypatch.setattr(image_cache, "_check_room", lambda place, size: there.append(files(folder)))
    open_set(folder)
    assert there == [[]] and any(path.read_bytes())


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


# --- what is in a file is in its name ---------------------------------------------------------------------------------


def subset(folder, images, cache="disk"):
    """A data set of some `images` of the folder; all of them make caches of equal size."""

    def choose(scanned):
        lists = {key: [getattr(scanned, key)[i] for i in images] for key in ("img_files", "label_files", "labels")}
        return replace(scanned, shapes=scanned.shapes[images], segments=[[]] * len(images), **lists)

    return open_set(folder, cache, subset_filter=choose)


def holds_its_images(dataset, folder, images):
    plain = subset(folder, images, cache=False)
    return all(np.array_equal(dataset.imgs[i], load_image(plain, i)[0]) for i in range(len(images)))


@pytest.fixture
def equal_images(folder):
    """The folder with all images of one size, so that nothing but their content tells them apart."""
    for number, file in enumerate(sorted(folder.rglob("*.png"))):
        cv2.imwrite(str(file), np.full((64, 64, 3), number * 10, np.uint8))
    return folder


def test_a_run_inside_another_one(equal_images, monkeypatch):
    """Another run on other images makes its cache while this one makes its own."""
    write, others = image_cache.atomic_write, []

    def interrupted(*arguments, **options):
        if not others:
            others.append(None)
            others[0] = subset(equal_images, [4, 5, 6, 7])
        return write(*arguments, **options)

    monkeypatch.setattr(image_cache, "atomic_write", interrupted)
    mine, (other,) = subset(equal_images, [0, 1, 2, 3]), others
    later = subset(equal_images, [0, 1, 2, 3])
    assert holds_its_images(mine, equal_images, [0, 1, 2, 3]) and holds_its_images(later, equal_images, [0, 1, 2, 3])
    assert holds_its_images(other, equal_images, [4, 5, 6, 7])
    assert len(files(equal_images)) == 2, "both are in use"


@pytest.mark.parametrize(
    "parts", [([0, 1, 2, 3], [4, 5, 6, 7]), ([0, 1, 2, 3], [0, 1, 2, 3]), ([0, 1], [1, 0])], ids=str
)
def test_two_processes_at_once(parts, equal_images):
    """They make the same cache, or caches of equal size; each reads its own images, every time."""
    children = []
    for images in parts:
        child = os.fork()
        if not child:
            good = False
            with suppress(BaseException):
                good = all(holds_its_images(subset(equal_images, images), equal_images, images) for _ in range(25))
            os._exit(not good)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert not list(equal_images.rglob("*.tmp"))


def test_caches_that_nobody_uses_go(equal_images):
    first = subset(equal_images, [0, 1, 2])
    (path,) = files(equal_images)
    old = path.with_name(path.name.replace(f".{path.name.split('.')[-3]}.", "."))  # as older versions called theirs
    old.touch()
    old.with_name(old.name.replace(".pixels.", ".pixels.json.")).touch()
    killed = path.with_name(f".{path.name}.0123456789ab.tmp")
    killed.touch()
    stranger = path.with_name(path.name.replace(".64.", ".65."))
    stranger.touch()
    second = subset(equal_images, [3, 4, 5])
    assert set(files(equal_images)) == {path, stranger, *files_of(second)}
    assert not [file for file in path.parent.iterdir() if ".json." in file.name or file.suffix == ".tmp"]
    del first
    third = subset(equal_images, [6, 7, 8])
    assert set(files(equal_images)) == {stranger, *files_of(second), *files_of(third)}
    assert holds_its_images(second, equal_images, [3, 4, 5]) and holds_its_images(third, equal_images, [6, 7, 8])


def files_of(dataset):
    return [image_cache._location(dataset, f"version {image_cache.FORMAT_VERSION}, 64 px, augment False")]


def test_a_cache_that_is_removed_while_it_is_used(equal_images):
    dataset = subset(equal_images, [0, 1, 2])
    (path,) = files(equal_images)
    path.unlink()
    assert holds_its_images(dataset, equal_images, [0, 1, 2])
    assert holds_its_images(subset(equal_images, [0, 1, 2]), equal_images, [0, 1, 2]) and path.exists()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_gets_full_is_said(error, folder, monkeypatch):
    def fail(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    message = rf"--cache-images disk: 0\.0 GB cannot be written to .* \({os.strerror(error)}\); make room there, use a"
    with pytest.raises(ValueError, match=message):
        open_set(folder)
    assert not [path for path in folder.rglob("*") if "pixels" in path.name]


def test_file_systems_that_reserve_nothing(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    cached, plain = open_set(folder), open_set(folder, cache=False)
    assert all(np.array_equal(cached.imgs[i], load_image(plain, i)[0]) for i in range(12))


def test_a_file_system_without_locks(folder, monkeypatch):
    def refuse(file, flags):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(image_cache.fcntl, "flock", refuse)
    expected = open_set(folder, cache=False)
    for _ in range(2):
        cached = open_set(folder)
        assert np.array_equal(cached.imgs[0], load_image(expected, 0)[0])
    assert len(files(folder)) == 1


def test_a_file_that_cannot_be_mapped_is_said(folder, monkeypatch):
    monkeypatch.setattr(image_cache, "_mapped", lambda path, num_bytes: None)
    with pytest.raises(ValueError, match="cannot be read as memory.*--cache-images ram"):
        open_set(folder)


@pytest.mark.parametrize(
    ("put", "kind"),
    [(Path.mkdir, "a folder"), (os.mkfifo, "no ordinary file"), (lambda path: path.symlink_to("away"), "a link to")],
)
def test_something_else_in_the_place_of_a_file_is_said(put, kind, folder):
    open_set(folder)
    [file] = files(folder)
    file.unlink()
    put(file)
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}, where the pixels belong, is {kind}.*; remove it"):
        open_set(folder)
    assert os.path.lexists(file) and not file.with_name("away").exists()


def test_a_link_to_a_file_is_used(folder):
    """As of somebody who keeps it on another disk."""
    open_set(folder)
    [file] = files(folder)
    file.rename(folder / "elsewhere")
    file.symlink_to(folder / "elsewhere")
    assert np.array_equal(open_set(folder).imgs[0], load_image(open_set(folder, cache=False), 0)[0])
    assert file.is_symlink()
