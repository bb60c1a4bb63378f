import logging
import os
import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.label_sets import BOX, TRIANGLE, make_dataset
from utils.data.labels import cache, scan
from utils.data.labels.image_list import expand_paths, img2label_paths
from utils.data.labels.scan import scan_dataset


@pytest.fixture
def scans(monkeypatch):
    """The image paths that were really looked at."""
    looked_at, verify_image = [], scan.verify_image
    monkeypatch.setattr(scan, "verify_image", lambda path: looked_at.append(path) or verify_image(path))
    return looked_at


def cache_of(folder):
    return Path(cache.cache_location(folder, img2label_paths(expand_paths(folder))))


def test_the_cache_gives_the_same_without_looking(tmp_path, scans):
    folder = make_dataset(tmp_path, {"a": f"{BOX}\n{TRIANGLE}", "b": None, "c": "", "d": "x", "e": TRIANGLE, "f": BOX})
    first = scan_dataset(folder)
    assert len(scans) == 6
    second = scan_dataset(folder)
    assert len(scans) == 6
    assert second.counts == first.counts
    assert second.messages == first.messages
    assert second.img_files == first.img_files
    assert second.label_files == first.label_files
    np.testing.assert_array_equal(second.shapes, first.shapes)
    for mine, other in zip(first.labels, second.labels, strict=True):
        assert mine.dtype == other.dtype == np.float32
        np.testing.assert_array_equal(mine, other)
    for mine, other in zip(first.segments, second.segments, strict=True):
        assert len(mine) == len(other)
        for points, others in zip(mine, other, strict=True):
            np.testing.assert_array_equal(points, others)


def test_the_cache_of_a_set_without_any_label(tmp_path, scans):
    folder = make_dataset(tmp_path, {"a": None, "b": None})
    for _ in range(2):
        assert [rows.shape for rows in scan_dataset(folder).labels] == [(0, 5)] * 2
    assert len(scans) == 2


def rewrite_secretly(file, text):
    """Replace the content of `file` by one of the same size, and set its modification time back."""
    before = file.stat()
    file.write_text(text)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_every_change_makes_a_new_scan(tmp_path, scans):
    folder = make_dataset(tmp_path, {"a": BOX, "b": BOX, "c": None})
    (tmp_path / "list.txt").write_text("./images/train/a.jpg\n./images/train/b.jpg")

    def boxes_after(change, source=folder):
        scan_dataset(source)
        scans.clear()
        change()
        scanned = scan_dataset(source)
        assert scans, "the old cache was used"
        return sum(map(len, scanned.labels))

    label = tmp_path / "labels/train/a.txt"
    assert boxes_after(lambda: label.write_text("1" + BOX[1:])) == 2  # the same size
    assert scan_dataset(folder).labels[0][0, 0] == 1
    assert boxes_after(lambda: rewrite_secretly(label, BOX)) == 2
    assert scan_dataset(folder).labels[0][0, 0] == 0
    assert boxes_after(lambda: (tmp_path / "labels/train/c.txt").write_text(BOX)) == 3
    assert boxes_after(lambda: label.unlink()) == 2
    assert boxes_after(lambda: os.utime(tmp_path / "images/train/a.jpg", ns=(1, 1))) == 2
    assert boxes_after(lambda: (tmp_path / "images/train/b.jpg").unlink()) == 1
    make_dataset(tmp_path, {"b": BOX})
    assert boxes_after(lambda: (tmp_path / "list.txt").write_text("./images/train/b.jpg"), tmp_path / "list.txt") == 1


