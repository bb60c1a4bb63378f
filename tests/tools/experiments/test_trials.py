"""Trials: the table, elimination, ranking, what is asked for; a whole series with a fake training, and its restart."""

import csv
import json
import math
import subprocess
import sys

import pytest

from tests.tools.experiments import test_runner
from tests.tools.experiments.test_runner import CFG
from tools import run_trials
from tools.experiments import runner, trials
from tools.experiments.command_line import fingerprints
from tools.experiments.optuna_sampler import OptunaSampler
from tools.experiments.runner import MAP50
from tools.experiments.trials import Elimination, Trial, TrialTable
from utils.system import folder_lock
from utils.system.files import PROJECT_ROOT

SETTINGS = {"base_args": ["--epochs", "3"]}


@pytest.fixture
def series(tmp_path, monkeypatch):
    """Runs tools/run_trials.py with the fake training, five epochs a trial; returns the table."""
    monkeypatch.setattr(runner, "TRAIN", test_runner.FAKE)
    monkeypatch.setattr(runner, "POLL", 0.02)
    monkeypatch.setenv("FAKE_SECONDS", "0.2")
    (tmp_path / "hyp.yaml").write_text("lr0: 0.1\nbox: 0.05\n")

    def run(asked, *more):
        base = f"{CFG} --hyp {tmp_path / 'hyp.yaml'} --batch-size 2"
        line = ["--base-args", base, "--output-dir", str(tmp_path / "out"), "--budget-epochs", "5", *more]
        if asked is not None:
            (tmp_path / "trials.json").write_text(json.dumps(asked))
            line[:0] = ["--trials-file", str(tmp_path / "trials.json")]
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
    training = runner.training

    def interrupt(arguments, folder, on_epoch, **options):
        def watch(rows):
            if folder.name == "trial_001" and len(rows) >= 2:
                raise KeyboardInterrupt
            return on_epoch(rows)

        return training(arguments, folder, watch, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner, "training", interrupt)
        series(asked)
    started = []
    monkeypatch.setattr(runner, "training", lambda *a, **k: started.append(a) or training(*a, **k))
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


def interrupted(series, monkeypatch, *asked):
    """Begin a series and end it when its first trial has two epochs."""
    training = runner.training

    def interrupt(arguments, folder, on_epoch):
        def watch(rows):
            if len(rows) >= 2:
                raise KeyboardInterrupt

        return training(arguments, folder, watch)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner, "training", interrupt)
        series(list(asked))


def commands(monkeypatch):
    """The command lines of the runs that begin from now on."""
    training, started = runner.training, []
    monkeypatch.setattr(runner, "training", lambda *a, **k: started.append(a[0]) or training(*a, **k))
    return started


def test_a_trial_that_was_edited_does_not_continue_the_old_one(series, monkeypatch):
    """Not even if it is itself interrupted before its first checkpoint."""
    interrupted(series, monkeypatch, {"hyp.lr0": 0.2})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner, "training", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        series([{"hyp.lr0": 0.1}])
    started = commands(monkeypatch)
    table = series([{"hyp.lr0": 0.1}])
    assert "--resume" not in started[0] and [row["param_hyp.lr0"] for row in rows_of(table)] == ["0.1"]
    assert table.trials[0].final_map == pytest.approx(0.5)


@pytest.mark.parametrize("change", ["true for 1", "gone", "list", "cut", "of an earlier version"])
def test_checkpoints_that_nobody_says_the_trial_of_are_not_continued(change, series, tmp_path, monkeypatch):
    interrupted(series, monkeypatch, {"hyp.lr0": 0.2, "rect": True})
    (folder,) = tmp_path.glob("out/*/trial_000")
    path = folder / "weights" / "trial.json"
    text = path.read_text()
    if change in ("gone", "of an earlier version"):
        path.unlink()
        if change != "gone":
            (folder / "trial.json").write_text(text)
    else:
        path.write_text({"true for 1": text.replace("true", "1"), "list": "[]", "cut": text[:-3]}[change])
    started = commands(monkeypatch)
    series([{"hyp.lr0": 0.2, "rect": True}])
    assert "--resume" not in started[0]


