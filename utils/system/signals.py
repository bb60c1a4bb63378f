"""Ctrl-C and SIGTERM: both end a program by an exception in its main thread, and can be held back for a while."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

SOON = 0.2  # seconds


class Terminated(KeyboardInterrupt):
    """SIGTERM, as `kill` and `docker stop` send it: it ends a program as Ctrl-C does."""


def status_of(interruption: KeyboardInterrupt) -> int:
    """The exit status after Ctrl-C or SIGTERM: 128 and the number of the signal, as shells have it."""
    return 128 + (signal.SIGTERM if isinstance(interruption, Terminated) else signal.SIGINT)


def quiet_interrupt() -> None:
    """Until `interrupt_raised`, Ctrl-C ends this process at once, without a traceback: while modules are imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt_raised() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, as Python has it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def sigterm_raised() -> Iterator[None]:
    """Within, the first SIGTERM raises Terminated in the main thread.

    Nothing is changed where SIGTERM is handled already. In ranks of a launcher the Watch takes it over later.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_terminated(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Workers end, too, when all processes get the signal (systemd, Slurm, `timeout`). The handler of torch's loader
    # would raise that, over this.
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    raise Terminated


@contextmanager
def held_back(deliver: Callable[[int], object] = signal.raise_signal) -> Iterator[None]:
    """Within, the first Ctrl-C or SIGTERM waits for the end: for work that an exception must not break off.

    `deliver` gets its number then. A second one is not held back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # None is set by C; what is ignored, as in the background of a script, compilers have to ignore, too
    usual = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}

    def hold(number, frame):
        held.append(number)
        _set(usual)

    _set(dict.fromkeys(usual, hold))
    try:
        yield
    finally:
        _set(usual)
        if held:
            deliver(held[0])


def send_soon(number: int) -> None:
    """Send this process a signal when the caller has returned: Python drops what is raised within hooks of a fork."""
    Timer(SOON, os.kill, (os.getpid(), number)).start()


def _set(handlers):
    for number, handler in handlers.items():
        signal.signal(number, handler)
