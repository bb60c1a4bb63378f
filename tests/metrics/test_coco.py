"""The COCO result file: numbers for images and classes, and the official score of hand-made detections."""

import json
import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from utils.metrics import coco

NAMES = ["cat", "dog"]


def annotation_file(folder, file_names=("a.jpg", "b.jpg", "c.jpg"), categories=((1, "cat"), (7, "dog")), first_id=0):
    """Two objects on the first image, one on the second, none on the third; no area and no iscrowd."""
    images = [{"id": 10 + i, "file_name": name, "width": 100, "height": 100} for i, name in enumerate(file_names)]
    boxes = [(10, 1, [10, 10, 40, 40]), (10, 7, [60, 60, 20, 30]), (11, 7, [0, 0, 50, 50])]
    annotations = [
        {"id": first_id + i, "image_id": image, "category_id": category, "bbox": box}
        for i, (image, category, box) in enumerate(boxes)
    ]
    content = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": number, "name": name} for number, name in categories],
    }
    path = folder / "annotations" / "instances_val.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def data_in(folder, annotations=None, is_coco=False):
    return SimpleNamespace(val=str(folder / "images" / "val"), test=None, annotations=annotations, is_coco=is_coco)


def files_in(folder, names=("a.jpg", "b.jpg", "c.jpg")):
    return [str(folder / "images" / "val" / name) for name in names]


def rows(*values):
    return torch.tensor(values, dtype=torch.float32).reshape(-1, 6)


PERFECT = {
    "a.jpg": rows([10, 10, 50, 50, 0.9, 0], [60, 60, 80, 90, 0.8, 1]),
    "b.jpg": rows([0, 0, 50, 50, 0.7, 1]),
    "c.jpg": rows(),
}


def collect(results, folder, detections=PERFECT):
    for name, found in detections.items():
        results.add(folder / "images" / "val" / name, found)
    return results


def test_category_numbers_of_coco():
    assert len(coco.COCO_CATEGORY_IDS) == 80
    assert coco.COCO_CATEGORY_IDS[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13]
    assert coco.COCO_CATEGORY_IDS[-1] == 90


def test_rows_have_corner_size_and_rounded_numbers():
    found = rows([1.23456, 2, 11.23456, 22.00049, 0.123456789, 1])
    (row,) = coco.detection_rows(found, 42, [1, 7])
    assert row == {"image_id": 42, "category_id": 7, "bbox": [1.235, 2, 10, 20], "score": 0.12346}
    assert coco.detection_rows(rows(), 42, [1, 7]) == []


def test_perfect_detections_score_one(tmp_path):
    annotation_file(tmp_path)
    results = collect(coco.open_results(data_in(tmp_path), "val", NAMES, files_in(tmp_path)), tmp_path)
    before = [dict(row) for row in results.rows]
    scores = results.score()
    assert scores.ap == pytest.approx(1)
    assert scores.ar100 == pytest.approx(1)
    assert scores.ap_small == pytest.approx(1)  # one box of 20 x 30
    assert np.isnan(scores.ap_large)  # there is none
    assert results.rows == before  # the scorers add keys to what they are given
    results.write(tmp_path / "best_predictions.json")
    assert json.loads((tmp_path / "best_predictions.json").read_text()) == before
    assert {row["image_id"] for row in before} == {10, 11}
    assert {row["category_id"] for row in before} == {1, 7}


def test_one_object_of_two_is_found(tmp_path):
    """Class dog has two objects on two images; only the first detection is right, so AP50 is the area up to 1/2."""
    annotation_file(tmp_path)
    results = coco.open_results(data_in(tmp_path), "val", NAMES, files_in(tmp_path))
    scores = collect(results, tmp_path, PERFECT | {"b.jpg": rows([60, 60, 90, 90, 0.7, 1])}).score()
    assert scores.ap50 == pytest.approx((1 + 51 / 101) / 2)


def test_only_the_images_that_were_evaluated_count(tmp_path):
    annotation_file(tmp_path)
    only = files_in(tmp_path, ["a.jpg"])
    results = coco.open_results(data_in(tmp_path), "val", NAMES, only)
    assert collect(results, tmp_path, {"a.jpg": PERFECT["a.jpg"]}).score().ap == pytest.approx(1)