def test_one_wrong_value_costs_one_trial(series, caplog):
    table = series([{"epochs": "two"}, {"epochs": None}, {"epochs": "2"}, {"hyp.lr0": "0.2"}, {"adam": "yes"}])
    assert [row["status"] for row in rows_of(table)] == ["failed", "failed", "completed", "completed", "failed"]
    assert len(table.trials[2].curve) == 2 and table.trials[3].final_map == pytest.approx(1.0)
    for number, fault in ((0, "epochs has to be a number, not 'two'"), (4, "adam has to be true or false")):
        assert fault in table.trials[number].message and f"trials.json, trial {number}: {fault}" in caplog.text
    assert len(series([{"epochs": 1}]).trials[0].curve) == 1, "a trial that was corrected is run"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trial_id", "x", "invalid literal"), ("trial_id", "-1", "trial -1 with the status"),
        ("trial_id", "1", "line 3: trial 1 stands there twice"), ("status", "done", "with the status 'done'"),
        ("final_map", "high", "could not convert"), ("seconds", "[]", "could not convert"),
        ("final_map", "nan", "final_map nan is not usable"), ("final_map", "98.5", "final_map 98.5 is too large"),
        ("seconds", "-1", "seconds -1.0 is too small"),
    ],
)  # fmt: skip
def test_a_table_that_a_person_has_edited(name, text, message, tmp_path):
    table = TrialTable.open(tmp_path, SETTINGS)
    for number in (0, 1):
        table.add(Trial(number, {"adam": True}, "completed", 0.5, 1.0, 2.0))
    titles, first, second = table.path.read_text().splitlines()
    cells = first.split(",")
    cells[titles.split(",").index(name)] = text
    table.path.write_text("\n".join([titles, ",".join(cells), second]))
    with pytest.raises(
        ValueError, match=f"{table.path} is damaged .*{message}.*; correct it, or begin anew with --fresh"
    ):
        TrialTable.open(tmp_path, SETTINGS)


@pytest.mark.parametrize("content", [b"a,b\n1,2\n", b"\xff\x00\xff", b"trial_id,status\n0,completed,1,2,3,4\n", None])
def test_a_table_that_is_none(content, tmp_path):
    path = TrialTable.open(tmp_path, SETTINGS).path
    path.unlink()
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        TrialTable.open(tmp_path, SETTINGS)


def test_a_table_continues_only_with_the_same_files_from_the_same_folder(series, tmp_path, monkeypatch, caplog):
    first = series([{}])
    monkeypatch.chdir(tmp_path)
    assert series([{}]).path != first.path, "what is relative means something else here"
    (tmp_path / "hyp.yaml").write_text("lr0: 0.3\n")
    assert series([{}]).trials[0].final_map == pytest.approx(1.5)
    assert "was made with other arguments or files" in caplog.text
    (tmp_path / "start.pt").write_bytes(b"1")
    words = ["--weights", str(tmp_path / "start.pt")]
    before = fingerprints(words)
    (tmp_path / "start.pt").write_bytes(b"2")
    assert before != fingerprints(words), "trials that start from other weights are no continuation"


