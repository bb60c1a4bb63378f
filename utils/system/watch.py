"""Ends a process that waits in vain for the others of its run, with one sentence.

Whoever takes part in an exchange waits until the others do. When one of them has died, was stopped or hangs, that would
be for ever, or until a library gives up and prints its stack.

A thread beside the training looks for two signs. Every process reports to the store of the launcher that it lives, so
one that was killed or stopped is noticed whatever the others do just then. And an exchange that has been waited for too
long, though all report, tells of a process that lives but does not go on. Without end is only the patience with the
meeting before an epoch: rank 0 may still validate, or somebody read images.
"""

import math
import os
import secrets
import select
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from utils.system.distributed import RESUME_ADVICE, exchange_advice
from utils.system.rendezvous import text_of_rank_zero

PERIOD = 5.0  # seconds between two reports, at most
SILENCE = 0.8  # of the timeout: so long may a process be silent
START = 300.0  # seconds that a process has at least until its first report: machines differ, GPUs open slowly
DONE = 1 << 40  # added to the reports of a process that has no more to say


@dataclass
class Pending:
    """An exchange that this process takes part in; over when `event` has happened on the device."""

    what: str
    iteration: int | None
    since: float
    limit: float  # seconds that it may take
    event: torch.cuda.Event | None = None


class Watch(threading.Thread):
    """Ends this process if another one gives no sign for most of `timeout` seconds, or an exchange takes so long."""

    running: "Watch | None" = None

    def __init__(self, rank, world_size, timeout, device, name):
        super().__init__(daemon=True, name="watch")
        self.rank, self.timeout, self.device = rank, timeout, device
        self.period = min(PERIOD, timeout / 10)
        self.keys = [f"yolov7fast/{name}/{other}" for other in range(world_size)]
        self.store, self.stopped = None, threading.Event()
        self.reports, self.heard = [None] * world_size, [time.monotonic()] * world_size
        self.pending, self.next_limit = None, timeout

    # ---- called by the training

    @classmethod
    def of_process(cls, rank: int, world_size: int, timeout: float, device: torch.device) -> "Watch":
        """The watch of this process; it begins with the first call, which may come before there is a group."""
        if cls.running is None:
            # reports of before a restart may still lie in the store, and machines count restarts differently
            name = text_of_rank_zero(secrets.token_hex(8), rank, world_size)
            cls.running = Watch(rank, world_size, timeout, device, name)
            cls.running.start()
        return cls.running

    def start(self):
        """Begin to watch. A launcher sends SIGTERM when another process has ended; that gets a sentence, too."""
        self.signals, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        # The handler of Python would have to wait until the main thread comes out of a library; these bytes do not.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=forget_signals)  # workers end as ever
        super().start()

    @contextmanager
    def exchange(self, what, iteration=None):
        """A context around an operation in which all processes take part, queued on the current stream."""
        pending = None
        if self.pending is None:  # or an earlier one is looked at
            pending = self.pending = Pending(what, iteration, time.monotonic(), self.next_limit)
            self.next_limit = self.timeout
        yield
        if pending is not None and self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            pending.event = event
        elif pending is not None:
            self.pending = None

    def allow_waiting(self, seconds=math.inf):
        """The other processes may be late for the next exchange, and those queued behind it, by at least `seconds`."""
        self.next_limit, self.pending = max(seconds, self.timeout), None

    def stop(self):
        """Tell the others that this process needs them no more; may be called again."""
        if self.stopped.is_set():
            return
        self.stopped.set()
        Watch.running = None
        os.write(self.writer, b"\0")
        self.join()
        forget_signals()

    # ---- the thread

    def run(self):
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a new thread begins with the first GPU, and would take memory there
        self._report(1)
        while True:
            arrived = select.select([self.signals], [], [], self.period)[0]
            if arrived and signal.SIGTERM in os.read(self.signals, 4096):
                self.end(f"ended by SIGTERM, as launchers do when they or another process end{RESUME_ADVICE}")
            if self.stopped.is_set():
                break
            self._report(1)
            fault = self.fault(time.monotonic())
            if fault:
                self.end(fault)
        with suppress(RuntimeError):  # the others may be gone with the store
            self._report(DONE)

    def _report(self, count):
        """Add `count` to our reports and read those of the others; when the store does not answer, nobody has said."""
        try:
            if self.store is None:
                self.store = open_store(self.period)
            self.store.add(self.keys[self.rank], count)
            now = time.monotonic()
            for other, key in enumerate(self.keys):
                report = self.store.add(key, 0)
                if report and (report != self.reports[other] or report >= DONE):
                    self.reports[other], self.heard[other] = report, now
        except RuntimeError:
            self.store = None  # an answer that comes late must not be taken for one to a later question

    def fault(self, now):
        """What keeps this process waiting in vain, a sentence; None if nothing does."""
        silent = [other for other in range(len(self.heard)) if now - self.heard[other] > self._patience(other)]
        if silent:
            who = ", ".join(f"rank {other}" for other in silent if other != self.rank or len(silent) == 1)
            return (
                f"no sign of life from {who} for {min(map(self._patience, silent)):.0f} s (--loader-timeout "
                f"{self.timeout}): the process has ended, was killed or stopped, or cannot be reached{RESUME_ADVICE}"
            )
        pending = self.pending
        if pending is None:
            return None
        if pending.event is not None and pending.event.query():
            if self.pending is pending:
                self.pending = None
        elif now - pending.since > pending.limit:
            return self._describe(pending)
        return None

    def _patience(self, other):
        """How long the process `other` may be silent, in seconds."""
        limit = SILENCE * self.timeout
        return limit if self.reports[other] is not None else max(limit, START)

    def _describe(self, pending):
        if pending.iteration is None and pending.what == "a first number":
            return f"the processes have not exchanged a first number: {exchange_advice(self.device)}"
        where = "" if pending.iteration is None else f" of iteration {pending.iteration}"
        return (
            f"the exchange of {pending.what}{where} has not ended for {pending.limit:.0f} s (--loader-timeout "
            f"{self.timeout}): another process hangs, or a GPU{RESUME_ADVICE}"
        )

    def end(self, fault):
        """Leave the process; its main thread cannot do it, as it may wait inside of a library."""
        print(f"error: rank {self.rank}: {fault}", file=sys.stderr, flush=True)
        os._exit(2)


def forget_signals():
    """SIGTERM ends the process at once again."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def open_store(timeout):
    """A connection of our own to the store that the processes of this run met at; seconds to wait for its answers."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=max(timeout, 1)))
