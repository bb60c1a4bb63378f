"""Run processes: train in a process of its own, watch it, and read what it left behind."""

import csv
import logging
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from utils.config.data_yaml import read_yaml
from utils.config.hyp import save_hyp
from utils.loggers.monitor import ResourceMonitor, Usage, gpu_name
from utils.system.children import PARENT
from utils.system.cores import usable_cores
from utils.system.files import PROJECT_ROOT
from utils.system.folder_lock import check_free

TRAIN = [sys.executable, str(PROJECT_ROOT / "train.py")]
LOG = "output.log"  # in the run folder: what the process printed
MAP50, LOSS = "metrics/mAP_0.5", "train/total_loss"  # columns of results.csv
TIMED_OUT = "timed out"
POLL = 0.2  # seconds between two looks at a process
CHILD = {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that wait sleep: the workers of the loader need the cores
GRACE = 15  # seconds that a process is given to end when it is asked to
WORKERS_GRACE = 2  # further ones for its workers, which remove their temporary files


@dataclass
class FinishedRun:
    """A training process that has ended.

    `status` is completed, stopped (by the caller, who said why in `message`) or failed (`message`: its last words).
    `rows` are the rows of results.csv, one {column: number} an epoch; `speed` {tag: [value of each epoch]} comes from
    the event file; `seconds` is the time of the process with its start, `usage` what it used all in all; `memory` are
    samples of the GB that its processes had for themselves in the epochs after the first.
    """

    folder: Path
    status: str
    message: str = ""
    seconds: float = 0.0
    rows: list = field(default_factory=list)
    speed: dict = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    memory: list = field(default_factory=list)

    @property
    def completed(self):
        return self.status == "completed"

    def last(self, column):
        """The value of the last epoch; None without one."""
        return self.rows[-1].get(column) if self.rows else None

    def typical(self, tag):
        """Median over the epochs of a tag of `speed` or a column of `rows`; None when there is none.

        The first epoch, which also starts workers and finds kernels, counts only when there is no other.
        """
        values = self.speed.get(tag) or [row[tag] for row in self.rows if tag in row]
        return statistics.median(values[1:] or values) if values else None

    def peak(self, column):
        return max((row[column] for row in self.rows if column in row), default=None)

    def log(self):
        """What the process printed."""
        path = self.folder / LOG
        return path.read_text(encoding="utf-8", errors="replace").replace("\r", "\n") if path.is_file() else ""


def run_training(*arguments: Any, **options: Any) -> FinishedRun:
    """`training` with these arguments, to its end."""
    return at_once([training(*arguments, **options)])[0]


def training(
    arguments: Sequence,
    folder: str | Path,
    on_epoch: Callable[[list[dict]], str | None] | None = None,
    timeout: float | None = None,
    environment: dict[str, str] | None = None,
) -> Generator[subprocess.Popen, None, FinishedRun]:
    """Train with the command line `arguments` into `folder`, for `at_once`: yields the process as long as it runs.

    `on_epoch(rows)` is called whenever an epoch is complete; what it returns, if anything, is the reason to stop the
    run. After `timeout` seconds the run is stopped and counts as failed. `environment` adds variables. With everything
    that ends this generator, an interruption included, the process and its workers end too, and when this process is
    killed (Linux).
    """
    folder = Path(folder)
    check_free(folder, "end it")
    folder.mkdir(parents=True, exist_ok=True)
    place = []
    if "--resume" not in arguments:  # such a run continues where it is
        place = ["--project", str(folder.parent), "--name", folder.name, "--exist-ok"]
        # without what an earlier run left here to read, or a run that fails would seem to have results
        for path in (folder / LOG, folder / "results.csv", *folder.glob("events.out.tfevents.*")):
            path.unlink(missing_ok=True)
    command = [*TRAIN, *map(str, arguments), *place]
    started = time.monotonic()
    variables = CHILD | os.environ | (environment or {}) | {PARENT: str(os.getpid())}
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True)
        try:
            with ResourceMonitor(process.pid, interval=1.0, memory=True) as monitor:
                reason = yield from wait_for_end(process, folder, on_epoch, timeout and started + timeout)
        finally:
            end_group(process)
    run = FinishedRun(folder, "completed", seconds=time.monotonic() - started, usage=monitor.usage())
    run.rows, run.speed = read_rows(folder), read_speed(folder)
    start, end = later_epochs(folder, run.rows, started)
    run.memory = [sample.anonymous for sample in monitor.samples if start < sample.time < end]
    if reason == TIMED_OUT:
        run.status, run.message = "failed", f"no end after {timeout:.0f} s: the run was stopped"
    elif reason:
        run.status, run.message = "stopped", reason
    elif process.returncode:
        run.status, run.message = "failed", last_words(run.log(), process.returncode)
    return run


def wait_for_end(process, folder, on_epoch, deadline):
    """Yield until a training process has ended; returns why it has to be stopped, or "" when it ended by itself."""
    num_rows = len(read_rows(folder))
    while process.poll() is None:
        if deadline and time.monotonic() > deadline:
            return TIMED_OUT
        rows = read_rows(folder) if on_epoch else []
        if len(rows) > num_rows and (reason := on_epoch(rows)):
            return reason
        num_rows = len(rows)
        yield process
    return ""


