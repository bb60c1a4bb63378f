"""The record of a run: results.txt to the letter, files that survive a kill, a resume that goes on where it should."""

import csv
import inspect
import io
import logging
import re
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import parity
from utils.loggers import results as report_module
from utils.loggers.clock import per_second
from utils.loggers.results import NullReport, RunReport
from utils.plots import run as plots

NAMES = ["circle", "square"]
RATES = (0.01, 0.01, 0.1)
IMAGES = torch.zeros(2, 3, 64, 64)
PATHS = ["a.jpg", "b.jpg"]


def open_quiet(folder, num_epochs=2, **options):
    return RunReport(folder, num_epochs, NAMES, **{"images": False, "tensorboard": False, **options})


def one_epoch(report, epoch, losses=((0.1, 0.2, 0.3, 0.6),), results=(0,) * 7, num_labels=5, **options):
    for items in report.epoch(epoch, list(losses), len(losses)):
        report.batch(torch.tensor(items), IMAGES, torch.zeros(num_labels, 6), PATHS)
    report.epoch_done(results, RATES, **options)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_line_of_results_txt_equals_stock(tmp_path):
    """The numbers of a recorded stock run, put through the report, give its line."""
    expected = (
        "       0/1        0G   0.07249  0.002652   0.02917    0.1043        28        64"
        "  0.002876    0.1508  0.001209 0.0001209    0.1261  0.003634   0.03906"
    )
    report = open_quiet(tmp_path)
    results = (
        0.002875652197918488, 0.15079365079365079, 0.0012090389376193287, 0.00012090389376193289,
        0.12605462968349457, 0.003633654909208417, 0.03905981034040451,
    )  # fmt: skip
    one_epoch(report, 0, [(0.07249, 0.002652, 0.02917, 0.1043)], results, num_labels=28)
    parity.check("train/results_txt", "line of epoch 0", report.results_text(), expected + "\n")


def test_losses_are_the_running_mean_of_the_epoch(tmp_path):
    report = open_quiet(tmp_path)
    one_epoch(report, 0, [(1.0, 0, 0, 1), (2.0, 0, 0, 2), (6.0, 1, 0, 7)])
    assert report.results_text().split()[2:6] == ["3", "0.3333", "0", "3.333"]
    one_epoch(report, 1, [(5.0, 0, 0, 5)])
    assert report.results_text().splitlines()[1].split()[:3] == ["1/1", "0G", "5"]


def test_losses_that_come_late_in_blocks_have_the_same_mean(tmp_path):
    """To the last bit, whatever the blocks; the bar shows what is known."""
    losses = torch.rand(7, 4, generator=torch.Generator().manual_seed(0))
    texts = []
    for blocks in ((1,) * 7, (0, 0, 3, 0, 0, 3, 0)):
        report = open_quiet(tmp_path / str(len(texts)))
        rows = iter(losses)
        for count in report.epoch(0, list(blocks), len(blocks)):
            new = torch.stack([next(rows) for _ in range(count)]) if count else torch.zeros(0, 4)
            report.batch(new, IMAGES, torch.zeros(5, 6), PATHS)
        report.losses(torch.stack([*rows, *torch.zeros(0, 4)]) if sum(blocks) < 7 else torch.zeros(0, 4))
        report.epoch_done((0,) * 7, RATES)
        texts.append((report.results_text(), report.mean_losses))
    assert texts[0][0] == texts[1][0] and torch.equal(texts[0][1], texts[1][1])


