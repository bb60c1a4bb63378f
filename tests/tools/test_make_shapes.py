"""The embedded data set: deterministic, labels that fit the images, and manners towards other people's folders."""

import json
import subprocess
import sys

import cv2
import numpy as np
import pytest

from tools import make_shapes as shapes
from utils.system import folder_lock
from utils.system.files import PROJECT_ROOT

SMALL = {"train": 12, "val": 5, "size": 96}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "shapes"
    assert shapes.make_shapes(folder, **SMALL)
    return folder


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_seed_gives_the_same_files(made, tmp_path):
    shapes.make_shapes(tmp_path / "again", **SMALL)
    assert contents(tmp_path / "again") == contents(made)


def test_another_seed_gives_other_images(made, tmp_path):
    shapes.make_shapes(tmp_path / "other", **SMALL, seed=1)
    name = "images/train/000001.jpg"
    assert (tmp_path / "other" / name).read_bytes() != (made / name).read_bytes()


def test_an_image_does_not_depend_on_how_many_are_drawn(made, tmp_path):
    shapes.make_shapes(tmp_path / "fewer", train=3, val=1, size=SMALL["size"])
    fewer, all_files = contents(tmp_path / "fewer"), contents(made)
    shared = [name for name in fewer if name.startswith(("images", "labels"))]
    assert len(shared) == 8
    assert all(fewer[name] == all_files[name] for name in shared)


def test_every_image_has_a_label_file_and_the_wanted_size(made):
    for split, count in (("train", 12), ("val", 5)):
        images = sorted((made / "images" / split).iterdir())
        labels = sorted((made / "labels" / split).iterdir())
        assert [image.stem for image in images] == [label.stem for label in labels] == [
            f"{k + 1:06d}" for k in range(count)
        ]  # fmt: skip
        assert all(max(cv2.imread(str(image)).shape[:2]) == SMALL["size"] for image in images)


def test_box_rows_are_the_bounds_of_the_polygon_rows(made, tmp_path):
    shapes.make_shapes(tmp_path / "boxes", **SMALL, boxes=True)
    num_rows = 0
    for file in sorted((made / "labels" / "train").iterdir()):
        polygons = [np.array(line.split(), float) for line in file.read_text().splitlines()]
        rows = np.loadtxt(tmp_path / "boxes" / "labels" / "train" / file.name, ndmin=2) if polygons else []
        for row, polygon in zip(rows, polygons, strict=True):
            points = polygon[1:].reshape(-1, 2)
            assert row[0] == polygon[0] < len(shapes.NAMES)
            np.testing.assert_allclose(row[1:3], (points.min(0) + points.max(0)) / 2, atol=2e-6)
            np.testing.assert_allclose(row[3:5], np.ptp(points, axis=0), atol=2e-6)
            assert points.min() >= 0 and points.max() <= 1
            num_rows += 1
    assert num_rows > 12


def test_coco_json_agrees_with_the_label_files(made):
    coco = json.loads((made / "annotations" / "instances_val.json").read_text())
    assert [category["name"] for category in coco["categories"]] == list(shapes.NAMES)
    assert len(coco["images"]) == 5
    for image in coco["images"]:
        rows = (made / "labels" / "val" / image["file_name"]).with_suffix(".txt").read_text().splitlines()
        annotations = [a for a in coco["annotations"] if a["image_id"] == image["id"]]
        assert image["id"] == int(image["file_name"].split(".")[0])
        for row, annotation in zip(rows, annotations, strict=True):
            numbers = np.array(row.split(), float)
            points = numbers[1:].reshape(-1, 2) * (image["width"], image["height"])
            assert annotation["category_id"] == numbers[0]
            np.testing.assert_allclose(np.reshape(annotation["segmentation"][0], (-1, 2)), points, atol=2e-3)
            box = [*points.min(0), *np.ptp(points, axis=0)]
            np.testing.assert_allclose(annotation["bbox"], box, atol=2e-3)
            assert 0 < annotation["area"] <= box[2] * box[3]


def test_area_of_a_square_by_hand():
    thing = shapes.Thing(0, np.array([(10.0, 10), (30, 10), (30, 30), (10, 30)]))
    assert thing.area() == 400
    assert thing.box_xyxy() == (10, 10, 30, 30)
    mask = thing.mask(40, 40)[..., 0]
    assert mask[20, 20] == 1 and mask[5, 5] == 0 and mask.sum() == pytest.approx(400, rel=0.03)


def test_outlines_fit_the_unit_circle():
    for outline in shapes.OUTLINES.values():
        assert np.linalg.norm(outline, axis=1).max() == pytest.approx(1)


def test_no_object_is_hidden_by_more_than_the_limit():
    for seed in range(30):
        things = shapes.place_things(np.random.default_rng(seed), 96, 96)
        masks = [thing.mask(96, 96) for thing in things]
        for index, mask in enumerate(masks):
            visible = mask.copy()
            for later in masks[index + 1 :]:
                visible *= 1 - later
            assert visible.sum() >= (1 - shapes.MAX_HIDDEN) * mask.sum() - 1e-2


