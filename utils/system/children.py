"""Processes that a run or a tool starts: how they begin, so that none of them is left over."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context

PARENT = "YOLOV7FAST_PARENT"  # environment variable: the process that a run was started by and has to end with


def end_with(parent: int, number: int = signal.SIGTERM) -> None:
    """On Linux, let the kernel send this process the signal `number` when the process `parent`, which made it, ends.

    To the kernel the parent is the thread that started this process; the signal comes when that thread ends.
    """
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, number)
        if os.getppid() != parent:  # it was gone before
            os._exit(1)


def end_with_starter() -> None:
    """Let this process end with the tool or torchrun that waits for it, also when that is killed; call it at the start.

    A run from a shell goes on without it, as with nohup.
    """
    if parent := os.environ.pop(PARENT, ""):  # not for processes that this one starts
        end_with(int(parent))
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())


def enter_child(parent: int | None) -> None:
    """Called first in a forked process: Ctrl-C is the business of `parent`, and the kernel ends it with that one.

    `parent` is None where that cannot be: not forked by a main thread, which lives as long as its process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if parent is not None:
        end_with(parent, signal.SIGKILL)


def forked_pool(count: int, enter: Callable[[int | None], None] = enter_child) -> Executor:
    """A pool of `count` processes that call `enter`, and with it `enter_child`."""
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
    return ProcessPoolExecutor(count, get_context("fork"), enter, (parent,))
