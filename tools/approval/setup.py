"""What every check of a stage needs: the data and options of its runs, and how a check reports what it found."""

import io
import re
import shlex
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import psutil
import yaml

from tools.experiments import runner
from tools.make_shapes import NAMES, make_shapes
from utils.system.files import PROJECT_ROOT

TIMEOUT = 900  # seconds after which a training run counts as hung, if it has the machine to itself
NOT_MADE = "not made"


class Failed(Exception):
    """A check that did not find what it has to; the message says what it found."""


class NotMeasured(Exception):
    """A check that this machine or version cannot make; the message says why."""


@dataclass
class CheckResult:
    """`status` is passed, failed, not measured, or NOT_MADE: the stage has not come to it."""

    name: str
    status: str
    detail: str
    seconds: float


@dataclass
class Setup:
    """How the runs of the stages train; sizes in pixels. Without `data` they use the embedded shapes."""

    out: Path
    data: str = ""
    cfg: str = "cfg/training/yolov7-tiny.yaml"
    hyp: str = ""
    img: int = 64
    batch_size: int = 8
    workers: int = 2
    device: str = ""
    subset: int | None = None
    repeats: int = 1
    epochs: int = 6
    all_combinations: bool = False
    places: list = field(default_factory=lambda: [None])  # devices of the runs of stage 6 that are not timed
    more: tuple = ()  # further words of every command line
    findings: list = field(default_factory=list)
    measured: dict = field(default_factory=dict)  # {row: {column: number}}
    curves: dict = field(default_factory=dict)  # {label: rows of results.csv}
    comparison: dict | None = None  # what the performance run of stage 6 found

    def prepare(self):
        """Draw the embedded data where none is given. Hyper-parameters default to the tiny ones, with OTA."""
        self.out.mkdir(parents=True, exist_ok=True)
        if not self.data:
            self.data = draw_shapes(self.out.parent / "shapes", 64, 16, self.img)
            if not self.hyp:
                base = PROJECT_ROOT / "data" / "hyp.shapes.yaml"
                self.hyp = str(runner.write_hyp(base, {"loss_ota": 1, "lr0": 0.003}, self.out / "hyp.yaml"))
        self.hyp = self.hyp or str(PROJECT_ROOT / "data" / "hyp.scratch.tiny.yaml")

    def arguments(self, epochs, *flags, small=True, device=None):
        """A command line of train.py (words) with the same data, model and --seed for every run.

        It trains on `device` instead of that of the setup.
        """
        device = self.device if device is None else device
        words = ["--data", self.data, "--cfg", self.cfg, "--hyp", self.hyp, "--weights", "", "--img", self.img,
                 "--batch-size", self.batch_size, "--workers", self.workers, "--epochs", epochs, "--seed", 0,
                 "--noautoanchor", "--device", device, *self.more, *flags]  # fmt: skip
        if self.subset and small:
            words += ["--subset-size", self.subset]
        return list(map(str, words))

    def describe(self):
        """The command line that the runs share."""
        return "train.py " + shlex.join(self.arguments(2))

    def folder_of(self, name):
        """The folder of a run of this stage."""
        return self.out / "runs" / re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")

    def train(self, name, *flags, epochs=2, environment=None):
        """A training run, which has to reach its end and leave no process behind; its numbers go to `measured`."""
        before = children()
        run = runner.at_once([self._run(name, flags, environment, epochs)])[0]
        if children() - before:
            raise Failed(f"{' '.join(flags)}: processes were left behind")
        self.measured[name] = {
            "epoch, s": run.typical("seconds"), "img/s": run.typical("speed/images_per_second"),
            "main process, cores": run.typical("speed/main_cpu"), "a worker, cores": run.typical("speed/worker_cpu"),
            "GPU": run.typical("speed/gpu_utilisation"), "memory, GB": run.usage.memory,
        }  # fmt: skip
        return run

    def train_all(self, variants, epochs):
        """A Run for each of `variants` (name, flags, environment), one at a time in each of `places`.

        Runs that share the machine say nothing about speed, so only single ones go to `measured`.
        """
        if len(self.places) == 1:
            return [self.train(name, *flags, epochs=epochs, environment=more) for name, flags, more in variants]
        before, order = children(), sorted(range(len(variants)), key=lambda k: not variants[k][2])  # compiling is slow
        runs = runner.spread([partial(self._run, *variants[k], epochs) for k in order], self.places)
        done = dict(zip(order, runs, strict=True))
        if children() - before:
            raise Failed("processes were left behind")
        return [done[k] for k in range(len(variants))]

    def _run(self, name, flags, environment, epochs, device=None):
        print(f"    {name}", flush=True)
        words = self.arguments(epochs, *flags, device=device)
        limit = TIMEOUT * len(self.places)
        run = yield from runner.training(words, self.folder_of(name), None, limit, environment)
        if not run.completed or len(run.rows) != epochs:
            raise Failed(f"{' '.join(flags) or 'no flag'}: {run.message or 'rows are missing'}; see {run.folder}")
        self.curves[name] = run.rows
        return run

    def check_all(self, checks):
        """Make the `checks` {name: function} one after another; yields after each, when a report may be written."""
        self.findings = [CheckResult(name, NOT_MADE, "", 0.0) for name in checks]
        for index, (name, check) in enumerate(checks.items()):
            print(f"  {name} ...", flush=True)
            self.findings[index] = found = make_check(name, check, self)
            print(f"    {found.status}: {found.detail}", flush=True)
            yield

    def as_dict(self):
        return {"findings": [asdict(finding) for finding in self.findings], "measured": self.measured}


def make_check(name, check, *arguments):
    """The CheckResult of check(*arguments), which returns what it found or raises Failed or NotMeasured."""
    started = time.monotonic()
    try:
        status, detail = "passed", check(*arguments) or ""
    except Failed as error:
        status, detail = "failed", str(error)
    except NotMeasured as error:
        status, detail = "not measured", str(error)
    except Exception as error:  # a check that breaks is a failed check, and the others go on
        traceback.print_exc()
        status, detail = "failed", f"{type(error).__name__}: {error}"
    return CheckResult(name, status, detail, time.monotonic() - started)


def draw_shapes(folder, train, val, size):
    """Draw the embedded data set into `folder`, silently; the path of its data yaml, which lies beside the folder."""
    folder = Path(folder).resolve()
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        make_shapes(folder, train=train, val=val, size=size, seed=0)
    content = {"path": str(folder), "train": "images/train", "val": "images/val", "names": list(NAMES)}
    folder.with_suffix(".yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return str(folder.with_suffix(".yaml"))


def children():
    """Ids of the processes that this one has started and that are still there."""
    with suppress(psutil.Error):
        return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != "zombie"}
    return set()


def expect(condition, message):
    """Fail the check with `message` unless the condition holds."""
    if not condition:
        raise Failed(message)


def same_results(first, second, tolerance):
    """In words how far two Runs agree in their training losses of each epoch; Failed beyond `tolerance` (relative)."""
    pairs = [(a[runner.LOSS], b[runner.LOSS]) for a, b in zip(first.rows, second.rows, strict=True)]
    difference = max(abs(a - b) / max(abs(a), 1e-9) for a, b in pairs)
    expect(difference <= tolerance, f"the training loss differs by {difference:.2%}, allowed is {tolerance:.2%}")
    if [row_without_time(row) for row in first.rows] == [row_without_time(row) for row in second.rows]:
        return "every number of results.csv is equal"
    return f"training loss within {difference:.4%} of the run without flags"


def row_without_time(row):
    return {name: value for name, value in row.items() if name not in ("seconds", "memory_gb")}
