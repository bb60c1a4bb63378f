"""test.py: scores agree with training's own validation, files, tasks, and what it refuses."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

import test as program
from tests import small_run
from utils.config.options import test_parser as build_parser
from utils.plots.run import read_results


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run folder of a short training; its data lies two folders up."""
    folder = tmp_path_factory.mktemp("trained")
    return small_run.run(folder, "--epochs", "3", hyp={"warmup_min_iters": 1000, "lr0": 0.1}, num_images=6, num_empty=1)


def score(trained, tmp_path, *flags, pictures=False):
    """Run the program; returns its output folder."""
    data = trained.parent.parent / "data.yaml"
    weights = trained / "weights" / "last.pt"
    line = ["--weights", str(weights), "--data", str(data), "--img", "64", "--batch-size", "6", "--device", "cpu",
            "--project", str(tmp_path), "--name", "out", *flags]  # fmt: skip
    with small_run.drawing(pictures):
        program.main(build_parser().parse_args(line))
    return tmp_path / "out"


def test_repeats_the_last_validation(trained, tmp_path, monkeypatch):
    found = []
    original = program.evaluate
    monkeypatch.setattr(program, "evaluate", lambda *a, **kw: found.append(original(*a, **kw)) or found[-1])
    score(trained, tmp_path, "--iou", "0.6")
    last = read_results(trained / "results.txt")[-1]
    # the stored weights are rounded to half precision, and the model is fused
    np.testing.assert_allclose(found[0].results[:4], last[8:12], rtol=0.05, atol=2e-3)


def test_files_of_detections(trained, tmp_path):
    folder = score(trained, tmp_path, "--save-txt", "--save-conf", "--save-json", "--save-per-class-ap",
                   str(tmp_path / "new" / "ap.json"), "--conf", "0.0001", "--verbose", pictures=True)  # fmt: skip
    texts = sorted((folder / "labels").iterdir())
    assert [path.stem for path in texts] == [f"{i:02d}" for i in range(6)]
    rows = np.loadtxt(texts[0], ndmin=2)
    assert rows.shape[1] == 6 and set(rows[:, 0]) <= {0, 1} and (rows[:, 1:] >= 0).all() and (rows[:, 1:] <= 1).all()
    detections = json.loads((folder / "last_predictions.json").read_text())
    assert set(detections[0]) == {"image_id", "category_id", "bbox", "score"}
    assert sum(len(path.read_text().splitlines()) for path in texts) == len(detections)
    assert set(json.loads((tmp_path / "new" / "ap.json").read_text())) == {"map50", "map", "per_class"}
    assert (folder / "confusion_matrix.png").exists() and (folder / "test_batch0_pred.jpg").exists()


def test_hybrid_labels_are_found(trained, tmp_path, caplog):
    caplog.set_level("INFO")
    score(trained, tmp_path, "--save-hybrid")
    row = next(line for line in caplog.messages if line.split()[0] == "all")
    assert float(row.split()[5]) > 0.9, "the labels themselves compete as certain detections"


def test_study_writes_the_size_of_each_row(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "range", lambda *a: [32, 64], raising=False)
    folder = score(trained, tmp_path, "--task", "study")
    rows = np.loadtxt(folder / "study_data_last.txt")
    assert rows.shape == (2, 13) and rows[:, 10:].tolist() == [[32, 32, 6], [64, 64, 6]]
    assert (folder / "study.png").exists()


@pytest.mark.parametrize("flags", [("--task", "speed"), ("--task", "train"), ("--augment",), ("--single-cls",)])
def test_other_ways_to_score(trained, tmp_path, flags):
    assert score(trained, tmp_path, *flags).is_dir()


def test_several_weights_form_an_ensemble(trained, tmp_path):
    weights = [str(trained / "weights" / name) for name in ("last.pt", "best.pt")]
    assert score(trained, tmp_path, "--weights", *weights).is_dir()


