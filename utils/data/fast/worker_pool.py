"""Processes that work for a loader: started by fork, fed through one common pipe, each answers through its own.

Whatever happens to a worker ends in one LoaderError that names the sample it was working on; no process is left.
Neither side can block the other: the main process writes only what the pipe has room for and reads only what is there.
"""

import logging
import os
import pickle
import random
import selectors
import signal
import threading
import time
import traceback
import weakref
from collections import deque
from multiprocessing import get_context

import cv2
import numpy as np
import torch
from numpy import random as numpy_random  # now: NumPy leaves it to the first use, and drops a Ctrl-C that comes then

from utils.data.worker_errors import LoaderError, about, describe
from utils.system.children import enter_child
from utils.system.memory import shared_array
from utils.system.streams import wants_traceback

logger = logging.getLogger(__name__)

JOIN_LIMIT = 2.0  # seconds that workers get to end before they are killed
READ_SIZE = 1 << 16  # bytes; what a pipe of Linux holds
LENGTH = 8  # bytes in front of an answer that tell how long it is


class WorkerPool:
    """`count` processes that call `job(task, doing)` for tasks, tuples of integers, in the order of `submit`.

    `job.enter()` is called once in each of them. `doing` is an array of two integers that the job keeps up to date;
    `job.describe(*doing)` then names what it was busy with. Answers come in any order. `timeout` in seconds.
    """

    def __init__(self, job, count, timeout):
        self.job, self.timeout = job, timeout
        self.waiting = deque()  # tasks that the pipe had no room for
        self.received = [bytearray() for _ in range(count)]  # from each worker, the beginning of its next answer
        self.doing = shared_array((count, 2), np.int64)
        self.doing[:] = -1
        context = get_context("fork")
        reader, self.tasks = context.Pipe(duplex=False)
        pipes = [context.Pipe(duplex=False) for _ in range(count)]
        ends = [reader, self.tasks, *(end for pipe in pipes for end in pipe)]
        lock, seed = context.Lock(), torch.empty((), dtype=torch.int64).random_().item()
        # The kernel signals the end of the thread that forked: that means nothing unless it is the main thread.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        self.processes = []
        for number, (_, writer) in enumerate(pipes):
            inherited = [end for end in ends if end not in (reader, writer)]
            process = context.Process(
                target=_work, args=(job, self.doing[number], reader, lock, writer, inherited, parent, seed + number),
                name=f"loader-{number}", daemon=True,
            )  # fmt: skip
            process.start()
            self.processes.append(process)
        # From here on only the workers hold these ends, so that their death is seen as the end of a pipe.
        for end in (reader, *(writer for _, writer in pipes)):
            end.close()
        self.selector = selectors.DefaultSelector()
        for number, (answers, _) in enumerate(pipes):
            self.selector.register(answers, selectors.EVENT_READ, number)
        os.set_blocking(self.tasks.fileno(), False)
        self.close = weakref.finalize(self, _stop, self.processes, self.selector, self.tasks, os.getpid())

    def submit(self, task):
        """Queue a task."""
        self.waiting.append(task)
        self._send()

    def _send(self):
        """Write tasks until the pipe is full. A task is so short that it is written as a whole or not at all."""
        while self.waiting:
            try:
                self.tasks.send(self.waiting[0])
            except OSError:
                # The pipe is full, and to wait would be a deadlock: the workers read on only after somebody has taken
                # their answers. Or every worker is gone, which `answers` will see.
                return
            self.waiting.popleft()

    def answers(self):
        """Wait until there are answers: a list of (task, result). Raises LoaderError instead of waiting in vain."""
        found = []
        while not found:
            ready = self.selector.select(self.timeout)
            if not ready:
                busy = [self.job.describe(*doing) for doing in self.doing.tolist() if doing[0] >= 0]
                self._fail(
                    f"the loader delivered nothing for {self.timeout:g} s (--loader-timeout); its workers are busy "
                    f"with {', '.join(busy[:4]) or 'nothing'}; is the disk with the images still there?"
                )
            for key, _ in ready:
                found += self._read(key.fd, key.data)
            self._send()
        return found

    def _read(self, pipe, number):
        """The (task, result) of all answers that worker `number` has completed; waits for no more than is there."""
        part = os.read(pipe, READ_SIZE)
        if not part:
            self._report_death(number)
        received, found = self.received[number], []
        received += part
        while len(received) >= (end := LENGTH + int.from_bytes(received[:LENGTH], "little")):
            task, result, error = pickle.loads(received[LENGTH:end])
            del received[:end]
            if error is not None:
                if wants_traceback():
                    logger.error("%s", error[1])
                self._fail(about(self.job.describe(*error[2]), error[0]))
            found.append((task, result))
        return found

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
    for end in ("terminate", "kill"):
        for process in processes:
            getattr(process, end)()
        deadline = time.monotonic() + JOIN_LIMIT
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
    for process in processes:
        if process.exitcode is not None:  # else a dead disk holds it, and nothing can be done
            process.close()
    for key in list(selector.get_map().values()):
        key.fileobj.close()
    selector.close()
    tasks.close()


def _work(job, doing, reader, lock, writer, inherited, parent, seed):
    """The life of a worker: it ends when the pipe of the tasks does, or when nobody reads its answers."""
    # First of all: as long as one worker holds the main process's ends, no other sees that the main process is gone.
    for end in inherited:
        end.close()
    enter_child(parent)  # where the pipes fail, this ends it with the main process
    # The workers share the cores already; threads of each would only get in their way.
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    # Else all workers would go on with the one state of the generators that the fork has copied.
    random.seed(seed)
    numpy_random.seed(numpy_random.SeedSequence(seed % 2**64).generate_state(4))
    torch.manual_seed(seed)
    job.enter()
    while True:
        try:
            with lock:  # one message, one reader
                task = reader.recv()
        except (EOFError, OSError):  # the main process is gone
            return
        try:
            answer = task, job(task, doing), None
        except Exception as error:  # whatever it is, the main process has to know
            answer = task, None, (describe(error), traceback.format_exc(), doing.tolist())
        message = pickle.dumps(answer)
        try:
            _write(writer.fileno(), len(message).to_bytes(LENGTH, "little") + message)
        except OSError:  # the main process is gone
            return
        doing[0] = -1  # after the answer is out: a death before that belongs to this sample


def _write(pipe, message):
    while message:
        message = message[os.write(pipe, message) :]
