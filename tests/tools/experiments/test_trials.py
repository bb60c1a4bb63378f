"""Trials: the table, elimination, ranking, what is asked for; a whole series with a fake training, and its restart."""

import csv
import json
import math
import sys
from pathlib import Path

import pytest
import yaml

from tests.tools.experiments import test_runner
from tools import run_trials
from tools.experiments import overrides, runner, trials
from tools.experiments.optuna_sampler import OptunaSampler
from tools.experiments.overrides import Budget
from tools.experiments.runner import MAP50
from tools.experiments.trials import Elimination, Trial, TrialTable

SETTINGS = {"base_args": ["--epochs", "3"]}


@pytest.fixture
def series(tmp_path, monkeypatch):
    """Runs tools/run_trials.py with the fake training, five epochs a trial; returns the table."""
    monkeypatch.setattr(runner, "TRAIN", test_runner.FAKE)
    monkeypatch.setattr(runner, "POLL", 0.02)
    monkeypatch.setenv("FAKE_SECONDS", "0.2")
    (tmp_path / "hyp.yaml").write_text("lr0: 0.1\nbox: 0.05\n")

    def run(asked, *more):
        (tmp_path / "trials.json").write_text(json.dumps(asked))
        line = ["--base-args", f"--hyp {tmp_path / 'hyp.yaml'} --batch-size 2", "--output-dir", str(tmp_path / "out"),
                "--budget-epochs", "5", "--trials-file", str(tmp_path / "trials.json"), *more]  # fmt: skip
        return run_trials.run(run_trials.parse(line))

    return run


def rows_of(table):
    with table.path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_completed_eliminated_and_failed(series):
    table = series([{"hyp.lr0": 0.2}, {"batch_size": 0}, {"hyp.lr0": 0.01}, {"hyp.lr0": 0.19}],
                   "--early-stop-threshold", "0.1")  # fmt: skip
    rows = rows_of(table)
    assert list(rows[0]) == [
        "trial_id", "status", "final_map", "final_loss", "seconds", "param_batch_size", "param_hyp.lr0"
    ]  # fmt: skip
    assert [row["status"] for row in rows] == ["completed", "failed", "eliminated", "completed"]
    assert [row["param_hyp.lr0"] for row in rows] == ["0.2", "", "0.01", "0.19"]
    assert float(rows[0]["final_map"]) == pytest.approx(1.0) and float(rows[0]["final_loss"]) == pytest.approx(0.2)
    assert rows[1]["final_map"] == rows[1]["final_loss"] == ""
    assert 2 <= len(table.trials[2].curve) < 5  # the first epoch eliminates nobody; after the second it is 0.38 behind
    assert [trial.trial_id for trial in table.ranking()] == [0, 3, 2, 1]
    text = trials.ranking_text(table.ranking())
    assert "--batch-size 0 is too small" in text and "below the best trial's" in text
    assert trials.plot_trials(table.ranking(), table.path.with_suffix(".png")).stat().st_size > 10_000


def test_a_restart_continues_where_it_stopped(series, monkeypatch, caplog):
    asked = [{"hyp.lr0": 0.2}, {"hyp.lr0": 0.1}, {"hyp.lr0": 0.15}]
    run_training = runner.run_training

    def interrupt(arguments, folder, on_epoch, **options):
        def watch(rows):
            if folder.name == "trial_001" and len(rows) >= 2:
                raise KeyboardInterrupt
            return on_epoch(rows)

        return run_training(arguments, folder, watch, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner, "run_training", interrupt)
        series(asked)
    started = []
    monkeypatch.setattr(runner, "run_training", lambda *a, **k: started.append(a) or run_training(*a, **k))
    caplog.set_level("INFO")
    table = series(asked)
    assert [args[1].name for args in started] == ["trial_001", "trial_002"]
    assert started[0][0][0] == "--resume" and "trial 1 continues after an interruption" in caplog.text
    assert [row["status"] for row in rows_of(table)] == ["completed"] * 3
    assert len(table.trials[1].curve) == 5 and table.trials[1].final_map == pytest.approx(0.5)
    assert len(list(table.path.parent.glob("trials_*.csv"))) == 1

    started.clear()
    series([*asked[:2], {"hyp.lr0": 0.05}, {}])  # one changed, one new
    assert [args[1].name for args in started] == ["trial_002", "trial_003"]
    assert "trial 2 has changed" in caplog.text


def test_failed_trials_are_repeated_on_request(series):
    table = series([{"batch_size": 0}])
    assert series([{"batch_size": 0}]).path == table.path
    before = table.path.stat().st_mtime_ns
    series([{"batch_size": 0}], "--retry-failed")
    assert table.path.stat().st_mtime_ns > before


def test_other_arguments_begin_a_new_table(tmp_path, caplog):
    first = TrialTable.open(tmp_path, SETTINGS)
    first.add(Trial(0, {"adam": True, "weights": ""}, "completed", 0.5, 1.0, 2.0))
    again = TrialTable.open(tmp_path, SETTINGS)
    assert again.path == first.path and again.knows(0, {"adam": True, "weights": ""})
    assert not again.knows(0, {"adam": True})
    assert TrialTable.open(tmp_path, SETTINGS, fresh=True).path != first.path
    other = TrialTable.open(tmp_path, {"base_args": []})
    assert other.path != first.path and not other.trials
    assert "made with other arguments" in caplog.text