def test_another_format_version_makes_a_new_scan(tmp_path, scans, monkeypatch):
    folder = make_dataset(tmp_path, {"a": BOX})
    scan_dataset(folder)
    monkeypatch.setattr(cache, "FORMAT_VERSION", cache.FORMAT_VERSION + 1)
    scan_dataset(folder)
    assert len(scans) == 2


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("content", ["pickle", "text", "empty", "torn", "other archive"])
def test_what_is_no_cache_is_replaced_with_one_warning(tmp_path, scans, monkeypatch, caplog, content):
    monkeypatch.chdir(tmp_path)
    folder = make_dataset(tmp_path, {"a": BOX})
    scan_dataset(folder)
    file = cache_of(folder)
    whole = file.read_bytes()
    if content == "other archive":
        np.savez(file.open("wb"), signature=np.array([Bomb()], object))
    else:
        replacement = {
            "pickle": pickle.dumps(Bomb()),
            "text": b"x" * 99,
            "empty": b"",
            "torn": whole[: len(whole) // 2],
        }
        file.write_bytes(replacement[content])
    scan_dataset(folder)
    assert len(scans) == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "not a usable label cache" in caplog.text
    assert not Path("exploded").exists()
    scan_dataset(folder)
    assert len(scans) == 2
    assert sorted(path.name for path in file.parent.iterdir()) == sorted(["train", file.name])


def test_different_sources_have_different_caches(tmp_path):
    make_dataset(tmp_path, {"a": BOX})
    make_dataset(tmp_path, {"a": BOX}, "images/v1.1")
    make_dataset(tmp_path, {"a": BOX}, "images/v1.2")
    for name in ("train.txt", "train.lst", "val.txt"):
        (tmp_path / name).write_text("./images/train/a.jpg")
    folders = [str(tmp_path / "images" / name) for name in ("train", "v1.1", "v1.2")]
    lists = [str(tmp_path / name) for name in ("train.txt", "train.lst", "val.txt")]
    sources = [*folders, *lists, lists[:2], [lists[2], lists[1]], folders[:2], [folders[0], folders[2]]]
    caches = [cache_of(source) for source in sources]
    assert len(set(caches)) == len(caches)
    assert {file.suffix for file in caches} == {".cache"}
    assert caches[0].parent == tmp_path / "labels"
    assert caches[3].parent == tmp_path


def test_folders_with_very_long_names(tmp_path, scans, caplog):
    folders = [make_dataset(tmp_path, {"a": BOX}, f"images/{'x' * 249}{end}") for end in ("a", "b")]
    caches = [cache_of(folder) for folder in folders]
    assert len(set(caches)) == 2 and all(len(file.name) < 210 for file in caches)
    for _ in range(2):
        assert [len(scan_dataset(folder).labels) for folder in folders] == [1, 1]
    assert len(scans) == 2 and all(file.is_file() for file in caches) and not caplog.records


def test_a_cache_that_cannot_be_written_costs_one_warning(tmp_path, scans, monkeypatch, caplog):
    folder = make_dataset(tmp_path, {"a": BOX})

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache, "atomic_write", refuse)
    for _ in range(2):
        assert len(scan_dataset(folder).labels) == 1
    assert len(scans) == 2
    assert len(caplog.messages) == 2
    assert "label cache not saved (Permission denied)" in caplog.messages[0]


def test_two_processes_at_once(tmp_path):
    """Both write the cache of one folder again and again; each gets the labels that it asks for."""
    folder = make_dataset(tmp_path, {"a": "0 .5 .5 .2 .2 .1 .1 .3 .4", "b": BOX})
    children = []
    for keypoints, polygons in ((None, 1), ((2, 2), 0)):
        child = os.fork()
        if not child:
            good = False
            with suppress(BaseException):
                good = all(sum(map(len, scan_dataset(folder, "", keypoints).segments)) == polygons for _ in range(25))
            os._exit(not good)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    "damage",
    [
        {"labels": np.zeros((1, 5), np.float32)},
        {"labels": np.full((2, 5), np.nan, np.float32)},
        {"labels": np.full((2, 5), "a")},
        {"rows_per_image": np.array([-1, 3])},
        {"shapes": np.zeros((1, 2))},
        {"shapes": np.full((2, 2), np.nan)},
        {"text": np.frombuffer(b"{}", np.uint8)},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_a_cache_with_the_right_signature_and_other_parts(damage, tmp_path):
    folder = make_dataset(tmp_path, {"a": BOX, "b": BOX})
    first = scan_dataset(folder)
    with np.load(cache_of(folder)) as archive:
        parts = dict(archive)
    np.savez(cache_of(folder).open("wb"), **(parts | damage))
    again = scan_dataset(folder)
    assert all(map(np.array_equal, again.labels, first.labels)) and np.array_equal(again.shapes, first.shapes)
