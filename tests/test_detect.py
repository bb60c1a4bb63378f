"""detect.py: agrees with test.py, its files, damaged sources, videos, streams, and how it ends."""

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

import detect
import test as scorer
from tests import small_run
from tests.detect_cases import camera, frames_of, line_of, picture, random_detector, run, write_film, write_weights
from utils.config.data_yaml import read_yaml
from utils.config.options import test_parser as parser_of_test
from utils.engine import evaluate
from utils.ops.nms import non_max_suppression
from utils.system.files import PROJECT_ROOT

parser_of_test.__test__ = False
LOW = ("--conf", "0.02", "--iou", "0.3")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights") / "best.pt")


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number, (height, width) in enumerate([(64, 64), (48, 64), (64, 64), (64, 30), (48, 64)]):
        cv2.imwrite(str(folder / f"{number}.png"), picture(number, height, width))
    return folder


def table(folder):
    with (folder / "detections.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# ---- against test.py ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "options", "model"),
    [
        ((), {}, {}),
        (("--agnostic",), {"agnostic": True}, {}),
        (("--class", "1"), {"classes": [1]}, {}),
        ((), {}, {"nc": 1}),
        (("--batch-size", "3"), {}, {"heads": True}),
        (("--augment",), {}, {}),
    ],
)
def test_the_rows_of_test_py(tmp_path, monkeypatch, flags, options, model):
    """The scorer puts 16 pixels of gray around its squares of 64; here that border is a part of the files."""
    path = write_weights(tmp_path / "best.pt", **model)
    num_classes = 3 if model.get("heads") else model.get("nc", 2)
    for kind in ("plain", "padded"):
        (tmp_path / kind).mkdir()
    for number in range(4):
        image = picture(number)
        cv2.imwrite(str(tmp_path / "plain" / f"{number}.png"), image)
        padded = cv2.copyMakeBorder(image, 16, 16, 16, 16, cv2.BORDER_CONSTANT, value=(114, 114, 114))
        cv2.imwrite(str(tmp_path / "padded" / f"{number}.png"), padded)
    data = tmp_path / "data.yaml"
    data.write_text(f"val: {tmp_path / 'plain'}\nnames: {['red', 'green', 'blue'][:num_classes]}\n")

    def best_class(prediction, conf_thres, iou_thres, labels, multi_label):
        return non_max_suppression(prediction, conf_thres, iou_thres, **options)

    monkeypatch.setattr(evaluate, "non_max_suppression", best_class)
    line = ["--weights", str(path), "--data", str(data), "--img", "64", "--device", "cpu", "--save-txt", "--save-conf",
            "--project", str(tmp_path), "--name", "scored", *LOW,
            *(flags if "--augment" in flags else ())]  # fmt: skip
    with small_run.drawing(False):
        scorer.main(parser_of_test().parse_args(line))
    folder, status = run(path, tmp_path / "padded", tmp_path, "--img", "96", "--save-txt", "--save-conf", *LOW, *flags)
    assert status == 0
    total = 0
    for number in range(4):
        expected, found = comparable(tmp_path / "scored", number, 64, 0), comparable(folder, number, 96, 16)
        assert found.shape == expected.shape
        # rows of nearly equal confidence may have changed places
        distances = np.abs(found[:, None] - expected[None]).max(2)
        assert distances.min(0).max() < 0.02 and distances.min(1).max() < 0.02
        np.testing.assert_allclose(found[:, 5], expected[:, 5], atol=2e-5)
        total += len(found)
    assert total > 10


def comparable(folder, number, side, border):
    """Rows [n x 6: class, corners in pixels of the square without its border, confidence], in the order of the file."""
    rows = np.loadtxt(folder / "labels" / f"{number}.txt", ndmin=2)
    centre, half = rows[:, 1:3] * side, rows[:, 3:5] * side / 2
    corners = np.concatenate((centre - half, centre + half), 1) - border
    return np.concatenate((rows[:, :1], corners.clip(0, 64), rows[:, 5:]), 1)


def test_batches_change_nothing(weights, images, tmp_path, caplog):
    """Images of several shapes, one by one and four at a time: rows, their order, lines."""
    caplog.set_level("INFO")
    found, said = [], []
    for size in (1, 4):
        caplog.clear()
        folder, _ = run(weights, images, tmp_path / str(size), *LOW, "--save-csv", "--batch-size", str(size))
        found.append(table(folder))
        said.append([text.rpartition(",")[0] for text in caplog.messages if text.startswith("image ")])
        assert len(list(folder.glob("*.png"))) == 5
    assert said[0] == said[1] and len(said[0]) == 5 and said[0] == sorted(said[0])
    assert [row["source"] for row in found[0]] == [row["source"] for row in found[1]] and len(found[0]) > 10
    for name in sorted({row["source"] for row in found[0]}):
        keys = ("class", "confidence", "x1", "y1", "x2", "y2")
        one, four = (np.array([[float(row[key]) for key in keys] for row in rows if row["source"] == name])
                     for rows in found)  # fmt: skip
        distances = np.abs(one[:, None] - four[None]).max(2)  # equal confidences may have changed places
        assert distances.min(0).max() < 0.02 and distances.min(1).max() < 0.02