def test_some_images_are_empty():
    things = [shapes.place_things(np.random.default_rng(seed), 64, 64) for seed in range(200)]
    assert 0 < sum(not found for found in things) < 40


def test_up_to_date_folder_is_left_alone(made, capsys):
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    assert not shapes.make_shapes(made, **SMALL)
    assert "up to date" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in made.rglob("*")}


def test_incomplete_or_outdated_folder_is_drawn_again(tmp_path):
    folder = tmp_path / "shapes"
    shapes.make_shapes(folder, train=2, val=1, size=64)
    (folder / "images" / "train" / "000001.jpg").unlink()
    assert shapes.make_shapes(folder, train=2, val=1, size=64)
    assert shapes.make_shapes(folder, train=1, val=1, size=64)
    assert len(list((folder / "images" / "train").iterdir())) == 1


def test_whatever_is_missing_is_drawn_again(tmp_path):
    folder, sizes = tmp_path / "shapes", {"train": 2, "val": 1, "size": 64}
    shapes.make_shapes(folder, **sizes)
    whole = contents(folder)
    for damage in (lambda: (folder / "labels/val/000001.txt").unlink(),
                   lambda: (folder / "annotations/instances_val.json").unlink(),
                   lambda: (folder / "images/train/000002.jpg").write_bytes(b"")):  # fmt: skip
        (folder / "labels/train.0123.cache").touch()  # of a training
        (folder / "images/.DS_Store").touch()
        damage()
        assert shapes.make_shapes(folder, **sizes) and contents(folder) == whole
    assert not shapes.make_shapes(folder, **sizes)


def test_images_of_somebody_else_stay(tmp_path):
    folder, sizes = tmp_path / "shapes", {"train": 2, "val": 1, "size": 64}
    shapes.make_shapes(folder, **sizes)
    mine = folder / "images/train/mine.jpg"
    mine.write_text("mine")
    assert not shapes.make_shapes(folder, **sizes)
    with pytest.raises(ValueError, match="1 file in it would be lost .*mine.jpg.*: move them away, or name another"):
        shapes.make_shapes(folder, **sizes, seed=1)
    assert mine.read_text() == "mine"
    mine.unlink()
    (folder / "images").rename(tmp_path / "elsewhere")
    (folder / "images").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="images is a link, and would be drawn anew: delete it"):
        shapes.make_shapes(folder, **sizes, seed=1)
    (folder / "images").unlink()
    assert shapes.make_shapes(folder, **sizes, seed=1)


@pytest.mark.parametrize("stamp", ["null", "[]", "{}", '{"train": "2", "val": 1}', "[" * 100_000, "\udcff"])
def test_a_damaged_stamp(stamp, tmp_path):
    shapes.make_shapes(tmp_path / "shapes", train=2, val=1, size=64)
    (tmp_path / "shapes" / shapes.STAMP).write_text(stamp, errors="surrogateescape")
    with pytest.raises(ValueError, match=f"holds no readable {shapes.STAMP}"):
        shapes.make_shapes(tmp_path / "shapes", train=2, val=1, size=64)


def test_a_folder_that_another_process_draws(tmp_path):
    folder = tmp_path / "shapes"
    shapes.make_shapes(folder, train=2, val=1, size=64)
    (folder / shapes.STAMP).write_text(json.dumps({"train": 2, "val": 1, "complete": False}))
    code = "import sys; from utils.system.folder_lock import own; own(sys.argv[1], ''); print(flush=True); input()"
    folder_lock._give_up(folder)
    with subprocess.Popen([sys.executable, "-c", code, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          cwd=PROJECT_ROOT) as other:  # fmt: skip
        other.stdout.readline()
        with pytest.raises(ValueError, match="is in use: process .* or name another folder with --out"):
            shapes.make_shapes(folder, train=2, val=1, size=64)
        assert len(list((folder / "images/train").iterdir())) == 2, "what it draws stays"
        other.communicate(b"\n")


def test_names_that_are_no_text(tmp_path):
    """OpenCV crashes at them."""
    folder = tmp_path / "sh\udcff"
    assert shapes.make_shapes(folder, train=1, val=1, size=64) and (folder / "images/train/000001.jpg").stat().st_size
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="link.* leads nowhere; name another folder"):
        shapes.make_shapes(tmp_path / "link", train=1, val=1, size=64)


def test_somebody_elses_folder_is_refused(tmp_path):
    precious = tmp_path / "images" / "holiday.jpg"
    precious.parent.mkdir()
    precious.write_text("mine")
    with pytest.raises(ValueError, match="was not made by this tool"):
        shapes.make_shapes(tmp_path, **SMALL)
    assert precious.read_text() == "mine"
    with pytest.raises(ValueError, match="is a file"):
        shapes.make_shapes(precious, **SMALL)


def test_senseless_numbers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs 1 image"):
        shapes.make_shapes(tmp_path / "new", train=0)
    assert not (tmp_path / "new").exists()
