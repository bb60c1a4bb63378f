"""The same training with other settings, one after another or one on each device, each a real run in its own process.

    python tools/run_trials.py --trials-file trials.json \\
        --output-dir runs/trials \\
        --budget-epochs 5 --early-stop-threshold 0.1 \\
        --base-args "--data data/coco320.yaml \\
            --cfg cfg/training/yolov7-tiny.yaml --img 320"

trials.json is a list of overrides: [{"hyp.lr0": 0.005}, {"batch_size": 32, "adam": true}]. Instead of it, Optuna draws
them from a space: --sampler tpe --num-trials 20 --space space.yaml, with lines such as

    hyp.lr0: {low: 0.001, high: 0.1, log: true}
    hyp.mosaic: {low: 0.0, high: 1.0}
    batch_size: {choices: [16, 32, 64]}

trials_<timestamp>.csv has a row for each trial that has ended: completed, eliminated (after an epoch its mAP@.5 was
more than the threshold below the best trial's at the same epoch) or failed (the others go on). The same command
continues where an interruption stopped it. At the end: a ranking, and a plot beside the table.

--devices 0,1 runs a trial on each at the same time. --storage, given to several processes or machines with the same
search, lets them share it: each trial is drawn by one of them, and done again when that one dies.
"""

import argparse
import logging
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tqdm.contrib.logging import logging_redirect_tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.experiments import command_line, runner, trials
from tools.experiments.devices import ProgressLines, read_devices
from tools.experiments.optuna_sampler import OptunaSampler
from tools.experiments.overrides import Budget, read_space, read_trials, trial_options
from tools.experiments.runner import MAP50
from tools.experiments.shared_search import SharedSearch, agreement, first_line, without_password
from tools.experiments.trials import Elimination, TrialTable, curve_of
from utils.config.flags import TRAIN_FLAGS
from utils.config.limits import Range, above, at_least
from utils.config.options import check_model
from utils.run import entry
from utils.system.files import check_can_be_made

logger = logging.getLogger("run_trials")


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    add = parser.add_argument
    add("--base-args", required=True, help="command line of train.py that all trials share")
    add("--trials-file", help="JSON list of overrides")
    add("--output-dir", default="runs/trials")
    add("--budget-epochs", type=int, help="epochs of each trial")
    add("--budget-subset", type=int, help="training images of each trial (--subset-size)")
    add("--budget-size", type=int, help="image size of each trial, pixels")
    add("--early-stop-threshold", type=float, metavar="MAP",
        help="mAP@.5 below the best trial at which one is eliminated; default: never")  # fmt: skip
    add("--early-stop-grace", type=int, default=1, help="epochs that eliminate nobody")
    add("--sampler", choices=("file", "tpe"), default="file", help="tpe: Optuna draws the trials from --space")
    add("--num-trials", type=int, default=20, help="with --sampler tpe")
    add("--space", help="yaml of the space to search, with --sampler tpe")
    add("--sampler-seed", type=int, help="with --sampler tpe; default: 0")
    add("--storage", help="share the search of --sampler tpe with other processes: a data base (mysql://..., "
        "sqlite:///FILE on one machine), or the path of a file on a disk that all machines see")  # fmt: skip
    add("--abandoned-after", type=float, default=120.0, metavar="SECONDS",
        help="with --storage: the trial of a process that gave no sign of life for so long is done again")  # fmt: skip
    add("--devices", default="", help="such as 0,1: a trial on each at the same time; --workers is that of each trial")
    add("--retry-failed", action="store_true", help="a restart repeats the trials that failed")
    add("--fresh", action="store_true", help="begin a new table instead of continuing")
    return command_line.parse(parser, arguments, ("--base-args",))


