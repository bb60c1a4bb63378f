"""Optuna as a source of trials: the tree-structured Parzen estimator draws them, the median of earlier ones prunes.

A restart needs no data base: a new study is told what has ended, from the table and the run folders.
"""

import logging
import math
import warnings

from tools.experiments.runner import MAP50

logger = logging.getLogger(__name__)
INSTALL = "--sampler tpe needs Optuna, which is not installed: pip install optuna"


class OptunaSampler:
    """`num_trials` trials from `space` (see overrides.read_space); ValueError when Optuna is missing."""

    errors: tuple = ()  # what the storage of a search may raise

    def __init__(self, space, num_trials, seed=0):
        try:
            import optuna
        except ImportError as error:
            raise ValueError(INSTALL) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        self.optuna, self.num_trials, self.seed, self.study = optuna, num_trials, seed, None
        self.running, self.reported = {}, {}  # {trial_id: trial of Optuna, number of epochs that it was told}
        self.space = {name: self._distribution(**entry) for name, entry in space.items()}

    def __len__(self):
        return self.num_trials

    def _distribution(self, choices=None, low=None, high=None, log=False, step=None):
        kinds = self.optuna.distributions
        if choices is not None:
            return kinds.CategoricalDistribution(choices)
        if isinstance(low, int) and isinstance(high, int) and isinstance(step or 1, int):
            return kinds.IntDistribution(low, high, log=log, step=step or 1)
        return kinds.FloatDistribution(float(low), float(high), log=log, step=step)

    def name(self, trial_id):
        """How a message calls a trial."""
        return f"trial {trial_id}"

    def draws(self, table):
        """(trial_id, overrides) of every trial that has not ended, drawn when it is asked for."""
        for trial_id in range(self.num_trials):
            if trial_id in table.trials:
                continue
            if self.study is None:
                self._start(table)
            interrupted = table.unfinished(trial_id)
            if interrupted is not None and interrupted.keys() == self.space.keys():
                self.study.enqueue_trial(interrupted)
            self.running[trial_id] = trial = self.study.ask(self.space)
            yield trial_id, dict(trial.params)

    def each_round(self):
        """Called several times a second as long as trials run."""

    def is_hopeless(self, trial_id, rows):
        """The reason to end a running trial after an epoch, if its mAP@.5 is below the median of the others."""
        trial, score, epoch = self.running[trial_id], rows[-1].get(MAP50, 0.0), len(rows) - 1
        for step in range(self.reported.get(trial_id, 0), len(rows)):
            trial.report(rows[step].get(MAP50, 0.0), step)
        self.reported[trial_id] = len(rows)
        hopeless = trial.should_prune()
        return f"mAP@.5 {score:.4f} after epoch {epoch} is below the median of the others" if hopeless else None

    def end(self, trial):
        """Tell the study what came of a trial that `draws` gave."""
        self.study.tell(self.running.pop(trial.trial_id), **self._outcome(trial))

    def _outcome(self, trial):
        """Value and state of a trial that has ended, as Optuna calls them."""
        states = self.optuna.trial.TrialState
        if trial.status == "completed" and _is_number(trial.final_map):
            return {"values": trial.final_map, "state": states.COMPLETE}
        return {"values": None, "state": states.PRUNED if trial.status == "eliminated" else states.FAIL}

    def _start(self, table):
        """A study that knows the trials that have ended; another seed, or it would draw the same ones again."""
        self.study = self._study(self.seed + len(table.trials))
        for trial_id, trial in sorted(table.trials.items()):
            try:
                self.study.add_trial(self._frozen(trial))
            except (ValueError, StopIteration):  # the space was another one then
                logger.warning("%s: trial %d lies outside of the space, and is not learned from", table.path, trial_id)

    def _study(self, seed, **where):
        # Several trials run at a time: without the constant liar they would all be drawn near the same best one.
        sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        pruner = self.optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1)
        return self.optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner, **where)

    def _frozen(self, trial):
        outcome = self._outcome(trial)
        params = {name: self._value(name, text) for name, text in trial.params.items() if name in self.space}
        return self.optuna.trial.create_trial(
            state=outcome["state"], value=outcome["values"], params=params,
            distributions={name: self.space[name] for name in params},
            intermediate_values={epoch: score for epoch, score in enumerate(trial.curve) if _is_number(score)},
        )  # fmt: skip

    def _value(self, name, text):
        """A parameter as it was before it was written to the table."""
        kind = self.space[name]
        if isinstance(kind, self.optuna.distributions.CategoricalDistribution):
            return next(choice for choice in kind.choices if str(choice) == str(text))
        return int(text) if isinstance(kind, self.optuna.distributions.IntDistribution) else float(text)


def _is_number(value):
    return value is not None and math.isfinite(value)
