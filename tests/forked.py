"""A program as a fork of a process that has everything imported: a start takes no seconds of imports.

That process does nothing but fork (a GPU or threads of its own would not survive it), so what is run has to be found
by its name: a function of a module, or a `partial` of one. What is asked of processes (their ends, signals, what they
print and leave behind) is as in one of their own. What a fresh interpreter or an import decides (locale, environment
variables of libraries, loaded modules) is not. No GPU is seen.
"""

import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing import forkserver
from typing import NamedTuple
from unittest import mock

import cv2
import psutil
import torch

from utils.system.files import PROJECT_ROOT

WHERE = signal.SIGUSR1  # a program and what it has forked answer it with the stacks of all their threads
IMPORTED = ["pytest", "tests.kill_resume", "tests.parity"]


class Ended(NamedTuple):
    """How a program ended: its status (negative: the signal), what it wrote; None while it had to be killed."""

    status: int | None
    text: str


class Forked(multiprocessing.get_context("forkserver").Process):
    """`body(*args)` as a program with one thread that writes to the file `output`."""

    def __init__(self, output, body, *args):
        super().__init__(target=_in_fork, args=(output, body, args))
        self.output = output
        output.touch()
        environment = {"PYTHONPATH": str(PROJECT_ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with mock.patch.dict(os.environ, environment):
            forkserver.set_forkserver_preload(IMPORTED)
            forkserver.ensure_running()
        self.start()

    def end(self, timeout=120):
        """Wait for the end of the program, and kill it after `timeout` seconds; returns an Ended.

        Before, it and its workers write where they are.
        """
        self.join(timeout)
        is_stuck = self.exitcode is None
        if is_stuck:
            for process in self._ask_where():
                with suppress(psutil.Error):
                    process.kill()
            self.join()
        return Ended(None if is_stuck else self.exitcode, self.output.read_text(errors="replace"))

    def _ask_where(self):
        """The program and its children, after they have written where they are."""
        processes = []
        with suppress(psutil.Error):
            processes = [psutil.Process(self.pid)]
            processes += processes[0].children(recursive=True)
            for process in processes:
                process.send_signal(WHERE)
                time.sleep(0.2)  # for its answer
        return processes


def run(folder, body, *args):
    """Run `body(*args)` to its end; an Ended. Its output is kept in a file in `folder`."""
    return Forked(folder / "output.txt", body, *args).end()


def _in_fork(output, body, args):
    file = os.open(output, os.O_WRONLY | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    faulthandler.register(WHERE, file=2)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
    gc.freeze()  # or each collection would look through all that is imported
    logging.root.handlers.clear()
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    status = 0
    try:
        body(*args)
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
