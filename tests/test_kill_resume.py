"""A short version of tests/kill_resume.py: three kills, aimed at different moments."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill_resume.py")


@pytest.mark.slow
def test_killed_runs_end_like_an_undisturbed_one():
    line = [sys.executable, str(SCRIPT), "--kills", "3", "--kills-a-run", "3", "--epochs", "3", "--seed", "4"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.endswith("3 kills in 1 runs, 0 of them wrong\n")
    assert sum(" SIG" in row for row in done.stdout.splitlines()) == 3
