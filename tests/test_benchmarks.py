"""Every benchmark that can be small comes to its end and writes a table with both sides.

One that measures parts replaces functions where they are called; it says nothing of one that is called elsewhere now.
"""

import re
import runpy
import sys

import pytest

from tests import forked
from utils.system.files import PROJECT_ROOT

PARTS = ("loader alone", "forward", "loss", "nms", "match", "curves", "all, waiting")  # of a fast validation
STEPS = ("draw the mosaic", "labels in pixels", "draw the transform", "paint", "warp the image", "warp the labels",
         "objects to paste", "paste in", "colours", "hand over")  # fmt: skip
SMALL = {  # options, and patterns of what they have to print
    "tests/bench_val.py": (
        "--images 8 --img 64 --batch 4 --repeats 1 --workers 1 --candidates 20 --device cpu",
        [r"\| reference \|", r"\| --fast-val \|", *(rf"--fast-val, by part.* {part} \d" for part in PARTS)],
    ),
    "tests/bench_epoch_change.py": (
        "--images 8 --val-images 8 --img 64 --batch 4 --epochs 3 --device cpu --variants=--fast",
        [r"\| all .*\| validation .*\| snapshot", r"\| `--fast` \| [1-9]"],
    ),
    "tests/bench_detect.py": (
        "--images 6 --img 64 --batch 4 --repeats 1 --candidates 20 --device cpu --save",
        [r"\| one by one \|", r"\| detect.py, batch 1 \|", r"\| detect.py, batch 4 \|"],
    ),
    "tests/bench_heads.py": ("--batch 1 --img 64 --device cpu", [r"\| one head \|", r"\| four heads \|"]),
    "tools/bench_loader.py": (
        "--images 12 --img 64 --batch 4 --workers 2 --epochs 1 --repeats 1 --loaders reference fast-dataloader",
        [r"\| reference \|", r"\| --fast-dataloader \|"],
    ),
    "tools/bench_composing.py": (
        "--images 12 --img 64 --batch 4 --samples 6 --repeats 2",
        [r"\| reference \| \d", r"\| --fast-step \| \d", r"\| --cache-images gpu \| \d"],
    ),
    "tools/bench_samples.py": (
        "--images 6 --samples 10 --repeats 1 --sizes 64 --hyps tiny",
        ["in a batch ms", "  64  tiny "],
    ),
    "tools/bench_samples.py --steps": (
        "--images 6 --samples 3 --repeats 1 --sizes 64 --hyps tiny",
        [rf"\| {step} \| [1-9]" for step in STEPS],
    ),
}


def run(words):
    sys.argv = words
    runpy.run_path(str(PROJECT_ROOT / words[0]), run_name="__main__")


def test_wrong_input_is_one_sentence(tmp_path):
    ended = forked.run(tmp_path, run, ["tools/bench_loader.py", "--data", "none", "--out", str(tmp_path)])
    assert ended.status == 2 and ended.text.startswith("error: none does not exist") and ended.text.count("\n") == 1


@pytest.mark.parametrize("program", SMALL)
def test_benchmark(program, tmp_path):
    options, expected = SMALL[program]
    words = [*program.split(), *options.split()]
    if "--out" in (PROJECT_ROOT / words[0]).read_text():
        words += ["--out", str(tmp_path)]
    ended = forked.run(tmp_path, run, words)
    assert ended.status == 0, ended.text[-2000:]
    for pattern in expected:
        assert re.search(pattern, ended.text), f"{pattern}\n{ended.text}"
