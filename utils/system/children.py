"""Processes that a run or a tool starts: how they begin, so that none of them is left over."""

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

from utils.system.signals import held_back, send_soon

PARENT = "YOLOV7FAST_PARENT"  # environment variable: the process that a run was started by and has to end with
THREADS = Path("/proc/self/task")
PATIENCE = 0.5  # seconds that a fork waits for threads that work; half as many after each time that they ran out
GLANCE = 0.0005  # seconds between two looks at them
_patience = PATIENCE


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
    gc.freeze()  # or it would look for garbage among all that the parent has, and copy its pages by that
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if parent is not None:
        end_with(parent, signal.SIGKILL)


def let_threads_rest() -> None:
    """On Linux, return at a moment when all other threads of this process sleep, at the latest after PATIENCE seconds.

    All forks together wait two times PATIENCE for a thread that never sleeps.

    Called before each fork: the new process has the locks that other threads hold just then, and nobody to open them.
    Who sleeps seldom holds one. Who tidies up does, and two were met that made workers hang:
    - A thread of gloo frees the tensors of an exchange that is over for its caller. It becomes one of Python for that,
      whose list of threads is locked meanwhile. Up to Python 3.11 a new process waits for that lock before all else.
    - A thread that decoded images leaves; up to Python 3.12 to join it is not to wait for that. OpenCV, which locks
      what it keeps for threads, frees it.
    """
    global _patience
    end = time.monotonic() + _patience
    while is_late := _others_work():
        if time.monotonic() > end:
            break
        time.sleep(GLANCE)
    _patience = _patience / 2 if is_late else PATIENCE


def _others_work():
    own = str(threading.get_native_id())
    with suppress(OSError):  # another system
        for thread in os.listdir(THREADS):
            with suppress(OSError):  # it has left meanwhile
                status = (THREADS / thread / "stat").read_bytes() if thread != own else b") S"
                if status[status.rindex(b")") + 2] in b"RD":  # runs or wants to; waits for memory or a disk
                    return True
    return False


_fork = threading.local()


def _begin_fork():
    """Hold Ctrl-C and SIGTERM back: Python prints and drops what is raised in the hooks of a fork, also in others'."""
    parent = os.getpid()
    _fork.signals = held_back(lambda number: os.getpid() == parent and send_soon(number))
    _fork.signals.__enter__()
    let_threads_rest()


def _end_fork():
    if signals := vars(_fork).pop("signals", None):
        signals.__exit__(None, None, None)


os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_end_fork)


def forked_pool(count: int, enter: Callable[[int | None], None] = enter_child) -> Executor:
    """A pool of `count` processes that call `enter`, and with it `enter_child`."""
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
    return ProcessPoolExecutor(count, get_context("fork"), enter, (parent,))
