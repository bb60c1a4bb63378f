"""Trials: the same training with other options and hyper-parameters, each in its own process, one table for all.

A trial is a dict of overrides: `hyp.NAME` is a hyper-parameter, any other name an option of train.py (`batch_size`).
The table is a CSV with a row for each trial that has ended; it is all that a restart needs beside the run folders.
"""

import csv
import io
import json
import logging
import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from tools.experiments import runner
from tools.experiments.devices import on_device
from tools.experiments.overrides import trial_arguments, trial_options
from tools.experiments.runner import LOSS, MAP50
from utils.config.limits import SHARE, at_least
from utils.config.options import train_parser
from utils.plots.style import FAINT, PALETTE, new_figure, save_figure, set_title, whole_numbers
from utils.system.files import atomic_write, read_json, read_text, shown
from utils.system.folder_lock import check_free, own

logger = logging.getLogger(__name__)

COLUMNS = ("trial_id", "status", "final_map", "final_loss", "seconds")
STATUSES = ("completed", "eliminated", "failed")
LONGEST_LABEL = 60  # letters of a trial in the plot
EMPTY = '""'  # an empty text in the table
# In the folder of a trial, beside its checkpoints, which continue only what they belong to: its overrides.
PARAMETERS = "weights/trial.json"
csv.field_size_limit(1 << 30)  # what this writes it reads again: an override may be longer than the default, 131072


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


# ---- the table -------------------------------------------------------------------------------------------------------


