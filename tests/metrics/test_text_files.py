"""Detections as text files, by hand."""

import pytest
import torch

from utils.metrics.text_files import TextFiles

# 100 wide, 50 high: a box of 20 x 10 around (30, 25), and the whole image
DETECTIONS = torch.tensor([[20.0, 20.0, 40.0, 30.0, 0.9, 3.0], [0.0, 0.0, 100.0, 50.0, 0.125, 0.0]])


def test_rows_are_normalised_by_the_image(tmp_path):
    files = TextFiles(tmp_path / "run" / "labels", ["images/some.image.jpg"])
    files.add("images/some.image.jpg", DETECTIONS, (50, 100))
    assert [path.name for path in files.folder.iterdir()] == ["some.image.txt"]
    assert (files.folder / "some.image.txt").read_text() == "3 0.3 0.5 0.2 0.2\n0 0.5 0.5 1 1\n"


def test_confidence_is_the_last_column(tmp_path):
    TextFiles(tmp_path, ["a.jpg"], with_confidence=True).add("a.jpg", DETECTIONS, (50, 100))
    assert (tmp_path / "a.txt").read_text() == "3 0.3 0.5 0.2 0.2 0.9\n0 0.5 0.5 1 1 0.125\n"


def test_detections_are_not_changed_and_may_be_half(tmp_path):
    detections = DETECTIONS.clone()
    files = TextFiles(tmp_path, ["a.jpg", "b.jpg"])
    files.add("a.jpg", detections, (50, 100))
    assert torch.equal(detections, DETECTIONS)
    files.add("b.jpg", detections[1:].half(), (50, 100))
    assert (tmp_path / "b.txt").read_text() == "0 0.5 0.5 1 1\n"


def test_image_without_detections(tmp_path):
    TextFiles(tmp_path, ["a.jpg"]).add("a.jpg", torch.zeros(0, 6), (50, 100))
    assert (tmp_path / "a.txt").read_text() == ""


def test_a_second_test_replaces_the_first(tmp_path, caplog):
    for detections in (DETECTIONS, DETECTIONS[1:]):
        TextFiles(tmp_path, ["a.jpg"]).add("a.jpg", detections, (50, 100))
    assert (tmp_path / "a.txt").read_text() == "0 0.5 0.5 1 1\n"
    assert caplog.text.count("text files of an earlier test") == 1


@pytest.mark.parametrize(
    ("images", "texts"),
    [
        (("x/clipA/00.jpg", "x/clipB/00.jpg"), {"clipA/00.txt", "clipB/00.txt"}),
        (("x/a.jpg", "x/a.png"), {"a.jpg.txt", "a.png.txt"}),
        (("x/a.jpg", "y/a.png", "y/b.c.png"), {"x/a.txt", "y/a.txt", "y/b.c.txt"}),
        (("x/A.jpg", "y/a.jpg"), {"x/A.txt", "y/a.txt"}),
        (("x/A.jpg", "x/a.jpg"), {"A.txt", "a.txt"}),
        (("x/a.jpg", "x/./a.jpg"), {"a.txt"}),
        (("x/000123.jpg", "x/123.jpg"), {"000123.txt", "123.txt"}),
    ],
)
def test_each_image_has_a_file_of_its_own(tmp_path, images, texts):
    files = TextFiles(tmp_path / "labels", images)
    for path in images:
        files.add(path, DETECTIONS, (50, 100))
    written = [file for file in (tmp_path / "labels").rglob("*") if file.is_file()]
    assert {file.relative_to(tmp_path / "labels").as_posix() for file in written} == texts
    assert all(len(file.read_text().splitlines()) == 2 for file in written)


def test_a_test_that_is_interrupted_leaves_no_half_file(tmp_path):
    files = TextFiles(tmp_path, ["a.jpg"])
    with pytest.raises(ValueError, match="too many values"):
        files.add("a.jpg", DETECTIONS, (50, 100, 3))
    broken = DETECTIONS.clone()
    broken.tolist = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        files.add("a.jpg", broken, (50, 100))
    assert not list(tmp_path.iterdir())


def test_labels_of_the_data_set_are_not_written_over(tmp_path):
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text("0 0.5 0.5 1 1\n")
    with pytest.raises(ValueError, match="choose another --project or --name"):
        TextFiles(tmp_path / "labels", ["images/a.jpg"], label_files=[str(tmp_path / "labels" / "a.txt")])
