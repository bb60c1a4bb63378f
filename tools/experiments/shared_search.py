"""One search by several processes, on one machine or on many, through a storage of Optuna (--storage).

The storage knows every trial of the search: who draws one gives a sign of life every few seconds, and whose trial gives
none for a while has abandoned it; one of the others then takes it off the search and queues it to be done again.
Numbers of trials are those of the storage; the table of each process repeats what the storage knows.
"""

import json
import logging
import re
import time
from contextlib import suppress
from dataclasses import asdict

from tools.experiments.command_line import FILES, fingerprints
from tools.experiments.optuna_sampler import OptunaSampler
from tools.experiments.trials import Trial
from utils.config.flags import MACHINE, TRAIN_FLAGS
from utils.config.options import explicit_options, train_parser

logger = logging.getLogger(__name__)

NAME = "run_trials"  # of the study in the storage
MOST_TRIES = 3  # a trial that has been abandoned so often has failed
SIGNS = 8  # signs of life in the time after which a trial counts as abandoned
# Attributes of a trial in the storage: its last sign of life, its Trial when it has ended, how often it was begun.
ALIVE, ENDED, TRIES = "alive", "ended", "tries"


def without_password(storage):
    """The text of --storage as it may be shown."""
    return re.sub(r"(//[^:/@]*):[^@]*@", r"\1:***@", storage)


def first_line(error):
    return str(error).strip().split("\n")[0]


def agreement(base, budget, space):
    """What all processes of a search have to be given alike: {name: value}; how each machine trains is its own."""
    typed = explicit_options(train_parser(), list(base))
    own = {name for name in typed if TRAIN_FLAGS[name].resume == MACHINE} | {*FILES, "weights"}
    return {"--base-args": {name: value for name, value in typed.items() if name not in own},
            "files of --base-args": fingerprints(base), "--budget": asdict(budget), "--space": space}  # fmt: skip


