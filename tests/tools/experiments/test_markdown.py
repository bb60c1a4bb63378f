"""Tables of reports, and numbers that were not measured."""

from tools.experiments.markdown import median, show, spread, table


def test_a_table():
    assert table(("a", "b"), [(1, "x"), (None, 2.5)]) == "| a | b |\n| --- | --- |\n| 1 | x |\n|  | 2.5 |"


def test_what_was_not_measured():
    assert show(None, "{:.1f}") == "not measured" and show(0.25, "{:.1f}") == "0.2"
    assert median([3.0, None, 1.0]) == 2.0 and median([None]) is None


def test_the_spread_of_several_values():
    assert spread([1.0, 3.0, 2.0], "{:.1f}") == "2.0 (1.0 to 3.0)"
    assert spread([None, 2.0], "{:.1f}") == "2.0" and spread([None], "{:.1f}") == "not measured"
