"""Resumed runs end bit-equal to uninterrupted ones; what changes on resume takes effect and is said."""

import logging
import os
from argparse import Namespace

import numpy as np
import pytest
import torch

from tests import small_run
from tests.test_train import SLOW_WARMUP, Interrupted, interrupt_after, results_of
from utils.engine import resume
from utils.engine.checkpoint_reader import read_checkpoint
from utils.engine.trainer import Progress
from utils.plots.run import read_results
from utils.run import folder as run_folder
from utils.run.entry import NothingToDo

SHORT_WARMUP = {"warmup_min_iters": 3, "warmup_epochs": 1.0}


def assert_equal(a, b, path=""):
    """Equal values of nested dicts, lists and tensors."""
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_equal(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, pair in enumerate(zip(a, b, strict=True)):
            assert_equal(*pair, f"{path}/{i}")
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path


def assert_same_end(run, reference):
    """Weights, average, optimiser, random states and results of two finished runs, to the last bit."""
    assert results_of(run) == results_of(reference)
    a, b = (read_checkpoint(folder / "weights" / "last_full.pt") for folder in (run, reference))
    assert_equal(a.optimizer, b.optimizer)
    states = [resume.of(stored) for stored in (a, b)]
    for state in states:
        state.pop("options")
    assert_equal(*states)
    for name in ("last.pt", "best.pt", "init.pt"):
        a, b = (read_checkpoint(folder / "weights" / name).model.state for folder in (run, reference))
        assert_equal(a, b, name)
    assert {p.name for p in (run / "weights").iterdir()} == {p.name for p in (reference / "weights").iterdir()}


def interrupted(folder, monkeypatch, epoch, *flags, **options):
    """The last.pt of a run that was interrupted after `epoch`."""
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupt_after(epoch, patch)
        small_run.run(folder, *flags, **options)
    return folder / "runs" / "run" / "weights" / "last.pt"


def resumed(last, *flags):
    return small_run.run_line(["--resume", str(last), "--device", "cpu", *flags])


@pytest.mark.parametrize(
    ("flags", "hyp"),
    [
        (("--adam", "--linear-lr", "--ota-last", "2", "--subset-size", "4"), SHORT_WARMUP),
        (("--seed", "5", "--workers", "2", "--fast-dataloader"), {}),
        (("--image-weights", "--multi-scale", "--eval-interval", "2"), SHORT_WARMUP),
        (("--max-iter", "1", "--seed", "5"), {}),
        (("--resize-schedule", "0:64,1:96,2:32"), SHORT_WARMUP),
        (("--overfit", "--subset-size", "4"), {}),
        (("--fast", "--seed", "5", "--workers", "2"), SHORT_WARMUP),
    ],
    ids=lambda value: " ".join(value) or "stock" if isinstance(value, tuple) else "",
)
def test_interrupted_run_ends_bit_equal(flags, hyp, tmp_path, monkeypatch):
    flags = ("--epochs", "3", "--batch-size", "2", *flags)
    reference = small_run.run(tmp_path, *flags, "--name", "reference", hyp=hyp)
    last = interrupted(tmp_path, monkeypatch, 1, *flags, hyp=hyp)
    assert_same_end(resumed(last), reference)


def test_every_epoch_may_be_interrupted(tmp_path, monkeypatch):
    reference = small_run.run(tmp_path, "--epochs", "4", "--name", "reference", hyp=SHORT_WARMUP)
    last = interrupted(tmp_path, monkeypatch, 0, "--epochs", "4", hyp=SHORT_WARMUP)
    for epoch in (1, 2):
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            interrupt_after(epoch, patch)
            resumed(last)
    assert_same_end(resumed(last), reference)


def test_killed_after_the_last_epoch_is_finished(tmp_path, monkeypatch):
    reference = small_run.run(tmp_path, "--name", "reference")
    last = interrupted(tmp_path, monkeypatch, 1)
    assert read_checkpoint(last).optimizer is not None
    assert_same_end(resumed(last), reference)
    with pytest.raises(NothingToDo, match="finished its 2 epochs"):
        resumed(last)


def test_killed_while_it_strips(tmp_path, monkeypatch):
    reference = small_run.run(tmp_path, "--name", "reference")

    def interrupted(path):
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr("utils.engine.checkpoint.full_state_path", interrupted)  # of last.pt, the second one
        small_run.run(tmp_path)
    last = tmp_path / "runs" / "run" / "weights" / "last.pt"
    assert read_checkpoint(last.with_name("best.pt")).optimizer is None, "the first one is done"
    assert read_checkpoint(last).optimizer is not None, "last.pt says that something is left to do"
    assert_same_end(resumed(last), reference)


# ---- what changes on the way ---------------------------------------------------------------------------------------


def rates_of(run):
    """Learning rate of the first group in each epoch."""
    header, *rows = (run / "results.csv").read_text().splitlines()
    return [float(row.split(",")[header.split(",").index("x/lr0")]) for row in rows]


def test_more_epochs_follow_the_longer_schedule_at_once(tmp_path, caplog):
    hyp = {"warmup_min_iters": 1, "warmup_epochs": 0.0}
    long = small_run.run(tmp_path, "--epochs", "6", "--linear-lr", "--name", "long", hyp=hyp)
    short = small_run.run(tmp_path, "--epochs", "3", "--linear-lr", hyp=hyp)
    with caplog.at_level(logging.INFO):
        resumed(short / "weights" / "last.pt", "--epochs", "6")
    assert rates_of(short)[3:] == rates_of(long)[3:] and rates_of(short)[2] < rates_of(short)[3]
    assert "Changed since the checkpoint: epochs 3 -> 6" in caplog.text
    assert read_results(short / "results.txt")[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_another_batch_size(tmp_path, monkeypatch, caplog):
    hyp = {"warmup_min_iters": 1, "warmup_epochs": 0.0}
    last = interrupted(tmp_path, monkeypatch, 0, "--batch-size", "2", "--epochs", "3", hyp=hyp)
    before = read_checkpoint(last).optimizer["param_groups"][1]["weight_decay"]
    with caplog.at_level(logging.INFO):
        run = resumed(last, "--batch-size", "6", "--workers", "1")
    assert "total_batch_size 2 -> 6" in caplog.text and "workers 0 -> 1" in caplog.text
    after = read_checkpoint(run / "weights" / "last_full.pt")
    assert before == small_run.HYP["weight_decay"] and after.extra["full_state"]["accumulate"] == 11  # 64 / 6
    assert after.optimizer["param_groups"][1]["weight_decay"] == pytest.approx(before * 6 * 11 / 64)
    assert after.extra["full_state"]["options"]["total_batch_size"] == 6


@pytest.mark.parametrize("is_on", [False, True], ids=["switched on", "switched off"])
@pytest.mark.parametrize(
    ("names", "tolerance"),  # losses and steps differ by rounding
    [(["fast_dataloader"], 0), (["fast_dataloader", "fast_loss"], 1e-6), (["fast"], 1e-6)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_faster_paths_change_on_the_way(names, tolerance, is_on, tmp_path, monkeypatch, caplog):
    flags = [f"--{name.replace('_', '-')}" for name in names]
    common = ("--epochs", "3", "--batch-size", "2", "--seed", "5", "--workers", "1")
    reference = small_run.run(tmp_path, *common, "--name", "reference", hyp=SLOW_WARMUP)
    last = interrupted(tmp_path, monkeypatch, 0, *common, *(flags if is_on else ()), hyp=SLOW_WARMUP)
    with caplog.at_level(logging.INFO):
        run = resumed(last, *(flag.replace("--", "--no-") if is_on else flag for flag in flags))
    changes = ", ".join(f"{name} {is_on} -> {not is_on}" for name in names)
    assert f"Changed since the checkpoint: {changes}" in caplog.messages
    states = [resume.of(read_checkpoint(folder / "weights" / "last_full.pt")) for folder in (run, reference)]
    for name in ("model", "ema"):
        torch.testing.assert_close(*(state[name] for state in states), rtol=0, atol=tolerance)
    tables = [read_results(folder / "results.txt") for folder in (run, reference)]
    assert np.allclose(*tables, rtol=0, atol=tolerance)


def test_changed_hyper_parameters_are_named(tmp_path, monkeypatch, caplog):
    last = interrupted(tmp_path, monkeypatch, 0, hyp={"warmup_min_iters": 1, "warmup_epochs": 0.0})
    text = (tmp_path / "hyp.yaml").read_text()
    (tmp_path / "hyp.yaml").write_text(text.replace("lr0: 0.01", "lr0: 0.02"))
    run = resumed(last)
    assert "hyp.yaml has changed since the checkpoint" in caplog.text and "lr0 0.01 -> 0.02" in caplog.text
    assert rates_of(run) == pytest.approx([0.01, 0.02])


def test_file_without_a_full_state_goes_on(tmp_path, monkeypatch, caplog):
    last = interrupted(tmp_path, monkeypatch, 0)
    content = torch.load(last, weights_only=False)
    del content["full_state"]
    torch.save(content, last)
    with caplog.at_level(logging.INFO):
        run = resumed(last)
    assert "last.pt holds no full state" in caplog.text
    assert read_results(run / "results.txt")[:, 0].tolist() == [0, 1]


DAMAGES = (
    lambda state: state.pop("maps"),
    lambda state: state["ema"].clear(),
    lambda state: state.update(options=None),
    lambda state: state["random_states"][0].pop("numpy"),
    lambda state: state["random_states"][0].update(torch=torch.zeros(3)),
    lambda state: state["random_states"][0].update(python=torch.zeros(3)),
    lambda state: state.update(random_states={"a": 1}),
    lambda state: state.update(accumulate="x"),
    lambda state: state.update(accumulate=0),
    lambda state: state.update(hyp=torch.zeros(3)),
    lambda state: state["hyp"].update(obj_pw=torch.zeros(3)),
    lambda state: state["options"].update(epochs=torch.zeros(3)),
    lambda state: state.update(results=["x"] * 7),
    lambda state: state.update(results=[1.0]),
    lambda state: state.update(maps=[[1.0]]),
    lambda state: state.update(maps=[1.0] * 9),
    lambda state: state.update(best_epoch="x"),
)


def test_damaged_state_is_refused(tmp_path, monkeypatch):
    last = interrupted(tmp_path, monkeypatch, 0)
    for damage in DAMAGES:
        content = torch.load(last, weights_only=False)
        damage(content["full_state"])
        torch.save(content, last.with_name("damaged.pt"))
        with pytest.raises(ValueError, match="full state is damaged|random states of the checkpoint cannot be used"):
            resumed(last.with_name("damaged.pt"))


def test_stock_entries_stay_in_half_precision(tmp_path, monkeypatch):
    stored = read_checkpoint(interrupted(tmp_path, monkeypatch, 0, hyp=SLOW_WARMUP))
    state = resume.of(stored)
    for name in ("model", "ema"):
        rounded = getattr(stored, name).state
        exact = state[name]
        assert list(rounded) == list(exact)
        assert all(torch.equal(rounded[key], exact[key].to(rounded[key].dtype)) for key in exact)
    weight = state["model"]["model.1.conv.weight"]
    assert weight.dtype == torch.float32 and not torch.equal(weight, weight.half().float())
    assert state["scheduler"] == {"last_epoch": 0} and len(state["random_states"]) == 1
    assert state["hyp"] == small_run.HYP | SLOW_WARMUP and state["options"]["epochs"] == 2
    assert np.isfinite(state["results"]).all() and len(state["maps"]) == 2


def test_a_run_trains_on_its_own_images_wherever_it_is_resumed(tmp_path, monkeypatch):
    """In the other folder lie namesakes, whose list of images would be read with the same words."""
    for name, num_images in (("here", 6), ("there", 3)):
        (tmp_path / name).mkdir()
        small_run.arguments(tmp_path / name, num_images=num_images)
        images = sorted((tmp_path / name / "images" / "train").iterdir())
        (tmp_path / name / "lists").mkdir()
        (tmp_path / name / "lists" / "train.txt").write_text("\n".join(f"images/train/{path.name}" for path in images))
        text = (tmp_path / name / "data.yaml").read_text().replace("train: images/train", "train: lists/train.txt")
        (tmp_path / name / "data.yaml").write_text(text)
    line = ["--data", "data.yaml", "--cfg", "cfg.yaml", "--hyp", "hyp.yaml", "--img", "64", "--batch-size", "3",
            "--epochs", "3", "--workers", "0", "--device", "cpu", "--noautoanchor", "--project", "runs"]  # fmt: skip
    monkeypatch.chdir(tmp_path / "here")
    assert small_run.program("train", [*line, "--name", "whole"]) == 0
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupt_after(1, patch)
        small_run.program("train", [*line, "--name", "run"])
    monkeypatch.chdir(tmp_path / "there")
    last = tmp_path / "here" / "runs" / "run" / "weights" / "last.pt"
    assert small_run.program("train", ["--resume", str(last), "--device", "cpu"]) == 0
    assert results_of(last.parent.parent) == results_of(tmp_path / "here" / "runs" / "whole")


@pytest.mark.parametrize("flags", [(), ("--strict-data",)])
def test_images_that_are_gone_since(flags, tmp_path, monkeypatch, caplog):
    last = interrupted(tmp_path, monkeypatch, 0, "--epochs", "2", *flags)
    count = resume.of(read_checkpoint(last))["images"]["count"]
    sorted((tmp_path / "images").rglob("*.*g"))[0].unlink()
    said = f"the training set has {count - 1} images, and had {count} when the checkpoint was written; they are not"
    if flags:
        with pytest.raises(ValueError, match=f"--strict-data: .*data.yaml: {said}"):
            resumed(last)
    else:
        resumed(last)
        assert said in caplog.text


@pytest.mark.parametrize(("before", "now", "is_said"), [
    (["a/x.jpg", "a/y.jpg"], ["b/a/y.jpg", "b/a/x.jpg"], False),  # the data set has moved
    (["a/x.jpg", "a/y.jpg"], ["a/x.jpg", "a/z.jpg"], True),  # as many, but others
    (["a/x.jpg"], ["a/x.jpg", "a/y.jpg"], True),
    (None, ["a/x.jpg"], False),  # a checkpoint of an older version
])  # fmt: skip
def test_which_images_a_run_had(before, now, is_said, caplog):
    progress = Progress(1, np.zeros(1))
    opt = Namespace(data="d.yaml", strict_data=False)
    if before:
        resume.note_images(progress, before, opt)
    resume.note_images(progress, now, opt)
    assert bool(caplog.messages) == is_said and progress.images["count"] == len(now)


@pytest.mark.parametrize(
    ("content", "seconds", "said"),
    [
        ("lr0: 0.5\nlrf: 0.1\n", 5, "hyp.yaml has been edited (lr0 0.5 there, 0.01 here), but"),
        ("a: [", 5, "nothing of it is used"),
        ("lr0: 0.5\n", 0, ""), ("lr0: 0.01\nmine: 3\n", 5, ""),
    ],
)  # fmt: skip
def test_whoever_edits_the_record_of_a_run_hears_which_file_is_read(content, seconds, said, tmp_path, caplog):
    for name, text in (("given.yaml", "lr0: 0.01\nlrf: 0.1\n"), ("hyp.yaml", content), ("opt.yaml", "")):
        (tmp_path / name).write_text(text)
    now = (tmp_path / "opt.yaml").stat().st_mtime
    os.utime(tmp_path / "hyp.yaml", (now, now + seconds))
    run_folder._say_which_is_read(tmp_path, tmp_path / "given.yaml")
    assert (said in caplog.text and "given.yaml" in caplog.text) if said else not caplog.text
    caplog.clear()
    run_folder._say_which_is_read(tmp_path, tmp_path / "hyp.yaml")
    assert not caplog.text
