"""Command lines: those of train.py as lists of words, and how the tools that start it read their own."""

import argparse
import difflib
import hashlib
import logging
import shlex
import sys
from contextlib import suppress
from pathlib import Path

from utils.config.flags import TRAIN_FLAGS
from utils.config.options import check_ranges, explicit_options, train_parser
from utils.run import entry
from utils.system.distributed import check_device
from utils.system.files import check_can_be_made, check_file, printable, shown
from utils.system.folder_lock import own
from utils.system.streams import keep_streams

# Options of train.py that belong to the tool which starts it, and why.
OF_THE_TOOL = {
    "evolve": "a search is many trainings",
    "resume": "every run starts anew",
    "project": "the tool says where its runs lie",
    "name": "the tool says where its runs lie",
    "exist_ok": "the tool says where its runs lie",
    "local_rank": "every run is one process",
}
FILES = ("data", "hyp", "cfg", "head_config")  # options that name a text file


def split(text, where):
    """The words of `text`, which came from the option `where`."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{where} {text!r}: {error}") from error


def train_words(text, where, refused=OF_THE_TOOL):
    """The words of a command line of train.py that came as `text` from the option `where`, checked."""
    words = split(text, where)
    check_arguments(words, where)
    check_names(words, where, refused)
    return words


def check_names(words, where, refused=OF_THE_TOOL):
    """Raise ValueError for an option that stands in `words` twice, or is one of `refused` {name: why}."""
    seen = set()
    for name in typed_names(words):
        if name in refused:
            raise ValueError(f"{where}: {TRAIN_FLAGS[name].name} cannot be given here: {refused[name]}")
        if name in seen:
            raise ValueError(f"{where}: {TRAIN_FLAGS[name].name} stands there twice")
        seen.add(name)


def typed_names(words):
    """The options (their names in the code) that stand in `words`, in their order; twice what stands there twice."""
    names = []

    class Found(argparse.Namespace):
        def __setattr__(self, name, value):
            names.append(name)
            super().__setattr__(name, value)

    explicit_options(train_parser(), list(words), Found())
    return names


def check_run(words, where, check):
    """Raise ValueError when train.py would refuse its command line `words`, or miss a file or the device of it.

    `check` looks at the options: `check_train_options`, or less while the command line is not complete.
    """
    options = train_parser().parse_args(list(words))
    typed = explicit_options(train_parser(), list(words))
    try:
        check(options)
        for name in FILES:
            check_file(typed.get(name, ""))
        if options.weights and not Path(options.weights).is_file():
            raise ValueError(f"--weights {printable(options.weights)} does not exist")
        check_device(options.device)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except OSError as error:  # such as a name that is too long
        raise ValueError(f"{where}: {shown(error.filename)}: {error.strerror}") from error


def check_shared(words, where):
    """As `check_run` for what several runs share; whether all values fit together is checked for each run."""
    check_run(words, where, lambda options: check_ranges(options, TRAIN_FLAGS))


def fingerprints(words):
    """{option: hash} of the contents of the files that a command line of train.py names, the weights included."""
    options, found = train_parser().parse_args(list(words)), {}
    for name in (*FILES, "weights"):
        with suppress(ValueError):  # a file that is not there
            if path := check_file(getattr(options, name)):
                found[name] = hashlib.sha1(Path(path).read_bytes()).hexdigest()
    return found


def check_arguments(words, where):
    """Raise ValueError when train.py would not understand the command line that came from `where`."""
    parser = train_parser()
    parser.exit_on_error = False
    parser.error, parser.print_help = _raise, lambda: None
    try:
        parser.parse_args(list(words))
    except SystemExit as error:
        raise ValueError(f"{where}: --help cannot be given here: every run would print it and end") from error
    except Exception as error:
        raise ValueError(f"{where}: train.py does not understand this: {error}") from error


def _raise(message):
    raise ValueError(message)


def override(words, overrides):
    """The command line `words` of train.py with options replaced: {name: value}, as words.

    True switches a flag on, False and None leave an option out, a list becomes several words.
    Raises ValueError for a name that train.py does not have.
    """
    options = explicit_options(train_parser(), list(words))
    for name, value in overrides.items():
        dest = name.lstrip("-").replace("-", "_")
        if dest not in TRAIN_FLAGS:
            raise ValueError(f"train.py has no option {name!r}{did_you_mean(dest, TRAIN_FLAGS)}")
        options[dest] = value
    words = []
    for dest, value in options.items():
        if isinstance(value, str) and value.startswith("-"):  # argparse takes it for an option otherwise
            words.append(f"{TRAIN_FLAGS[dest].name}={value}")
        elif value is not None and value is not False:
            words.append(TRAIN_FLAGS[dest].name)
            words += [] if value is True else map(str, value if isinstance(value, (list, tuple)) else [value])
    return words


def did_you_mean(name, known):
    """The end of a message about a `name` that is not `known`."""
    near = difflib.get_close_matches(str(name), known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def parse(parser, words, names, defaults=None):
    """Parse the command line of a tool (None: that of this process); options in `names` hold words of train.py.

    `--b --fast` is read as `--b=--fast`: argparse alone would take such a value for another option.
    """
    words, bound = list(sys.argv[1:] if words is None else words), []
    while words:
        word = words.pop(0)
        bound.append(f"{word}={words.pop(0)}" if word in names and words else word)
    return parser.parse_args(bound, defaults)


def open_folder(folder, name):
    """Make the folder that the option `name` says, and own it; ValueError when that is impossible."""
    check_can_be_made(folder, name)
    Path(folder).mkdir(parents=True, exist_ok=True)
    own(folder, f"choose another {name}")


def run_tool(main, options=None, level=logging.INFO, layout="%(message)s", go_on=""):
    """As `entry.run`, for a main(options) that returns the status; messages below `level` are left out."""
    keep_streams()
    logging.basicConfig(stream=sys.stdout, level=level, format=layout)
    entry.run(lambda given: sys.exit(main(given)), options, go_on)