def test_an_epoch_is_one_line_and_a_bar_that_goes_away(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    report = open_quiet(tmp_path)
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    for _ in report.epoch(0, iter([1]), 1):
        report.batch(torch.tensor((0.1, 0.2, 0.3, 0.6)), IMAGES, torch.zeros(7, 6), PATHS)
        report.bar.refresh()
    report.end_training(torch.zeros(0, 4))
    assert re.fullmatch(r"train 0/1: box 0.1 obj 0.2 cls 0.3, 64 px, [\d.]+ img/s", caplog.messages[-1])
    assert len(caplog.messages) == 1
    shown = stream.getvalue().split("\r")
    assert any(text.startswith("train 0/1: box 0.1 obj 0.2 cls 0.3 |") for text in shown)
    assert not shown[-1] and not shown[-2].strip(), "the bar is wiped"


def test_rates_count_training_alone(tmp_path, monkeypatch):
    """Two epochs of two batches of 2 images in two processes, 1 s for each batch; the rest takes 100 s an epoch."""
    now = [0.0]
    monkeypatch.setattr("utils.loggers.clock.time.monotonic", lambda: now[0])
    report = open_quiet(tmp_path, world_size=2)
    for epoch in range(2):
        for _ in report.epoch(epoch, [None, None], 2):
            now[0] += 51.0
            report.exclude(50.0)
            report.batch(torch.zeros(4), IMAGES, torch.zeros(1, 6), PATHS)
        report.end_training(torch.zeros(0, 4))
        assert (report.clock.seconds, report.clock.rate) == (2.0, 4.0)
        now[0] += 100.0
        report.epoch_done((0,) * 7, RATES)
    assert (report.clock.total_images, report.clock.total_rate) == (16, 4.0)
    assert (per_second(4.04), per_second(44.4), per_second(5800)) == ("4.0 img/s", "44 img/s", "5800 img/s")


def test_results_csv_has_names_and_everything(tmp_path):
    report = open_quiet(tmp_path)
    one_epoch(report, 0, results=(0.5, 0.25, 0.125, 0.1, 1, 2, 3))
    (row,) = rows_of(tmp_path / "results.csv")
    assert row.pop("seconds")
    assert {key: float(value) for key, value in row.items()} == pytest.approx(
        {
            "epoch": 0, "train/box_loss": 0.1, "train/obj_loss": 0.2, "train/cls_loss": 0.3,
            "metrics/precision": 0.5, "metrics/recall": 0.25, "metrics/mAP_0.5": 0.125, "metrics/mAP_0.5:0.95": 0.1,
            "val/box_loss": 1, "val/obj_loss": 2, "val/cls_loss": 3, "x/lr0": 0.01, "x/lr1": 0.01, "x/lr2": 0.1,
            "train/total_loss": 0.6, "labels": 5, "image_size": 64, "memory_gb": 0,
        }
    )  # fmt: skip


def test_class_rows_only_from_tested_epochs(tmp_path):
    report = open_quiet(tmp_path, num_epochs=3, per_class=True)
    for epoch, class_ap in enumerate(([0.1, 0.2], None, [0.3, 0.4])):
        one_epoch(report, epoch, class_ap=class_ap)
    assert rows_of(tmp_path / "results_per_class.csv") == [
        {"epoch": "0", "circle": "0.1", "square": "0.2"},
        {"epoch": "2", "circle": "0.3", "square": "0.4"},
    ]


def test_every_epoch_is_on_disk_when_it_is_done(tmp_path):
    report = open_quiet(tmp_path)
    for epoch in range(2):
        one_epoch(report, epoch)
        assert len((tmp_path / "results.txt").read_text().splitlines()) == epoch + 1
        assert len(rows_of(tmp_path / "results.csv")) == epoch + 1


def test_resume_cuts_what_came_after_the_checkpoint(tmp_path):
    first = open_quiet(tmp_path)
    one_epoch(first, 0)
    checkpointed = first.results_text()
    one_epoch(first, 1, [(9.0, 9, 9, 9)])
    with (tmp_path / "results.csv").open("a") as file:
        file.write("1,0.1,0.")  # killed in the middle of a line

    second = open_quiet(tmp_path)
    second.resume(checkpointed, num_epochs=4)
    assert second.results_text() == checkpointed
    one_epoch(second, 1)
    assert [line.split()[0] for line in second.results_text().splitlines()] == ["0/1", "1/3"]
    rows = rows_of(tmp_path / "results.csv")
    assert [(row["epoch"], row["train/box_loss"]) for row in rows] == [("0", "0.1"), ("1", "0.1")]


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"epoch,a\n0,1\n\0\0\0\0", ["0"]),
        (b"epoch,a\n0,1\n\xff\xfe,1\nx,1\n\n", ["0"]),
        (b"\n0,1\n", []),
        (b"\0\0\0\0", []),
        (b"", []),
    ],
)
def test_a_table_that_a_power_cut_damaged_does_not_keep_a_run_from_going_on(content, kept, tmp_path):
    (tmp_path / "results.csv").write_bytes(content)
    report = open_quiet(tmp_path)
    report.resume("       0/1        0G" + "         0" * 13 + "\n", num_epochs=2)
    one_epoch(report, 1)
    assert [row["epoch"] for row in rows_of(tmp_path / "results.csv")] == [*kept, "1"]


def test_resume_in_a_new_folder_writes_the_old_lines(tmp_path):
    first = open_quiet(tmp_path / "one")
    one_epoch(first, 0)
    second = open_quiet(tmp_path / "two")
    second.resume(first.results_text(), num_epochs=2)
    one_epoch(second, 1)
    assert len(second.results_text().splitlines()) == 2
    assert [row["epoch"] for row in rows_of(tmp_path / "two" / "results.csv")] == ["1"]


def test_fresh_run_replaces_older_results_and_says_so(tmp_path, caplog):
    one_epoch(open_quiet(tmp_path), 0)
    again = open_quiet(tmp_path)
    assert (tmp_path / "results.txt").read_text()  # still there: nothing has been trained yet
    assert "replaced" not in caplog.text
    one_epoch(again, 0)
    assert len(again.results_text().splitlines()) == 1
    assert "results.txt of an earlier run is replaced" in caplog.text