@pytest.mark.parametrize(
    ("threshold", "rows", "reason"),
    [
        (0.1, [0.0], None),  # first epoch
        (0.1, [0.0, 0.25], None),  # 0.05 behind
        (0.1, [0.0, 0.15], "mAP@.5 0.1500 after epoch 1 is 0.1500 below the best trial's"),
        (None, [0.0, 0.0], None),
        (0.1, [0.0, 0.3, 0.0], None),  # nobody has come so far
    ],
)
def test_elimination_by_hand(threshold, rows, reason):
    check = Elimination(threshold, [[0.1, 0.2], [0.05, 0.3], []])
    assert check([{MAP50: value} for value in rows]) == reason


def test_elimination_without_rivals():
    assert Elimination(0.0, [])([{MAP50: 0.0}] * 5) is None


def test_base_args_of_a_single_flag():
    assert run_trials.parse(["--base-args", "--adam", "--fresh"]).base_args == "--adam"


def test_command_line_of_a_trial(tmp_path):
    (tmp_path / "hyp.yaml").write_text("lr0: 0.1\nbox: 0.05\n")
    base = ["--hyp", str(tmp_path / "hyp.yaml"), "--epochs", "9", "--adam"]
    line = overrides.trial_arguments(
        base, {"hyp.lr0": 0.5, "adam": False, "batch_size": 4}, Budget(5, None, 320), tmp_path
    )
    hyp = tmp_path / "trial_hyp.yaml"
    assert line == ["--hyp", str(hyp), "--epochs", "5", "--img-size", "320", "320", "--batch-size", "4"]
    assert yaml.safe_load(hyp.read_text()) == {"lr0": 0.5, "box": 0.05}


def test_a_budget_as_options():
    assert Budget(5, 100, 320).overrides() == {"epochs": 5, "subset_size": 100, "img_size": [320, 320]}
    assert Budget().overrides() == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "is no JSON"),
        ("{}", "has to be a list of overrides"),
        ("[]", "has to be a list of overrides"),
        ('[{"hyp.lr": 1}]', "trial 0: nothing called 'hyp.lr' can be set; did you mean hyp.lr"),
        ('[{}, {"name": "x"}]', "trial 1: nothing called 'name' can be set"),
    ],
)
def test_trials_files_that_make_no_sense(tmp_path, text, message):
    path = tmp_path / "trials.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        overrides.read_trials(path)
    with pytest.raises(ValueError, match="cannot be read"):
        overrides.read_trials(tmp_path / "none.json")


def test_a_space(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("hyp.lr0: {low: 1e-4, high: 0.1, log: true}\nbatch_size: {choices: [16, 32]}\n"
                    "epochs: {low: 2, high: 8, step: 2}\n")  # fmt: skip
    assert overrides.read_space(path) == {
        "hyp.lr0": {"low": 1e-4, "high": 0.1, "log": True, "step": None},
        "batch_size": {"choices": [16, 32]},
        "epochs": {"low": 2, "high": 8, "log": False, "step": 2},
    }


@pytest.mark.parametrize(
    ("entry", "message"),
    [("3", "needs either choices"), ("{low: 1}", "needs either"), ("{low: 2, high: 1}", "low has to be below high"),
     ("{low: 0, high: 1, log: true}", "above 0 with log"), ("{low: x, high: 1}", "needs either")],
)  # fmt: skip
def test_spaces_that_make_no_sense(tmp_path, entry, message):
    path = tmp_path / "space.yaml"
    path.write_text(f"hyp.lr0: {entry}\n")
    with pytest.raises(ValueError, match=message):
        overrides.read_space(path)


def test_tpe_without_optuna(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match="pip install optuna"):
        OptunaSampler({}, 3)


def test_tpe_finds_the_better_half_and_restarts(series, tmp_path, monkeypatch):
    """mAP@.5 grows with lr0, so later trials lie higher; a restart knows the earlier ones."""
    pytest.importorskip("optuna")
    monkeypatch.setenv("FAKE_SECONDS", "0")
    (tmp_path / "space.yaml").write_text("hyp.lr0: {low: 0.0, high: 0.1}\nadam: {choices: [true, false]}\n")
    options = ("--sampler", "tpe", "--space", str(tmp_path / "space.yaml"), "--budget-epochs", "2")
    table = series([{}], *options, "--num-trials", "10")
    more = series([{}], *options, "--num-trials", "14")
    assert more.path == table.path and len(more.trials) == 14
    rates = [float(trial.params["hyp.lr0"]) for _, trial in sorted(more.trials.items())]
    assert len(set(rates)) == 14
    assert sum(rates[10:]) / 4 > sum(rates[:10]) / 10
    assert more.ranking()[0].final_map == pytest.approx(2 * max(rates), rel=1e-4)


def test_tpe_prunes_below_the_median():
    pytest.importorskip("optuna")
    space = {"hyp.lr0": {"low": 0.0, "high": 1.0, "log": False, "step": None}}
    source = OptunaSampler(space, 9)
    table = TrialTable(Path("none.csv"), {})
    for number in range(5):
        table.trials[number] = Trial(number, {"hyp.lr0": "0.5"}, "completed", 0.5, 1.0, 1.0, [0.1, 0.4, 0.5])
    table.trials[5] = Trial(5, {"hyp.lr0": "0.5"}, "failed", math.nan, None, 1.0, [math.nan])
    assert source.begin(4, table) is None
    assert 0 <= source.begin(6, table)["hyp.lr0"] <= 1
    assert source.is_hopeless([{MAP50: 0.0}]) is None
    assert "below the median" in source.is_hopeless([{MAP50: 0.0}, {MAP50: 0.1}])
    source.end(Trial(6, {}, "eliminated", 0.1, 1.0, 1.0))
    assert [trial.state.name for trial in source.study.trials] == ["COMPLETE"] * 5 + ["FAIL", "PRUNED"]
