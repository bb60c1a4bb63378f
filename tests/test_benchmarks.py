"""Every benchmark that can be small comes to its end and writes a table with both sides."""

import os
import subprocess
import sys

import pytest

from utils.files import PROJECT_ROOT

SMALL = {
    "tests/bench_val.py": (
        "--images 8 --img 64 --batch 4 --repeats 1 --workers 1 --candidates 20 --device cpu",
        ["| reference |", "| fast |", "fast, by part"],
    ),
    "tests/bench_heads.py": ("--batch 1 --img 64 --device cpu", ["| one head |", "| four heads |"]),
    "tools/bench_loader.py": (
        "--images 12 --img 64 --batch 4 --workers 2 --epochs 1 --repeats 1 --loaders reference fast-dataloader",
        ["| reference |", "| --fast-dataloader |"],
    ),
    "tools/bench_samples.py": (
        "--images 6 --samples 3 --repeats 1 --sizes 64 --hyps tiny",
        ["in a batch ms", "  64  tiny "],
    ),
    "tools/profile_samples.py": ("--images 6 --samples 3 --repeats 1 --jobs 64:tiny", ["| warp the picture |"]),
}


@pytest.mark.parametrize("program", SMALL)
def test_benchmark(program, tmp_path):
    options, expected = SMALL[program]
    words = [sys.executable, str(PROJECT_ROOT / program), *options.split()]
    if "--out" in (PROJECT_ROOT / program).read_text():
        words += ["--out", str(tmp_path)]
    answer = subprocess.run(words, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=300, env=os.environ)
    assert answer.returncode == 0, answer.stderr[-2000:]
    for text in expected:
        assert text in answer.stdout, answer.stdout
