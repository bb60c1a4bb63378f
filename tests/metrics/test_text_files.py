"""Detections as text files, by hand."""

import torch

from utils.metrics.text_files import TextFiles

# 100 wide, 50 high: a box of 20 x 10 around (30, 25), and the whole image
DETECTIONS = torch.tensor([[20.0, 20.0, 40.0, 30.0, 0.9, 3.0], [0.0, 0.0, 100.0, 50.0, 0.125, 0.0]])


def test_rows_are_normalised_by_the_image(tmp_path):
    files = TextFiles(tmp_path / "run" / "labels")
    files.add("images/some.image.jpg", DETECTIONS, (50, 100))
    assert [path.name for path in files.folder.iterdir()] == ["some.image.txt"]
    assert (files.folder / "some.image.txt").read_text() == "3 0.3 0.5 0.2 0.2\n0 0.5 0.5 1 1\n"


def test_confidence_is_the_last_column(tmp_path):
    TextFiles(tmp_path, with_confidence=True).add("a.jpg", DETECTIONS, (50, 100))
    assert (tmp_path / "a.txt").read_text() == "3 0.3 0.5 0.2 0.2 0.9\n0 0.5 0.5 1 1 0.125\n"


def test_detections_are_not_changed_and_may_be_half(tmp_path):
    detections = DETECTIONS.clone()
    files = TextFiles(tmp_path)
    files.add("a.jpg", detections, (50, 100))
    assert torch.equal(detections, DETECTIONS)
    files.add("b.jpg", detections[1:].half(), (50, 100))
    assert (tmp_path / "b.txt").read_text() == "0 0.5 0.5 1 1\n"


def test_image_without_detections(tmp_path):
    TextFiles(tmp_path).add("a.jpg", torch.zeros(0, 6), (50, 100))
    assert (tmp_path / "a.txt").read_text() == ""


def test_a_second_call_appends(tmp_path):
    files = TextFiles(tmp_path)
    files.add("a.jpg", DETECTIONS[:1], (50, 100))
    files.add("a.jpg", DETECTIONS[1:], (50, 100))
    assert len((tmp_path / "a.txt").read_text().splitlines()) == 2
