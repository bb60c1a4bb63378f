"""Whole training runs: equality with the golden traces, repeatability, resume, every flag, several processes."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

import train
from tests import parity, small_run, traces
from utils.engine.checkpoint_reader import read_checkpoint
from utils.plots.run import read_results
from utils.run.context import Run
from utils.run.entry import NothingToDo
from utils.run.fast_paths import by_one
from utils.system.distributed import Ranks

ROOT = Path(__file__).resolve().parents[1]
CPU_ONLY = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


# A long warm-up, so that a run of a few batches steps after each of them instead of accumulating 64 images.
SLOW_WARMUP = {"warmup_min_iters": 1000, "lr0": 0.1}


def results_of(run_folder):
    return (run_folder / "results.txt").read_text()


# ---- equality with stock -------------------------------------------------------------------------------------------

# These runs amplify rounding: the same code with two threads instead of one, and the same code on another processor,
# differ by about 1e-4 in the last of the four iterations, and by a few percent in biases that started at zero.
ITEMS = {"rtol": 1e-3, "atol": 2e-6}
SUMS = {"rtol": 1e-4, "atol": 2e-3}


@pytest.mark.parametrize("name", ["robust_formula_plain", "robust_formula_ota", "robust_seeded_ota"])
def test_run_equals_the_golden_trace(name, tmp_path):
    trace = traces.load_trace(name)
    mine = traces.replay(trace, tmp_path, seeded="seeded" in name)
    group = "train: " + name

    assert len(mine["it"]) == len(trace["it"]) == 4
    for i, (actual, golden) in enumerate(zip(mine["it"], trace["it"], strict=True)):
        exactly = {"rtol": 2e-5, "atol": 1e-6}
        parity.check(group, f"items {i}", actual["items"], golden["items"], **(exactly if i < 2 else ITEMS))
        parity.check(group, f"rates {i}", actual["lr"], golden["lr"])
        parity.check(group, f"momentum {i}", actual["momentum"], golden["momentum"])
    for actual, golden in zip(mine["steps"], trace["steps"], strict=True):
        assert actual["after_iteration"] == golden["after_iteration"]
        keys = ("param_sum", "param_abssum")
        parity.check(group, "parameters", [actual[k] for k in keys], [golden[k] for k in keys], rtol=1e-6, atol=2e-3)
    for i, (actual, golden) in enumerate(zip(mine["results"], trace["results"], strict=True)):
        parity.check(group, f"results {i}", actual["results"], golden["results"], rtol=1e-2, atol=1e-5)
        parity.check(group, f"maps {i}", actual["maps"], golden["maps"], rtol=1e-2, atol=1e-5)
    for kind in ("init", "final_model", "final_ema"):
        assert list(mine[kind]) == list(trace[kind])
        for key, (*sums, shape) in trace[kind].items():
            assert mine[kind][key][2] == shape
            exact = {"rtol": 1e-12} if kind == "init" else SUMS
            parity.check(f"{group} {kind}", key, mine[kind][key][:2], sums, **exact)
    assert mine["ema_updates"] == trace["ema_updates"]

    lines = results_of(mine["folder"]).splitlines()
    for line, golden in zip(lines, trace["results_txt"], strict=True):
        assert len(line) == len(golden) and line[:20] == golden[:20], "column positions"


# ---- one run, and the same again -----------------------------------------------------------------------------------


def test_run_leaves_a_complete_folder(tmp_path):
    folder = small_run.run(tmp_path, pictures=True)
    table = read_results(folder / "results.txt")
    assert table.shape == (2, 15) and np.isfinite(table).all()
    assert (folder / "results.csv").read_text().count("\n") == 3
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    expected = set(traces.load_trace("robust_formula_ota")["files"]) | {"labels.jpg"}
    assert len(expected) > 20 and not expected - written, "files that stock writes and this run does not"
    weights = {path.name for path in (folder / "weights").iterdir()}
    assert weights == {"init.pt", "last.pt", "best.pt", "last_full.pt", "epoch_000.pt", "epoch_001.pt"}
    assert yaml.safe_load((folder / "hyp.yaml").read_text()) == small_run.HYP, "as given, before any scaling"
    stripped, full = (read_checkpoint(folder / "weights" / name) for name in ("last.pt", "last_full.pt"))
    assert stripped.optimizer is None and stripped.epoch == -1
    assert full.epoch == 1 and full.optimizer is not None and full.training_results == results_of(folder)


def test_same_command_gives_same_results(tmp_path):
    first = small_run.run(tmp_path)
    second = small_run.run(tmp_path)
    assert first != second and results_of(first) == results_of(second)
    weights = [read_checkpoint(folder / "weights" / "last.pt").model.state for folder in (first, second)]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


def test_training_learns(tmp_path):
    hyp = {"mosaic": 0.0, "mixup": 0.0, "paste_in": 0.0, "scale": 0.0, "translate": 0.0} | SLOW_WARMUP
    run = small_run.run(tmp_path, "--epochs", "40", "--notest", "--nosave", "--adam", hyp=hyp)
    table = read_results(run / "results.txt")
    assert table[-1, 5] < 0.75 * table[0, 5], "total training loss"


# ---- every flag ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ("--rect",), ("--multi-scale",), ("--image-weights",), ("--quad", "--batch-size", "4"), ("--adam",),
        ("--linear-lr",), ("--label-smoothing", "0.1"), ("--single-cls",), ("--freeze", "2"), ("--freeze", "0", "1"),
        ("--notest",), ("--nosave",), ("--sync-bn",), ("--cache-images",), ("--workers", "2"), ("--v5-metric",),
        ("--test-batch-size", "2"), ("--fast-dataloader",), ("--fast-dataloader", "--workers", "2"),
        ("--seed", "7", "--workers", "2", "--worker-tensor", "--quad", "--batch-size", "4"),
        ("--seed", "7", "--workers", "2", "--image-weights", "--fast-dataloader"), ("--img", "64", "96"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_flag(flags, tmp_path):
    folder = small_run.run(tmp_path, *flags)
    table = read_results(folder / "results.txt")
    assert table.shape == (2, 15) and np.isfinite(table[-1]).all()
    names = {path.name for path in (folder / "weights").iterdir()}
    if flags == ("--nosave",):
        assert "epoch_000.pt" not in names and "last.pt" in names
    if flags == ("--notest",):
        assert results_of(folder).splitlines()[0].split()[8:] == ["0"] * 7, "validated only after the last epoch"
    if flags == ("--multi-scale",):
        assert set(table[:, 7]) <= {32, 64, 96}
    if flags[0] == "--quad":
        assert (table[:, 7] == 128).all()


def test_frozen_layers_keep_their_weights(tmp_path):
    folder = small_run.run(tmp_path, "--freeze", "1", "--epochs", "3", hyp=SLOW_WARMUP)
    before = read_checkpoint(folder / "weights" / "init.pt").model.state
    after = read_checkpoint(folder / "weights" / "last_full.pt").model.state
    assert torch.equal(before["model.0.conv.weight"].half(), after["model.0.conv.weight"])
    assert not torch.equal(before["model.1.conv.weight"].half(), after["model.1.conv.weight"])


def test_plain_and_ota_and_auxiliary_losses_differ(tmp_path):
    losses = []
    for i, options in enumerate(({"hyp": {"loss_ota": 0}}, {}, {"auxiliary": True})):
        folder = tmp_path / str(i)
        folder.mkdir()
        losses.append(read_results(small_run.run(folder, "--epochs", "1", **options) / "results.txt")[0, 2])
    assert len(set(losses)) == 3


def test_autoanchor_reaches_model_and_average(tmp_path):
    line = small_run.arguments(tmp_path, "--epochs", "1", hyp={"anchor_t": 1.05})
    line.remove("--noautoanchor")
    state = read_checkpoint(small_run.run_line(line) / "weights" / "last_full.pt")
    assert torch.equal(state.model.state["model.5.anchor_grid"], state.ema.state["model.5.anchor_grid"])


# ---- start from weights, resume ------------------------------------------------------------------------------------


def test_starts_from_stripped_weights(tmp_path, caplog):
    weights = small_run.run(tmp_path, "--epochs", "1") / "weights" / "best.pt"
    with caplog.at_level(logging.INFO):
        folder = small_run.run(tmp_path, "--weights", str(weights), "--cfg", "")
    assert re.search(r"Transferred (\d+)/\1 items", caplog.text)
    assert read_results(folder / "results.txt")[:, 0].tolist() == [0, 1]


class Interrupted(Exception):
    """Stands for a killed run."""


def interrupt_after(epoch, monkeypatch):
    original = train.finish_epoch

    def finish_epoch(number, *args):
        original(number, *args)
        if number == epoch:
            raise Interrupted

    monkeypatch.setattr(train, "finish_epoch", finish_epoch)


def test_interrupted_run_resumes_to_its_end(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupt_after(1, patch)
        small_run.run(tmp_path, "--epochs", "4")
    last = tmp_path / "runs" / "run" / "weights" / "last.pt"
    before = results_of(last.parent.parent)
    with last.parent.parent.joinpath("results.txt").open("a") as file:
        file.write("a torn line of the epoch that was killed")

    folder = small_run.run_line(["--resume", str(last), "--device", "cpu"])
    assert folder == last.parent.parent
    assert results_of(folder).startswith(before)
    assert read_results(folder / "results.txt")[:, 0].tolist() == [0, 1, 2, 3]
    assert len((folder / "results.csv").read_text().splitlines()) == 5


def test_finished_run_resumes_only_for_more_epochs(tmp_path):
    folder = small_run.run(tmp_path)
    last = str(folder / "weights" / "last.pt")
    with pytest.raises(NothingToDo, match="--epochs"):
        small_run.run_line(["--resume", last])
    moved = folder.rename(tmp_path / "moved")
    again = small_run.run_line(["--resume", str(moved / "weights" / "last.pt"), "--epochs", "4", "--device", "cpu"])
    assert again == moved and read_results(moved / "results.txt")[:, 0].tolist() == [0, 1, 2, 3]


def test_schedule_follows_a_run_that_is_extended_by_its_weights(tmp_path):
    full = small_run.run(tmp_path, "--linear-lr", "--epochs", "5", hyp={"warmup_min_iters": 1})
    weights = str(full / "weights" / "last_full.pt")
    longer = small_run.run_line(
        small_run.arguments(tmp_path, "--linear-lr", "--epochs", "4", "--weights", weights, hyp={"warmup_min_iters": 1})
    )
    rates = [float(line.split(",")[11]) for line in (longer / "results.csv").read_text().splitlines()[1:]]
    assert len(rates) == 3 and min(rates) > 0


def test_search_over_real_generations(tmp_path, monkeypatch):
    line = small_run.arguments(tmp_path, "--evolve", "3", "--epochs", "1")
    line.remove("--noautoanchor")
    monkeypatch.setattr("sys.argv", ["train.py", *line])
    train.main(train.train_parser().parse_args(line))
    folder = tmp_path / "runs" / "evolve"
    assert len((folder / "evolve.txt").read_text().splitlines()) == 4
    assert {"hyp_evolved.yaml", "evolve.png"} <= {path.name for path in folder.iterdir()}
    assert not (folder / "weights").exists()


# ---- data that is hard to train on ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_ota", [0, 1])
def test_batches_without_boxes_train_objectness_only(tmp_path, loss_ota):
    hyp = {"mosaic": 0.0, "loss_ota": loss_ota}
    folder = small_run.run(tmp_path, "--batch-size", "1", "--epochs", "1", hyp=hyp, num_images=4, num_empty=3)
    table = read_results(folder / "results.txt")
    assert table[0, 6] == 0 and table[0, 3] > 0, "the last batch had no box, the epoch had an objectness loss"


def test_all_background_is_refused_unless_allowed(tmp_path):
    with pytest.raises(ValueError, match="no boxes in 3 label files"):
        small_run.run(tmp_path, num_images=3, num_empty=3)
    table = read_results(small_run.run(tmp_path, "--allow-background") / "results.txt")
    assert (table[:, [2, 4]] == 0).all() and (table[:, 3] > 0).all(), "only objectness is trained"


def test_last_batch_of_one_is_skipped_where_batchnorm_cannot_take_it(tmp_path, caplog):
    folder = small_run.run(tmp_path, "--img", "32", "--batch-size", "4", num_images=5)
    assert read_results(folder / "results.txt").shape == (2, 15)
    assert caplog.text.count("a batch of one image of 32 px is skipped") == 1


def test_an_epoch_without_a_trainable_batch_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no batch can be trained"):
        small_run.run(tmp_path, "--img", "32", "--batch-size", "1")


def test_only_the_main_process_draws(monkeypatch):
    """A resumed run has its folder in all processes, which score the last epoch together."""
    for name in ("heads_of", "score_heads", "log_scores"):
        monkeypatch.setattr(train, name, lambda *_: [])
    asked = []

    def evaluate(*_, plot_dir=None, **__):
        asked.append(plot_dir)
        return SimpleNamespace(scores=None, results=(), maps=())

    monkeypatch.setattr(train, "evaluate", evaluate)
    paths = SimpleNamespace(together=by_one, drawn=lambda function: function, evaluate=evaluate)
    ema = SimpleNamespace(ema=None, ema_for_evaluation=lambda half: None)
    opt = SimpleNamespace(save_dir="runs/exp", evolve=0, single_cls=False, v5_metric=False)
    for rank in (0, 1):
        run = Run(opt, {}, SimpleNamespace(names=[], nc=2), torch.device("cpu"), Ranks(rank, rank, 2))
        for is_last in (False, True):
            train.validate_ema(run, paths, ema, [], None, lambda call: call, "val", is_last)
    assert asked == [None, "runs/exp", None, None]


def test_what_happens_between_the_steps_may_take_their_memory(tmp_path, monkeypatch):
    """The copy of the average, each validation and each checkpoint find no memory at first, with the same results."""
    expected, refused = results_of(small_run.run(tmp_path, "--fast", "--name", "expected")), []

    def with_room(steps, call):
        def tried_twice(*args, **options):
            call(*args, **options)  # what a first attempt has done before it fails must do no harm
            if getattr(call, "__name__", "") not in ("ema_for_evaluation", "after_epoch"):
                next(iter(args[1]))  # nor a second one that fails after its first batch
            refused.append(getattr(call, "__name__", type(call).__name__))
            return call(*args, **options)

        return tried_twice

    monkeypatch.setattr("utils.fast.train_step.FastSteps.with_room", with_room)
    folder = small_run.run(tmp_path, "--fast", "--name", "refused")
    assert refused == [
        "ema_for_evaluation",
        "FastValidation",
        "after_epoch",
        "ema_for_evaluation",
        "partial",
        "after_epoch",
    ]
    assert results_of(folder) == expected
    saved = [read_checkpoint(tmp_path / "runs" / name / "weights/last.pt") for name in ("expected", "refused")]
    states = [checkpoint.for_inference().state for checkpoint in saved]
    assert all(value.equal(states[1][name]) for name, value in states[0].items())


def test_resume_with_other_classes_is_refused(tmp_path):
    folder = small_run.run(tmp_path)
    (tmp_path / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [red, green, blue]\n")
    before = results_of(folder)
    with pytest.raises(ValueError, match="holds another model"):
        small_run.run_line(["--resume", str(folder / "weights" / "last.pt"), "--epochs", "4", "--device", "cpu"])
    assert results_of(folder) == before


def test_wrong_class_id_stops_before_training(tmp_path):
    small_run.make_data(tmp_path)
    (tmp_path / "labels" / "val" / "00.txt").write_text("2 0.5 0.5 0.2 0.2\n")
    with pytest.raises(ValueError, match=r"00\.txt:1"):
        small_run.run(tmp_path)


# ---- the program ---------------------------------------------------------------------------------------------------


def test_user_errors_are_one_line_and_status_2(tmp_path):
    words = [sys.executable, str(ROOT / "train.py"), "--data", "missing.yaml", "--cfg", "cfg/training/yolov7.yaml"]
    done = subprocess.run(words, cwd=tmp_path, env=CPU_ONLY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "missing.yaml" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout and not list(tmp_path.iterdir())


def test_parser_can_be_taken_out_of_the_program(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--fast-dataloader", "--workers", "8"])
    names = {"__name__": "__main__"}
    exec((ROOT / "train.py").read_text().split("opt = parser.parse_args()")[0] + "opt = parser.parse_args()", names)
    opt = names["opt"]
    assert (opt.fast_dataloader, opt.persistent_workers, opt.worker_tensor) == (True, False, False)
