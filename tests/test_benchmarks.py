"""Every benchmark that can be small comes to its end and writes a table with both sides.

One that measures parts replaces functions where they are called; it says nothing of one that is called elsewhere now.
"""

import os
import re
import runpy
import signal
import sys
import tempfile
import threading

import pytest
import torch

from tests import forked
from tests.bench_step import gradient_like
from utils.run import entry
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
        ["plain ms +ours ms", "  64  tiny "],
    ),
    "tools/bench_samples.py --steps": (
        "--images 6 --samples 3 --repeats 1 --sizes 64 --hyps tiny",
        [rf"\| {step} \| [1-9]" for step in STEPS],
    ),
}


def run(words):
    sys.argv = words
    runpy.run_path(str(PROJECT_ROOT / words[0]), run_name="__main__")


def interrupt(number, words, folder):
    """Run a program that gets the signal when it has begun; its temporary files are in `folder`."""
    tempfile.tempdir = str(folder)
    begin = entry._check_working_directory

    def begin_and_wait():
        begin()
        threading.Timer(0.3, os.kill, [os.getpid(), number]).start()

    entry._check_working_directory = begin_and_wait
    run(words)


def show_help(program):
    os.environ["COLUMNS"] = "80"
    run([program, "--help"])


# what takes a while on a CPU
LONG = {
    "tests/bench_val.py": "--img 320 --batch 4 --device cpu",
    "tests/bench_epoch_change.py": "--batch 4 --device cpu",
    "tests/bench_detect.py": "--batch 4 --device cpu",
    "tests/bench_heads.py": "--batch 64 --img 640 --device cpu",
    "tests/bench_loss.py": "--device cpu",
    "tests/bench_step.py": "--device cpu",
    "tests/kill_resume.py": "",
    "tests/profile_training_loop.py": "--device cpu",
    "tools/bench_loader.py": "--images 9000",
    "tools/bench_composing.py": "--images 9000",
    "tools/bench_samples.py": "--images 9000",
    "tools/make_shapes.py": "--train 20000",
    "tools/smoke.py": "",
}


@pytest.mark.parametrize("program", LONG)
def test_ctrl_c_and_sigterm_are_one_line(program, tmp_path):
    for number, line in ((signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")):
        words = [program, *LONG[program].split()]
        if "--out" in (PROJECT_ROOT / program).read_text():
            words += ["--out", str(tmp_path / "out")]
        temporary = tmp_path / line
        temporary.mkdir()
        ended = forked.run(tmp_path, interrupt, number, words, temporary)
        assert ended.status == 128 + number and "Traceback" not in ended.text, ended.text[-2000:]
        assert ended.text.splitlines()[-1].partition(";")[0] == line
        assert not list(temporary.iterdir())


@pytest.mark.parametrize("program", [*LONG, "tests/bench_pieces.py", "tests/bench_pools.py", "tests/profile_start.py"])
def test_help_fits_a_terminal(program, tmp_path):
    ended = forked.run(tmp_path, show_help, program)
    assert ended.status == 0 and max(map(len, ended.text.splitlines())) < 80, ended.text


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


def test_a_gradient_lies_as_its_maps():
    rows = torch.zeros(2 * 5 * 4, 24, dtype=torch.half)
    maps = rows.view(2, 5, 4, 24)[..., :21].unflatten(3, (3, 7)).permute(0, 3, 1, 2, 4)
    found = gradient_like(maps)
    assert (found.shape, found.stride(), found.dtype) == (maps.shape, maps.stride(), maps.dtype)
    assert found.untyped_storage().nbytes() == rows.untyped_storage().nbytes() and 0 < found.abs().max() < 0.01
