"""Hyper-parameter search: generations, the table, the limits, and what a failure does."""

import logging
import random
from itertools import count

import numpy as np
import pytest

from utils.config.hyp import DEFAULTS, HYPER_PARAMETERS, load_hyp
from utils.run import evolve as search
from utils.run.evolve import NUM_RESULTS, evolve, mutate, read_table

NAMES = [name for name, row in HYPER_PARAMETERS.items() if row.mutation]
RESULTS = (0.1, 0.2, 0.3, 0.25, 0.01, 0.02, 0.03)


@pytest.fixture(autouse=True)
def seeds(monkeypatch):
    """The search seeds itself from the system; here each mutation has a seed of its own."""
    kind, numbers = np.random.RandomState, count()
    monkeypatch.setattr(np.random, "RandomState", lambda: kind(next(numbers)))
    random.seed(0)


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """Searches whose picture was asked for (folder); drawing takes seconds and is tested with the other pictures."""
    folders = []
    monkeypatch.setattr(search, "plot_evolution", lambda table, names, folder: folders.append(folder))
    return folders


def scored(fitness):
    return (0.1, 0.2, fitness, fitness, 0.01, 0.02, 0.03)


def rows_of(folder):
    return read_table(folder / "evolve.txt", NAMES)


def test_generations_including_one_that_fails(tmp_path, caplog, drawn):
    seen = []

    def train(hyp):
        seen.append(hyp)
        if len(seen) == 2:
            raise RuntimeError("CUDA out of memory")
        hyp["box"] = "a training may write into its copy"
        return scored((0.25, None, 0.5, 0.125)[len(seen) - 1])

    start = dict(DEFAULTS)
    best = evolve(train, start, tmp_path, 4)
    assert len(seen) == 4 and start == DEFAULTS and drawn == [tmp_path]
    assert {key: value for key, value in seen[0].items() if key != "box"} == {
        key: value for key, value in (DEFAULTS | {"anchors": 3}).items() if key != "box"
    }
    assert all(hyp["loss_ota"] == 1 and set(hyp) == set(DEFAULTS) | {"anchors"} for hyp in seen)
    assert len({hyp["lr0"] for hyp in seen}) > 1
    assert "generation 2 failed and scores 0: CUDA out of memory" in caplog.text

    table = rows_of(tmp_path)
    assert table.shape == (4, NUM_RESULTS + len(NAMES))
    assert table[:, 3].tolist() == [0.5, 0.25, 0.125, 0.0], "best first; the failure is the last row"
    assert table[3, :NUM_RESULTS].tolist() == [0] * NUM_RESULTS
    assert best["lr0"] == table[0, NUM_RESULTS] == pytest.approx(seen[2]["lr0"], rel=1e-4)


def test_evolved_file_is_a_hyp_file(tmp_path, caplog):
    best = evolve(lambda hyp: RESULTS, DEFAULTS | {"loss_ota": 0, "warmup_min_iters": 7}, tmp_path, 3)
    hyp = load_hyp(tmp_path / "hyp_evolved.yaml")
    assert hyp == best and not caplog.records
    assert (hyp["loss_ota"], hyp["warmup_min_iters"]) == (0, 7)
    assert (tmp_path / "hyp_evolved.yaml").read_text().startswith("# P R mAP@.5 mAP@.5:.95 box obj cls: 0.1 0.2 0.3")


def test_search_goes_on_from_its_table(tmp_path, caplog):
    caplog.set_level("INFO")
    evolve(lambda hyp: scored(0.5), DEFAULTS, tmp_path, 1)
    assert "goes on from" not in caplog.text
    first = rows_of(tmp_path)
    seen = []
    evolve(lambda hyp: seen.append(hyp) or scored(0.25), DEFAULTS | {"lr0": 0.05}, tmp_path, 2)
    assert len(rows_of(tmp_path)) == 3 and np.array_equal(rows_of(tmp_path)[0], first[0])
    assert f"The search goes on from the 1 row of {tmp_path / 'evolve.txt'}" in caplog.text
    lr0 = {row[NUM_RESULTS] for row in rows_of(tmp_path)}
    assert 0.01 in lr0 and 0.05 not in lr0, "the parents come from the table, not from the hyp file"


