"""Kill small training runs at random moments, resume them, and compare them with a run that was left alone.

    python tests/kill_resume.py --kills 50

Every start is a fork of this process, which has everything imported, so that a start costs a fraction of a second. Some
kills come at a random time; others are aimed: at a random byte of a random file that is being written (checkpoints,
pictures, tables, options), at the validation, between results.txt and the checkpoint, at the last steps of a run.
Prints a row for each kill and for each run, and ends with status 1 when a run does not end bit-equal, loses more than
the epoch in progress, or leaves a torn or temporary file.
"""

import argparse
import csv
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import matplotlib.backends.backend_agg  # noqa: F401  (so that a fork need not import it)
import matplotlib.figure  # noqa: F401
import torch
import torch.utils.tensorboard  # noqa: F401
import yaml
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train
from tests import small_run
from tools.experiments import command_line
from utils.engine import resume
from utils.engine.checkpoint import Checkpoints
from utils.engine.checkpoint_reader import read_checkpoint
from utils.loggers import results as report
from utils.plots import run as plots
from utils.run import entry

MOMENTS = ("time",) * 4 + ("file",) * 2 + ("checkpoint",) * 3 + ("validation",) * 2 + ("results", "last steps")
HYP = {"warmup_min_iters": 5, "warmup_epochs": 1.0}
LIMIT = 300  # seconds that a single start may take


# ---- in the process that will be killed ----------------------------------------------------------------------------


def die(number):
    os.kill(os.getpid(), number)
    time.sleep(60)


class TornFile:
    """A file that kills its process after `rest` bytes, or when it is closed."""

    def __init__(self, file, rest, number):
        self.file, self.rest, self.number = file, rest, number

    def write(self, data):
        part = data[: self.rest]
        self.file.write(part)
        self.rest -= len(part)
        if self.rest <= 0:
            self.__exit__()
        return len(part)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.flush()
        die(self.number)

    def __getattr__(self, name):
        return getattr(self.file, name)


def before_call(owner, name, call, action):
    """Let call number `call` of `owner.name` begin with `action()`."""
    original, calls = getattr(owner, name), []

    def counted(*args, **options):
        calls.append(name)
        if len(calls) == call:
            action()
        return original(*args, **options)

    setattr(owner, name, counted)


def aim(moment, number, rng, epochs):
    """Change a function of the program so that one of its calls kills the process."""
    call = rng.randint(1, max(epochs - 3, 1))
    if moment in ("file", "checkpoint"):
        num_bytes = int(10 ** rng.uniform(0, 6))  # a checkpoint has some 500,000
        tear_a_file(".pt." if moment == "checkpoint" else ".", rng.randint(1, 2 * epochs), num_bytes, number)
    elif moment == "validation":
        timer = threading.Timer(rng.uniform(0, 0.05), die, [number])
        before_call(train, "validate_ema", call, timer.start)
    elif moment == "results":
        before_call(Checkpoints, "after_epoch", call, lambda: die(number))
    elif moment == "last steps":
        before_call(train, "rebuild", rng.randint(1, 2), lambda: die(number))


def tear_a_file(name, count, num_bytes, number):
    """Kill the process in the temporary file with `name` in its name that is opened as number `count`."""
    original, opened = Path.open, []

    def open_counted(path, *args, **options):
        file = original(path, *args, **options)
        is_counted = path.suffix == ".tmp" and name in path.name
        opened.extend([path] if is_counted else [])
        return TornFile(file, num_bytes, number) if is_counted and len(opened) == count else file

    Path.open = open_counted


