"""One search by several processes: who draws what, what happens to the trials of one that died, what is counted."""

import subprocess
import sys
import time

import psutil
import pytest

from tests.tools.experiments.test_devices import TOOL
from tests.tools.experiments.test_runner import CFG
from tools import run_trials
from tools.experiments import runner, shared_search
from tools.experiments.overrides import Budget
from tools.experiments.runner import LOSS, MAP50, FinishedRun
from tools.experiments.shared_search import SharedSearch, agreement, without_password
from tools.experiments.trials import Trial, TrialTable
from utils.system.files import PROJECT_ROOT

SPACE = {"hyp.lr0": {"low": 0.0, "high": 1.0, "log": False, "step": None}}


@pytest.fixture
def begin(tmp_path):
    """Begins a process of the search in the storage of `tmp_path`: (SharedSearch, table, draws)."""
    pytest.importorskip("optuna")

    def make(num_trials=3, settings=None, patience=0.05):
        search = SharedSearch(SPACE, num_trials, str(tmp_path / "search"), settings or {"a": 1}, patience)
        table = TrialTable.open(tmp_path / "out", {"base_args": []}, fresh=True)
        return search, table, search.draws(table)

    return make


def ended(number, params, score=0.5):
    return Trial(number, params, "completed", score, 1.0, 2.0, [score / 2, score])


def abandon(*searches):
    """Let the time pass after which these searches give up what shows no sign of life."""
    for _ in range(2):
        for search in searches:
            search.next_sign = 0.0
            search.each_round()
        time.sleep(0.1)
    for search in searches:
        search.next_sign = 0.0
        search.each_round()


def test_every_trial_is_drawn_by_one(begin):
    (a, table_a, draws_a), (b, table_b, draws_b) = begin(), begin()
    first, second, third = next(draws_a), next(draws_b), next(draws_a)
    assert [number for number, _ in (first, second, third)] == [0, 1, 2]
    assert first[1] != second[1], "not the same random numbers"
    assert next(draws_b) is None, "all are drawn; b waits"
    for search, drawn in ((a, first), (b, second), (a, third)):
        search.end(ended(*drawn))
    assert list(draws_a) == [] and [drawn for drawn in draws_b if drawn] == []
    for table in (table_a, table_b):
        assert {number: trial.params for number, trial in table.trials.items()} == dict((first, second, third))
        assert all(trial.curve == [0.25, 0.5] for trial in table.trials.values())
        assert len(table.path.read_text().splitlines()) == 4


def test_an_abandoned_trial_is_done_again_once(begin, caplog):
    (a, _, draws_a), (b, table_b, draws_b), (c, _, draws_c) = begin(1), begin(1), begin(1)
    number, params = next(draws_a)
    assert next(draws_b) is next(draws_c) is None
    abandon(b, c)
    assert caplog.text.count("trial 0 was abandoned by its process; it is done again under a new number") == 1
    b.next_look = c.next_look = 0.0
    again = next(draws_b)
    assert again == (1, params) and next(draws_c) is None
    assert "another one does the trial again" in a.is_hopeless(number, [{MAP50: 0.5}])
    a.end(ended(number, params, 0.9))
    assert "trial 0 was taken over by another process; its result here is not counted" in caplog.text
    b.end(ended(*again))
    assert list(draws_b) == [] and list(table_b.trials) == [1] and table_b.trials[1].final_map == 0.5


def test_a_sign_of_life_keeps_a_trial(begin, caplog):
    (a, _, draws_a), (b, *_) = begin(), begin()
    next(draws_a)
    abandon(a, b)
    assert "abandoned" not in caplog.text


def test_a_trial_that_kills_its_process_each_time_has_failed(begin, monkeypatch):
    monkeypatch.setattr(shared_search, "MOST_TRIES", 2)
    last, table, draws = begin(1)
    for _ in range(2):
        search, _, their_draws = begin(1)
        assert next(their_draws) is not None
        abandon(last)
    assert list(draws) == []
    assert [trial.status for trial in table.trials.values()] == ["failed"]
    assert "abandoned 2 times" in table.trials[1].message