def test_all_failing_generations_end_the_search_in_order(tmp_path):
    def train(hyp):
        raise RuntimeError("NaN")

    evolve(train, DEFAULTS, tmp_path, 3)
    assert len(rows_of(tmp_path)) == 3 and not rows_of(tmp_path)[:, :NUM_RESULTS].any()


def test_wrong_input_in_the_first_generation_is_an_error(tmp_path):
    def train(hyp):
        raise ValueError("data.yaml: the key `train` is missing")

    with pytest.raises(ValueError, match="data.yaml"):
        evolve(train, DEFAULTS, tmp_path, 3)
    assert not (tmp_path / "evolve.txt").exists()

    evolve(lambda hyp: RESULTS, DEFAULTS, tmp_path, 1)
    evolve(train, DEFAULTS, tmp_path, 1)
    assert len(rows_of(tmp_path)) == 2, "later it may be the mutation's fault"


def test_results_that_are_no_numbers_are_recorded(tmp_path):
    results = iter([scored(0.5), (float("nan"),) * 7, (0, 0, 0, 0, float("inf"), 1e-9, 123456.0)])
    evolve(lambda hyp: next(results), DEFAULTS, tmp_path, 3)
    table = rows_of(tmp_path)
    assert len(table) == 3 and table[0, 3] == 0.5 and not np.isnan(table).any()
    evolve(lambda hyp: scored(0.75), DEFAULTS, tmp_path, 1)
    assert rows_of(tmp_path)[0, 3] == 0.75


def test_equal_rows_are_kept_once(tmp_path):
    path = tmp_path / "evolve.txt"
    hyp = DEFAULTS | {"anchors": 3}
    for _ in range(2):
        search.add_row(path, RESULTS, hyp, NAMES)
    assert len(rows_of(tmp_path)) == 1


def test_mutation_stays_within_limits_and_changes_something():
    for parent in (DEFAULTS | {"anchors": 3}, DEFAULTS | {"anchors": 10, "lr0": 0.1, "momentum": 0.98, "cls": 4.0}):
        children = [mutate(parent, NAMES) for _ in range(50)]
        for child in children:
            assert child != parent and child["loss_ota"] == 1 and list(child) == list(parent)
            for name in NAMES:
                gain, low, high = HYPER_PARAMETERS[name].mutation
                assert low <= child[name] <= high
                assert child[name] == round(child[name], 5)
                if gain == 0:
                    assert child[name] == parent[name]
        assert len({child["lr0"] for child in children}) > 10


def test_values_outside_the_limits_are_moved_inside():
    child = mutate(DEFAULTS | {"degrees": 90.0, "lr0": 1.0, "iou_t": 0.9, "fl_gamma": -1.0, "anchors": 3}, NAMES)
    assert child["degrees"] <= 45 and child["lr0"] <= 0.1 and child["iou_t"] == 0.7 and child["fl_gamma"] == 0.0


def test_factors_are_between_a_third_and_three():
    parent = {"lr0": 0.01}
    values = [mutate(parent, ["lr0"], probability=1.0, sigma=50.0)["lr0"] for _ in range(30)]
    assert min(values) == 0.003 and max(values) == 0.03