def at_once(works: Iterable[Generator[Any, None, Any]], each_round: Callable[[], object] = lambda: None) -> list:
    """Go on with all generators of `works` in turns until each has ended; returns what they returned, in their order.

    They yield the process that they wait for, or None. `each_round()` is called between two rounds. With everything
    that ends this function, all processes end: they are asked together, not one after another. One thread does it all,
    so nothing needs a lock, and an interruption reaches everything.
    """
    works = list(works)
    results: dict[int, Any] = {}
    processes: dict[int, subprocess.Popen | None] = {}
    with ExitStack() as on_the_way_out:
        for work in works:
            on_the_way_out.callback(work.close)  # does nothing where it has ended
        on_the_way_out.callback(ask_to_end, processes)
        while len(results) < len(works):
            for index, work in enumerate(works):
                if index not in results:
                    try:
                        processes[index] = next(work)
                    except StopIteration as end:
                        results[index], processes[index] = end.value, None
            each_round()
            if len(results) < len(works):
                time.sleep(POLL)
    return [results[index] for index in range(len(works))]


def ask_to_end(processes):
    """Ask the processes of {anything: process or None} to end, and wait for none."""
    for process in processes.values():
        if process:
            process.terminate()


def spread(jobs: Iterable[Callable[[str | None], Generator[Any, None, Any]]], devices: Sequence[str | None]) -> list:
    """Do `jobs`, each a function of a device that gives a generator for `at_once`, where a device is free.

    Returns what the generators returned, in the order of the jobs. One that raises ends the others.
    """
    waiting, results = deque(enumerate(jobs)), {}

    def work(device):
        while waiting:
            index, job = waiting.popleft()
            results[index] = yield from job(device)

    at_once([work(device) for device in devices])
    return [results[index] for index in sorted(results)]


def run_program(
    command: Sequence[str], log: Path, environment: Mapping[str, str], timeout: float | None = None
) -> int | None:
    """The status of a program whose output goes to the file `log`; None if it had to be ended after `timeout` seconds.

    When this process is interrupted, the program and its children end too.
    """
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_group(process)


def wait_for_group(leader, seconds):
    """Return when no process is left of the group of `leader`, after so many seconds at most."""
    end = time.monotonic() + seconds
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < end:
            os.killpg(leader, 0)
            time.sleep(0.02)


def end_group(process):
    """End a process that leads a session: it is asked first; what is left of it and its workers is killed."""
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        wait_for_group(process.pid, WORKERS_GRACE)
    finally:  # after a second Ctrl-C as well
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_rows(folder: str | Path) -> list[dict[str, float]]:
    """results.csv of a run folder: one {column: number} an epoch, without a half line at the end."""
    path = Path(folder) / "results.csv"
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        lines = file.read().split("\n")[:-1]  # what comes after the last line end is still being written
    rows = []
    for row in csv.DictReader(lines, restval=None):
        try:
            rows.append({name: float(value) for name, value in row.items() if value != ""})
        except (TypeError, ValueError):  # the process is writing this line, or died while it did
            break
    return rows


def read_speed(folder):
    """{tag: [value of each epoch]} of the speed scalars in the event files of a run; empty without tensorboard."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        return {}
    if not any(Path(folder).glob("events.out.tfevents.*")):
        return {}
    logging.getLogger("tensorboard").setLevel(logging.WARNING)
    events = EventAccumulator(str(folder), size_guidance={"images": 1, "scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("speed/")]
    series = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}
    return {tag: [values[step] for step in sorted(values)] for tag, values in series.items()}


def later_epochs(folder, rows, started):
    """When the second epoch began and the last one ended, by time.monotonic(), of a process that has just ended.

    The process began at `started`. If it resumed a run, only its own epochs count.
    """
    path = Path(folder) / "results.csv"
    if len(rows) < 2 or not path.is_file():
        return 0.0, 0.0
    end = time.monotonic() - (time.time() - path.stat().st_mtime)  # the last row is written with the last epoch
    return max(end - sum(row.get("seconds", 0.0) for row in rows[1:]), started), end


def last_words(log, return_code):
    """What a failed process says about itself: its error line, else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ") or "Error: " in line]
    if return_code < 0 and not errors:
        return f"ended by signal {signal.Signals(-return_code).name}"
    return (errors or lines or [f"exit status {return_code}"])[-1].removeprefix("error: ")


def call_python(*words, environment=None, timeout=600):
    """Run Python with `words` in the project's folder; the CompletedProcess with what it printed."""
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=timeout,
        env=os.environ | (environment or {}),
    )  # fmt: skip


def machine():
    """What a measurement has to be read with: {name: text}."""
    versions = []
    for package in ("torch", "numpy", "opencv-python-headless", "opencv-python"):
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    return {
        "commit": current_commit(),
        "GPU": gpu_name() or "none that NVML shows",
        "CPU cores": str(usable_cores()),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "packages": ", ".join(versions),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def current_commit():
    """The commit of the project, and whether tracked files differ from it; "none" outside of git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + (" with changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "none"


def _git(*words):
    answer = subprocess.run(["git", *words], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def resume_arguments(folder):
    """The command line that continues the run in `folder`; None when it has no checkpoint of a complete epoch."""
    last = Path(folder) / "weights" / "last.pt"
    return ["--resume", str(last)] if last.is_file() and (Path(folder) / "opt.yaml").is_file() else None


def write_hyp(base, changes, path):
    """A hyper-parameter file with the values of the file `base` and the `changes` {name: value}."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_hyp(read_yaml(base) | changes, path)
    return path