def test_a_trial_that_ended_before_its_process_told_the_search(begin, monkeypatch):
    a, _, draws_a = begin(1)
    number, params = next(draws_a)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(a.study, "tell", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        a.end(ended(number, params))
    b, table, draws_b = begin(1)
    abandon(b)
    assert list(draws_b) == [] and table.trials[0].final_map == 0.5
    assert [trial.state.name for trial in b.study.trials] == ["COMPLETE"]


def test_two_that_draw_the_last_one_in_the_same_moment(begin):
    (a, _, _), (b, table, draws) = begin(1), begin(1)
    (number, params), surplus = a._ask(), b._ask()
    assert number == 0 and surplus is None
    a.end(ended(number, params))
    assert list(draws) == [] and list(table.trials) == [0]


def test_a_restart_continues_its_own_trial(begin):
    a, table, draws = begin(2)
    drawn = next(draws)
    table.claim(*drawn)
    a.is_hopeless(0, [{MAP50: 0.1}])
    again = SharedSearch(SPACE, 2, a.study._storage._backend._file_path, {"a": 1}, 0.05)
    restarted = again.draws(table)
    assert next(restarted) == drawn and next(restarted)[0] == 1
    assert again.is_hopeless(0, [{MAP50: 0.1}, {MAP50: 0.2}]) is None
    assert again.study.trials[0].intermediate_values == {0: 0.1, 1: 0.2}


def test_all_processes_are_given_the_same(begin, tmp_path):
    begin()
    with pytest.raises(ValueError, match="search holds a search with another content of a; give what its other"):
        begin(settings={"a": 2})
    with pytest.raises(ValueError, match=r"--storage none://ann:\*\*\*@host/x cannot be used \("):
        SharedSearch(SPACE, 1, "none://ann:secret@host/x", {}, 1.0)
    assert without_password("sqlite:///file.db") == "sqlite:///file.db"
    settings = agreement(["--epochs", "3", "--workers", "4", "--device", "1"], Budget(2), SPACE)
    assert settings["--base-args"] == {"epochs": 3} and settings["--space"] == SPACE


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trials-file", "t.json"], "--storage shares a search: give --sampler tpe with --space"),
        (["--sampler", "tpe", "--space", "s.yaml", "--fresh"], "--fresh cannot be given together with --storage"),
        (["--sampler", "tpe", "--space", "s.yaml", "--retry-failed"], "--retry-failed cannot be given together"),
        (["--sampler", "tpe", "--space", "s.yaml", "--sampler-seed", "0"], "--sampler-seed cannot be given together"),
        (["--sampler", "tpe", "--space", "s.yaml", "--abandoned-after", "0"], "--abandoned-after 0.0 is too small"),
    ],
)
def test_what_does_not_go_with_a_storage(words, message):
    with pytest.raises(ValueError, match=message):
        run_trials.run(run_trials.parse(["--base-args", "--epochs 2", "--storage", "x", *words]))


def test_a_process_is_killed_and_another_one_goes_on(tmp_path, monkeypatch, caplog):
    pytest.importorskip("optuna")
    (tmp_path / "hyp.yaml").write_text("lr0: 0.1\n")
    (tmp_path / "space.yaml").write_text("hyp.lr0: {low: 0.1, high: 0.2}\n")
    words = ["--base-args", f"{CFG} --hyp {tmp_path / 'hyp.yaml'} --batch-size 2 --workers 0", "--sampler", "tpe",
             "--space", str(tmp_path / "space.yaml"), "--num-trials", "3", "--storage", str(tmp_path / "search"),
             "--output-dir", str(tmp_path / "out"), "--abandoned-after", "1"]  # fmt: skip
    monkeypatch.setenv("FAKE_SECONDS", "600")
    with subprocess.Popen([sys.executable, "-c", TOOL, *words, "--devices", "cpu,cpu"], cwd=PROJECT_ROOT) as tool:
        while len(list(tmp_path.glob("out/*/*/results.csv"))) < 2:
            assert tool.poll() is None
            time.sleep(0.05)
        trainings = psutil.Process(tool.pid).children(recursive=True)
        for process in (tool, *trainings):
            process.kill()

    def training(arguments, folder, on_epoch, *rest):
        yield None
        return FinishedRun(folder, "completed", rows=[{MAP50: 0.5, LOSS: 1.0}])

    monkeypatch.setattr(runner, "training", training)
    monkeypatch.setattr(runner, "POLL", 0.02)
    shared = [word if word != str(tmp_path / "out") else str(tmp_path / "other") for word in words]  # another machine
    table = run_trials.run(run_trials.parse(shared))
    assert [trial.status for trial in table.trials.values()] == ["completed"] * 3 and not {0, 1} & table.trials.keys()
    assert len({str(trial.params) for trial in table.trials.values()}) == 3
    assert all(f"trial {number} was abandoned" in caplog.text for number in (0, 1))
    back = run_trials.run(run_trials.parse(words))  # the one that was killed
    assert back.path.parent == tmp_path / "out" and back.trials.keys() == table.trials.keys()
