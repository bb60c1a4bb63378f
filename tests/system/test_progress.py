"""Progress where nobody watches: whole lines now and then. (The bar of a terminal: tests/run/test_entry.py.)"""

import io
import logging
import re
import sys

import pytest
from tqdm import tqdm

from utils.run import entry
from utils.system.progress import SECONDS_IN_A_FILE, progress


def log_file(monkeypatch):
    """Takes both streams, as in `train.py > log 2>&1`; the time stands still. (No fixture: pytest sets its own.)"""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(logging.root, "handlers", [])
    entry.set_logging()
    stream.now = 0.0
    monkeypatch.setattr("tqdm.std.time", lambda: stream.now)
    return stream


def test_what_is_done_soon_leaves_nothing(monkeypatch):
    file = log_file(monkeypatch)
    for _ in progress(range(100), desc="scoring"):
        file.now += SECONDS_IN_A_FILE / 101
    assert file.getvalue() == ""


@pytest.mark.parametrize("options", [{}, {"bar_format": "{desc} |{bar}| {n_fmt}"}, {"leave": True}])
def test_whole_lines_at_intervals(options, monkeypatch):
    """200 steps of 1 s, with a message after each: a line each 30 s, with what is known then."""
    file = log_file(monkeypatch)
    bar = progress(range(200), desc="train", unit="batch", **options)
    for number in bar:
        logging.getLogger("utils").info("step %d", number)
        bar.set_description_str(f"train: loss {number}", refresh=False)
        file.now += 1
    text = file.getvalue()
    assert "\r" not in text and "\x1b" not in text and "\n\n" not in text and text.endswith("\n")
    lines = [line for line in text.splitlines() if not re.fullmatch(r"step \d+", line)]
    assert len(text.splitlines()) == len(lines) + 200 and len(lines) == 200 // SECONDS_IN_A_FILE
    assert re.fullmatch(r"train: loss 29:\s+15% 30/200 \[00:30<02:50,\s+1\.00batch/s\]", lines[0])
    assert [re.search(r"(\d+)/200", line)[1] for line in lines] == ["30", "60", "90", "120", "150", "180"]


def test_without_a_known_end(monkeypatch):
    """As for cameras: counted by hand, with a text behind."""
    file = log_file(monkeypatch)
    with progress(total=None, desc="detect", unit="img") as bar:
        for _ in range(31):
            file.now += 1
            bar.update()
            bar.set_postfix_str("0: 3 stars", refresh=False)
    assert re.fullmatch(r"detect: 30img \[00:30,\s+1\.00img/s, 0: 3 stars\]\n", file.getvalue())


def test_time_that_does_not_count_can_be_left_out(monkeypatch):
    """The report of a run moves the start of its bar; the thread of tqdm that wakes bars up has nothing to do."""
    file = log_file(monkeypatch)
    bar = progress(range(3))
    bar.start_t += 5
    assert bar.miniters == 1 and isinstance(bar, tqdm) and list(bar) == [0, 1, 2] and file.getvalue() == ""