def test_ensembles(weights, images, tmp_path):
    other = write_weights(tmp_path / "other.pt")
    folder, status = run(weights, images, tmp_path, "--weights", str(weights), str(other), "--save-txt")
    assert status == 0 and len(list((folder / "labels").iterdir())) == 5


def test_category_ids_of_coco_itself():
    names = read_yaml(PROJECT_ROOT / "data" / "coco.yaml")["names"]
    assert detect.category_ids(names)[-1] == 90 and detect.category_ids(names[:3]) == [0, 1, 2]


# ---- files --------------------------------------------------------------------------------------------------------


def test_all_that_is_written(weights, images, tmp_path, caplog):
    caplog.set_level("INFO")
    folder, status = run(weights, images, tmp_path, *LOW, "--save-txt", "--save-csv", "--save-json", "--save-crop",
                         "--show-counts")  # fmt: skip
    rows, objects = table(folder), json.loads((folder / "detections.json").read_text())
    labels = sum(len(path.read_text().splitlines()) for path in (folder / "labels").iterdir())
    assert status == 0 and len(rows) == len(objects) == labels > 10
    assert objects[0]["image_id"] == 0 and objects[0]["category_id"] == int(rows[0]["class"])
    x, y, width, height = objects[0]["bbox"]
    corners = [x, y, x + width, y + height]
    assert corners == pytest.approx([float(rows[0][key]) for key in ("x1", "y1", "x2", "y2")], abs=0.02)
    assert {path.parent.name for path in (folder / "crops").rglob("*.jpg")} <= {"red", "green"}
    assert len(list((folder / "crops").rglob("0_*.jpg"))) > 0
    for number in range(5):
        drawn, plain = cv2.imread(str(folder / f"{number}.png")), cv2.imread(str(images / f"{number}.png"))
        assert drawn.shape == plain.shape and (drawn != plain).any()
    lines = [text for text in caplog.messages if text.startswith("image 2/5")]
    assert len(lines) == 1 and lines[0].startswith(f"image 2/5 {images / '1.png'}:")
    assert " 64x48 " in lines[0] and all(len(line) < 80 for line in lines[0].splitlines()[1:])
    assert any(text.startswith("Done: 5 images in ") for text in caplog.messages)


def test_crops_of_an_earlier_run_go(weights, images, tmp_path):
    """Those of the same images; files of somebody else stay."""
    folder, _ = run(weights, images, tmp_path, *LOW, "--save-crop", "--exist-ok")
    before = sorted((folder / "crops").rglob("*.jpg"))
    others = [before[0].with_name(name) for name in ("0_mine.jpg", "00_1.jpg", "mine.txt")]
    for other in others:
        other.touch()
    run(weights, images, tmp_path, "--conf", "1", "--save-crop", "--exist-ok")
    assert len(before) > 5 and sorted((folder / "crops").rglob("*.*")) == sorted(others)
    run(weights, images, tmp_path, *LOW, "--save-crop", "--exist-ok")
    assert set(before) < set((folder / "crops").rglob("*.jpg"))


def test_numbers_that_are_written_in_several_ways_stay_apart(weights, tmp_path):
    for name in ("1", "01", "7"):
        cv2.imwrite(str(tmp_path / f"{name}.png"), picture(0))
    folder, _ = run(weights, tmp_path, tmp_path, *LOW, "--save-json")
    rows = json.loads((folder / "detections.json").read_text())
    assert {(row["image_id"], Path(row["file_name"]).stem) for row in rows} == {(n, n) for n in ("1", "01", "7")}


def test_very_long_names(tmp_path):
    """Of images: all that is written has a name of its own. Of classes: their crops have a folder."""
    names = ["x" * 250 + end for end in "ab"]
    for name in names:
        cv2.imwrite(str(tmp_path / f"{name}.png"), picture(0))
    model = random_detector()
    model.names = ["r" * 300, "g" * 300]
    torch.save({"model": model}, tmp_path / "long.pt")
    folder, status = run(tmp_path / "long.pt", tmp_path, tmp_path, *LOW, "--save-txt", "--save-json", "--save-crop")
    assert status == 0 and {path.stem for path in folder.glob("*.png")} == set(names)
    assert {path.stem for path in (folder / "labels").iterdir()} == set(names)
    crops = [path.name for path in (folder / "crops").rglob("*.jpg")]
    assert len(crops) == len(set(crops)) > 2 and len({name.rpartition("_")[0][-12:] for name in crops}) == 2