def in_fork(line, log, prepare):
    """Run train.py with the arguments `line` in a fork; returns its process id."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    sys.argv, status = ["train.py", *line], 0
    try:
        prepare()
        entry.run(train.main, train.train_parser().parse_args(line))
    except SystemExit as error:
        status = error.code or 0
    except BaseException:
        logging.exception("the run failed")
        status = 1
    sys.stdout.flush()
    os._exit(status)


# ---- in this process -----------------------------------------------------------------------------------------------


def start(line, log, moment=None, number=None, rng=None, epochs=0, seconds=0.0):
    """Run train.py until it ends or is killed. Returns (the signal that ended it or 0, its exit status)."""
    process = in_fork(line, log, lambda: moment and aim(moment, number, rng, epochs))
    deadline = time.monotonic() + (seconds if moment == "time" else LIMIT)
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(status)
            ended_by = signal.SIGTERM if status == 128 + signal.SIGTERM else max(-status, 0)
            return (ended_by, 0) if ended_by else (0, status)
        if time.monotonic() > deadline:
            os.kill(process, number or signal.SIGKILL)
            deadline += LIMIT
        time.sleep(0.002)


def temporary_files(folder):
    return [path.name for path in folder.rglob(".*.tmp")]


def epochs_in(folder):
    """(epochs in results.txt, epochs in the checkpoint) of a run that was killed."""
    results, last = folder / "results.txt", folder / "weights" / "last.pt"
    lines = results.read_text().count("\n") if results.exists() else 0
    if not last.exists():
        return lines, 0
    stored = read_checkpoint(last)
    if stored.optimizer is None:
        stored = read_checkpoint(last.with_name("last_full.pt"))
    return lines, stored.epoch + 1


def unreadable_files(folder):
    """Names of the files of a run that cannot be read."""
    bad = []
    for path in sorted(folder.rglob("*")):
        try:
            if path.suffix == ".pt":
                read_checkpoint(path)
            elif path.suffix in (".jpg", ".png"):
                Image.open(path).load()
            elif path.suffix == ".yaml":
                assert isinstance(yaml.safe_load(path.read_text()), dict)
            elif path.suffix == ".csv":
                assert len({len(row) for row in csv.reader(path.read_text().splitlines())}) == 1
        except Exception as error:  # whatever it is, the file is not readable
            bad.append(f"{path.name} ({error})")
    return bad


def differences(run, reference):
    """What differs between two finished runs, in words; nothing if they are equal to the last bit."""
    found = []
    if (run / "results.txt").read_text() != (reference / "results.txt").read_text():
        found.append("results.txt")
    if {p.name for p in (run / "weights").iterdir()} != {p.name for p in (reference / "weights").iterdir()}:
        found.append("the names of the weights")
    for path in sorted((reference / "weights").glob("*.pt")):
        mine, theirs = (read_checkpoint(folder / "weights" / path.name) for folder in (run, reference))
        if not _equal(_content(mine), _content(theirs)):
            found.append(path.name)
    return found


def _content(stored):
    state = {key: value for key, value in (resume.of(stored) or {}).items() if key != "options"}
    models = [None if model is None else model.state for model in (stored.model, stored.ema)]
    return [models, stored.epoch, stored.best_fitness, stored.updates, stored.optimizer, stored.training_results, state]


def _equal(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def one_run(folder, line, reference, seconds, kills, rng, rows):
    """Train with up to `kills` kills until the run is done; returns what is wrong with it. `seconds` of a whole run."""
    run, epochs = folder / "runs" / "run", train.train_parser().parse_args(line).epochs
    wrong, num_killed = [], 0
    while True:
        last = run / "weights" / "last.pt"
        command = ["--resume", str(last), "--device", "cpu"] if last.exists() else [*line, "--exist-ok"]
        moment = rng.choice(MOMENTS) if num_killed < kills else None
        number = rng.choice((signal.SIGKILL, signal.SIGTERM))
        ended_by, status = start(command, folder / "log.txt", moment, number, rng, epochs, rng.uniform(0, seconds))
        if ended_by:
            num_killed += 1
            lines, saved = epochs_in(run)
            leftovers = temporary_files(run)
            rows.append((moment, signal.Signals(ended_by).name, lines, saved, len(leftovers)))
            columns = f"{len(rows):<5}{moment:<12}{rows[-1][1]:<9}{lines:>9}{saved:>9}"
            print(f"{columns}   {', '.join(leftovers)}", flush=True)
            wrong += [f"{lines - saved} epochs lost"] if lines - saved > 1 else []
        elif status:
            return [*wrong, f"status {status}, see {folder / 'log.txt'}"]
        else:
            break
    wrong += differences(run, reference)
    return wrong + [f"unreadable: {name}" for name in unreadable_files(run)] + temporary_files(run)


def draw_nothing(*arguments, **options):
    """In the place of a chart."""
    return ()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    parser.add_argument("--kills", type=int, default=50, help="of all runs together")
    parser.add_argument("--kills-a-run", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--flags", default="", help="more flags of train.py, e.g. '--seed 1 --workers 2'")
    opt = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # charts would take longer than everything else; batches are drawn
    for module, names in ((plots, ("plot_curves", "plot_confusion_matrix")), (report, ("plot_labels", "plot_results"))):
        for name in names:
            setattr(module, name, draw_nothing)
    rng, rows, failed, number = random.Random(opt.seed), [], 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        line = small_run.arguments(folder, "--epochs", str(opt.epochs), *opt.flags.split(), hyp=HYP)
        started = time.monotonic()
        if start([*line, "--name", "reference"], folder / "log.txt") != (0, 0):
            sys.exit((folder / "log.txt").read_text()[-3000:])
        seconds = time.monotonic() - started
        print(f"one run: {opt.epochs} epochs in {seconds:.1f} s\n\n"
              "kill moment      signal     epochs    saved   temporary files", flush=True)  # fmt: skip
        while len(rows) < opt.kills:
            number += 1
            kills = min(opt.kills_a_run, opt.kills - len(rows))
            wrong = one_run(folder, line, folder / "runs" / "reference", seconds, kills, rng, rows)
            print(f"run {number}: {'; '.join(wrong) or 'bit-equal, all files readable, no temporary file'}", flush=True)
            failed += bool(wrong)
            if wrong:
                print((folder / "log.txt").read_text(errors="replace")[-3000:], flush=True)
            if (folder / "runs" / "run").exists():
                (folder / "runs" / "run").rename(folder / "runs" / f"done{number}")
    print(f"\n{len(rows)} kills in {number} runs, {failed} of them wrong")
    return int(failed > 0)


if __name__ == "__main__":
    command_line.run_tool(main)
