"""The same training with other settings, one after another, each a real run in its own process.

    python tools/run_trials.py --base-args "--data data/coco320.yaml --cfg cfg/training/yolov7-tiny.yaml --img 320" \
        --trials-file trials.json --output-dir runs/trials --budget-epochs 5 --early-stop-threshold 0.1

trials.json is a list of overrides: [{"hyp.lr0": 0.005}, {"batch_size": 32, "adam": true}]. Instead of it, Optuna draws
them from a space: --sampler tpe --num-trials 20 --space space.yaml, with lines such as

    hyp.lr0: {low: 0.001, high: 0.1, log: true}
    hyp.mosaic: {low: 0.0, high: 1.0}
    batch_size: {choices: [16, 32, 64]}

trials_<timestamp>.csv has a row for each trial that has ended: completed, eliminated (after an epoch its mAP@.5 was
more than the threshold below the best trial's at the same epoch) or failed (the others go on). The same command
continues where an interruption stopped it. At the end: a ranking, and a plot beside the table.
"""

import argparse
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.experiments import command_line, trials
from tools.experiments.optuna_sampler import OptunaSampler
from tools.experiments.overrides import Budget, read_space, read_trials, trial_options
from tools.experiments.trials import Elimination, TrialTable
from utils.config.flags import TRAIN_FLAGS
from utils.config.limits import Range, at_least
from utils.system.files import check_can_be_made

logger = logging.getLogger("run_trials")


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    add("--sampler-seed", type=int, default=0)
    add("--retry-failed", action="store_true", help="a restart repeats the trials that failed")
    add("--fresh", action="store_true", help="begin a new table instead of continuing")
    return command_line.parse(parser, arguments, ("--base-args",))


def run(options):
    """Run every trial that has not ended yet; returns the TrialTable."""
    base = command_line.train_words(options.base_args, "--base-args")
    command_line.check_shared(base, "--base-args")
    check_numbers(options)
    budget = Budget(options.budget_epochs, options.budget_subset, options.budget_size)
    unused = "space" if options.sampler == "file" else "trials_file"
    if getattr(options, unused):
        raise ValueError(f"--{unused.replace('_', '-')} is not read with --sampler {options.sampler}; drop one of them")
    if options.sampler == "file":
        if not options.trials_file:
            raise ValueError("give --trials-file, or --sampler tpe with --space")
        source = FromFile(read_trials(options.trials_file), options.trials_file)
        source.name_those_that_will_fail(base, budget)
    else:
        if not options.space:
            raise ValueError("--sampler tpe needs --space, a yaml file with the ranges to search")
        source = OptunaSampler(read_space(options.space), options.num_trials, options.sampler_seed)
    check_can_be_made(options.output_dir, "--output-dir")
    shared = {"base_args": base, "budget": asdict(budget), "sampler": options.sampler, "folder": os.getcwd(),
              "files": command_line.fingerprints(base)}  # fmt: skip
    table = TrialTable.open(options.output_dir, shared, options.fresh)
    if options.retry_failed:
        table.trials = {key: trial for key, trial in table.trials.items() if trial.status != "failed"}
    for trial_id in range(len(source)):
        params = source.begin(trial_id, table)
        if params is None:
            continue
        logger.info("trial %d of %d: %s", trial_id, len(source), params or "no overrides")
        curves = [other.curve for other in table.trials.values()]
        far_behind = Elimination(options.early_stop_threshold, curves, options.early_stop_grace)
        checks = [far_behind, source.is_hopeless]
        trial = trials.run_trial(table, trial_id, params, base, budget, checks, source.name(trial_id))
        source.end(trial)
        score = "no result" if trial.final_map is None else f"mAP@.5 {trial.final_map:.4f}"
        logger.info("trial %d %s: %s, %.0f s %s", trial_id, trial.status, score, trial.seconds, trial.message)
    return table


def check_numbers(options):
    """Raise ValueError for a number that makes no sense."""
    for name, row in (("epochs", "epochs"), ("subset", "subset_size"), ("size", "img_size")):
        TRAIN_FLAGS[row].range.check(f"--budget-{name}", getattr(options, f"budget_{name}"))
    at_least(0).check("--early-stop-threshold", options.early_stop_threshold)
    at_least(0).check("--early-stop-grace", options.early_stop_grace)
    at_least(1).check("--num-trials", options.num_trials)
    Range(0, 2**32 - 1).check("--sampler-seed", options.sampler_seed)


class FromFile:
    """The trials of a list, in its order; `path` is their file."""

    def __init__(self, overrides, path):
        self.overrides, self.path = overrides, path

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

    def begin(self, trial_id, table):
        """The overrides of the next trial; None when it has ended already."""
        return None if table.knows(trial_id, self.overrides[trial_id]) else self.overrides[trial_id]

    def is_hopeless(self, rows):
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
    command_line.run_tool(main, parse(), interrupted="interrupted; the same command continues where it stopped")
