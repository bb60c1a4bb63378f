"""A small data set of a COCO download: files, counts, interruption, what is said of faults."""

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest

from tests import small_run
from tools import make_coco320 as tool
from utils.config.data_yaml import load_data_yaml
from utils.data.labels.scan import scan_dataset
from utils.metrics import coco as scores

SIZES = [(90, 60), (60, 90), (40, 30), (90, 90)]  # width, height; the third is enlarged
CATEGORIES = [{"id": 9, "name": "green"}, {"id": 3, "name": "red"}]


@pytest.fixture
def coco(tmp_path):
    """Two splits; ids that are no class ids; one object of two parts, one crowd, one image without objects."""
    rng = np.random.default_rng(0)
    (tmp_path / "coco" / "annotations").mkdir(parents=True)
    for split in ("train2017", "val2017"):
        (tmp_path / "coco" / split).mkdir()
        images, annotations = [], []
        for number, (w, h) in enumerate(SIZES):
            name = f"{number:012d}.jpg"
            cv2.imwrite(str(tmp_path / "coco" / split / name), rng.integers(0, 255, (h, w, 3), dtype=np.uint8))
            images.append({"id": 50 + number, "file_name": name, "width": w, "height": h})
            parts = [[2, 2, 12, 2, 12, 12, 2, 12], [20, 2, 26, 2, 26, 8]][: number + 1]
            box = [2, 2, 10, 10] if number == 0 else [2, 2, 24, 10]
            annotations.append({"id": number, "image_id": 50 + number, "category_id": (3, 9)[number % 2], "bbox": box,
                                "area": 100, "iscrowd": int(number == 3), "segmentation": parts})  # fmt: skip
        content = {"images": images, "annotations": annotations, "categories": CATEGORIES}
        (tmp_path / "coco" / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return tmp_path / "coco"


@pytest.fixture
def here(monkeypatch):
    """No processes: threads are enough for eight images."""
    monkeypatch.setattr(tool, "forked_pool", lambda count, enter: ThreadPoolExecutor(count))


def make(coco, *flags, out="small"):
    out = coco.parent / out
    tool.main(tool.parser().parse_args(["--coco", str(coco), "--size", "64", "--out", str(out), *flags]))
    return out


def digest(folder):
    return {path: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def test_the_data_set_of_a_download(coco, capsys):
    before = digest(coco)
    out = make(coco, "--workers", "2")
    assert digest(coco) == before
    said, bars = capsys.readouterr()
    assert "train2017: 4 images (0 were there), 3 objects of 4 annotations; left out: 1 crowd" in " ".join(said.split())
    assert f"{out} is complete. Train with --data {out}/data.yaml --img 64" in said and bars == "", "no terminal"
    for (w, h), path in zip(SIZES, sorted((out / "images" / "train2017").iterdir()), strict=True):
        height, width = cv2.imread(str(path)).shape[:2]
        assert max(width, height) == 64 and width / height == pytest.approx(w / h, abs=0.02)
    data = load_data_yaml(out / "data.yaml")
    assert data.names == ["red", "green"], "in the order of their ids"
    for listed in (data.train, out / "train2017.txt"):
        scanned = scan_dataset(listed)
        assert [rows[:, 0].tolist() for rows in scanned.labels] == [[0], [1], [0], []] and not scanned.findings
    assert scanned.labels[0][0, 1:].tolist() == pytest.approx([7 / 90, 7 / 60, 10 / 90, 10 / 60], abs=1e-6)
    assert len(scanned.segments[1][0]) == 4 + 3 + 2, "two parts, joined"


def test_the_official_score_has_the_new_pixels(coco, here):
    out = make(coco)
    data = load_data_yaml(out / "data.yaml")
    files = sorted(map(str, (out / "images" / "val2017").iterdir()))
    results = scores.open_results(data, "val", data.names, files)
    box = np.array([2, 2, 12, 12]) * 64 / 90
    results.add(files[0], np.array([[*box, 0.9, 0]]), cv2.imread(files[0]).shape[:2])
    assert not results.problem
    assert results.score().ap75 == pytest.approx(51 / 101 / 2), "one of two red objects, none of the green one"


def test_an_interrupted_run_goes_on(coco, here, monkeypatch, capsys):
    resized, calls = tool.resized_file, []

    def interrupted(source, *others):
        calls.append(source)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return resized(source, *others)

    monkeypatch.setattr(tool, "resized_file", interrupted)
    with pytest.raises(SystemExit, match="130"):
        tool.entry.run(lambda _: make(coco), None, tool.GO_ON)
    assert capsys.readouterr().err.endswith("interrupted; the same command goes on, finished images stay\n")
    first = digest(coco.parent / "small" / "images")
    (next(iter(first)).parent / ".a.jpg.0123456789ab.tmp").write_text("of a process that was killed")
    calls = [None] * 9
    out = make(coco)
    assert len(calls) == 9 + 8 - len(first) and first.items() <= digest(out / "images").items()
    assert len(first) in (3, 4) and not list(out.rglob("*.tmp"))
    make(coco)
    assert len(calls) == 9 + 8 - len(first), "a finished one is left alone"


@pytest.mark.parametrize("columns", [80, 120])
def test_the_help_fits_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = tool.parser().format_help().splitlines()
    assert max(map(len, lines)) < columns
    start = lines.index("    python tools/make_coco320.py --coco DIR --size 320 \\")
    assert lines[start + 1] == "        [--out coco320] [--fit longer]"


@pytest.mark.parametrize("fit", ["stretch", "pad"])
def test_other_fits(coco, here, fit, capsys):
    out = make(coco, "--fit", fit, "--splits", "val2017")
    assert {cv2.imread(str(path)).shape for path in (out / "images" / "val2017").iterdir()} == {(64, 64, 3)}
    assert ("NOT those of stock" in " ".join(capsys.readouterr().out.split())) == (fit == "pad")
    with pytest.raises(ValueError, match="small was made with .*name another folder"):
        make(coco)


def test_a_training_on_it(coco, here):
    out = make(coco)
    cfg = small_run.arguments(out)
    run = small_run.run_line([*cfg, "--epochs", "1", "--batch-size", "2"])
    assert (run / "results.txt").read_text().count("\n") == 1


def damage(path, text):
    path.write_bytes(text)


def edit(coco, change):
    path = coco / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (lambda c: (c / "train2017" / "000000000001.jpg").unlink(), "lacks 1 of the 4 images .*unpack train2017.zip"),
        (lambda c: (c / "train2017").rename(c / "other"), "has no images: neither .*train2017 nor"),
        (lambda c: (c / "annotations").rename(c / "notes"), "instances_NAME.json does not exist: unpack"),
        (lambda c: damage(c / "annotations" / "instances_train2017.json", b"{"), "train2017.json is no usable"),
        (lambda c: damage(c / "train2017" / "000000000001.jpg", b"<html>"), "1 image could not be .*not an image"),
        (lambda c: cv2.imwrite(str(c / "train2017" / "000000000001.jpg"), np.zeros((50, 50, 3))), "50 x 50 .*the json"),
        (lambda c: edit(c, lambda j: j["images"][0].pop("width")), r"images\[0\] has no width"),
        (lambda c: edit(c, lambda j: j["images"][0].update(width="90")), r"images\[0\] has no width .*but '90' and 60"),
        (lambda c: edit(c, lambda j: j["images"][0].update(width=1e300)), r"images\[0\] has no width .*but 1e\+300"),
        (lambda c: edit(c, lambda j: j["images"][0].update(width=90.5)), r"images\[0\] has no width .*but 90.5 and 60"),
        (lambda c: edit(c, lambda j: j.update(images=[], annotations=[])), "train2017.json lists no images; leave it"),
        (lambda c: edit(c, lambda j: j["images"][0].update(file_name="../a.jpg")), "leads out of the folder"),
        (lambda c: edit(c, lambda j: j["images"][0].update(file_name="000000000001.png")), "share its label file"),
        (lambda c: edit(c, lambda j: j["annotations"][0].update(category_id=77)), "77, which is none of the"),
        (lambda c: edit(c, lambda j: j["annotations"][0].update(image_id=77)), "does not list.*77"),
        (lambda c: edit(c, lambda j: j["annotations"][0].update(segmentation=[[1]])), "annotation 0 is no list"),
        (lambda c: edit(c, lambda j: j["categories"].pop()), "none of the categories|other categories"),
    ],
)  # fmt: skip
def test_a_fault_is_one_sentence(coco, here, fault, sentence):
    fault(coco)
    with pytest.raises(ValueError, match=sentence):
        make(coco)