def run(options):
    """Run every trial that has not ended yet; returns the TrialTable."""
    base = command_line.train_words(options.base_args, "--base-args")
    command_line.check_shared(base, "--base-args")
    check_numbers(options)
    budget = Budget(options.budget_epochs, options.budget_subset, options.budget_size)
    check_together(options)
    devices = read_devices(options.devices, base, "--base-args")
    source, sampler = open_source(options, base, budget), options.sampler
    if options.storage:
        sampler += f" with --storage {without_password(options.storage)}"
    check_can_be_made(options.output_dir, "--output-dir")
    shared = {"base_args": base, "budget": asdict(budget), "sampler": sampler, "folder": os.getcwd(),
              "files": command_line.fingerprints(base)}  # fmt: skip
    table = TrialTable.open(options.output_dir, shared, options.fresh, share=bool(options.storage))
    if options.sampler == "file":
        table.leave_out_from(len(source))
    if options.retry_failed:
        table.trials = {key: trial for key, trial in table.trials.items() if trial.status != "failed"}
    with logging_redirect_tqdm(), ProgressLines(len(devices)) as lines:
        series = Series(options, base, budget, source, table, lines)
        try:
            runner.at_once([series.work(k, device) for k, device in enumerate(devices)], source.each_round)
        except source.errors as error:
            raise ValueError(f"--storage {source.shown}: {first_line(error)}; the same command continues") from error
    return table


def check_together(options):
    """Raise ValueError for options that do not go together."""
    unused = "space" if options.sampler == "file" else "trials_file"
    if getattr(options, unused):
        raise ValueError(f"--{unused.replace('_', '-')} is not read with --sampler {options.sampler}; drop one of them")
    if options.sampler == "file":
        if not options.trials_file:
            raise ValueError("give --trials-file, or --sampler tpe with --space")
        if options.storage:
            raise ValueError("--storage shares a search: give --sampler tpe with --space instead of a list of trials")
    elif not options.space:
        raise ValueError("--sampler tpe needs --space, a yaml file with the ranges to search")
    if options.storage:
        for flag, why in (("fresh", "to begin anew, name another --storage"),
                          ("retry_failed", "what has failed there stays so for all"),
                          ("sampler_seed", "processes with the same seed would draw the same trials")):  # fmt: skip
            if getattr(options, flag) is not (None if flag == "sampler_seed" else False):
                raise ValueError(f"--{flag.replace('_', '-')} cannot be given together with --storage: {why}")


def open_source(options, base, budget):
    """Where the trials come from."""
    if options.sampler == "file":
        source = FromFile(read_trials(options.trials_file), options.trials_file, bool(options.devices))
        source.name_those_that_will_fail(base, budget)
        return source
    space = read_space(options.space)
    if options.devices and "device" in space:
        raise ValueError(f"{options.space}: device cannot be searched together with --devices; drop one of them")
    if not space.keys() & {"cfg", "weights"}:
        command_line.check_run(base, "--base-args", check_model)
    if not options.storage:
        return OptunaSampler(space, options.num_trials, options.sampler_seed or 0)
    settings = agreement(base, budget, space)
    return SharedSearch(space, options.num_trials, options.storage, settings, options.abandoned_after)


