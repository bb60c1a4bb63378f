"""Trials: the same training with other options and hyper-parameters, each in its own process, one table for all.

A trial is a dict of overrides: `hyp.NAME` is a hyper-parameter, any other name an option of train.py (`batch_size`).
The table is a CSV with a row for each trial that has ended; it is all that a restart needs beside the run folders.
"""

import csv
import json
import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from tools.experiments import command_line, runner
from tools.experiments.runner import LOSS, MAP50
from utils.config.data_yaml import read_yaml
from utils.config.flags import TRAIN_FLAGS
from utils.config.hyp import HYPER_PARAMETERS
from utils.config.options import train_parser
from utils.plots.style import FAINT, PALETTE, new_figure, save_figure, set_title, whole_numbers
from utils.system.files import atomic_write, check_file

logger = logging.getLogger(__name__)

COLUMNS = ("trial_id", "status", "final_map", "final_loss", "seconds")
STATUSES = ("completed", "eliminated", "failed")
# What a trial may not set, because the run folders belong to the trials.
RESERVED = {"project", "name", "exist_ok", "resume", "evolve", "hyp"}
EMPTY = '""'  # an empty text in the table
PARAMETERS = "trial.json"  # in the folder of a trial: its overrides, known before it starts


@dataclass
class Trial:
    """A trial that has ended. `final_map` (mAP@.5) and `final_loss` (training loss) are those of its last epoch, None
    without one; `seconds` includes the start of the process; `curve` is the mAP@.5 of each epoch."""

    trial_id: int
    params: dict
    status: str
    final_map: float | None
    final_loss: float | None
    seconds: float
    curve: list = field(default_factory=list)
    message: str = ""


@dataclass(frozen=True)
class Budget:
    """What every trial is given; None leaves the base command line as it is. `subset` in images, `size` in pixels."""

    epochs: int | None = None
    subset: int | None = None
    size: int | None = None

    def overrides(self):
        """As overrides of train.py."""
        values = {"epochs": self.epochs, "subset_size": self.subset, "img_size": self.size and [self.size, self.size]}
        return {name: value for name, value in values.items() if value is not None}


# ---- what is asked for -----------------------------------------------------------------------------------------------


def read_trials(path):
    """The list of override dicts in a JSON file; ValueError for anything else."""
    try:
        trials = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(trials, list) or not trials or not all(isinstance(trial, dict) for trial in trials):
        raise ValueError(f'{path} has to be a list of overrides, such as [{{"hyp.lr0": 0.01}}, {{"batch_size": 32}}]')
    for index, trial in enumerate(trials):
        check_names(trial, f"{path}, trial {index}")
    return trials


def check_names(names, where):
    """Raise ValueError when a name is neither a hyper-parameter (hyp.NAME) nor an option that a trial may set."""
    known = TRAIN_FLAGS.keys() - RESERVED | {f"hyp.{name}" for name in HYPER_PARAMETERS}
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: nothing called {name!r} can be set{command_line.did_you_mean(name, known)}")


def trial_arguments(base, params, budget, folder):
    """The command line (words) of a trial; hyper-parameters that it changes go to trial_hyp.yaml in `folder`."""
    options = {name: value for name, value in params.items() if not name.startswith("hyp.")}
    changes = {name.removeprefix("hyp."): value for name, value in params.items() if name.startswith("hyp.")}
    if changes:
        source = check_file(train_parser().parse_args(base).hyp)
        options["hyp"] = str(runner.write_hyp(source, changes, Path(folder) / "trial_hyp.yaml"))
    return command_line.override(base, budget.overrides() | options)


# ---- the table -------------------------------------------------------------------------------------------------------


