"""Batches of frames, and videos that OpenCV and Pillow find hard to take."""

import os
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.detect_cases import frames_of, picture, write_film
from utils.data.stream import LoadImages
from utils.detect.names import Frame, Item, find_items
from utils.detect.sources import WAITING, FileSource, batches, prepare
from utils.detect.writers import MAX_SIDE, Video, folder_name, rate_of_video, size_of_video


def frames(shapes):
    return [Frame(Item(str(k), "image"), pixels=np.empty(shape), order=k) for k, shape in enumerate(shapes)]


def read(path):
    """(its frames, its faults) of a source."""
    found = [frame for batch in FileSource(find_items([str(path)]), lambda image: image) for frame in batch]
    return [frame for frame in found if not frame.fault], [frame.fault for frame in found if frame.fault]


def test_a_rare_shape_does_not_wait_for_ever():
    rare, usual = (1, 2), (2, 1)
    given = frames([usual, rare, *[usual] * 40])
    made = [[frame.order for frame in batch] for batch in batches(given, 4)]
    place = next(number for number, batch in enumerate(made) if batch == [1])
    assert sum(map(len, made[:place])) <= WAITING * 4 and sorted(sum(made, [])) == list(range(42))
    assert all(len({given[k].pixels.shape for k in batch}) == 1 for batch in made)


def test_many_shapes_keep_few_images_in_memory():
    given = frames([(1, 1 + k % 7) for k in range(200)])
    late, seen = 0, 0
    for batch in batches(given, 4):
        seen += len(batch)
        late = max(late, batch[-1].order - batch[0].order)
    assert seen == 200 and late <= WAITING * 4


def test_what_comes_after_a_fault_does_not_wait_for_it():
    given = frames([(1, 1)] * 3)
    given[1].fault = "damaged"
    assert [[frame.order for frame in batch] for batch in batches(given, 2)] == [[1], [0, 2]]


@pytest.mark.parametrize("name", [
    "12:30.mp4", "100%.mp4", "a%03d.mp4", "x?y.mp4", "#1.mp4", "-dash.mp4", " lead.mp4", "two\nlines.mp4", "straße.mp4",
    "東京.mp4", "a b.mp4", "'q'.mp4", "[1].mp4", "a*.mp4", "file:x.mp4", "pipe:0.mp4", "a&b.mp4", "~x.mp4", "..mp4",
    "UPPER.MP4",
])  # fmt: skip
def test_names_of_videos(name, tmp_path, monkeypatch):
    """Some are addresses to FFmpeg."""
    monkeypatch.chdir(tmp_path)
    write_film(tmp_path / "film.mp4", num_frames=3).rename(tmp_path / name)
    found, faults = read(name)
    assert (len(found), faults) == (3, [])


def test_a_name_that_is_no_utf8_is_a_sentence(tmp_path, caplog):
    """OpenCV would end the process."""
    name = os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.mp4")
    write_film(tmp_path / "film.mp4", num_frames=3).rename(name)
    found, (fault,) = read(name)
    assert not found and "bad\\udcff.mp4: the name is no UTF-8, as OpenCV needs it; rename it" in fault
    assert list(LoadImages(name)) == [] and "the name is no UTF-8" in caplog.text
    with pytest.raises(ValueError, match="the name is no UTF-8"):
        Video(Path(name), Item("a", "video"), (64, 64))


@pytest.mark.parametrize("share", np.linspace(0.02, 0.98, 20))
def test_a_gif_cut_off_anywhere(share, tmp_path):
    stills = [Image.fromarray(picture(k)) for k in range(5)]
    stills[0].save(tmp_path / "a.gif", save_all=True, append_images=stills[1:], duration=50)
    data = (tmp_path / "a.gif").read_bytes()
    (tmp_path / "a.gif").write_bytes(data[: int(len(data) * share)])
    found, faults = read(tmp_path / "a.gif")
    assert len(faults) == 1 and "a.gif" in faults[0] and not any(frame.is_last for frame in found)
    if found:
        assert f"only {len(found)}" in faults[0] and "cut off" in faults[0] or "of" in faults[0]


