"""Several trainings at a time: the list of devices, a series of trials on two of them, lines on the terminal."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
import yaml

from tests.tools.experiments import test_runner
from tests.tools.experiments.test_runner import CFG
from tools import run_trials
from tools.experiments import devices, runner
from tools.experiments.devices import ProgressLines, read_devices
from tools.experiments.runner import LOSS, MAP50, FinishedRun
from utils.system.files import PROJECT_ROOT

TOOL = """
import sys
from tools import run_trials
from tools.experiments import command_line, runner
runner.TRAIN, runner.POLL = [sys.executable, "tests/fake_train.py"], 0.02
command_line.run_tool(run_trials.main, run_trials.parse())
"""  # tools/run_trials.py with the fake training


@pytest.fixture
def line(tmp_path):
    """Makes the command line of a series of trials with these overrides."""
    (tmp_path / "hyp.yaml").write_text("lr0: 0.1\n")

    def make(asked, *more):
        (tmp_path / "trials.json").write_text(json.dumps(asked))
        return ["--base-args", f"{CFG} --hyp {tmp_path / 'hyp.yaml'} --batch-size 2 --workers 0", "--trials-file",
                str(tmp_path / "trials.json"), "--output-dir", str(tmp_path / "out"), *more]  # fmt: skip

    return make


@pytest.fixture
def pretended(monkeypatch):
    """Trainings without processes: five epochs, mAP@.5 as in fake_train, one in each round; {folder: --device}."""
    began = {}

    def training(arguments, folder, on_epoch, *rest):
        began[folder.name] = arguments[-1] if arguments[-2] == "--device" else None
        rate = yaml.safe_load(open(arguments[arguments.index("--hyp") + 1]))["lr0"]  # noqa: SIM115, PTH123
        rows = []
        for epoch in range(5):
            rows.append({MAP50: rate * (epoch + 1), LOSS: 1.0})
            if reason := on_epoch(list(rows)):
                return FinishedRun(folder, "stopped", reason, rows=rows)
            yield None
        return FinishedRun(folder, "completed", rows=rows)

    monkeypatch.setattr(runner, "training", training)
    monkeypatch.setattr(runner, "POLL", 0.0)
    return began


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("gpu", [], "'gpu' is no device; give a list such as 0,1 or cpu,cpu"),
        ("0,,1", [], "'' is no device"),
        ("-1", [], "'-1' is no device"),
        ("0", ["--device", "1"], "--base-args: --device cannot be given together with --devices"),
        ("1,9,1", [], "--devices 1,9,1 names 2 GPUs, but 1 of them can be seen"),
    ],
)
def test_devices_that_cannot_be(text, words, message, monkeypatch):
    monkeypatch.setattr(runner, "call_python", lambda *a, **k: subprocess.CompletedProcess([], 0, "1\n"))
    with pytest.raises(ValueError, match=message):
        read_devices(text, words, "--base-args")


def test_lists_of_devices(monkeypatch):
    answers = []

    def call(*words, environment):
        answers.append(environment["CUDA_VISIBLE_DEVICES"])
        return subprocess.CompletedProcess([], 0, "2\n")

    monkeypatch.setattr(runner, "call_python", call)
    assert read_devices("", ["--device", "1"], "--base-args") == [None]
    assert read_devices("CPU, cpu", ["--workers", "0"], "--base-args") == ["cpu", "cpu"] and not answers
    assert read_devices("10,2,2,cpu", ["--workers", "0"], "--base-args") == ["10", "2", "2", "cpu"]
    assert answers == ["2,10"], "a card that stands there twice is one card"


def test_more_workers_than_cores(monkeypatch, caplog):
    monkeypatch.setattr(devices, "usable_cores", lambda: 8)
    read_devices("cpu,cpu", ["--workers", "4"], "--base-args")
    read_devices("cpu", ["--workers", "40"], "--base-args")  # nobody stands beside it: as train.py alone
    assert not caplog.text
    read_devices("cpu,cpu,cpu", ["--workers", "4"], "--base-args")
    assert "3 trainings at a time with --workers 4 each need 12 cores, this machine has 8" in caplog.text


def test_a_trial_on_each_device(line, pretended):
    asked = [{"hyp.lr0": 0.1}, {"hyp.lr0": 0.2}, {"batch_size": 0}, {"hyp.lr0": 0.05}]
    table = run_trials.run(run_trials.parse(line(asked, "--devices", "cpu,cpu")))
    assert [trial.status for _, trial in sorted(table.trials.items())] == ["completed"] * 2 + ["failed", "completed"]
    assert [trial.trial_id for trial in table.ranking()] == [1, 0, 3, 2]
    assert pretended == dict.fromkeys(["trial_000", "trial_001", "trial_003"], "cpu")
    again = run_trials.run(run_trials.parse(line(asked)))
    assert again.path == table.path and len(again.trials) == 4, "other devices are the same series"


def test_a_trial_may_be_far_behind_one_that_still_runs(line, pretended):
    options = ("--early-stop-threshold", "0.1")
    asked = [{"hyp.lr0": 0.2}, {"hyp.lr0": 0.01}]
    table = run_trials.run(run_trials.parse(line(asked, "--devices", "cpu,cpu", *options)))
    assert table.trials[1].status == "eliminated" and len(table.trials[1].curve) == 2
    assert "0.3800 below the best trial's" in table.trials[1].message and table.trials[0].status == "completed"


def test_trials_do_not_choose_their_device_as_well(line, pretended):
    with pytest.raises(ValueError, match="trials.json, trial 1: device cannot be given together with --devices"):
        run_trials.run(run_trials.parse(line([{}, {"device": "cpu"}], "--devices", "cpu,cpu")))
    assert not pretended


def test_an_interruption_ends_all_trials_and_the_same_command_continues_them(line, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "0.3")
    asked = [{"hyp.lr0": 0.2}, {"hyp.lr0": 0.1}]
    words = line(asked, "--devices", "cpu,cpu", "--budget-epochs", "1000")
    before = test_runner.children()
    with subprocess.Popen([sys.executable, "-c", TOOL, *words], cwd=PROJECT_ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True) as tool:  # fmt: skip
        results = [f"trial_00{k}/weights/last.pt" for k in (0, 1)]
        while not all(list(tmp_path.glob(f"out/*/{path}")) for path in results):
            assert tool.poll() is None, tool.stdout.read()
        tool.send_signal(signal.SIGINT)
        assert "interrupted" in tool.communicate(timeout=60)[0]
    assert not [pid for pid in test_runner.children() - before if test_runner.is_running(pid)]
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]
    monkeypatch.setattr(runner, "TRAIN", [sys.executable, "-c", "import sys; sys.exit('error: ' + str(sys.argv))"])
    table = run_trials.run(run_trials.parse(words))
    for number, trial in table.trials.items():
        assert "'--resume'" in trial.message and f"trial_00{number}/weights/last.pt" in trial.message
        assert "'--device', 'cpu'" in trial.message


def test_lines_on_a_terminal():
    """30 columns wide: every line is cut there, so that going up by a line is right."""
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (20, 30)) if hasattr(termios, "tcsetwinsize") else pytest.skip("Python 3.11")
    pipe = io.StringIO()
    terminal = open(theirs, "w")  # noqa: PTH123, SIM115
    with terminal, ProgressLines(2, terminal) as lines, ProgressLines(2, pipe) as silent:
        for shown in (lines, silent):
            shown.show(0, "cpu  trial_000  epoch 3")
            shown.show(1, "cpu  trial_001  epoch 4  " + "x" * 80)
    written = b""
    with suppress(OSError):  # at the end; a read takes what has arrived, which may be a part
        while more := os.read(ours, 100_000):
            written += more
    os.close(ours)
    written = written.decode()
    assert "cpu  trial_000  epoch 3" in written and "cpu  trial_001  epoch 4  xxxx" in written
    pieces = re.split(r"\r|\n|\x1b\[A|\x1b\[0m", written)
    assert max(map(len, pieces)) <= 30 and not pipe.getvalue()
