"""Standard output and error that a run survives: closed from the start, reader gone, disk full, terminal closed.

And loggers that are told to be quiet for a while, and whether tracebacks are wanted.
"""

import io
import logging
import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path


class LastingStream:
    """A text stream around `stream` (or None) that takes everything, also what cannot be written any more.

    Whatever else is asked of it (fileno, isatty, encoding) the stream inside answers.
    """

    def __init__(self, stream):
        # pythonw and a closed descriptor have no stream at all
        self._inner = Path(os.devnull).open("w", encoding="utf-8") if stream is None else stream  # noqa: SIM115

    def write(self, text):
        try:
            return self._inner.write(text)
        except (OSError, ValueError):  # ValueError: it is closed
            return len(text)

    def writelines(self, lines):
        for line in lines:
            self.write(line)

    def flush(self):
        with suppress(OSError, ValueError):
            self._inner.flush()

    def __getattr__(self, name):
        if name == "_inner":  # not made yet
            raise AttributeError(name)
        return getattr(self._inner, name)


def keep_streams() -> None:
    """Let this process write to its standard output and error whatever becomes of them; log, progress bars, print().

    Called once by every program, before it opens files. SIGHUP stays deadly: who closes the terminal means it, or
    starts the run with nohup.
    """
    # A file that is opened while 0, 1 or 2 is free gets that number, and what libraries in C print lands in it.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # for loader workers that are started anew
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, LastingStream):
            continue
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a letter of a name shows its number instead
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, LastingStream(stream))


def wants_traceback() -> bool:
    """Whether YOLOV7FAST_TRACEBACK=1 asks for where an error came from, instead of one sentence."""
    return os.environ.get("YOLOV7FAST_TRACEBACK") == "1"


@contextmanager
def quiet_loggers(*names, level=logging.WARNING):
    """Nothing below `level` from the loggers called `names` and those below them."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(level)
        yield
    finally:
        for logger, old in zip(loggers, before, strict=True):
            logger.setLevel(old)