def test_images_of_equal_names(trained, tmp_path, caplog):
    """Two folders with equal stems: a text file each, an id each in the json."""
    for clip in ("clipA", "clipB"):
        (tmp_path / "images" / clip).mkdir(parents=True)
        for name in ("00.png", "01.png"):
            cv2.imwrite(str(tmp_path / "images" / clip / name), np.full((48, 64, 3), 9, np.uint8))
    data = tmp_path / "clips.yaml"
    data.write_text(f"val: {tmp_path / 'images'}\nnames: [dog, dog]\n")
    caplog.set_level("INFO")
    folder = score(trained, tmp_path, "--data", str(data), "--save-txt", "--save-json", "--conf", "0.0")
    texts = {path.relative_to(folder / "labels").as_posix() for path in (folder / "labels").rglob("*.txt")}
    assert texts == {"clipA/00.txt", "clipA/01.txt", "clipB/00.txt", "clipB/01.txt"}
    rows = json.loads((folder / "last_predictions.json").read_text())
    assert {row["image_id"] for row in rows} == {name.removesuffix(".txt") for name in texts}


def test_thresholds_are_said(trained, tmp_path, caplog):
    caplog.set_level("INFO")
    score(trained, tmp_path)
    line = "NMS: --iou-thres 0.65, --conf-thres 0.001 (validation of a training: 0.6, 0.001)"
    assert caplog.messages.count(line) == 1


def test_tasks_that_score_many_times_write_no_files(trained, tmp_path, caplog):
    folder = score(trained, tmp_path, "--task", "speed", "--save-txt", "--save-per-class-ap", str(tmp_path / "ap.json"))
    assert not (folder / "labels").exists() and not (tmp_path / "ap.json").exists()
    assert "--save-txt has no effect with --task speed" in caplog.text


def test_a_broken_annotation_file_keeps_our_own_score(trained, tmp_path, caplog):
    """End to end: one warning that names entry and key, the result file, and no traceback."""
    (tmp_path / "val.json").write_text('{"images": [], "categories": [], "annotations": [{"image_id": 1}]}')
    data = tmp_path / "data.yaml"
    images = trained.parent.parent / "images" / "val"
    data.write_text(f"val: {images}\nannotations: {tmp_path / 'val.json'}\nnames: [red, green]\n")
    folder = score(trained, tmp_path, "--data", str(data), "--save-json", "--conf", "0.0001")
    assert "annotations[0] has no category_id" in caplog.text and (folder / "last_predictions.json").is_file()


def test_class_ap_of_any_name_is_written_twice(trained, tmp_path):
    """With a list of annotation files too, which are none."""
    data = tmp_path / "data.yaml"
    images = trained.parent.parent / "images" / "val"
    data.write_text(f"val: {images}\nannotations: [a.json, b.json]\nnames: [red, green]\n")
    file = tmp_path / "ap.txt"
    for _ in range(2):
        score(trained, tmp_path, "--data", str(data), "--save-per-class-ap", str(file), "--exist-ok")
    assert file.read_text().startswith('{\n "map50"')


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--img", "0"), "--img-size 0"),
        (("--batch-size", "0"), "--batch-size 0"),
        (("--conf", "2"), "--conf-thres 2.0"),
        (("--task", "test"), "test"),
        (("--weights", "missing.pt"), "missing.pt"),
        (("--save-per-class-ap", __file__ + "/ap.json"), "is a file.*choose another --save-per-class-ap"),
        (("--save-per-class-ap", __file__), "test_test.py is no .json file and would be lost"),
        (("--save-per-class-ap", str(Path(__file__).parent)), "is a folder; give the name of a file"),
    ],
)
def test_refused_input(trained, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        score(trained, tmp_path, *flags)


def test_another_number_of_classes_is_refused(trained, tmp_path):
    image = tmp_path / "images" / "a.png"
    image.parent.mkdir()
    cv2.imwrite(str(image), np.zeros((64, 64, 3), np.uint8))
    other = tmp_path / "three.yaml"
    other.write_text(f"val: {image.parent}\nnames: [a, b, c]\n")
    with pytest.raises(ValueError, match=r"last\.pt detects 2 classes, but .*three\.yaml has 3"):
        score(trained, tmp_path, "--data", str(other))