class TrialTable:
    """The trials that have ended, in trials_<timestamp>.csv; run folders lie in the folder of the same name.

    `settings` (what all trials share) are kept beside it, so that a restart only continues what was the same.
    """

    def __init__(self, path, settings):
        self.path, self.settings = Path(path), settings
        self.folder = self.path.with_suffix("")
        self.trials = {}

    @classmethod
    def open(cls, output_dir, settings, fresh=False):
        """Continue the newest table in `output_dir` that was made with these settings, or begin one."""
        tables = sorted(Path(output_dir).glob("trials_*.csv"), reverse=True)
        for path in tables if not fresh else ():
            if _read_json(path.with_suffix(".json")) == settings:
                table = cls(path, settings)
                table._load()
                logger.info("continuing %s: %d trials have ended", path, len(table.trials))
                return table
        if tables and not fresh:
            logger.warning("%s was made with other arguments; a new table is begun", tables[0])
        table = cls(_free_name(Path(output_dir)), settings)
        table.folder.mkdir(parents=True)
        with atomic_write(table.path.with_suffix(".json"), "w") as file:
            json.dump(settings, file, indent=1)
        table.save()
        return table

    def folder_of(self, trial_id):
        return self.folder / f"trial_{trial_id:03}"

    def unfinished(self, trial_id):
        """The overrides of a trial that was interrupted; None when there is none."""
        return _read_json(self.folder_of(trial_id) / PARAMETERS)

    def add(self, trial):
        self.trials[trial.trial_id] = trial
        self.save()

    def knows(self, trial_id, params):
        """Whether the trial has ended with the same overrides; a row of other overrides is dropped."""
        row = self.trials.get(trial_id)
        if row and as_text(row.params) != as_text(params):
            logger.warning("trial %d has changed since it was run; it is run again", trial_id)
            del self.trials[trial_id]
            return False
        return row is not None

    def save(self):
        names = sorted({name for trial in self.trials.values() for name in trial.params})
        with atomic_write(self.path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*COLUMNS, *(f"param_{name}" for name in names)])
            for trial in sorted(self.trials.values(), key=lambda trial: trial.trial_id):
                numbers = [_text(trial.final_map), _text(trial.final_loss), f"{trial.seconds:.1f}"]
                params = [as_text(trial.params).get(name, "") for name in names]
                writer.writerow([trial.trial_id, trial.status, *numbers, *params])

    def _load(self):
        with self.path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                trial_id = int(row["trial_id"])
                params = {name[6:]: value for name, value in row.items() if name.startswith("param_") and value != ""}
                curve = [epoch.get(MAP50, math.nan) for epoch in runner.read_rows(self.folder_of(trial_id))]
                numbers = [float(row[name]) if row[name] else None for name in ("final_map", "final_loss", "seconds")]
                self.trials[trial_id] = Trial(trial_id, params, row["status"], *numbers, curve)

    def ranking(self):
        """Best mAP first: completed trials, then eliminated ones, then those that failed."""
        return sorted(
            self.trials.values(),
            key=lambda trial: (STATUSES.index(trial.status), -(trial.final_map or 0), trial.trial_id),
        )


def as_text(params):
    """Overrides as they stand in the table, where an empty cell means that the trial does not set this one."""
    return {name: str(value) or EMPTY for name, value in params.items()}


def _text(number):
    return "" if number is None else f"{number:.6g}"


def _read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _free_name(folder):
    """trials_<timestamp>.csv that does not exist yet."""
    while (path := folder / f"trials_{time.strftime('%Y%m%d_%H%M%S')}.csv").exists():
        time.sleep(0.2)
    return path


# ---- running ---------------------------------------------------------------------------------------------------------


class Elimination:
    """Ends a trial whose mAP@.5 after an epoch is more than `threshold` below the best of the earlier trials there.

    The first `grace` epochs end nobody. Epochs that are not validated repeat the mAP before them, for all alike.
    """

    def __init__(self, threshold, curves, grace=1):
        self.threshold, self.curves, self.grace = threshold, list(curves), grace

    def __call__(self, rows):
        epoch = len(rows) - 1
        rivals = [curve[epoch] for curve in self.curves if len(curve) > epoch]
        if self.threshold is None or len(rows) <= self.grace or not rivals:
            return None
        behind = max(rivals) - rows[-1].get(MAP50, 0.0)
        if behind <= self.threshold:
            return None
        return f"mAP@.5 {rows[-1].get(MAP50, 0.0):.4f} after epoch {epoch} is {behind:.4f} below the best trial's"


