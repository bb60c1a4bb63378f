"""Every number that a user can give: its lowest and highest value pass, what lies beyond is refused in one sentence."""

import math

import pytest

from utils.config import limits
from utils.config.hyp import DEFAULTS, OPTIONAL
from utils.config.options import layer_range, train_parser
from utils.config.options import test_parser as parser_of_test
from utils.run.evolve import LIMITS as SEARCHED

TABLES = {"train": limits.TRAIN_OPTIONS, "test": limits.TEST_OPTIONS, "hyp": limits.HYP}
ROWS = [(table, name) for table, rows in TABLES.items() for name in rows]


def refusal(table, name, value):
    """The sentence about a value, None if it passes."""
    try:
        limits.check({name: value}, TABLES[table])
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("table", "name"), ROWS, ids=map("-".join, ROWS))
def test_both_ends(table, name):
    row = TABLES[table][name]
    below = row.low if row.open_low else row.low - 1
    assert refusal(table, name, below).startswith(f"{name} {below} is too small: it has to be ")
    assert f"{row.low:g}" in refusal(table, name, below), "what is allowed is said"
    if not row.open_low:
        assert refusal(table, name, row.low) is None
    if row.high < math.inf:
        beyond = row.high if row.open_high else row.high * 2
        assert refusal(table, name, beyond).startswith(f"{name} {beyond} is too large: it has to be ")
        assert row.open_high or refusal(table, name, row.high) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("table", "name"), ROWS, ids=map("-".join, ROWS))
def test_what_is_no_finite_number(table, name, value):
    assert name in refusal(table, name, value)


def test_how_ranges_read():
    assert str(limits.SHARE) == "at least 0 and at most 1"
    assert str(limits.SHARE_BELOW_ONE) == "at least 0 and below 1"
    assert str(limits.above(1)) == "above 1" and str(limits.at_least(1)) == "at least 1"
    assert refusal("hyp", "loss_ota", 0.5) == (
        "loss_ota 0.5 is not usable: it has to be a whole number, at least 0 and at most 1"
    )


def test_lists_and_what_is_no_number():
    assert refusal("train", "freeze", [0, 3, -1]) == "freeze -1 is too small: it has to be at least 0"
    assert all(refusal("train", "epochs", value) is None for value in (None, True, "text", []))
    limits.check({"unknown": -1}, limits.TRAIN_OPTIONS)


@pytest.mark.parametrize(("make_parser", "table"), [(train_parser, "train"), (parser_of_test, "test")])
def test_every_number_of_a_parser_has_a_row(make_parser, table):
    unlimited = {"local_rank", "bbox_interval"}  # set by launchers; without effect
    numeric = {action.dest for action in make_parser()._actions if action.type in (int, float, layer_range)}
    assert numeric - unlimited == set(TABLES[table])
    for name in numeric - unlimited:
        assert refusal(table, name, make_parser().get_default(name)) is None, "the default itself passes"


def test_every_hyper_parameter_has_a_row():
    assert set(limits.HYP) == {*DEFAULTS, *OPTIONAL}
    assert all(refusal("hyp", name, value) is None for name, value in DEFAULTS.items())


def test_the_search_stays_inside():
    for name, (_, low, high) in SEARCHED.items():
        assert refusal("hyp", name, low) is None and refusal("hyp", name, high) is None, name
