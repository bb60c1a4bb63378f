"""Every number that a user can give: its lowest and highest value pass, what lies beyond is refused in one sentence."""

import math

import pytest

from utils.config import limits
from utils.config.flags import TEST_FLAGS, TRAIN_FLAGS, layer_range
from utils.config.hyp import HYPER_PARAMETERS

ALL = {"train": TRAIN_FLAGS, "test": TEST_FLAGS, "hyp": HYPER_PARAMETERS}
TABLES = {table: {name: row.range for name, row in rows.items() if row.range} for table, rows in ALL.items()}
ROWS = [(table, name) for table, rows in TABLES.items() for name in rows]


def refusal(table, name, value):
    """The sentence about a value, None if it passes."""
    try:
        TABLES[table][name].check(name, value)
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


@pytest.mark.parametrize("table", ["train", "test"])
def test_every_number_has_a_range(table):
    unlimited = {"local_rank", "bbox_interval"}  # set by launchers; without effect
    numeric = {name for name, flag in ALL[table].items() if flag.type in (int, float, layer_range)}
    assert numeric - unlimited == set(TABLES[table])
    for name in numeric - unlimited:
        assert refusal(table, name, ALL[table][name].default) is None, "the default itself passes"