def test_images_that_the_annotations_do_not_name_are_left_out(tmp_path, caplog):
    annotation_file(tmp_path)
    files = files_in(tmp_path, ["a.jpg", "b.jpg", "stranger.jpg"])
    results = coco.open_results(data_in(tmp_path), "val", NAMES, files)
    assert "does not name 1 of the 3 images" in caplog.text
    collect(results, tmp_path, PERFECT | {"stranger.jpg": PERFECT["a.jpg"]})
    assert len(results.rows) == 3
    assert results.score().ap == pytest.approx(1)


def test_stock_numbers_without_annotations(tmp_path, caplog):
    files = files_in(tmp_path, ["000000000139.jpg", "street.jpg"])
    for is_coco, categories in ((True, [1, 90]), (False, [0, 79])):
        names = [str(i) for i in range(80)]
        results = coco.open_results(data_in(tmp_path, is_coco=is_coco), "val", names, files)
        results.add(files[0], rows([0, 0, 1, 1, 0.5, 0]))
        results.add(files[1], rows([0, 0, 1, 1, 0.5, 79]))
        assert [row["image_id"] for row in results.rows] == [139, "street"]
        assert [row["category_id"] for row in results.rows] == categories
        assert results.score() is None
    assert str(tmp_path / "annotations" / "instances_val2017.json") in caplog.text


def test_places_of_the_annotations(tmp_path):
    named = tmp_path / "somewhere.json"
    found, places = coco.find_annotations("d/images/val", "val", named)
    assert (found, places) == (None, [named])
    path = annotation_file(tmp_path)
    assert coco.find_annotations(str(tmp_path / "images" / "val"))[0] == path  # the folders need not exist
    assert coco.find_annotations(["nowhere", str(tmp_path / "val.txt")])[0] == path
    assert coco.find_annotations(str(tmp_path / "images" / "val"), "test")[0] is None
    newer = path.with_name("instances_val2017.json")
    newer.write_text(path.read_text())
    assert coco.find_annotations(str(tmp_path / "images" / "val"))[0] == newer


def categories(*names):
    return [{"id": 5 * (i + 1), "name": name} for i, name in enumerate(names)]


def test_categories_by_name_whatever_their_order():
    assert coco.match_categories(["a", "B"], categories("all", "b", "A "), "file") == [15, 10]


def test_categories_by_place_when_no_name_objects(caplog):
    assert coco.match_categories(["tv", "sofa"], categories("tvmonitor", "sofa")[::-1], "file") == [5, 10]
    assert "matched by their order" in caplog.text


@pytest.mark.parametrize("known", [("sofa", "couch"), ("tv",), ("x", "y", "z")])
def test_categories_that_do_not_fit(known):
    with pytest.raises(ValueError, match="are not the 2 classes"):
        coco.match_categories(["tv", "sofa"], categories(*known), "file")


def test_broken_annotations_cost_the_score_but_not_the_rows(tmp_path, caplog):
    annotation_file(tmp_path).write_text("{")
    results = collect(coco.open_results(data_in(tmp_path), "val", NAMES, files_in(tmp_path)), tmp_path)
    assert "instances_val.json" in caplog.text
    assert [row["image_id"] for row in results.rows] == ["a", "a", "b"]
    with pytest.raises(ValueError, match=r"instances_val\.json"):
        results.score()


def test_nothing_detected_and_no_library(tmp_path, monkeypatch):
    annotation_file(tmp_path)
    results = coco.open_results(data_in(tmp_path), "val", NAMES, files_in(tmp_path))
    with pytest.raises(ValueError, match="no detection"):
        results.score()
    for module in ("faster_coco_eval", "pycocotools.coco", "pycocotools.cocoeval"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match="pip install"):
        collect(results, tmp_path).score()


def test_the_scorer_is_quiet_and_one_line_is_logged(tmp_path, capsys, caplog):
    annotation_file(tmp_path)
    results = collect(coco.open_results(data_in(tmp_path), "val", NAMES, files_in(tmp_path)), tmp_path)
    with caplog.at_level(logging.INFO):
        results.score()
    assert capsys.readouterr().out == ""
    assert "ap50 1.000" in caplog.text and "ap_large none" in caplog.text and "-1.0" not in caplog.text
