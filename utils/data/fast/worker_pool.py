"""Processes that work for a loader: started by fork, fed through one common pipe, answering each through its own.

Whatever happens to a worker ends in one LoaderError that names the sample it was working on, and in no process left.
"""

import logging
import os
import pickle
import random
import selectors
import signal
import time
import traceback
import weakref
from multiprocessing import get_all_start_methods, get_context

import cv2
import numpy as np
import torch

from utils.data.worker_errors import LoaderError, about, describe
from utils.system.memory import shared_array

logger = logging.getLogger(__name__)

PARENT_CHECK = 2.0  # seconds between two looks of an idle worker at whether its parent lives
JOIN_LIMIT = 2.0  # seconds that workers get to end before they are killed


def can_fork():
    return "fork" in get_all_start_methods()


class Workers:
    """`count` processes that call `job(task, doing)` for tasks, tuples of integers, in the order of `submit`.

    `job.enter()` is called once in each of them. `doing` is an array of two integers that the job keeps up to date;
    `job.describe(*doing)` then names what it was busy with. Answers come in any order. `timeout` in seconds.
    """

    def __init__(self, job, count, timeout):
        context = get_context("fork")
        self.job, self.timeout, self.count = job, timeout, count
        self.num_open = 0  # tasks without an answer
        self.doing = shared_array((count, 2), np.int64)
        self.doing[:] = -1
        reader, self.tasks = context.Pipe(duplex=False)
        lock = context.Lock()
        seed = torch.empty((), dtype=torch.int64).random_().item()
        self.processes, self.selector = [], selectors.DefaultSelector()
        for number in range(count):
            answers, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(job, self.doing[number], reader, lock, writer, os.getpid(), seed + number),
                name=f"loader-{number}", daemon=True,
            )  # fmt: skip
            process.start()
            # From here on only the worker can write: its end is seen as the end of its answers.
            writer.close()
            self.processes.append(process)
            self.selector.register(answers, selectors.EVENT_READ, number)
        reader.close()
        self.close = weakref.finalize(self, _stop, self.processes, self.selector, self.tasks, os.getpid())

    def submit(self, task):
        """Queue a task."""
        try:
            self.tasks.send(task)
        except OSError:  # every worker is gone, so nobody reads
            self._look_for_the_dead()
        self.num_open += 1

    def answers(self):
        """Wait until there are answers: a list of (task, result). Raises LoaderError instead of waiting in vain."""
        ready = self.selector.select(self.timeout)
        if not ready:
            busy = [self.job.describe(*doing) for doing in self.doing.tolist() if doing[0] >= 0]
            self._fail(
                f"the loader delivered nothing for {self.timeout:g} s (--loader-timeout); its workers are busy with "
                f"{', '.join(busy[:4]) or 'nothing'}; is the disk with the images still there?"
            )
        return [self._answer(key.fileobj, key.data) for key, _ in ready]

    def _answer(self, pipe, number):
        try:
            task, result, error = pipe.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            self._report_death(number)
        if error is not None:
            if os.environ.get("YOLOV7FAST_TRACEBACK") == "1":
                logger.error("%s", error[1])
            self._fail(about(self.job.describe(*error[2]), error[0]))
        self.num_open -= 1
        return task, result

    def _look_for_the_dead(self):
        for number, process in enumerate(self.processes):
            if not process.is_alive():
                self._report_death(number)
        self._fail("the loader's workers do not listen any more")

    def _report_death(self, number):
        process, doing = self.processes[number], self.doing[number].tolist()
        what = f"worked on {self.job.describe(*doing)}" if doing[0] >= 0 else "had nothing to do"
        process.join(JOIN_LIMIT)
        code = process.exitcode
        if code is not None and code < 0:
            cause = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                cause += " (out of memory? fewer --workers or a smaller --prefetch-factor need less)"
        else:
            cause = f"ended by itself with status {code}"
        self._fail(f"loader worker {number} (process {process.pid}) {cause} while it {what}")

    def _fail(self, message):
        self.close()
        raise LoaderError(message)


def _stop(processes, selector, tasks, owner):
    """End all workers and close the pipes; safe to call at any time, does nothing in a forked child."""
    if os.getpid() != owner:
        return
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + JOIN_LIMIT
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
    for key in list(selector.get_map().values()):
        key.fileobj.close()
    selector.close()
    tasks.close()


def _work(job, doing, reader, lock, writer, parent, seed):
    """The life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's business; it ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    random.seed(seed)
    np.random.seed(np.random.SeedSequence(seed % 2**64).generate_state(4))
    torch.manual_seed(seed)
    job.enter()
    while (task := _next_task(reader, lock, parent)) is not None:
        try:
            answer = task, job(task, doing), None
        except Exception as error:  # whatever it is, the main process has to know
            answer = task, None, (describe(error), traceback.format_exc(), doing.tolist())
        try:
            writer.send(answer)
        except OSError:  # the main process is gone
            return
        doing[0] = -1


def _next_task(reader, lock, parent):
    """The next task; None when the parent has gone."""
    while os.getppid() == parent:
        if lock.acquire(timeout=PARENT_CHECK):
            try:
                if reader.poll(PARENT_CHECK):
                    return reader.recv()
            except (EOFError, OSError):
                return None
            finally:
                lock.release()
    return None