def test_parents_are_drawn_by_their_lead_over_the_worst_of_five():
    names = ["lr0"]
    rows = np.array([[0, 0, f, f, 0, 0, 0, lr] for f, lr in zip((0.9, 0.5, 0.4, 0.3, 0.2, 0.1), range(6), strict=True)])
    drawn = [search.choose_parent(rows, names, {"loss_ota": 1}) for _ in range(200)]
    assert all(hyp["loss_ota"] == 1 for hyp in drawn)
    counts = [sum(hyp["lr0"] == lr for hyp in drawn) for lr in range(6)]
    assert counts[0] > counts[1] and counts[4] == counts[5] == 0
    assert search.choose_parent(rows[:1], names, {})["lr0"] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "searched other"), ("# P R mAP@.5 mAP@.5:.95 box obj cls lr0\n", "searched other"), (None, "damaged")],
)
def test_tables_that_do_not_fit_are_refused(text, message, tmp_path):
    path = tmp_path / "evolve.txt"
    if text is None:
        evolve(lambda hyp: RESULTS, DEFAULTS, tmp_path, 2)
        text = path.read_text()[:-20]
    path.write_text(text)
    with pytest.raises(ValueError, match=f"evolve.txt.*{message}.*--project"):
        evolve(lambda hyp: RESULTS, DEFAULTS, tmp_path, 1)


def test_rows_that_are_added_meanwhile_are_kept(tmp_path):
    """By hand, or by a search on another machine of a disk without locks."""
    path, hyp = tmp_path / "evolve.txt", DEFAULTS | {"anchors": 3}

    def train(candidate):
        search.add_row(path, scored(0.75), hyp | {"lr0": 0.02}, NAMES)
        return scored(0.5)

    evolve(train, DEFAULTS, tmp_path, 2)
    assert rows_of(tmp_path)[:, 3].tolist() == [0.75, 0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr0", "-1", "lr0 -1.0 is too small: it has to be above 0"),
        ("momentum", "2", "momentum 2.0 is too large"),
        ("mosaic", "inf", "mosaic inf is too large"),
        ("lr0", "nan", "has a score that is no number"),
        ("lr0", "high", "is damaged .*'high'"),
        ("mAP@.5", "nan", "has a score that is no number"),
        ("mAP@.5", "inf", "has a score that is no number"),
        ("mAP@.5", "98.5", "mAP@.5 98.5 is too large: it has to be at least 0 and at most 1"),
        ("P", "-0.1", "P -0.1 is too small"),
        ("mAP@.5", "", "is damaged .* numbers, its titles are"),
        ("lr0", "1 2", "is damaged"),
    ],
)
def test_rows_that_a_person_has_edited(name, value, message, tmp_path):
    evolve(lambda hyp: RESULTS, DEFAULTS, tmp_path, 2)
    path = tmp_path / "evolve.txt"
    titles, first, second = path.read_text().splitlines()
    words = second.split()
    words[titles.split().index(name) - 1] = value
    path.write_text("\n".join([titles, first, " ".join(words)]))
    with pytest.raises(ValueError, match=f"evolve.txt:3.*{message}"):
        evolve(lambda hyp: pytest.fail("trains"), DEFAULTS, tmp_path, 1)


def test_a_table_is_read_whatever_program_saved_it_and_best_first(tmp_path):
    evolve(lambda hyp: scored(0.5), DEFAULTS, tmp_path, 1)
    evolve(lambda hyp: scored(0.75), DEFAULTS, tmp_path, 1)
    path, before = tmp_path / "evolve.txt", rows_of(tmp_path)
    titles, *lines = path.read_text().splitlines()
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([titles, *reversed(lines), "", ""]).encode())
    assert np.array_equal(rows_of(tmp_path), before)


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"\x00" * 64, b"[]", None])
def test_a_table_that_is_none(content, tmp_path):
    path = tmp_path / "evolve.txt"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match="evolve.txt .*--project"):
        evolve(lambda hyp: pytest.fail("trains"), DEFAULTS, tmp_path, 1)


def test_progress_is_logged(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        evolve(lambda hyp: RESULTS, DEFAULTS, tmp_path, 2)
    assert "Generation 1 of 2" in caplog.text and "Generation 2 of 2" in caplog.text