def test_a_second_run_into_one_folder_doubles_nothing(weights, images, tmp_path):
    sizes = []
    for _ in range(2):
        folder, _ = run(weights, images, tmp_path, *LOW, "--save-txt", "--save-csv", "--exist-ok")
        sizes.append(
            [len(path.read_text()) for path in [*sorted((folder / "labels").iterdir()), folder / "detections.csv"]]
        )
    assert sizes[0] == sizes[1] and len(sizes[0]) == 6


def test_ctrl_c_writes_what_is_found(weights, images, tmp_path, monkeypatch, caplog):
    """Image 0 waits for others of its shape when Ctrl-C comes; those that have overtaken it are not lost."""
    caplog.set_level("INFO")
    for number in (1, 2):
        cv2.imwrite(str(images / f"{number}.png"), picture(number, 30, 64))

    def interrupted(source):
        plain = iter(type(source).__mro__[1].__iter__(source))
        yield next(plain)
        raise KeyboardInterrupt

    source = type("Interrupted", (detect.FileSource,), {"__iter__": interrupted})
    monkeypatch.setattr(detect, "FileSource", source)
    folder, status = run(weights, images, tmp_path, "--batch-size", "2", "--save-csv", *LOW)
    assert status == 130 and "Interrupted: 2 images" in caplog.text
    assert sorted(path.name for path in folder.glob("*.png")) == ["1.png", "2.png"]
    assert [Path(name).name for name in dict.fromkeys(row["source"] for row in table(folder))] == ["1.png", "2.png"]


def test_images_of_one_name_have_files_of_their_own(weights, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        cv2.imwrite(str(tmp_path / folder / "x.png"), picture())
    cv2.imwrite(str(tmp_path / "a" / "x.bmp"), picture(1))
    folder, _ = run(weights, str(tmp_path / "**" / "x.*"), tmp_path, "--save-txt")
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("x.*")}
    assert written == {
        "a/x.png",
        "a/x.bmp",
        "b/x.png",
        "labels/a/x.png.txt",
        "labels/a/x.bmp.txt",
        "labels/b/x.png.txt",
    }


def test_a_source_is_never_written_over(weights, images, tmp_path):
    images.rename(tmp_path / "out")
    with pytest.raises(ValueError, match=r"0\.png would be written over; choose another"):
        run(weights, tmp_path / "out", tmp_path, "--exist-ok")


@pytest.mark.parametrize(("flags", "expected"), [((), 0), (("--nosave",), 5)])
def test_nosave_and_styles(weights, images, tmp_path, flags, expected):
    plain, _ = run(weights, images, tmp_path / "plain", *LOW, *flags, "--save-csv")
    styled, _ = run(weights, images, tmp_path / "styled", *LOW, *flags, "--hide-labels", "--line-thickness", "1")
    assert 5 - len(list(plain.glob("*.png"))) == expected
    if not flags:
        assert (plain / "0.png").read_bytes() != (styled / "0.png").read_bytes()


# ---- sources ------------------------------------------------------------------------------------------------------


def test_video_gif_and_odd_names(weights, tmp_path):
    folder = tmp_path / "Bilder für 東京"
    folder.mkdir()
    (folder / "straße.png").write_bytes(cv2.imencode(".png", picture())[1].tobytes())
    write_film(folder / "film.mp4")
    stills = [Image.fromarray(picture(k)) for k in range(3)]
    stills[0].save(folder / "moves.gif", save_all=True, append_images=stills[1:], duration=50)
    stills[0].save(folder / "still.gif")
    out, status = run(weights, folder, tmp_path, "--save-txt", "--batch-size", "8", *LOW)
    assert status == 0
    assert frames_of(out / "film.mp4") == (60, 20) and frames_of(out / "moves.mp4") == (3, 20)
    assert (out / "straße.png").is_file() and (out / "still.jpg").is_file()
    names = [path.stem for path in (out / "labels").iterdir()]
    assert len(names) == 65 and {"film_1", "film_60", "moves_3", "still", "straße"} <= set(names)