@pytest.mark.parametrize("way", ["{}", "./{}", "train2017/{}", "images/train2017/{}", "train2017\\{}", ".\\{}"])
def test_where_the_json_says_that_an_image_lies(coco, here, way):
    edit(coco, lambda j: [image.update(file_name=way.format(image["file_name"])) for image in j["images"]])
    edit(
        coco, lambda j: [image.update(width=float(image["width"]), height=image["height"] / 1) for image in j["images"]]
    )
    out = make(coco)
    images = sorted((out / "images" / "train2017").iterdir())
    assert [image.name for image in images] == [f"{number:012d}.jpg" for number in range(4)]
    content = scores.read_annotations(out / "annotations" / "instances_train2017.json")
    assert [image["file_name"] for image in content["images"]] == [image.name for image in images]
    sizes = [cv2.imread(str(image)).shape[1::-1] for image in images]
    assert [(image["width"], image["height"]) for image in content["images"]] == sizes


def test_splits_of_other_names_are_said(coco, here, capsys):
    for old, new in (("val2017", "default"), ("train2017", "train2014")):
        shutil.copytree(coco / old, coco / new)
        shutil.copy(coco / "annotations" / f"instances_{old}.json", coco / "annotations" / f"instances_{new}.json")
    make(coco)
    assert "Its data.yaml does not use images/default, images/train2014: write there" in capsys.readouterr().out
    make(coco, "--splits", "default", out="other")
    said = "Its data.yaml has no train and no val, and does not use images/default: write there"
    assert said in capsys.readouterr().out
    make(coco, "--splits", "train2017", out="third")
    assert "Its data.yaml has no val: write there" in capsys.readouterr().out


def test_a_damaged_image_leaves_the_others(coco, here):
    path = coco / "train2017" / "000000000001.jpg"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="000000000001.jpg: truncated"):
        make(coco)
    out = coco.parent / "small"
    assert (out / "train2017.txt").read_text().count("jpg") == 3 and (out / "data.yaml").is_file()
    path.write_bytes(whole)
    assert (make(coco) / "train2017.txt").read_text().count("jpg") == 4


def test_folders_that_are_refused(coco, here):
    for out in (coco, coco / "inside", coco.parent):
        with pytest.raises(ValueError, match="are one in the other|was not made by this tool"):
            make(coco, out=str(out))
    (coco.parent / "photos").mkdir()
    (coco.parent / "photos" / "mine.jpg").write_text("")
    with pytest.raises(ValueError, match="was not made by this tool"):
        make(coco, out="photos")
    out = make(coco)
    (out / "images" / "train2017" / "mine.jpg").write_text("")
    with pytest.raises(ValueError, match="has 5 files for 4 images; not of the json: .*mine.jpg"):
        make(coco)
