"""Trainings as processes: how they end, what is read from them, nothing left behind."""

import math
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests import small_run
from tools.experiments import runner
from tools.experiments.runner import MAP50, FinishedRun, run_training
from utils.system.children import PARENT
from utils.system.files import PROJECT_ROOT

CFG = "--cfg cfg/training/yolov7-tiny.yaml"  # not read by the fake training, but the tools look for it
FAKE = [sys.executable, str(Path(__file__).resolve().parents[2] / "fake_train.py")]


@pytest.fixture
def hyp(tmp_path, monkeypatch):
    """A file of hyper-parameters for the fake training, which stands in for train.py."""
    monkeypatch.setattr(runner, "TRAIN", FAKE)
    path = tmp_path / "hyp.yaml"
    path.write_text("lr0: 0.1\n")
    return str(path)


def fake(folder, hyp, *arguments, **options):
    return run_training(["--hyp", hyp, *arguments], folder, **options)


def test_a_completed_run(tmp_path, hyp):
    run = fake(tmp_path / "runs" / "one", hyp, "--epochs", 3)
    assert (run.status, run.message, run.completed) == ("completed", "", True)
    assert [row[MAP50] for row in run.rows] == pytest.approx([0.1, 0.2, 0.3])
    assert run.last(MAP50) == pytest.approx(0.3) and run.peak("memory_gb") == 2
    assert run.log().startswith("Device: fake")


def test_a_failed_run_says_why(tmp_path, hyp):
    run = fake(tmp_path / "one", hyp, "--batch-size", 0)
    assert run.status == "failed"
    assert run.message == "--batch-size 0 is too small: it has to be at least 1"
    assert run.last(MAP50) is None and run.peak("memory_gb") is None and run.typical("seconds") is None


def test_a_run_is_stopped_with_its_workers(tmp_path, hyp, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "0.3")
    seen, before = [], children()

    def stop_after_two(rows):
        seen.append(children() - before)
        return "enough" if len(rows) >= 2 else None

    run = fake(tmp_path / "one", hyp, "--epochs", 50, "--workers", 2, on_epoch=stop_after_two)
    assert (run.status, run.message) == ("stopped", "enough")
    assert 2 <= len(run.rows) < 10
    assert len(seen[-1]) >= 3
    deadline = time.monotonic() + 10
    while any(map(is_running, seen[-1])) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, seen[-1]))


def children():
    """Ids of all processes below this one; other tests may have left some."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def is_running(pid):
    """Not only a process that nobody has asked for its exit status."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_run_that_hangs_is_ended(tmp_path, hyp, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "600")
    started = time.monotonic()
    run = fake(tmp_path / "one", hyp, timeout=0.5)
    assert (run.status, run.message) == ("failed", "no end after 0 s: the run was stopped")
    assert time.monotonic() - started < 300


def test_an_interruption_ends_the_run_too(tmp_path, hyp, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "0.3")
    before = children()

    def interrupt(rows):
        assert children() - before
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fake(tmp_path / "one", hyp, "--epochs", 50, on_epoch=interrupt)
    assert children() <= before


def test_several_at_once_end_together(tmp_path, hyp, monkeypatch):
    """An interruption reaches all; none is waited for before the others are asked."""
    monkeypatch.setenv("FAKE_SECONDS", "600")
    before, rounds, seen = children(), [], []

    def interrupt():
        rounds.append(1)
        seen[:] = children() - before
        if len(seen) >= 6:  # three, and a worker of each
            raise KeyboardInterrupt

    works = [runner.training(["--hyp", hyp, "--workers", 1], tmp_path / name) for name in "abc"]
    with pytest.raises(KeyboardInterrupt):
        runner.at_once(works, interrupt)
    assert rounds and len(seen) == 6 and children() <= before


def test_one_that_fails_ends_the_others(tmp_path, hyp, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "600")
    before = children()

    def bad():
        yield None
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        runner.at_once([runner.training(["--hyp", hyp], tmp_path / "one"), bad()])
    assert children() <= before


def test_jobs_are_spread_over_the_devices(monkeypatch):
    monkeypatch.setattr(runner, "POLL", 0.0)
    began = []

    def job(name, rounds, device):
        began.append((name, device))
        for _ in range(rounds):
            yield None
        return name

    jobs = [partial(job, name, rounds) for name, rounds in (("slow", 5), ("quick", 1), ("none", 0), ("last", 1))]
    assert runner.spread(jobs, ["0", "1"]) == ["slow", "quick", "none", "last"]
    assert began == [("slow", "0"), ("quick", "1"), ("none", "1"), ("last", "1")]
    assert runner.at_once([]) == [] == runner.spread([], ["0"])


def interrupt_next_wait(monkeypatch):
    """Ctrl-C comes while a process is waited for."""
    wait = subprocess.Popen.wait

    def interrupted_once(process, timeout=None):
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted_once)


