"""Hours of short epochs: do memory, open files, threads and shared memory stay where they are?

    python -m tests.soak --minutes 120 --out runs/soak          every set of flags in turn, 30 minutes each
    python -m tests.soak --minutes 20 --only fast --extra "--fast-step"

Writes soak.json (all samples) and soak.png, prints a table, and ends with status 1 if something grew.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from tests import small_run
from tools.experiments import command_line
from utils.system.files import atomic_write

ROOT = Path(__file__).resolve().parents[1]
SETS = {
    "reference": "--workers 2",
    "fast": "--workers 2 --fast-dataloader --fast-loss --seed 1",
    "mixed": "--workers 2 --persistent-workers --image-weights --multi-scale --quad --cache-images disk --adam "
    "--ota-last 9 --strict-data",
    "evolve": "--workers 2 --epochs 2 --evolve 100000",
}
QUANTITIES = ("main, MB", "workers, MB", "shared memory, MB", "files", "threads", "processes")
ALLOWED = {"main, MB": 0.05, "workers, MB": 0.10}  # growth by a share
MARGIN = 2  # MB or pieces: a checkpoint is open in some samples, and batches are on their way
INTERVAL = 5  # seconds between two samples
WARM_UP = 0.25  # of the samples, which are not judged: caches fill, workers start


def sample(process):
    """The QUANTITIES of a process and all below it, or None when it has ended."""
    try:
        others = process.children(recursive=True)
        usage = [_of_one(each) for each in (process, *others)]
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, IndexError):  # one ended: the next will do
        return None
    usage = np.array(usage, float)
    shared = psutil.disk_usage("/dev/shm").used / 1e6 if Path("/dev/shm").is_dir() else 0.0
    return [usage[0, 0], usage[1:, 0].sum(), shared, usage[:, 1].sum(), usage[:, 2].sum(), len(usage)]


def _of_one(process):
    """Memory of its own in MB, open files, threads.

    Pages of files do not count: whether a process has those of a library for itself depends on what else is running.
    A process that has ended, and that nobody has waited for, has nothing but its entry.
    """
    if process.status() == psutil.STATUS_ZOMBIE:
        return 0.0, 0, 0
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    own = int(rollup.split("Private_Dirty:")[1].split()[0]) * 1024
    return own / 1e6, process.num_fds(), process.num_threads()


def soak(name, flags, seconds, folder):
    """Train with `flags` for a while; returns samples [n x 1 + quantities], the first column being the seconds."""
    line = small_run.arguments(
        folder / name, "--epochs", "1000000", "--batch-size", "8", *shlex.split(flags), num_images=48
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    samples, started = [], time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        command = [sys.executable, str(ROOT / "train.py"), *line]
        program = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            while (elapsed := time.monotonic() - started) < seconds:
                time.sleep(INTERVAL)
                if program.poll() is not None:
                    tail = (folder / f"{name}.log").read_text()[-2000:]
                    raise SystemExit(
                        f"{name} ended by itself after {elapsed:.0f} s, status {program.returncode}:\n{tail}"
                    )
                values = sample(psutil.Process(program.pid))
                if values:
                    samples.append([elapsed, *values])
        finally:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGINT)
                try:
                    program.wait(60)
                except subprocess.TimeoutExpired:
                    os.killpg(program.pid, signal.SIGKILL)
    return np.array(samples)


def growth(samples):
    """{quantity: (before, after, whether that is flat)} from the medians of the first and last judged quarters."""
    judged = samples[int(len(samples) * WARM_UP) :, 1:]
    quarter = max(len(judged) // 4, 1)
    before, after = np.median(judged[:quarter], axis=0), np.median(judged[-quarter:], axis=0)
    verdicts = {}
    for i, quantity in enumerate(QUANTITIES):
        limit = before[i] * ALLOWED.get(quantity, 0) + MARGIN
        verdicts[quantity] = float(before[i]), float(after[i]), bool(after[i] <= before[i] + limit)
    return verdicts


def plot(all_samples, path):
    """One row for each set of flags, one column for each quantity."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(QUANTITIES), 2.2 * len(all_samples)), layout="constrained")
    axes = figure.subplots(len(all_samples), len(QUANTITIES), squeeze=False)
    for row, (name, samples) in zip(axes, all_samples.items(), strict=True):
        for i, (ax, quantity) in enumerate(zip(row, QUANTITIES, strict=True)):
            ax.plot(samples[:, 0] / 60, samples[:, 1 + i], linewidth=1)
            ax.set_ylim(0, max(samples[:, 1 + i].max() * 1.2, 1))
            ax.set_title(f"{name}: {quantity}", fontsize=8)
            ax.set_xlabel("minutes", fontsize=7)
            ax.tick_params(labelsize=7)
    figure.savefig(path, dpi=110)


def main(arguments=None):
    """Soak every set, write the files, print the table; returns whether all of it is flat."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=120, help="for all sets together")
    parser.add_argument(
        "--only", nargs="+", choices=SETS, metavar="SET", default=list(SETS), help=f"of {', '.join(SETS)}"
    )
    parser.add_argument("--extra", default="", help="flags for every set, in one string")
    parser.add_argument("--out", default="runs/soak")
    opt = parser.parse_args(arguments)
    out, all_samples, flat = Path(opt.out), {}, True
    out.mkdir(parents=True, exist_ok=True)
    print(f"| {'flags':10} | {'quantity':18} |  before |   after | flat |")
    with tempfile.TemporaryDirectory() as folder:
        for name in opt.only:
            (Path(folder) / name).mkdir()
            flags = f"{SETS[name]} {opt.extra}"
            samples = soak(name, flags, opt.minutes * 60 / len(opt.only), Path(folder))
            all_samples[name] = samples
            for quantity, (before, after, is_flat) in growth(samples).items():
                flat &= is_flat
                print(
                    f"| {name:10} | {quantity:18} | {before:7.1f} | {after:7.1f} | {'yes' if is_flat else 'NO':4} |",
                    flush=True,
                )
    with atomic_write(out / "soak.json", "w") as file:
        content = {name: samples.round(2).tolist() for name, samples in all_samples.items()}
        json.dump({"columns": ["seconds", *QUANTITIES], "flags": SETS, "extra": opt.extra, "samples": content}, file)
    plot(all_samples, out / "soak.png")
    return flat


if __name__ == "__main__":
    command_line.run_tool(lambda _: not main())