def run_trial(table, trial_id, params, base, budget, checks):
    """Run a trial, or continue it where an interruption left it, and add it to the table; returns the Trial.

    Each of `checks` is called with the rows of results.csv after an epoch and may give a reason to eliminate the trial.
    """
    folder = table.folder_of(trial_id)
    as_json = json.dumps(params)
    resumed = runner.resume_arguments(folder) if table.unfinished(trial_id) == json.loads(as_json) else None
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / PARAMETERS, "w") as file:
        file.write(as_json)
    before = sum(row.get("seconds", 0) for row in runner.read_rows(folder)) if resumed else 0.0
    if resumed:
        logger.info("trial %d continues after an interruption", trial_id)
    epochs = budget.epochs or train_parser().parse_args(base).epochs

    def watch(rows):
        if len(rows) >= params.get("epochs", epochs):
            return None  # it is about to end by itself
        return next((reason for check in checks if (reason := check(rows))), None)

    run = runner.run_training(resumed or trial_arguments(base, params, budget, folder), folder, watch)
    status = {"completed": "completed", "stopped": "eliminated", "failed": "failed"}[run.status]
    if run.completed and not run.rows:
        status, run.message = "failed", "the run left no results"
    curve = [row.get(MAP50, math.nan) for row in run.rows]
    trial = Trial(trial_id, params, status, run.last(MAP50), run.last(LOSS), before + run.seconds, curve, run.message)
    table.add(trial)
    return trial


# ---- a space to search -----------------------------------------------------------------------------------------------


def read_space(path):
    """{name: {low, high, log, step} or {choices}} from a yaml file, checked; whole numbers stay whole."""
    space = read_yaml(path)
    check_names(space, path)
    return {name: _dimension(name, entry, path) for name, entry in space.items()}


def _dimension(name, entry, path):
    if isinstance(entry, dict) and isinstance(entry.get("choices"), list) and entry["choices"]:
        return {"choices": entry["choices"]}
    try:
        low, high = (_number(entry[key]) for key in ("low", "high"))
        step, log = entry.get("step"), bool(entry.get("log", False))
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{path}: {name} needs either choices: [...] or the numbers low and high") from None
    if not low < high or (log and low <= 0) or (log and step is not None):
        raise ValueError(f"{path}: {name}: low has to be below high, above 0 with log, and log goes without step")
    return {"low": low, "high": high, "log": log, "step": None if step is None else _number(step)}


def _number(value):
    """A YAML scalar as a number; YAML itself reads 1e-3 (without a dot) as text."""
    return value if isinstance(value, (int, float)) else float(value)


# ---- the end ---------------------------------------------------------------------------------------------------------


def ranking_text(trials):
    """The trials, best first, as lines."""
    lines = [f"{'rank':>4}  {'trial':>5}  {'status':<10}  {'mAP@.5':>8}  {'loss':>8}  {'seconds':>7}  overrides"]
    for rank, trial in enumerate(trials, 1):
        final_map, loss = (_text(value) and f"{value:.4f}" for value in (trial.final_map, trial.final_loss))
        overrides = ", ".join(f"{name}={value}" for name, value in as_text(trial.params).items()) or "none"
        note = f"  ({trial.message})" if trial.message else ""
        lines.append(f"{rank:>4}  {trial.trial_id:>5}  {trial.status:<10}  {final_map:>8}  {loss:>8}  "
                     f"{trial.seconds:>7.1f}  {overrides}{note}")  # fmt: skip
    return "\n".join(lines)


def plot_trials(trials, path):
    """Left the mAP@.5 of every epoch, right the last one, in the order of the ranking."""
    figure, (curves, bars) = new_figure(1, 2, size=(12, max(4, 0.35 * len(trials) + 1.5)))
    for index, trial in enumerate(trials):
        colour = PALETTE[index % len(PALETTE)]
        style = "-" if trial.status == "completed" else ":"
        curves.plot(range(len(trial.curve)), trial.curve, style, color=colour, marker="o", markersize=3)
        bars.barh(index, trial.final_map or 0, color=colour if trial.status == "completed" else FAINT)
    labels = [f"{trial.trial_id}" + ("" if trial.status == "completed" else f" ({trial.status})") for trial in trials]
    bars.set_yticks(range(len(trials)), labels)
    bars.invert_yaxis()
    set_title(curves, "mAP@.5 (dotted: eliminated or failed)")
    set_title(bars, "last mAP@.5 of each trial, best first")
    curves.set_xlabel("epoch", fontsize=8)
    whole_numbers(curves.xaxis)
    return save_figure(figure, path)
