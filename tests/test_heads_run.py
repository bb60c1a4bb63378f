"""Whole runs with several heads: training, results by head, resume, transfer, scoring."""

import csv
import logging
from types import SimpleNamespace

import pytest
import torch
import yaml

import test
import train
from tests import small_run
from tests.heads_cases import small_model
from tests.tiny_model import tiny_model
from utils.config.options import test_parser as parser_of_test
from utils.engine.checkpoint_reader import read_checkpoint, take_body
from utils.metrics.detection import DetectionScores
from utils.metrics.multi_head import HeadScore, heads_of, score_heads
from utils.run.context import Run
from utils.system.distributed import Ranks

HEADS = {
    "nc": 2,
    "heads": 2,
    "head_assignments": {"head_0": {"classes": [1], "name": "greens"}, "head_1": {"classes": [0], "weight": 2.0}},
}
parser_of_test.__test__ = False


def heads_line(folder, *flags, heads=HEADS, **options):
    """The command line of a small run with several heads."""
    line = small_run.arguments(folder, **options)
    cfg = yaml.safe_load((folder / "cfg.yaml").read_text())
    cfg["head"][-1][2] = "MultiHeadDetect"
    (folder / "heads_cfg.yaml").write_text(yaml.safe_dump(cfg))
    (folder / "heads.yaml").write_text(yaml.safe_dump(heads))
    more = ["--cfg", str(folder / "heads_cfg.yaml"), "--heads", "2", "--head-config", str(folder / "heads.yaml")]
    return [*line, *more, *flags]


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_train_resume_and_score(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = small_run.run_line(heads_line(tmp_path))
    assert "2 heads for 2 classes" in caplog.text and "            0: greens" in caplog.text
    assert "head 0 (greens): 1 class," in caplog.text
    assert caplog.messages.count("several heads: the plain loss is used, OTA needs --ota-last") == 1
    first, second = rows_of(folder / "results.csv")
    assert float(first["val/box_loss"]) > 0 and float(first["val/obj_loss"]) > 0
    for name in ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95"):
        mean = (float(second[f"head_0/{name}"]) + float(second[f"head_1/{name}"])) / 2  # one class a head
        assert float(second[f"metrics/{name}"]) == pytest.approx(mean, rel=1e-4)
    assert list(rows_of(folder / "results_per_class.csv")[1]) == ["epoch", "red", "green"]

    (tmp_path / "heads.yaml").unlink()  # the checkpoint knows its heads
    again = small_run.run_line(["--resume", str(folder / "weights" / "last.pt"), "--epochs", "3"])
    assert again == folder and len(rows_of(folder / "results.csv")) == 3

    caplog.clear()
    opt = parser_of_test().parse_args(
        ["--weights", str(folder / "weights" / "last.pt"), "--data", str(tmp_path / "data.yaml"), "--img", "64",
         "--device", "cpu", "--project", str(tmp_path / "tests"), "--one-class-score"]
    )  # fmt: skip
    with small_run.drawing(pictures=False):
        test.main(opt)
    _, *table = [record.getMessage() for record in caplog.records if record.name == "utils.engine.evaluate"]
    assert [row[:20].strip() for row in table] == ["all", "0: greens", "1: Head 1", "red", "green"]
    assert [row.split()[-5] for row in table] == ["6", "3", "3", "3", "3"]  # labels
    assert "--one-class-score has no effect" not in caplog.text


def test_fast_and_reference_losses_train_alike(tmp_path):
    losses = []
    for name, flags in (("reference", ()), ("fast", ("--fast-loss", "--fast-dataloader"))):
        (tmp_path / name).mkdir()
        rows = rows_of(
            small_run.run_line(heads_line(tmp_path / name, "--notest", "--ota-last", "1", *flags)) / "results.csv"
        )
        losses.append([float(row[f"train/{key}_loss"]) for row in rows for key in ("box", "obj", "total")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_transfer(tmp_path, caplog):
    one = small_run.run(tmp_path, "--name", "one", "--epochs", "1")
    source = read_checkpoint(one / "weights" / "last_full.pt").model.state
    caplog.set_level(logging.INFO)
    line = heads_line(tmp_path, "--weights", str(one / "weights" / "last_full.pt"), "--transfer-weights", "--auto-lr")
    folder = small_run.run_line([*line, "--freeze", "5", "--batch-size", "128", "--epochs", "1"])
    assert "Transferred 32/44 items from" in caplog.text and "fresh: 12 (model.5.heads (12))" in caplog.text
    assert "in the file only: 12 (model.5.m (6), model.5.ia (3), model.5.im (3))" in caplog.text
    assert "--auto-lr: batch 128, lr0 0.01 -> 0.014142, warmup_epochs 1 -> 5" in caplog.text
    stored = read_checkpoint(folder / "weights" / "last_full.pt")
    assert stored.epoch == 0
    weights = {key: value for key, value in stored.model.state.items() if key.endswith("conv.weight")}
    assert len(weights) == 5 and all(torch.equal(value, source[key]) for key, value in weights.items())
    assert yaml.safe_load((folder / "hyp.yaml").read_text())["lr0"] == 0.01  # a resumed run scales it again


def test_transfer_between_heads_leaves_them_fresh(tmp_path, caplog):
    folder = small_run.run_line(heads_line(tmp_path, "--epochs", "1", "--nosave"))
    stored = read_checkpoint(folder / "weights" / "last.pt").model
    fresh = built(tmp_path)
    before = {key: value.clone() for key, value in fresh.state_dict().items()}
    take_body(fresh, stored.state, "last.pt")
    after = fresh.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in after if ".heads." in key)
    assert torch.equal(after["model.0.conv.weight"], stored.state["model.0.conv.weight"].float())
    with pytest.raises(ValueError, match="x.pt has no layer in common with this model"):
        take_body(fresh, {"model.5.anchors": after["model.5.anchors"], "other.weight": torch.zeros(1)}, "x.pt")

    # without options a checkpoint brings its own heads
    alone = built(tmp_path, weights=str(folder / "weights" / "last.pt"), cfg="", heads=0, head_config="")
    assert alone.model[-1].head_names == ["greens", "Head 1"] and alone.model[-1].head_weights == [1.0, 2.0]
    assert torch.equal(alone.model[-1].heads[1][2].bias, stored.state["model.5.heads.1.2.bias"].float())


def built(folder, **options):
    """What train.build_model makes of the files in `folder`."""
    files = {"cfg": str(folder / "heads_cfg.yaml"), "heads": 2, "head_config": str(folder / "heads.yaml")}
    opt = {"resume": False, "weights": "", "transfer_weights": False, "data": "d.yaml", **files, **options}
    run = Run(SimpleNamespace(**opt), {}, SimpleNamespace(nc=2), torch.device("cpu"), Ranks())
    return train.build_model(run)[0]


def test_scores_by_head():
    scores = DetectionScores()
    box = [10.0, 10.0, 30.0, 30.0]
    scores.add(torch.tensor([[*box, 0.9, 0], [*box, 0.8, 2]]), torch.tensor([[0, *box], [1, *box]]))
    scores.add(torch.tensor([[*box, 0.7, 1]]), torch.tensor([[1, *box]]))
    heads = [("a", [1, 0]), ("b", [2]), ("c", [1])]
    a, b, c = score_heads(scores.summary(3), heads)
    assert b == HeadScore("b", 0, 0.0, 0.0, 0.0, 0.0)
    assert (a.name, a.num_labels, c.num_labels) == ("a", 3, 2)
    assert c.map50 == pytest.approx(0.505, abs=0.01) and a.map50 == pytest.approx((0.995 + c.map50) / 2, abs=0.01)
    assert heads_of(torch.nn.Linear(1, 1)) == []


def test_one_class_scores_of_all_models(caplog):
    several, one = small_model(), tiny_model()
    test.fix_one_class_scores(torch.nn.ModuleList([several, one]))
    assert several.model[-1].columns[1, 5 + 1] == 7 and not caplog.text  # the column of ones
    test.fix_one_class_scores(one)
    assert "--one-class-score has no effect: this model has one head" in caplog.text
