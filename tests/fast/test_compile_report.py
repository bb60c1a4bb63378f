"""DIAGNOSE_COMPILE=1: no model or loss breaks, the report says so, and a run with it writes nothing."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml

import train
from models.yolo import Model
from tests import heads_cases, small_run
from utils.config.hyp import load_hyp
from utils.config.options import train_parser
from utils.fast import compile_report


def layers_of(cfg):
    return {row[2] for section in ("backbone", "head") for row in cfg[section]}


def cfg_of_w6_layers(folder):
    """A small network of those kinds of layers of yolov7-w6 that yolov7 lacks."""
    cfg = yaml.safe_load(small_run.make_cfg(folder, auxiliary=True).read_text())
    cfg["backbone"][0] = [-1, 1, "ReOrg", []]
    w6, yolov7 = (yaml.safe_load(Path(f"cfg/training/{name}.yaml").read_text()) for name in ("yolov7-w6", "yolov7"))
    assert layers_of(w6) <= layers_of(yolov7) | layers_of(cfg)
    return cfg


@pytest.mark.parametrize(
    ("name", "hyp", "losses"),
    [("yolov7-tiny", "tiny", ["BatchedLoss", "BatchedLossOTA"]), ("yolov7", "p5", None),
     ("yolov7-w6", "p6", ["BatchedLossAuxOTA"])],
)  # fmt: skip
def test_no_graph_breaks(name, hyp, losses, monkeypatch, tmp_path):
    if losses and torch.__version__.startswith("2.4."):
        pytest.skip("Dynamo of torch 2.4 cannot trace the losses in one piece")
    if losses is None:  # they are those of the tiny model
        monkeypatch.setattr(compile_report, "losses_of", lambda model: [])
    model = Model(cfg_of_w6_layers(tmp_path) if name == "yolov7-w6" else f"cfg/training/{name}.yaml", nc=80)
    lines = compile_report.explain(model, load_hyp(f"data/hyp.scratch.{hyp}.yaml"), 80, 63).splitlines()
    torch.compiler.reset()
    names = ["model, images [2, 3, 64, 64]", *(losses or [])]
    assert lines[0] == "DYNAMO EXPLANATION REPORT"
    assert lines[3:-2] == [f"{name}: graph count 1, break count 0" for name in names]
    assert lines[-1] == f"total: graph count {len(names)}, break count 0"


@pytest.mark.skipif(torch.__version__.startswith("2.4."), reason="Dynamo of torch 2.4 cuts the losses in pieces")
def test_several_heads():
    lines = compile_report.explain(
        heads_cases.small_model(), load_hyp("data/hyp.scratch.tiny.yaml"), 3, 64
    ).splitlines()
    names = [line.split(":")[0] for line in lines[3:-2]]
    assert names == ["model, images [2, 3, 64, 64]", "BatchedLoss, 2 heads", "BatchedLossOTA, 2 heads"]
    assert lines[-1] == "total: graph count 3, break count 0"


def test_breaks_come_with_their_reason():
    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    text = compile_report.report([("it", compile_report._explain(broken, (torch.zeros(2),)))])
    assert "it: graph count 2, break count 1" in text and "total: graph count 2, break count 1" in text
    assert "    1. " in text and "test_compile_report.py:" in text


def test_reasons_without_a_place():
    found = SimpleNamespace(
        graph_count=2, graph_break_count=1, break_reasons=[SimpleNamespace(reason="so\n so", user_stack=[])]
    )
    assert "    1. so so\n" in compile_report.report([("it", found)])


def test_a_run_ends_with_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DIAGNOSE_COMPILE", "1")
    seen = []
    monkeypatch.setattr(train, "explain", lambda *arguments: seen.append(arguments) or "THE REPORT")
    line = small_run.arguments(tmp_path)
    with mock.patch("sys.argv", ["train.py", *line]):
        train.main(train_parser().parse_args(line))
    ((model, hyp, nc, image_size),) = seen
    assert isinstance(model, Model) and hyp["box"] == small_run.HYP["box"] and (nc, image_size) == (2, 64)
    assert "THE REPORT" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