class TrialTable:
    """The trials that have ended, in trials_<timestamp>.csv; run folders lie in the folder of the same name.

    What all trials share is kept beside it (`open`), so that a restart only continues what was the same.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.folder = self.path.with_suffix("")
        self.trials = {}

    @classmethod
    def open(cls, output_dir, settings, fresh=False, share=False):
        """Continue the newest table in `output_dir` that was made with these settings, or begin one.

        This process owns it then. Raises ValueError when another one does (with `share` that one is passed over), or
        the table is damaged.
        """
        tables, is_other = sorted(Path(output_dir).glob("trials_*.csv"), reverse=True), True
        for path in tables if not fresh else ():
            if _agree(_read_json(path.with_suffix(".json")), settings):
                table = cls(path)
                table.folder.mkdir(exist_ok=True)
                try:
                    own(table.folder, "choose another --output-dir, or begin anew with --fresh")
                except ValueError:
                    if not share:
                        raise
                    is_other = False
                    continue
                table._load()
                logger.info("continuing %s: %d trials have ended", path, len(table.trials))
                return table
        if tables and is_other and not fresh:
            logger.warning("%s was made with other arguments or files; a new table is begun", tables[0])
        table = cls(_new_table(Path(output_dir)))
        own(table.folder, "choose another --output-dir")
        with atomic_write(table.path.with_suffix(".json"), "w") as file:
            json.dump(settings, file, indent=1)
        table.save()
        return table

    def folder_of(self, trial_id):
        return self.folder / f"trial_{trial_id:03}"

    def unfinished(self, trial_id):
        """The overrides of a trial that was interrupted; None when there is none."""
        params = _read_json(self.folder_of(trial_id) / PARAMETERS)
        return params if isinstance(params, dict) else None

    def claim(self, trial_id, params):
        """Make the folder of a trial its own, and return it.

        What another trial left there goes, for instance one of this number that has been edited since.
        """
        folder = self.folder_of(trial_id)
        check_free(folder, "end it")
        if _same_text(self.unfinished(trial_id)) != _same_text(params):
            shutil.rmtree(folder, ignore_errors=True)
            (folder / PARAMETERS).parent.mkdir(parents=True)
            with atomic_write(folder / PARAMETERS, "w") as file:  # before the first checkpoint is written
                json.dump(params, file)
        return folder

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

    def leave_out_from(self, count):
        """Drop the rows of trials that are no longer asked for, those from number `count` on."""
        gone = sorted(trial_id for trial_id in self.trials if trial_id >= count)
        if gone:
            logger.warning("trials %s are not in the list any more; their rows are left out", ", ".join(map(str, gone)))
        self.trials = {trial_id: trial for trial_id, trial in self.trials.items() if trial_id < count}

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
        try:
            rows = csv.DictReader(io.StringIO(read_text(self.path), newline=""), strict=True)
            if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
                raise ValueError(f"it lacks the columns {', '.join(missing)}")
            for number, row in enumerate(rows, 2):
                trial = self._trial(row)
                if trial.trial_id in self.trials:
                    raise ValueError(f"line {number}: trial {trial.trial_id} stands there twice")
                self.trials[trial.trial_id] = trial
        except (OSError, ValueError, TypeError, AttributeError, csv.Error) as error:  # those between: a row is too long
            raise ValueError(f"{self.path} is damaged ({error}); correct it, or begin anew with --fresh") from error

    def _trial(self, row):
        trial_id, status = int(row["trial_id"]), row["status"]
        if trial_id < 0 or status not in STATUSES:
            raise ValueError(f"trial {trial_id} with the status {shown(status)}")
        params = {name[6:]: value for name, value in row.items() if name.startswith("param_") and value != ""}
        curve = curve_of(runner.read_rows(self.folder_of(trial_id)))
        final_map, final_loss, seconds = (
            float(row[name]) if row[name] else None for name in ("final_map", "final_loss", "seconds")
        )
        SHARE.check("final_map", final_map)
        at_least(0).check("seconds", seconds)
        return Trial(trial_id, params, status, final_map, final_loss, seconds or 0.0, curve)

    def ranking(self):
        """Best mAP first: completed trials, then eliminated ones, then those that failed."""
        return sorted(
            self.trials.values(),
            key=lambda trial: (STATUSES.index(trial.status), -(trial.final_map or 0), trial.trial_id),
        )


def as_text(params):
    """Overrides as they stand in the table, where an empty cell means that the trial does not set this one."""
    texts = {name: str(value).encode("utf-8", "backslashreplace").decode() for name, value in params.items()}
    return {name: text or EMPTY for name, text in texts.items()}


def _text(number):
    return "" if number is None else f"{number:.6g}"


def _read_json(path):
    try:
        return read_json(path)
    except ValueError:
        return None


def _agree(before, settings):
    """Whether a table was made with the same settings; tables of earlier versions kept fewer."""
    return isinstance(before, dict) and bool(before) and all(settings.get(key) == before[key] for key in before)


def _same_text(params):
    """Text that is equal for equal overrides only: in Python 1 is equal to true, and NaN to nothing."""
    return json.dumps(params, sort_keys=True)


def _new_table(folder):
    """The path trials_<timestamp>.csv of a new table, whose run folder, which nobody has, is made here."""
    while True:
        path = folder / f"trials_{time.strftime('%Y%m%d_%H%M%S')}.csv"
        try:
            path.with_suffix("").mkdir(parents=True)
            return path
        except FileExistsError:
            time.sleep(0.2)


# ---- running ---------------------------------------------------------------------------------------------------------


class Elimination:
    """Ends a trial whose mAP@.5 after an epoch is more than `threshold` below the best of the other trials there.

    `curves()` are those of the trials that have ended and of those that run now. The first `grace` epochs end nobody.
    Epochs that are not validated repeat the mAP before them, for all alike.
    """

    def __init__(self, threshold, curves, grace=1):
        self.threshold, self.curves, self.grace = threshold, curves, grace

    def __call__(self, rows):
        epoch = len(rows) - 1
        rivals = [curve[epoch] for curve in self.curves() if len(curve) > epoch]
        if self.threshold is None or len(rows) <= self.grace or not rivals:
            return None
        behind = max(rivals) - rows[-1].get(MAP50, 0.0)
        if behind <= self.threshold:
            return None
        return f"mAP@.5 {rows[-1].get(MAP50, 0.0):.4f} after epoch {epoch} is {behind:.4f} below the best trial's"


def run_trial(table, trial_id, params, base, budget, checks, where="trial", device=None):
    """Run a trial, or continue it where an interruption left it, and add it to the table; returns the Trial.

    A generator for `runner.at_once`. Each of `checks` is called with the rows of results.csv after an epoch and may
    give a reason to eliminate the trial. A trial with a wrong override has failed; its message begins with `where`.
    `device` is where it trains, None leaves that to the command line.
    """
    try:
        words, _ = trial_options(base, params, budget, where)
    except ValueError as error:
        trial = Trial(trial_id, params, "failed", None, None, 0.0, [], str(error))
        table.add(trial)
        return trial
    folder = table.claim(trial_id, params)
    resumed = runner.resume_arguments(folder)
    before = sum(row.get("seconds", 0) for row in runner.read_rows(folder)) if resumed else 0.0
    if resumed:
        logger.info("trial %d continues after an interruption", trial_id)
    epochs = train_parser().parse_args(words).epochs

    def watch(rows):
        reasons = [reason for check in checks if (reason := check(rows))]
        return reasons[0] if reasons and len(rows) < epochs else None  # else it is about to end by itself

    words = on_device(resumed or trial_arguments(base, params, budget, folder), device)
    run = yield from runner.training(words, folder, watch)
    status = {"completed": "completed", "stopped": "eliminated", "failed": "failed"}[run.status]
    if run.completed and not run.rows:
        status, run.message = "failed", "the run left no results"
    trial = Trial(trial_id, params, status, run.last(MAP50), run.last(LOSS), before + run.seconds, curve_of(run.rows),
                  run.message)  # fmt: skip
    table.add(trial)
    return trial


def curve_of(rows):
    """The mAP@.5 of each epoch of results.csv; nan where it is missing."""
    return [row.get(MAP50, math.nan) for row in rows]


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


def bar_label(trial):
    """What a trial changed, in at most LONGEST_LABEL letters, and how it ended if it did not complete."""
    words = ", ".join(f"{name.removeprefix('hyp.')}={value}" for name, value in as_text(trial.params).items())
    text = f"{trial.trial_id}: {words or 'nothing changed'}"
    text = text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 3]}..."
    return text if trial.status == "completed" else f"{text} ({trial.status})"


def plot_trials(trials, path):
    """Left the mAP@.5 of every epoch, right the last one, in the order of the ranking."""
    figure, (curves, bars) = new_figure(1, 2, size=(15, max(4, 0.35 * len(trials) + 1.5)))
    for index, trial in enumerate(trials):
        colour = PALETTE[index % len(PALETTE)]
        style = "-" if trial.status == "completed" else ":"
        curves.plot(range(len(trial.curve)), trial.curve, style, color=colour, marker="o", markersize=3)
        bars.barh(index, trial.final_map or 0, color=colour if trial.status == "completed" else FAINT)
    labels = [bar_label(trial) for trial in trials]
    bars.set_yticks(range(len(trials)), labels)
    bars.invert_yaxis()
    set_title(curves, "mAP@.5 (dotted: eliminated or failed)")
    set_title(bars, "last mAP@.5 of each trial, best first")
    curves.set_xlabel("epoch", fontsize=8)
    whole_numbers(curves.xaxis)
    return save_figure(figure, path)
