"""Wrong input of every kind, through the programs: one sentence that says what is wrong, status 2, nothing written."""

import re

import pytest
import yaml

from tests import small_run

MUST = "has to be"


def files_in(folder):
    """Every path below `folder` except label caches, which belong to the data."""
    return sorted(str(path) for path in folder.rglob("*") if path.suffix != ".cache")


def refused(name, line, folder, message, capsys):
    """Run a program that has to refuse its input."""
    before = files_in(folder)
    assert small_run.program(name, line) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(("error: ", f"{name}.py: error: ")) and re.search(message, said), said
    assert files_in(folder) == before


OPTIONS = [
    ("--epochs 0", f"--epochs 0 is too small: it {MUST} at least 1"),
    ("--epochs one", "argument --epochs: invalid int value: 'one'"),
    ("--epochs 1.5", "argument --epochs: invalid int value"),
    ("--batch-size 0", f"--batch-size 0 is too small: it {MUST} at least 1"),
    ("--img 0", "--img-size .* one or two positive numbers"),
    ("--img 64 64 64", "--img-size .* one or two positive numbers"),
    ("--img 99999", f"--img-size 99999 is too large: it {MUST} at least 1 and at most 16000"),
    ("--img 64px", "argument --img-size: invalid int value"),
    ("--workers -1", f"--workers -1 is too small: it {MUST} at least 0"),
    ("--label-smoothing 1", f"--label-smoothing 1.0 is too large: it {MUST} at least 0 and below 1"),
    ("--label-smoothing nan", f"--label-smoothing nan is not usable: it {MUST}"),
    ("--freeze -1", "argument --freeze: '-1' is neither a layer number nor a range"),
    ("--freeze 99", "--freeze 99: the model has the layers 0 to"),
    ("--freeze 6", "--freeze 6 leaves no layer to train"),
    ("--device gpu", "--device 'gpu' is unknown: give cpu, 0, or a list like 0,1"),
    ("--cache-images tape", "argument --cache-images: invalid choice: 'tape'"),
    ("--name=", "--name '' names no folder inside of --project; give a name, such as exp"),
    ("--name .", "--name '.' names no folder"),
    ("--cfg none.yaml", "none.yaml does not exist"),
    ("--data none.yaml", "none.yaml does not exist"),
    ("--hyp none.yaml", "none.yaml does not exist"),
    ("--weights none.pt", "none.pt: no such checkpoint"),
    ("--cfg= --weights=", "give --cfg .* or --weights"),
    ("--resume none.pt", "none.pt: no such checkpoint"),
    ("--unknown", "unrecognized arguments: --unknown"),
]


@pytest.mark.parametrize(("flags", "message"), OPTIONS, ids=[flags for flags, _ in OPTIONS])
def test_options_of_training(flags, message, tmp_path, capsys):
    refused("train", small_run.arguments(tmp_path, *flags.split()), tmp_path, message, capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--img 0", f"--img-size 0 is too small: it {MUST} at least 1 and at most 16000"),
        ("--batch-size 0", f"--batch-size 0 is too small: it {MUST} at least 1"),
        ("--conf-thres 2", f"--conf-thres 2.0 is too large: it {MUST} at least 0 and at most 1"),
        ("--iou-thres -0.1", f"--iou-thres -0.1 is too small: it {MUST} at least 0"),
        ("--iou-thres nan", "--iou-thres nan is not usable"),
        ("--conf-thres much", "argument --conf-thres: invalid float value: 'much'"),
        ("--task none", "argument --task: invalid choice"),
        ("--name=", "--name '' names no folder"),
        ("--weights none.pt", "none.pt: no such checkpoint"),
        ("--data none.yaml", "none.yaml does not exist"),
    ],
)
def test_options_of_scoring(flags, message, tmp_path, capsys):
    line = ["--data", str(small_run.make_data(tmp_path)), "--device", "cpu", "--project", str(tmp_path / "runs")]
    refused("test", [*line, "--weights", "none.pt", *flags.split()], tmp_path, message, capsys)


