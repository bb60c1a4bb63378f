"""export.py: files whole or not at all, status 0, 1 or 2."""

import importlib.util

import pytest
import torch

import export
from models.yolo import Model
from tests import small_run
from tests.heads_cases import small_heads
from tests.tiny_model import CFG, tiny_model

needs_onnx = pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs requirements-export.txt")


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(0)
    torch.save({"model": tiny_model().half(), "epoch": 0}, tmp_path / "best.pt")  # as a training leaves it
    return tmp_path / "best.pt"


def run(weights, *flags):
    return small_run.program("export", ["--weights", str(weights), "--img", "64", *flags])


def names(weights):
    return sorted(path.name for path in weights.parent.iterdir())


@needs_onnx
@pytest.mark.parametrize("flags", ["", "--grid --dynamic", "--end2end --max-wh 64 --dynamic-batch", "--include-nms"])
def test_both_files_by_default(weights, flags, capsys):
    assert run(weights, *flags.split()) == 0
    assert names(weights) == ["best.onnx", "best.pt", "best.torchscript.pt"]
    said = capsys.readouterr().out
    assert said.count("largest differences") == (4 if "dynamic" in flags else 3)
    assert ("2x3x96x128" in said.partition("best.torchscript.pt")[2]) == ("--dynamic" in flags.split())


@needs_onnx
def test_several_heads_are_always_decoded(weights, capsys):
    cfg = CFG | {"nc": 3, "head": [[[2, 3, 4], 1, "MultiHeadDetect", ["nc", "anchors"]]]}
    torch.save(Model(cfg, head_config=small_heads()), weights)
    assert run(weights) == 0
    said = capsys.readouterr().out
    assert "Several heads: boxes with the class ids of the data set are written" in said and "boxes" in said


@pytest.mark.parametrize("is_link", [False, True])
def test_the_weights_are_not_written_over(is_link, weights, capsys, monkeypatch):
    """A checkpoint of that name, and a link of that name to the checkpoint."""
    monkeypatch.setattr(export, "check_packages", lambda opt: None)
    other, whole = weights.with_suffix(".onnx"), weights.read_bytes()
    if is_link:
        other.symlink_to(weights)
    else:
        weights.rename(other)
    assert run(weights if is_link else other) == 2
    assert "would be written over by --include onnx" in capsys.readouterr().err
    assert other.read_bytes() == whole and not list(weights.parent.glob("*.torchscript.pt"))


def test_a_failure_leaves_the_old_file_and_status_1(weights, capsys, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no such\noperator")

    monkeypatch.setattr(export, "check_packages", lambda opt: None)
    monkeypatch.setattr(export, "write_onnx", fails)
    weights.with_suffix(".onnx").write_text("old")
    assert run(weights) == 1
    assert "best.onnx is not written: no such operator (RuntimeError)" in capsys.readouterr().out
    assert weights.with_suffix(".onnx").read_text() == "old"
    assert names(weights) == ["best.onnx", "best.pt", "best.torchscript.pt"], "the other one is written"


@needs_onnx
def test_a_file_that_computes_something_else_is_not_left(weights, capsys, monkeypatch):
    monkeypatch.setattr(export, "onnx_outputs", lambda model, opt: export.Decoded(tiny_model().fuse()))
    check, other = export.check_onnx, export.Decoded(tiny_model())
    monkeypatch.setattr(export, "check_onnx", lambda path, outputs, *rest: check(path, other, *rest))
    assert run(weights, "--include", "onnx") == 1
    assert "differs from PyTorch in boxes" in capsys.readouterr().out and names(weights) == ["best.pt"]


@pytest.mark.parametrize(("flags", "message"), [
    ("--img 0", "--img-size 0 is too small"),
    ("--img 64 64 64", "one or two numbers: height, width"),
    ("--batch-size 0", "--batch-size 0 is too small"),
    ("--topk-all 0", "--topk-all 0 is too small"),
    ("--conf-thres 2", "--conf-thres 2.0 is too large"),
    ("--opset 5", "--opset 5 is too small"),
    ("--exporter dynamo --opset 12", "--exporter dynamo writes 18 or newer"),
    ("--max-wh 640", "it needs --end2end"),
    ("--include coreml", "invalid choice: 'coreml'"),
    ("--source none.jpg", "none.jpg: does not exist"),
    ("--source a.jpg --data b.yaml", "give one of them"),
    ("--weights none.pt", "none.pt: no such checkpoint"),
])  # fmt: skip
def test_refused_input(weights, flags, message, capsys):
    assert run(weights, "--include", "torchscript", *flags.split()) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error: " in said and message in said and names(weights) == ["best.pt"]


def test_a_missing_package_is_one_sentence(weights, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else find(name))
    assert run(weights, "--simplify") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "--include onnx needs onnx and onnxruntime and onnxslim: pip install -r requirements-export.txt" in said
    assert run(weights, "--include", "torchscript") == 0


@pytest.mark.parametrize(("flags", "warning"), [
    ("--fp16", "--fp16 and --int8 are for CoreML"),
    ("--end2end --max-wh 32", "--max-wh 32 is less than the image"),
    ("--img 60 64", "--img-size 60 has to be a multiple of the largest stride 32: 64 is used"),
])  # fmt: skip
def test_warnings(weights, flags, warning, capsys):
    assert run(weights, "--include", "torchscript", *flags.split()) == 0
    assert warning in capsys.readouterr().out