@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp", "webp", "tiff"])
def test_an_image_cut_off_anywhere(suffix, tmp_path):
    data = cv2.imencode(f".{suffix}", picture(0, 200, 300))[1].tobytes()
    for number, share in enumerate(np.linspace(0.02, 0.98, 20)):
        (tmp_path / f"{number:02}.{suffix}").write_bytes(data[: int(len(data) * share)])
    found, faults = read(tmp_path)
    assert not found and [Path(fault.partition(":")[0]).stem for fault in faults] == [f"{k:02}" for k in range(20)]


@pytest.mark.parametrize(("suffix", "codec"), [
    ("mp4", "mp4v"), ("avi", "MJPG"), ("mkv", "mp4v"), ("mpg", "PIM1"), ("mpeg", "MPG1"), ("wmv", "WMV2"),
    ("mov", "mp4v"), ("m4v", "mp4v"),
])  # fmt: skip
def test_all_kinds_of_videos(suffix, codec, tmp_path):
    path = tmp_path / f"film.{suffix}"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), 25, (64, 48))
    for number in range(30):
        writer.write(picture(number % 5, 48, 64))
    writer.release()
    found, faults = read(path)
    assert (len(found), faults, found[0].item.fps) == (30, [], 25) and found[-1].is_last


@pytest.mark.parametrize("fps", [
    0.0001, 0.01, 1 / 3, 0.5, 7.123456, 100 / 3, 23.976023976, 29.97002997, 59.94005994, 61.12345, 65.5354, 65.536,
    66.66667, 99.999, 119.88011988, 119.9234, 239.76, 239.873, 655.36, 999.99,
])  # fmt: skip
def test_rates_that_an_mp4_has(fps, tmp_path):
    item = Item("a", "video", fps=fps)
    video = Video(tmp_path / "a.mp4", item, (48, 64))
    for number in range(3):
        video.add(picture(number, 48, 64))
    video.close()
    count, found = frames_of(tmp_path / "a.mp4")
    assert (
        count == 3 and found == pytest.approx(max(fps, 0.01), rel=2e-3) and found == pytest.approx(rate_of_video(fps))
    )


@pytest.mark.parametrize("shape", [(1, 1), (47, 63), (1, 500), (500, 1), (MAX_SIDE + 2, 16), (16, 3 * MAX_SIDE)])
def test_sizes_that_an_mp4_has(shape, tmp_path):
    video = Video(tmp_path / "a.mp4", Item("a", "video"), shape)
    for _ in range(2):
        video.add(np.zeros((*shape, 3), np.uint8))
    video.close()
    assert frames_of(tmp_path / "a.mp4")[0] == 2 and size_of_video((480, 640, 3)) == (640, 480)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5000), (5000, 1), (3, 20_000), (2, 2)])
def test_odd_images_are_prepared(shape):
    pixels = prepare(np.zeros((*shape, 3), np.uint8), 64, 32)
    assert max(pixels.shape[1:]) == 64 and min(pixels.shape[1:]) >= 32


@pytest.mark.parametrize(("name", "folder"), [
    ("person", "person"), ("a/b", "a_b"), ("..", "_"), ("", "_"), (".", "_"), ("traffic light", "traffic light"),
    ("a:b*?", "a_b__"), ("../../x", "_.._x"), ("end. ", "end"), ("名", "名"), (7, "7"), ("a\\b", "a_b"), ("\n", "_"),
])  # fmt: skip
def test_folders_of_classes_stay_inside(name, folder):
    assert folder_name(name) == folder and os.path.basename(folder) == folder


@pytest.mark.parametrize("name", ["a.jpg", "a.mp4", "a.gif"])
def test_a_file_that_was_not_fetched(name, tmp_path):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n")
    found, faults = read(tmp_path / name)
    assert not found and len(faults) == 1 and "a Git LFS pointer, fetch the file with git lfs pull" in faults[0]
