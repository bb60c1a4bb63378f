"""What a trial overrides: read from a file, checked by the rows of flags and hyper-parameters, put on a command line.

Overrides are a dict: `hyp.NAME` is a hyper-parameter, any other name an option of train.py (`batch_size`).
"""

import argparse
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.experiments import command_line, runner
from utils.config.data_yaml import read_yaml
from utils.config.flags import TRAIN_FLAGS
from utils.config.hyp import HYPER_PARAMETERS, checked
from utils.config.limits import Range, above
from utils.config.options import check_train_options, train_parser
from utils.system.files import check_file, read_json, shown

# What a trial may not set, because the run folders belong to the trials.
RESERVED = {*command_line.OF_THE_TOOL, "hyp"}
MAX_TEXT = 1 << 14  # characters of an override
HYP = "trial_hyp.yaml"  # in the folder of a trial: its hyper-parameters


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


def read_trials(path):
    """The list of override dicts in a JSON file; ValueError for anything else.

    Their values are looked at when their turn has come (`trial_options`), so that one wrong value costs one trial.
    """
    trials = read_json(path)
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


def trial_options(base, params, budget, where="trial"):
    """(command line, {hyper-parameter: value}) of a trial; ValueError, which begins with `where`, for a wrong value."""
    values = {name: override_value(name, value, f"{where}: {name}") for name, value in params.items()}
    options = {name: value for name, value in values.items() if not name.startswith("hyp.")}
    words = command_line.override(base, budget.overrides() | options)
    command_line.check_run(words, where, check_train_options)
    return words, {name.removeprefix("hyp."): value for name, value in values.items() if name.startswith("hyp.")}


def override_value(name, value, where):
    """The value of an override as train.py takes it: numbers may be text, one number may stand for a list of it.

    Raises ValueError, which begins with `where`, for a value of another kind or out of range.
    """
    if name.startswith("hyp."):
        return checked(name.removeprefix("hyp."), value, where)
    flag = TRAIN_FLAGS[name]
    if flag.nargs == "+" and not isinstance(value, (list, dict)):
        value = [value]
    if flag.type and isinstance(value, list):
        value = [number for item in value for number in _numbers(flag, item)]
    elif flag.type:
        (value,) = _numbers(flag, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # such as "device": 0
    flag.check(value, where)
    if isinstance(value, str) and not _can_be_typed(value):
        raise ValueError(f"{where} has to be text that a command line can hold, not {shown(value)}")
    return value


def _can_be_typed(text):
    """JSON can write half a character, the character 0, and more text than any process can be started with."""
    try:
        return b"\0" not in os.fsencode(text) and len(text) < MAX_TEXT
    except UnicodeEncodeError:
        return False


def _numbers(flag, value):
    """The numbers that the text `value` means, several for a range of layers; anything else as it is."""
    if isinstance(value, str):
        with suppress(ValueError, argparse.ArgumentTypeError):
            value = flag.type(value)
            return value if isinstance(value, list) else [value]
    return [value]


def trial_arguments(base, params, budget, folder):
    """The command line (words) of a trial; hyper-parameters that it changes go to trial_hyp.yaml in `folder`."""
    words, changes = trial_options(base, params, budget)
    if not changes:
        return words
    source = check_file(train_parser().parse_args(base).hyp)
    return command_line.override(words, {"hyp": str(runner.write_hyp(source, changes, Path(folder) / HYP))})


def read_space(path):
    """{name: {low, high, log, step} or {choices}} from a yaml file, checked; whole numbers stay whole."""
    space = read_yaml(path)
    check_names(space, path)
    return {name: _dimension(name, entry, path) for name, entry in space.items()}


def _dimension(name, entry, path):
    where = f"{path}: {name}"
    keys = {"choices"} if isinstance(entry, dict) and "choices" in entry else {"low", "high", "log", "step"}
    if not isinstance(entry, dict) or not (entry.keys() == {"choices"} or {"low", "high"} <= entry.keys() <= keys):
        raise ValueError(f"{where} needs either choices: [...] or the numbers low and high (with log or step)")
    if "choices" in entry:
        if not isinstance(entry["choices"], list) or not entry["choices"]:
            raise ValueError(f"{where}: choices needs a list of values, not {shown(entry['choices'])}")
        return {"choices": [override_value(name, choice, f"{where}: choices") for choice in entry["choices"]]}
    low, high = (_bound(name, entry[key], where, key) for key in ("low", "high"))
    step, log = _number(entry.get("step")), entry.get("log", False)
    if entry.get("step") is not None and not (step and above(0).holds(step)):
        raise ValueError(f"{where}: step has to be a number above 0, not {shown(entry['step'])}")
    if not isinstance(log, bool):
        raise ValueError(f"{where}: log has to be true or false, not {shown(log)}")
    if not low < high or (log and low <= 0) or (log and step is not None):
        raise ValueError(f"{where}: low has to be below high, above 0 with log, and log goes without step")
    return {"low": low, "high": high, "log": log, "step": step}


def _bound(name, value, where, key):
    """An end of what is searched: a number that the option can have, or the end of its range."""
    value = _number(value)
    if value is None:
        raise ValueError(f"{where} needs either choices: [...] or the numbers low and high; {key} is no number")
    is_flag = not name.startswith("hyp.")
    row = TRAIN_FLAGS[name] if is_flag else HYPER_PARAMETERS[name.removeprefix("hyp.")]
    if is_flag and (not row.type or row.nargs):
        raise ValueError(f"{where} is no single number; give choices: [...]")
    if is_flag and row.type is int and not isinstance(value, int):
        raise ValueError(f"{where}: {key} has to be a whole number, not {shown(value)}")
    limits = row.range or Range()
    limits._replace(open_low=False, open_high=False).check(f"{where}: {key}", value)
    return value


def _number(value):
    """A YAML scalar as a number, for YAML itself reads 1e-3 (without a dot) as text; None when it is none."""
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