class Series:
    """The trials of `source`, as many at a time as there are devices; `lines` is a ProgressLines."""

    def __init__(self, options, base, budget, source, table, lines):
        self.options, self.base, self.budget, self.source = options, base, budget, source
        self.table, self.lines, self.running = table, lines, {}  # {trial_id: rows of its epochs}
        self.draws = source.draws(table)  # one for all devices

    def work(self, place, device):
        """One trial after another on `device`, for runner.at_once; `place` is the number of its line."""
        for drawn in self.draws:
            if drawn is None:
                yield None  # nothing to do yet
            else:
                yield from self.trial(place, device, *drawn)

    def trial(self, place, device, trial_id, params):
        """Run a trial to its end, and tell what came of it."""
        total = f" of {len(self.source)}" if trial_id < len(self.source) else ""  # one that is done again lies above
        where = f" on {device}" if device else ""
        logger.info("trial %d%s%s: %s", trial_id, total, where, params or "no overrides")
        far_behind = Elimination(self.options.early_stop_threshold, self.curves, self.options.early_stop_grace)
        checks = [partial(self.follow, place, device, trial_id), far_behind, partial(self.source.is_hopeless, trial_id)]
        self.follow(place, device, trial_id, [])
        name = self.source.name(trial_id)
        trial = yield from trials.run_trial(self.table, trial_id, params, self.base, self.budget, checks, name, device)
        del self.running[trial_id]
        self.lines.show(place)
        self.source.end(trial)
        score = "no result" if trial.final_map is None else f"mAP@.5 {trial.final_map:.4f}"
        logger.info("trial %d %s: %s, %.0f s %s", trial_id, trial.status, score, trial.seconds, trial.message)

    def follow(self, place, device, trial_id, rows):
        """Show how far a trial is, and keep it for the comparison with the others."""
        self.running[trial_id] = rows
        score = f"epoch {len(rows) - 1}  mAP@.5 {rows[-1].get(MAP50, 0.0):.4f}" if rows else "no epoch yet"
        self.lines.show(place, f"{device or '':<4}  trial_{trial_id:03}  {score}")

    def curves(self):
        """The mAP@.5 of each epoch of all trials that have ended, and of those that run now."""
        ended = [trial.curve for trial in self.table.trials.values()]
        return ended + [curve_of(rows) for rows in self.running.values()]


def check_numbers(options):
    """Raise ValueError for a number that makes no sense."""
    for name, row in (("epochs", "epochs"), ("subset", "subset_size"), ("size", "img_size")):
        TRAIN_FLAGS[row].range.check(f"--budget-{name}", getattr(options, f"budget_{name}"))
    at_least(0).check("--early-stop-threshold", options.early_stop_threshold)
    at_least(0).check("--early-stop-grace", options.early_stop_grace)
    at_least(1).check("--num-trials", options.num_trials)
    Range(0, 2**32 - 1).check("--sampler-seed", options.sampler_seed)
    above(0).check("--abandoned-after", options.abandoned_after)


class FromFile:
    """The trials of a list, in its order; `path` is their file. With `has_devices` none may choose its own device."""

    errors = ()

    def __init__(self, overrides, path, has_devices=False):
        self.overrides, self.path = overrides, path
        for trial_id, params in enumerate(overrides if has_devices else ()):
            if "device" in params:
                raise ValueError(f"{self.name(trial_id)}: device cannot be given together with --devices; drop one")

    def name(self, trial_id):
        """How a message calls a trial."""
        return f"{self.path}, trial {trial_id}"

    def name_those_that_will_fail(self, base, budget):
        """Say at the beginning what is wrong with trials; the others go on."""
        for trial_id, params in enumerate(self.overrides):
            try:
                trial_options(base, params, budget, self.name(trial_id))
            except ValueError as error:
                logger.warning("%s; this trial will not be run", error)

    def __len__(self):
        return len(self.overrides)

    def draws(self, table):
        """(trial_id, overrides) of every trial that has not ended."""
        for trial_id, params in enumerate(self.overrides):
            if not table.knows(trial_id, params):
                yield trial_id, params

    def each_round(self):
        pass

    def is_hopeless(self, trial_id, rows):
        return None

    def end(self, trial):
        pass


def main(options):
    """Run the trials and rank them; status 1 when none was completed."""
    table = run(options)
    ranking = table.ranking()
    print(f"\n{trials.ranking_text(ranking)}\n")
    plot = trials.plot_trials(ranking, table.path.with_suffix(".png"))
    print(f"written: {table.path}, {plot}; runs in {table.folder}")
    return 0 if any(trial.status == "completed" for trial in ranking) else 1


if __name__ == "__main__":
    command_line.run_tool(main, parse(), go_on="the same command continues where it stopped")
