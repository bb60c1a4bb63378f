"""Command lines: those of train.py as lists of words, and how the tools that start it read their own."""

import difflib
import logging
import shlex
import signal
import sys

from utils.config.flags import TRAIN_FLAGS
from utils.config.options import explicit_options, train_parser


def train_words(text, where):
    """The words of a command line of train.py that came as `text` from the option `where`, checked."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{where} {text!r}: {error}") from error
    check_arguments(words, where)
    return words


def check_arguments(words, where):
    """Raise ValueError when train.py would not understand the command line that came from `where`."""
    parser = train_parser()
    parser.exit_on_error = False
    parser.error, parser.print_help = _raise, lambda: None
    try:
        parser.parse_args(list(words))
    except (Exception, SystemExit) as error:
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
        if value is not None and value is not False:
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


def run_tool(main, options, level=logging.INFO, layout="%(message)s", interrupted="interrupted"):
    """Call main(options) and leave the process with the status that it returns; a ValueError is one line, no traceback.

    SIGTERM ends the process as an interruption does, so that the training that it started ends too.
    """
    logging.basicConfig(stream=sys.stdout, level=level, format=layout)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(options))
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(interrupted)
