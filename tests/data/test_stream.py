"""utils/data/stream.py: images and videos for a trained model."""

import logging

import cv2
import numpy as np
import pytest

from utils.datasets import LoadImages


@pytest.fixture
def folder(tmp_path):
    for name, shape in (("b.png", (40, 80, 3)), ("a.png", (60, 30, 3))):
        cv2.imwrite(str(tmp_path / name), np.full(shape, (10, 20, 30), np.uint8))
    (tmp_path / "c.jpg").write_bytes(b"not an image")
    (tmp_path / "notes.txt").write_text("not even by name")
    (tmp_path / ".hidden.png").write_bytes(b"")
    return tmp_path


def test_folder_in_order_with_one_bad_file(folder, caplog):
    source = LoadImages(str(folder), img_size=64, stride=32)
    assert len(source) == source.nf == 3
    with caplog.at_level(logging.WARNING):
        found = list(source)
    assert [path for path, *_ in found] == [str(folder / "a.png"), str(folder / "b.png")]
    assert "c.jpg" in caplog.text
    _, img, original, capture = found[1]
    assert (img.shape, original.shape, capture) == ((3, 32, 64), (40, 80, 3), None)
    assert img[:, 16, 32].tolist() == [30, 20, 10], "planes are RGB"
    assert original[0, 0].tolist() == [10, 20, 30]


def test_pattern_and_single_file(folder):
    assert [path for path, *_ in LoadImages(str(folder / "b*.png"))] == [str(folder / "b.png")]
    assert [path for path, *_ in LoadImages(str(folder / "a.png"))] == [str(folder / "a.png")]


def test_patterns_without_a_star(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    for pattern in (folder / "?.png", folder / "[ab].png", "~/[!c].png", "~"):
        found = [path for path, *_ in LoadImages(str(pattern)) if path.endswith("png")]
        assert found == [str(folder / name) for name in ("a.png", "b.png")]
    inside = folder / "odd[1]?"
    inside.mkdir()
    (folder / "b.png").rename(inside / "[b].png")
    for exact in (inside, inside / "[b].png", inside / "*.png"):
        assert [path for path, *_ in LoadImages(str(exact))] == [str(inside / "[b].png")]


def test_nothing_to_read_is_named(folder):
    with pytest.raises(ValueError, match="nowhere.png: does not exist"):
        LoadImages(str(folder / "nowhere.png"))
    with pytest.raises(ValueError, match="no images"):
        LoadImages(str(folder / "notes.txt"))


def test_frames_of_a_video_come_after_the_images(folder, caplog):
    path = folder / "a.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10, (64, 32))
    if not writer.isOpened():
        pytest.skip("this OpenCV cannot write videos")
    for level in (0, 100, 200):
        writer.write(np.full((32, 64, 3), level, np.uint8))
    writer.release()
    (folder / "broken.mp4").write_bytes(b"no video")
    source = LoadImages(str(folder), img_size=64)
    frames = [(source.mode, source.frame, source.nframes, original.mean()) for *_, original, _ in source]
    assert [mode for mode, *_ in frames] == ["image", "image", "video", "video", "video"]
    assert [frame[1:3] for frame in frames[2:]] == [(1, 3), (2, 3), (3, 3)]
    np.testing.assert_allclose([frame[3] for frame in frames[2:]], [0, 100, 200], atol=4)
    assert "broken.mp4 is not a readable video" in caplog.text