def test_a_video_that_breaks_off(weights, tmp_path, caplog):
    """What can be read is kept; the file is named, status 1."""
    writer = cv2.VideoWriter(str(tmp_path / "film.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 20, (64, 48))
    for number in range(40):
        writer.write(picture(number, 48, 64))
    writer.release()
    data = (tmp_path / "film.avi").read_bytes()
    (tmp_path / "film.avi").write_bytes(data[: len(data) // 2])
    out, status = run(weights, tmp_path / "film.avi", tmp_path)
    count, _ = frames_of(out / "film.mp4")
    assert status == 1 and 10 < count < 30 and f"film.avi: only {count} of 40 frames can be read" in caplog.text


def damage(folder):
    """Sources that are damaged in every way, by name."""
    whole = {kind: cv2.imencode(f".{kind}", picture())[1].tobytes() for kind in ("jpg", "png", "bmp", "webp", "tiff")}
    for kind, data in whole.items():
        (folder / f"half.{kind}").write_bytes(data[: len(data) // 2])
        (folder / f"start.{kind}").write_bytes(data[:20])
        (folder / f"noise.{kind}").write_bytes(np.random.default_rng(0).bytes(300))
    (folder / "empty.jpg").touch()
    (folder / "page.png").write_text("<!doctype html><html>not found</html>")
    (folder / "gone.jpg").symlink_to(folder / "nowhere")
    (folder / "half.gif").write_bytes(b"GIF89a" + bytes(20))
    film = write_film(folder / "whole.mp4").read_bytes()
    (folder / "whole.mp4").unlink()
    (folder / "cut.mp4").write_bytes(film[: len(film) // 2])
    (folder / "noise.avi").write_bytes(b"RIFF" + bytes(400))
    return sorted(path.name for path in folder.iterdir())


def test_damaged_files_are_named_and_skipped(weights, images, tmp_path, caplog):
    (images / "more").mkdir()
    names = damage(images / "more")
    assert len(names) == 21
    out, status = run(weights, [images, images / "more"], tmp_path, "--save-txt")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert status == 1 and [sum(f"/{name}:" in text for text in warnings) for name in names] == [1] * len(names)
    assert len(list(out.glob("*.png"))) == 5 and "21 files could not be read" in warnings[-1]


@pytest.mark.parametrize(
    ("source", "flags", "message"),
    [
        ("empty", (), r"has no file of a supported format \(images bmp, jpg"),
        ("notes.md", (), "is of no supported format"),
        ("list.txt", (), "does not exist; a list has one source a line"),
        (["http://127.0.0.1:9/x", "a.jpg"], (), "mixes streams and files"),
        ("http://127.0.0.1:9/x", (), "cannot be opened: is the camera attached, the address right"),
        ("a.jpg", ("--classes", "7"), "--classes 7: the detector knows the classes 0 to 1"),
        ("a.jpg", ("--conf", "2"), "--conf-thres 2"),
        ("a.jpg", ("--line-thickness", "99999"), "--line-thickness 99999 is too large"),
        ("a.jpg", ("--weights", "none.pt"), r"none\.pt: no such checkpoint"),
        ("a.jpg", ("--view-img",), "--view-img: "),
    ],
)
def test_refused_in_one_sentence(weights, tmp_path, monkeypatch, source, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    cv2.imwrite("a.jpg", picture())
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").touch()
    with pytest.raises(ValueError, match=message):
        run(weights, source, tmp_path / "runs", *flags)
    assert not (tmp_path / "runs").exists()


def test_docker_stop_leaves_a_video_that_plays(weights, tmp_path):
    """As Ctrl-C does; also a stream's, whose server ends the connection now and then."""
    with camera([15, 10_000]) as (address, _):
        line = line_of(weights, address, tmp_path, "--save-csv", *LOW)
        program = subprocess.Popen([sys.executable, "detect.py", *line], cwd=PROJECT_ROOT, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # fmt: skip
        said = ""
        while "is back" not in said and (line := program.stdout.readline()):
            said += line
        time.sleep(1)  # a second of video
        program.send_signal(signal.SIGTERM)
        said += program.communicate(timeout=60)[0]
    assert program.returncode == 143 and "Interrupted: " in said
    assert f"{address} is lost" in said and f"{address} is back" in said
    (video,) = (tmp_path / "out").glob("*.mp4")
    count, fps = frames_of(video)
    assert count > 15 and fps == 25, "the rate that ffmpeg gives to such a stream"


def test_status_2_from_the_command_line(tmp_path):
    words = [sys.executable, "detect.py", "--source", str(tmp_path / "none.jpg"), "--device", "cpu"]
    program = subprocess.run(words, cwd=PROJECT_ROOT, capture_output=True, text=True)
    assert program.returncode == 2
    assert program.stderr == f"error: --source {tmp_path / 'none.jpg'} does not exist\n"