def test_a_second_interruption_leaves_no_process(tmp_path, hyp, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "600")
    before = children()
    training = runner.training(["--hyp", hyp], tmp_path / "one")
    next(training)
    interrupt_next_wait(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        training.close()
    assert children() <= before


def test_a_program_and_its_children_end_in_time(tmp_path):
    """After a timeout, after an interruption, and by themselves."""
    before, log = children(), tmp_path / "log.txt"
    sleeping = [sys.executable, "-c", "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '600'])"]
    assert runner.run_program(sleeping, log, os.environ, timeout=1) is None and log.read_text() == "begun\n"
    assert children() <= before
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        interrupt_next_wait(patch)
        runner.run_program(sleeping, log, os.environ)
    assert children() <= before
    assert runner.run_program([sys.executable, "-c", "raise SystemExit(7)"], log, os.environ, timeout=60) == 7


def test_workers_may_put_their_files_away(tmp_path):
    """Those of a program that has ended, for a while, before they are killed."""
    worker = f"import time; from pathlib import Path; time.sleep(0.5); Path({str(tmp_path / 'away')!r}).touch()"
    family = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {worker!r}])"
    assert runner.run_program([sys.executable, "-c", family], tmp_path / "log.txt", os.environ) == 0
    assert (tmp_path / "away").exists()


def test_a_killed_process_is_named_by_its_signal():
    assert runner.last_words("Epoch 3\n", -9) == "ended by signal SIGKILL"
    assert runner.last_words("x\nerror: no such file\n1/3\n", 2) == "no such file"
    assert runner.last_words("", 1) == "exit status 1"


def test_rows_without_the_line_that_is_being_written(tmp_path):
    assert runner.read_rows(tmp_path) == []
    (tmp_path / "results.csv").write_text("epoch,a,b\n0,1,\n1,2,3\n2,5")
    assert runner.read_rows(tmp_path) == [{"epoch": 0, "a": 1}, {"epoch": 1, "a": 2, "b": 3}]


def test_typical_leaves_out_the_first_epoch():
    run = FinishedRun(
        Path(), "completed", rows=[{"seconds": 9}, {"seconds": 1}, {"seconds": 3}], speed={"speed/x": [5]}
    )
    assert run.typical("seconds") == 2
    assert run.typical("speed/x") == 5


def test_when_the_epochs_after_the_first_ran(tmp_path):
    path, now = tmp_path / "results.csv", time.monotonic()
    path.write_text("whatever")
    os.utime(path, (time.time() - 30,) * 2)
    rows = [{"seconds": 9.0}, {"seconds": 2.0}, {"seconds": 3.0}]
    assert runner.later_epochs(tmp_path, rows, now - 50) == pytest.approx((now - 35, now - 30), abs=1)
    assert runner.later_epochs(tmp_path, rows, now - 33) == pytest.approx((now - 33, now - 30), abs=1)
    assert runner.later_epochs(tmp_path, rows[:1], now) == (0, 0) == runner.later_epochs(tmp_path / "x", rows, now)


@pytest.mark.parametrize(("window", "is_inside"), [((0, math.inf), True), ((0, 0), False)])
def test_memory_is_that_of_the_epochs_after_the_first(window, is_inside, tmp_path, hyp, monkeypatch):
    monkeypatch.setattr(runner, "later_epochs", lambda folder, rows, started: window)
    memory = fake(tmp_path / "one", hyp).memory
    assert bool(memory) == is_inside and all(0 <= entry < 1 for entry in memory)


def test_a_real_training_with_its_speed(tmp_path, monkeypatch):
    assert [sys.executable, str(PROJECT_ROOT / "train.py")] == runner.TRAIN
    monkeypatch.setattr(runner, "TRAIN", small_run.UNDRAWN)
    arguments = small_run.arguments(tmp_path, "--epochs", "2")
    keep = [word for word in arguments if word not in ("--project", str(tmp_path / "runs"), "--name", "run")]
    run = run_training(keep, tmp_path / "real" / "run", timeout=120, environment={"OMP_NUM_THREADS": "1"})
    assert run.status == "completed", run.message
    assert len(run.rows) == 2 and run.last("train/total_loss") > 0
    assert len(run.speed["speed/images_per_second"]) == 2 and run.typical("speed/images_per_second") > 0
    assert runner.resume_arguments(run.folder) == ["--resume", str(run.folder / "weights" / "last.pt")]
    assert run.usage.seconds > 1 and len(run.memory) < run.seconds


def test_a_run_is_told_whom_to_end_with(tmp_path, hyp, monkeypatch):
    monkeypatch.setattr(runner, "TRAIN", [sys.executable, "-c", f"import os; print(os.environ['{PARENT}'])"])
    assert fake(tmp_path / "one", hyp).log() == f"{os.getpid()}\n"
