"""A short version of tests/kill_resume.py: three kills, aimed at different moments."""

import re
import sys

from tests import forked, kill_resume


def kill(line):
    sys.exit(kill_resume.main(line))


def test_killed_runs_end_like_an_undisturbed_one(tmp_path):
    line = ["--kills", "3", "--kills-a-run", "3", "--epochs", "3", "--seed", "4"]
    ended = forked.run(tmp_path, kill, line)
    assert ended.status == 0, ended.text
    assert re.search(r"\n3 kills in \d runs, 0 of them wrong\n$", ended.text), ended.text
    assert sum(" SIG" in row for row in ended.text.splitlines()) == 3
