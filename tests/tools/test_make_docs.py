"""What is made of flags and figures: pages that are up to date, and words and bars that say what the table says."""

import pytest

from tools import make_docs
from tools.make_docs import DOCS, PROGRAMS, Rates
from utils.config.flags import TRAIN_FLAGS
from utils.system.files import PROJECT_ROOT

ADVICE = "give `python tools/make_docs.py`"


def test_the_page_of_flags_is_up_to_date():
    assert (DOCS / "flags.md").read_text(encoding="utf-8") == make_docs.flags_page(), ADVICE


def test_the_page_has_a_row_for_every_flag():
    for program, flags in PROGRAMS.items():
        section = make_docs.flags_page().partition(f"\n## {program}\n")[2].partition("\n## ")[0].splitlines()
        for flag in flags.values():
            assert sum(line.startswith(f"| `{flag.name}`") for line in section) == 1, flag.name


def test_a_row_says_default_and_what_resume_does():
    rows = {row.split("`")[1]: row for row in reversed(make_docs.flags_page().splitlines()) if row.startswith("| `")}
    epochs, fast, seed = (rows[name] for name in ("--epochs", "--fast", "--seed"))
    assert "` | `300` |" in epochs and epochs.endswith("| taken, and kept |")
    assert fast.startswith("| `--fast` | off |") and fast.endswith("| taken, for this start |")
    assert TRAIN_FLAGS["seed"].default is None and "` |  |" in seed


@pytest.mark.parametrize("language", ["README.md", "README.zh-TW.md"])
def test_the_readme_has_the_measured_rates(language):
    """Below a header of its own, which may be in another language."""
    lines = (PROJECT_ROOT / language).read_text(encoding="utf-8").splitlines()
    wanted = make_docs.rates_table(make_docs.measured_rates()).splitlines()[1:]
    start = next((number for number, line in enumerate(lines) if line.startswith(wanted[1])), 1)
    assert lines[start - 1 : start - 1 + len(wanted)] == wanted, "copy what `python tools/make_docs.py` prints"


def test_hours_and_gains():
    assert make_docs.hours(3285.75) == "1.0 h" and make_docs.hours(328.575) == "10.0 h"
    assert make_docs.hours(3285.75 * 4) == "15 min"
    assert [Rates("", 100, fast).gain for fast in (150, 990, 1000, 6249)] == ["1.5x", "9.9x", "10x", "62x"]


def test_rates_are_read_and_drawn(tmp_path):
    page = tmp_path / "measurements.md"
    page.write_text(
        "# M\n\n### Against stock\n\nWords.\n\n| job | stock | fast | state |\n|---|---|---|---|\n"
        "| a, 320 px | 100 | 6,000 | x |\n| b | 90.5 | 181 | y |\n\n### Else\n\n| c | 1 | 2 | z |\n"
    )
    rates = make_docs.measured_rates(page)
    assert rates == [("a, 320 px", 100, 6000), ("b", 90.5, 181)]
    row = make_docs.rates_table(rates).splitlines()[2]
    assert row == "| a, 320 px | 100 img/s, 32.9 h | 6,000 img/s, 33 min | 60x |"
    figure = make_docs.draw_rates(rates, tmp_path / "a.png")
    other = make_docs.draw_rates(rates[:1], tmp_path / "b.png")
    assert figure.read_bytes()[:4] == b"\x89PNG" and figure.read_bytes() != other.read_bytes()


@pytest.mark.parametrize("table", ["", "| job | stock | fast |\n|---|---|---|\n| a | 100 | soon |\n",
                                   "| job | stock | fast |\n|---|---|---|\n| a | 100 |\n"])  # fmt: skip
def test_a_table_without_rates_is_refused(tmp_path, table):
    page = tmp_path / "measurements.md"
    page.write_text(f"### Against stock\n\n{table}")
    with pytest.raises(ValueError, match="measurements.md.*Against stock"):
        make_docs.measured_rates(page)