def test_an_epoch_without_batches_is_recorded(tmp_path):
    report = open_quiet(tmp_path)
    one_epoch(report, 0, losses=())
    assert report.results_text().split()[2:8] == ["nan"] * 4 + ["0", "0"]


def test_images_of_a_run(tmp_path):
    report = open_quiet(tmp_path, images=True)
    report.labels([torch.tensor([(0, 0.5, 0.5, 0.2, 0.2)]).numpy()])
    one_epoch(report, 0, losses=[(0.1, 0.2, 0.3, 0.6)] * 11, num_labels=0)
    report.last_plots()
    report.finish()
    previews = {f"train_batch{number}.jpg" for number in range(10)}
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.txt", "results.csv", "results.png", "labels.jpg", *previews
    }  # fmt: skip


def test_the_end_does_not_wait_for_figures_before_it_has_to(tmp_path):
    report = open_quiet(tmp_path, images=True)
    one_epoch(report, 0, num_labels=0)
    slow = plots.in_background(time.sleep, 1)
    shown = []
    report.tensorboard.predictions = lambda: shown.append(slow.done())
    report.last_plots()
    assert not slow.done() and not shown
    report.finish()
    assert shown == [True] and (tmp_path / "results.png").exists()


def test_previews_may_be_overwritten_and_only_open_a_run(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(report_module, "in_background", lambda function, *args: drawn.append(args) or Future())
    report = open_quiet(tmp_path, images=True)
    images = torch.ones(20, 3, 8, 8)
    for _ in report.epoch(0, [None], 1):
        report.batch(torch.zeros(4), images, torch.ones(1, 6), PATHS)
    images.zero_()
    assert drawn[0][0].shape == (16, 3, 8, 8) and drawn[0][0].min() == 1
    one_epoch(report, 10)
    assert len(drawn) == 1


def test_tensorboard_has_the_tags_of_stock(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    report = open_quiet(tmp_path, tensorboard=True)
    report.labels([torch.zeros(2, 5).numpy()])
    one_epoch(report, 0, results=(0.5, 0.25, 0.125, 0.1, 1, 2, 3))
    report.last_plots()
    report.finish()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    ours = ("speed/", "hparam/")
    assert {tag for tag in events.Tags()["scalars"] if not tag.startswith(ours)} == {
        "train/box_loss", "train/obj_loss", "train/cls_loss", "metrics/precision", "metrics/recall", "metrics/mAP_0.5",
        "metrics/mAP_0.5:0.95", "val/box_loss", "val/obj_loss", "val/cls_loss", "x/lr0", "x/lr1", "x/lr2",
    }  # fmt: skip
    assert events.Tags()["histograms"] == ["classes"]
    assert [(e.step, e.value) for e in events.Scalars("metrics/mAP_0.5")] == [(0, 0.125)]


def test_missing_tensorboard_is_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    one_epoch(open_quiet(tmp_path, tensorboard=True), 0)
    assert [record.getMessage() for record in caplog.records if "tensorboard" in record.getMessage()] == [
        "tensorboard is not installed: no event file is written (pip install tensorboard)"
    ]


def test_null_report_takes_every_call_and_does_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = NullReport()
    feed = [(0.1, 0.2, 0.3, 0.6)]
    assert report.epoch(0, feed, 1) is feed
    one_epoch(report, 0, feed)
    for name, method in inspect.getmembers(RunReport, inspect.isfunction):
        if not name.startswith("_") and name not in ("epoch", "results_text"):
            assert getattr(report, name)(*inspect.signature(method).parameters) is None
    assert report.results_text() == "" and not list(tmp_path.iterdir())


def test_equal_class_names_have_a_column_each(tmp_path):
    names = ["dog", "epoch", "dog", "dog (2)", "a b", "a_b"]
    report = RunReport(tmp_path, 1, names, images=False, tensorboard=False, per_class=True)
    tags = {}
    report.tensorboard = SimpleNamespace(
        begin_epoch=lambda: None, end_epoch=lambda epoch, scalars, clock: tags.update(scalars),
    )  # fmt: skip
    aps = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    one_epoch(report, 0, class_ap=np.array(aps))
    (row,) = rows_of(tmp_path / "results_per_class.csv")
    assert [float(value) for value in row.values()] == [0, *aps]
    assert list(row) == ["epoch", "dog (0)", "epoch (1)", "dog (2) (2)", "dog (2)", "a b", "a_b"]
    by_class = {tag: value for tag, value in tags.items() if tag.startswith("class_mAP")}
    assert list(by_class.values()) == aps
    assert len({tag.replace(" ", "_") for tag in by_class}) == len(names)
