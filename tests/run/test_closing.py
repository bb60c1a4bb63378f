"""The last lines of a training."""

import shlex
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from utils.config.options import test_parser as parser_of_test  # under its own name pytest takes it for a test
from utils.engine.trainer import Progress
from utils.loggers.clock import TrainingClock
from utils.run.closing import log_result
from utils.run.closing import test_command as command_of
from utils.system.files import duration

OPTIONS = {"data": "data/shapes.yaml", "img_size": [96, 96], "single_cls": False, "v5_metric": False}


def write_results(folder, maps, num_epochs):
    """results.txt with (mAP@.5, mAP@.5:.95) of each epoch."""
    rows = [
        f"{epoch:>8}/{num_epochs - 1}        0G" + "".join(f"{v:10.4g}" for v in (*[0.1] * 6, 0.5, 0.5, *pair, 1, 1, 1))
        for epoch, pair in enumerate(maps)
    ]
    (folder / "results.txt").write_text("\n".join(rows) + "\n")
    return Namespace(save_dir=str(folder), **OPTIONS)


def said(caplog, opt, seconds=184.0, weights=(), **progress):
    clock = TrainingClock()
    clock.total_images, clock.total_seconds = 4400, 100.0
    caplog.clear()
    with caplog.at_level("INFO"):
        log_result(opt, Progress(18, np.zeros(1), **{"trained": 3, **progress}), clock, seconds, list(weights))
    return caplog.messages


def test_what_was_achieved(tmp_path, caplog):
    opt = write_results(tmp_path, [(0.5, 0.2), (0.726, 0.293), (0.8, 0.1)], 3)
    weights = [tmp_path / "last.pt", Path("runs/best.pt")]
    first, second = said(caplog, opt, weights=weights, best_epoch=1)
    achieved, folder = first.split(" -> ")
    assert achieved.rstrip() == "best mAP@.5 0.726, mAP@.5:.95 0.293 at epoch 1 of 0-2, 3 min 4 s, 44 img/s"
    assert folder == str(tmp_path)
    assert second == "python test.py --weights runs/best.pt --data data/shapes.yaml --img 96"


def test_a_checkpoint_that_does_not_know_its_best_epoch(tmp_path, caplog):
    """By the fitness, as best.pt is chosen; an epoch that was not validated counts nothing."""
    opt = write_results(tmp_path, [(0, 0), (0.5, 0.2), (0.726, 0.293), (0.8, 0.1)], 4)
    (line,) = said(caplog, opt, best_epoch=-1, start_epoch=2)
    assert line.startswith("best mAP@.5 0.726, mAP@.5:.95 0.293 at epoch 2 of 0-3, 3 min 4 s since epoch 2, 44 img/s")


def test_a_run_that_stopped_early_or_only_had_to_be_finished(tmp_path, caplog):
    opt = write_results(tmp_path, [(0.5, 0.2), (0.7, 0.3)], 100)
    (line,) = said(caplog, opt, 0.4, best_epoch=1, trained=0, start_epoch=2)
    assert line.startswith("best mAP@.5 0.700, mAP@.5:.95 0.300 at epoch 1 of 0-1, 0.4 s since epoch 2")


def test_the_line_does_not_wrap(tmp_path, caplog, monkeypatch):
    """At 100 columns; only a long folder stands in a line of its own."""
    monkeypatch.chdir(tmp_path)
    for name, num_lines in (("runs/train/exp12", 1), ("runs/" + "x" * 60, 2)):
        Path(name).mkdir(parents=True)
        opt = write_results(Path(name), [(0.5, 0.2)] * 100, 100)
        lines = said(caplog, opt, 7500, best_epoch=99)[0].splitlines()
        assert len(lines) == num_lines and all(len(line) <= 100 for line in lines) and lines[-1].endswith(f"-> {name}")
        assert "at epoch 99 of 0-99, 2 h 5 min, 44 img/s" in lines[0]


def test_a_run_of_one_epoch(tmp_path, caplog):
    (line,) = said(caplog, write_results(tmp_path, [(0.5, 0.2)], 1), best_epoch=0)
    assert " at epoch 0, 3 min 4 s, " in line


def test_a_run_without_epochs_says_nothing(tmp_path, caplog):
    assert said(caplog, write_results(tmp_path, [], 3)) == []


@pytest.mark.parametrize("changes", [{}, {"single_cls": True, "v5_metric": True}, {"data": "/a folder/" + "x" * 80}])
def test_the_command_is_one_that_test_py_takes(changes):
    opt = Namespace(**OPTIONS | changes)
    line = command_of(opt, Path("runs/train/exp/weights/best.pt"))
    assert all(len(part) <= 79 for part in line.split("\n")) or "x" * 80 in line
    python, program, *words = shlex.split(line)
    read = parser_of_test().parse_args([word for word in words if word.strip()])
    assert (python, program) == ("python", "test.py") and read.weights == ["runs/train/exp/weights/best.pt"]
    assert (read.data, read.img_size, read.single_cls) == (opt.data, 96, opt.single_cls)


def test_duration():
    assert [duration(s) for s in (0.04, 59.9, 60, 184, 3599.6, 7500)] == [
        "0.0 s", "59.9 s", "1 min 0 s", "3 min 4 s", "1 h 0 min", "2 h 5 min"
    ]  # fmt: skip