def test_two_series_in_one_table_are_refused(series, tmp_path):
    table = series([{}])
    code = "import sys, time; from utils.system.folder_lock import own; own(sys.argv[1], ''); print(1, flush=True)"
    folder_lock._give_up(table.folder)
    words = [sys.executable, "-c", f"{code}; time.sleep(600)", str(table.folder)]
    with subprocess.Popen(words, cwd=PROJECT_ROOT, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(ValueError, match=f"is in use: process {other.pid} .* or choose another --output-dir"):
            series([{}])
        assert series([{}], "--fresh").path != table.path
        other.kill()
    assert series([{}]).trials


def test_text_that_no_process_can_be_given_fails_one_trial(series):
    for text in ("\ud800", "a\0b", "x" * 200_000):
        asked = [{"entity": text}, {"hyp.lr0": 0.1}]
        table = series(asked, "--fresh")
        assert [row["status"] for row in rows_of(table)] == ["failed", "completed"]
        assert "trials.json, trial 0: entity has to be text that a command line can hold" in table.trials[0].message
        assert trials.ranking_text(table.ranking()).encode()
        assert series(asked).path == table.path and len(table.trials) == 2


def test_text_with_line_ends_stands_in_the_table_as_it_was_given(series, caplog):
    asked = [{"entity": "two\nlines\u2028and more"}]
    table = series(asked)
    assert series(asked).path == table.path and "has changed" not in caplog.text


def test_a_shorter_list_leaves_out_the_rows_behind_its_end(series, caplog):
    path = series([{"hyp.lr0": 0.1}, {"hyp.lr0": 0.2}, {"hyp.lr0": 0.15}]).path
    table = series([{"hyp.lr0": 0.1}])
    assert table.path == path and [trial.trial_id for trial in table.ranking()] == [0]
    assert "trials 1, 2 are not in the list any more; their rows are left out" in caplog.text


def test_two_tables_of_one_second_have_two_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(trials.time, "strftime", lambda form: next(names))
    names = iter(["a", "a", "a", "b"])
    assert [TrialTable.open(tmp_path, SETTINGS, fresh=True).path.stem for _ in range(2)] == ["trials_a", "trials_b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--base-args", "--exist"], "--base-args: --exist-ok cannot be given here"),
        (["--base-args", "--epochs 0"], "--base-args: --epochs 0 is too small"),
        (["--budget-epochs", "0"], "--budget-epochs 0 is too small"),
        (["--budget-size", "-1"], "--budget-size -1 is too small"),
        (["--budget-subset", "-2"], "--budget-subset -2 is too small"),
        (["--early-stop-threshold", "nan"], "--early-stop-threshold nan is not usable"),
        (["--early-stop-grace", "-1"], "--early-stop-grace -1 is too small"),
        (["--num-trials", "0"], "--num-trials 0 is too small"),
        (["--sampler-seed", "-1"], "--sampler-seed -1 is too small"),
        (["--space", "space.yaml"], "--space is not read with --sampler file"),
        (["--sampler", "tpe"], "--trials-file is not read with --sampler tpe"),
        (["--output-dir", "/dev/null/x"], "/dev/null is a file.*choose another --output-dir"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_runs(words, message, series, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "training", lambda *a, **k: pytest.fail("runs"))
    with pytest.raises(ValueError, match=message):
        series([{}], *words)
    assert not (tmp_path / "out").exists()


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
    check = Elimination(threshold, lambda: [[0.1, 0.2], [0.05, 0.3], []])
    assert check([{MAP50: value} for value in rows]) == reason


def test_elimination_without_rivals():
    assert Elimination(0.0, list)([{MAP50: 0.0}] * 5) is None


def test_base_args_of_a_single_flag():
    assert run_trials.parse(["--base-args", "--adam", "--fresh"]).base_args == "--adam"


def test_tpe_without_optuna(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match="pip install optuna"):
        OptunaSampler({}, 3)


def test_tpe_without_a_model_is_refused_before_anything_runs(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(runner, "training", lambda *a, **k: pytest.fail("runs"))
    (tmp_path / "space.yaml").write_text("adam: {choices: [true, false]}\n")
    line = ["--base-args", "--epochs 1", "--sampler", "tpe", "--space", str(tmp_path / "space.yaml")]
    with pytest.raises(ValueError, match="--base-args: give --cfg .* or --weights"):
        run_trials.run(run_trials.parse([*line, "--output-dir", str(tmp_path / "out")]))


def test_tpe_finds_the_better_half_and_restarts(series, tmp_path, monkeypatch):
    """mAP@.5 grows with lr0, so later trials lie higher; a restart knows the earlier ones."""
    pytest.importorskip("optuna")
    monkeypatch.setenv("FAKE_SECONDS", "0")
    (tmp_path / "space.yaml").write_text("hyp.lr0: {low: 0.0, high: 0.1}\nadam: {choices: [true, false]}\n")
    options = ("--sampler", "tpe", "--space", str(tmp_path / "space.yaml"), "--budget-epochs", "2")
    table = series(None, *options, "--num-trials", "10")
    more = series(None, *options, "--num-trials", "14")
    assert more.path == table.path and len(more.trials) == 14
    rates = [float(trial.params["hyp.lr0"]) for _, trial in sorted(more.trials.items())]
    assert len(set(rates)) == 14
    assert sum(rates[10:]) / 4 > sum(rates[:10]) / 10
    assert more.ranking()[0].final_map == pytest.approx(2 * max(rates), rel=1e-4)


def test_tpe_prunes_below_the_median():
    pytest.importorskip("optuna")
    space = {"hyp.lr0": {"low": 0.0, "high": 1.0, "log": False, "step": None}}
    source = OptunaSampler(space, 9)
    table = TrialTable("none.csv")
    for number in range(5):
        table.trials[number] = Trial(number, {"hyp.lr0": "0.5"}, "completed", 0.5, 1.0, 1.0, [0.1, 0.4, 0.5])
    table.trials[5] = Trial(5, {"hyp.lr0": "0.5"}, "failed", math.nan, None, 1.0, [math.nan])
    number, params = next(source.draws(table))
    assert number == 6 and 0 <= params["hyp.lr0"] <= 1
    assert source.is_hopeless(6, [{MAP50: 0.0}]) is None
    assert "below the median" in source.is_hopeless(6, [{MAP50: 0.0}, {MAP50: 0.1}])
    source.end(Trial(6, {}, "eliminated", 0.1, 1.0, 1.0))
    assert [trial.state.name for trial in source.study.trials] == ["COMPLETE"] * 5 + ["FAIL", "PRUNED"]


def test_bars_say_what_a_trial_changed():
    few, many = {"hyp.lr0": 0.005, "adam": True}, {f"hyp.number{k}": k for k in range(20)}
    ended = [trials.Trial(k, params, status, 0.5, 0.1, 1.0) for k, (params, status) in enumerate(
        [(few, "completed"), ({}, "completed"), (few, "failed"), (many, "completed")])]  # fmt: skip
    labels = [trials.bar_label(trial) for trial in ended]
    assert labels[:2] == ["0: lr0=0.005, adam=True", "1: nothing changed"]
    assert labels[2] == "2: lr0=0.005, adam=True (failed)" and len(labels[3]) == trials.LONGEST_LABEL