class SharedSearch(OptunaSampler):
    """`num_trials` trials from `space`, shared with all processes that were given the same `storage`.

    `settings` is the `agreement`. A trial without a sign of life for `patience` seconds is abandoned. Raises ValueError
    when the storage cannot be used, or holds a search of other settings.
    """

    def __init__(self, space, num_trials, storage, settings, patience):
        super().__init__(space, num_trials)
        self.patience, self.shown = patience, without_password(storage)
        self.next_sign = self.next_look = 0.0  # by time.monotonic()
        self.signs = {}  # {number of another process's trial: (its sign of life, when that was first seen)}
        self.is_waiting = self.has_told = False
        self.errors = (self.optuna.exceptions.OptunaError,)
        with suppress(ImportError):
            from sqlalchemy.exc import SQLAlchemyError

            self.errors += (SQLAlchemyError,)
        self.study = self._open(storage)
        self._agree(json.loads(json.dumps(settings)))

    def _open(self, storage):
        for attempt in (1, 2, 3):
            try:
                where = storage
                if "://" not in storage:
                    file = self.optuna.storages.journal.JournalFileBackend(storage)
                    where = self.optuna.storages.JournalStorage(file)
                return self._study(None, storage=where, study_name=NAME, load_if_exists=True)
            except Exception as error:  # drivers of data bases raise what they like
                if attempt == 3:
                    fault = f"{type(error).__name__}: {first_line(error)}"
                    raise ValueError(f"--storage {self.shown} cannot be used ({fault})") from error
                time.sleep(0.5)  # two processes that make the tables of a new data base at once are in each other's way
        raise AssertionError

    def _agree(self, settings):
        """Raise ValueError when the search was begun with other settings."""
        before = self.study.user_attrs.get("settings")
        if before is None:
            self.study.set_user_attr("settings", settings)
        elif other := [name for name in settings if settings[name] != before.get(name)]:
            raise ValueError(f"--storage {self.shown} holds a search with another content of {', '.join(other)}; give "
                             "what its other processes were given, or another --storage")  # fmt: skip

    # ---- which trial is next -----------------------------------------------------------------------------------------

    def draws(self, table):
        """(number, overrides) of the next trial of this process; None: none now, ask again."""
        table.trials = {}  # the storage knows more
        yield from self._continued(table).items()
        while True:
            if self.is_waiting and time.monotonic() < self.next_look:
                yield None
                continue
            self.next_look = time.monotonic() + self.patience / SIGNS
            trials = [trial for trial in self.study.get_trials(deepcopy=False) if _counts(trial)]
            self._repeat(trials, table)
            unfinished = [trial for trial in trials if not trial.state.is_finished()]
            is_queued = any(trial.state.name == "WAITING" for trial in unfinished)
            if is_queued or len(trials) < self.num_trials:
                yield self._ask()
            elif unfinished:
                self._wait(unfinished)
                yield None
            else:
                return

    def _continued(self, table):
        """{number: overrides} of the trials that an earlier process with this table did not bring to their end."""
        found = {}
        for trial in self.study.get_trials(deepcopy=False, states=(self.optuna.trial.TrialState.RUNNING,)):
            if ENDED not in trial.user_attrs and table.unfinished(trial.number) == trial.params:
                found[trial.number] = dict(trial.params)
                self.running[trial.number] = self._handle(trial)
                self.reported[trial.number] = max(trial.intermediate_values, default=-1) + 1
        self._give_signs()
        return found

    def _ask(self):
        """Draw a trial; None when others have drawn the last ones in the same moment."""
        trial = self.study.ask(self.space)
        with suppress(RuntimeError):
            trial.set_user_attr(ALIVE, time.time())
        earlier = [other for other in self.study.get_trials(deepcopy=False) if _counts(other)]
        if sum(other.number < trial.number for other in earlier) >= self.num_trials:
            self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
            return None
        self.running[trial.number], self.is_waiting, self.has_told = trial, False, False
        return trial.number, dict(trial.params)

    def _wait(self, unfinished):
        others = [trial for trial in unfinished if trial.number not in self.running]
        if others and not self.has_told:
            logger.info("the others still run %d trials: waiting, in case that one is abandoned", len(others))
            self.has_told = True
        self.is_waiting = True

    def _repeat(self, trials, table):
        """Write what the storage knows of trials that have ended into the table."""
        ended = {trial.number: Trial(trial.number, dict(trial.params), **trial.user_attrs[ENDED])
                 for trial in trials if trial.state.is_finished() and ENDED in trial.user_attrs}  # fmt: skip
        if ended.keys() != table.trials.keys():
            table.trials = ended
            table.save()

    # ---- running trials ----------------------------------------------------------------------------------------------

    def is_hopeless(self, trial_id, rows):
        try:
            return super().is_hopeless(trial_id, rows)
        except RuntimeError:  # Optuna: the trial has ended
            return "this process gave no sign of life, so that another one does the trial again"

    def end(self, trial):
        """Tell the search what came of a trial, unless another process has taken it over."""
        drawn, self.next_look = self.running.pop(trial.trial_id), 0.0
        record = asdict(trial)
        del record["trial_id"], record["params"]
        try:
            drawn.set_user_attr(ENDED, record)
            self.study.tell(drawn, **self._outcome(trial))
        except (ValueError, RuntimeError):
            logger.warning("trial %d was taken over by another process; its result here is not counted", trial.trial_id)

    def each_round(self):
        """From time to time: give a sign of life for the trials of this process, and look for those of the others."""
        if time.monotonic() < self.next_sign:
            return
        self.next_sign = time.monotonic() + self.patience / SIGNS
        try:
            self._give_signs()
            self._look_for_abandoned()
        except self.errors as error:  # it may answer again before the others give this process up
            logger.warning("--storage %s does not answer: %s", self.shown, first_line(error))

    def _give_signs(self):
        for trial in self.running.values():
            with suppress(RuntimeError):  # another process has taken it over; is_hopeless ends it
                trial.set_user_attr(ALIVE, time.time())

    def _look_for_abandoned(self):
        """A sign of life is compared with the one before, not with a clock: those of machines differ."""
        now = time.monotonic()
        for trial in self.study.get_trials(deepcopy=False, states=(self.optuna.trial.TrialState.RUNNING,)):
            sign, since = self.signs.get(trial.number, (None, None))
            if trial.number in self.running:
                self.signs.pop(trial.number, None)
            elif since is None or sign != trial.user_attrs.get(ALIVE):
                self.signs[trial.number] = trial.user_attrs.get(ALIVE), now
            elif now - since > self.patience:
                self._give_up(trial)

    def _give_up(self, trial):
        """Take a trial that its process has abandoned off the search, once, and queue it to be done again.

        One that had ended before its process did is only told.
        """
        tries, ended = trial.user_attrs.get(TRIES, 1), trial.user_attrs.get(ENDED)
        try:
            if ended is None and tries >= MOST_TRIES:
                message = f"abandoned {tries} times: its process or machine died"
                ended = asdict(Trial(0, {}, "failed", None, None, 0.0, [], message))
                del ended["trial_id"], ended["params"]
                self._handle(trial).set_user_attr(ENDED, ended)
            outcome = {"state": self.optuna.trial.TrialState.FAIL}
            if ended is not None:
                outcome = self._outcome(Trial(trial.number, dict(trial.params), **ended))
            self.study.tell(trial.number, **outcome)
        except (ValueError, RuntimeError):
            return  # another process has noticed it, too, and was faster
        if ended is None:
            self.study.enqueue_trial(dict(trial.params), user_attrs={TRIES: tries + 1})
            logger.warning("trial %d was abandoned by its process; it is done again under a new number", trial.number)
        elif ended["status"] == "failed":
            logger.warning("trial %d failed: %s", trial.number, ended["message"])

    def _handle(self, trial):
        """The trial of Optuna, which can be told something, to what get_trials says about it."""
        return self.optuna.trial.Trial(self.study, trial._trial_id)


def _counts(trial):
    """Whether a trial of the storage is one of the --num-trials: not those that were abandoned or drawn too much."""
    return trial.state.name != "FAIL" or ENDED in trial.user_attrs