HYP = [
    ({"lr0": -1}, f"hyp.yaml: lr0 -1 is too small: it {MUST} above 0"),
    ({"lr0": "fast"}, f"hyp.yaml: lr0 {MUST} a number, not 'fast'"),
    ({"momentum": 1}, f"hyp.yaml: momentum 1 is too large: it {MUST} at least 0 and below 1"),
    ({"mosaic": 7}, f"hyp.yaml: mosaic 7 is too large: it {MUST} at least 0 and at most 1"),
    ({"scale": [0.1]}, f"hyp.yaml: scale {MUST} a number"),
    ({"anchor_t": 1}, f"hyp.yaml: anchor_t 1 is too small: it {MUST} above 1"),
    ({"anchors": 0.5}, "hyp.yaml: anchors 0.5 is too small"),
    ({"warmup_epochs": None}, f"hyp.yaml: warmup_epochs {MUST} a number, not None"),
]


@pytest.mark.parametrize(("change", "message"), HYP, ids=[str(change) for change, _ in HYP])
def test_hyper_parameters(change, message, tmp_path, capsys):
    refused("train", small_run.arguments(tmp_path, hyp=change), tmp_path, message, capsys)


FILES = [
    ("cfg.yaml", {"ch": 0}, "cfg.yaml: ch must be the number of input channels, not 0"),
    ("cfg.yaml", {"width_multiple": -1}, "cfg.yaml: width_multiple must be a positive number, not -1"),
    ("cfg.yaml", {"head": [[[2, 3, 9], 1, "IDetect", ["nc", "anchors"]]]}, "row 5 .* from 9 is not an earlier layer"),
    ("cfg.yaml", {"head": [[[2, 3, 4], 1, "Detekt", ["nc", "anchors"]]]}, "row 5 .* unknown module 'Detekt'"),
    ("cfg.yaml", {"head": [[-1, 1, "Conv", [8, 3, 2]]]}, "row 5 .* the last row.* must be a detection layer"),
    ("cfg.yaml", {"head": [[[3, 4], 1, "Shortcut", []], [[2, 3, 4], 1, "IDetect", ["nc", "anchors"]]]},
     r"row 5 .*cannot process input of shape \[\[1, 32, 32, 32\], \[1, 32, 8, 8\]\]|row 5 .*cannot process input"),
    ("cfg.yaml", {"head": [[[1, 4], 1, "Shortcut", []], [[2, 3, 4], 1, "IDetect", ["nc", "anchors"]]]},
     r"row 5 .* two inputs of equally many channels, not \[16, 32\]"),
    ("cfg.yaml", {"anchors": [[8, 8]]}, "3 levels need 3 equally long anchor lists"),
    ("data.yaml", {"nc": 3}, "data.yaml: nc is 3 but names has 2 entries"),
    ("data.yaml", {"nc": "two"}, "data.yaml: nc must be a whole number of at least 1, found 'two'"),
    ("data.yaml", {"nc": 1, "names": ["red"]}, r"class ids must lie in 0..0 \(nc is 1: red\).* worst id is 1"),
    ("data.yaml", {"train": "images/none"}, "data.yaml: train: images/none does not exist. Tried: "),
    ("data.yaml", {"val": None}, "data.yaml: the key `val` is missing"),
    ("data.yaml", {"train": "labels"}, "no images in .*labels"),
    ("data.yaml", {"names": {0: "a", 2: "b"}}, "class ids run from 0 without gaps; missing: 1"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "change", "message"), FILES, ids=[f"{file} {change}" for file, change, _ in FILES])
def test_files(file, change, message, tmp_path, capsys):
    line = small_run.arguments(tmp_path)
    path = tmp_path / file
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    refused("train", line, tmp_path, message, capsys)


def test_strict_data(tmp_path, capsys):
    line = small_run.arguments(tmp_path, "--strict-data")
    (tmp_path / "images/train/03.png").write_bytes(b"")
    refused("train", line, tmp_path, r"--strict-data: image dropped \(1x\): empty file .*03.png", capsys)


def test_places_that_cannot_be_written_to(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    line = small_run.arguments(tmp_path, "--project", str(tmp_path / "file" / "runs"))
    refused("train", line, tmp_path, "no run folder can be made in .*runs .*file is a file.; choose another", capsys)


def test_what_is_repaired_is_said(tmp_path, capsys, caplog):
    """A size between two strides, and a batch that exceeds the set."""
    line = small_run.arguments(tmp_path, "--img", "60", "--batch-size", "64", "--epochs", "1")
    assert small_run.program("train", line) == 0
    said = capsys.readouterr().out
    assert "WARNING: --img-size 60 has to be a multiple of the largest stride 32: 64 is used" in said
    assert "WARNING: --batch-size 64: there are only 6 training images" in said
