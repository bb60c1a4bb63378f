"""How busy a training run keeps its machine: CPU of the main process and of its workers, GPU, memory.

    with ResourceMonitor() as monitor:
        ...
    print(monitor.usage().gpu)

A thread takes a sample every `interval` seconds. CPU times are the kernel's running totals, so a usage is exact between
two samples, however rare they are; GPU values are means of what NVML reports, memory is the highest sample.
"""

import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

# Helpers of Python and PyTorch that belong to a run but prepare no batches.
NO_WORKERS = ("resource_tracker", "forkserver", "compile_worker")
REST = 20  # times as long as the memory took to measure it is not measured again
RECENT = 0.05  # seconds; a sample so old tells where a stretch begins, which saves a millisecond
IDLE_BELOW = 0.01  # share of a core; loader workers of the validation set only wait while the run trains


@dataclass(frozen=True)
class Usage:
    """A stretch of time of `seconds`. What could not be measured is None.

    `main_cpu` is the share of one core that the main process used with all its threads (1.0: one whole core),
    `worker_cpu` the mean share of each of the `num_workers` child processes that did anything, `gpu` the share of the
    time in which a kernel ran (0..1). Peaks in GB: `memory` of all processes (shared pages counted once), `gpu_memory`
    of the card, other programs included.
    """

    seconds: float = 0.0
    main_cpu: float | None = None
    worker_cpu: float | None = None
    num_workers: int = 0
    gpu: float | None = None
    gpu_memory: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class ResourceSample:
    """A moment: CPU seconds used so far by the main process and by each child {pid: seconds}; the rest as in Usage.

    `anonymous`: GB that are no part of a file or of shared memory, those which a child has from its parent included.
    """

    time: float
    main: float | None
    workers: dict
    gpu: float | None
    gpu_memory: float | None
    memory: float | None
    anonymous: float | None = None


class ResourceMonitor:
    """Watches the process `pid` (this one by default), its children, and the first GPU that this process can see.

    `interval` in seconds. `memory` asks for the memory of all processes as well. Counting shared pages once means to
    read tables of pages, a second for many GB, which holds up the processes; so most samples have no `memory`.
    """

    def __init__(self, pid=None, interval=0.5, memory=False):
        self.main = psutil.Process(pid)
        self.interval, self.memory = interval, memory
        self.gpu = open_gpu()
        self.samples = []
        self._found = None, {}  # children as the kernel told, their psutil.Process by pid, None for helpers
        self._rest_until = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="resource monitor", daemon=True)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.stop()

    def start(self):
        """Take the first sample and start the thread, unless it runs."""
        if not self._thread.is_alive():
            self.sample()
            self._thread.start()

    def stop(self):
        """Take the last sample and end the thread, if it runs."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()
            self.sample()

    def sample(self):
        """Note this moment. Call it at the borders of a stretch that `usage` is to be exact about."""
        gpu = self.gpu() if self.gpu else (None, None)
        workers = self._find_workers()
        memory = self._memory_of([self.main, *workers.values()]) if self.memory else (None, None)
        times = {pid: seconds for pid, process in workers.items() if (seconds := cpu_seconds(process)) is not None}
        self.samples.append(ResourceSample(time.monotonic(), cpu_seconds(self.main), times, *gpu, *memory))

    def restart(self):
        """Forget all samples but one of this moment, so that a long run does not collect them."""
        if not self.samples or time.monotonic() - self.samples[-1].time > RECENT:
            self.sample()
        del self.samples[:-1]

    def usage(self, start=None, end=None):
        """The Usage between two times of time.monotonic(); by default of all samples."""
        return summarise([s for s in list(self.samples) if (start or 0) <= s.time <= (end or float("inf"))])

    def _memory_of(self, processes):
        memory, started = None, time.monotonic()
        if started >= self._rest_until:
            memory = proportional_memory(processes)
            self._rest_until = time.monotonic() + REST * (time.monotonic() - started)
        return memory, anonymous_memory(processes)

    def _watch(self):
        while not self._stop.wait(self.interval):
            self.sample()

    def _find_workers(self):
        """{pid: psutil.Process}. To search takes most of the time of a sample, so it waits for a change of children."""
        children, (children_then, workers) = children_of(self.main.pid), self._found
        if children is None or children != children_then:
            workers = self._search(workers)
            self._found = children, workers  # another thread may be reading it, so both at once
        return {pid: process for pid, process in workers.items() if process}

    def _search(self, known):
        try:
            children = self.main.children(recursive=True)
        except psutil.Error:
            return {}
        return {child.pid: known[child.pid] if child.pid in known else worker(child) for child in children}


def summarise(samples):
    """The Usage of consecutive ResourceSamples; an empty one for fewer than two."""
    if len(samples) < 2:
        return Usage()
    seconds = samples[-1].time - samples[0].time
    main = [sample.main for sample in samples if sample.main is not None]
    shares = [used / seconds for used in worker_seconds(samples).values()]
    busy = [share for share in shares if share > IDLE_BELOW]
    gpu = [sample.gpu for sample in samples[1:] if sample.gpu is not None]  # each tells about the time before it
    return Usage(
        seconds=seconds,
        main_cpu=(main[-1] - main[0]) / seconds if len(main) > 1 else None,
        worker_cpu=sum(busy) / len(busy) if busy else None,
        num_workers=len(busy),
        gpu=sum(gpu) / len(gpu) if gpu else None,
        gpu_memory=_peak(sample.gpu_memory for sample in samples),
        memory=_peak(sample.memory for sample in samples),
    )


def worker_seconds(samples):
    """CPU seconds that each child {pid: seconds} used between the first and the last ResourceSample that saw it.

    A child that was not there at the beginning started at zero.
    """
    first, last = dict(samples[0].workers), {}
    for sample in samples:
        last.update(sample.workers)
    return {pid: seconds - first.get(pid, 0.0) for pid, seconds in last.items()}


def cpu_seconds(process):
    """User and system time of a psutil.Process; None when it has ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return None
    return times.user + times.system


def proportional_memory(processes):
    """GB of several processes, shared pages counted once where the system tells (Linux)."""
    total = 0
    for process in processes:
        try:
            info = process.memory_full_info()
            total += getattr(info, "pss", info.uss)
        except (psutil.Error, OSError):
            continue
    return total / 1e9


def anonymous_memory(processes):
    """GB that processes hold without files and shared memory (Linux; elsewhere all); the kernel counts it anyway."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            info = process.memory_info()
            total += info.rss - getattr(info, "shared", 0)
    return total / 1e9


def children_of(pid):
    """The kernel's list of what the main thread of a process has started, as text; None where there is no such list."""
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return None


def worker(child):
    """The process `child` itself; None when it serves Python or PyTorch instead of making batches, or has ended."""
    try:
        words = " ".join(child.cmdline())
    except psutil.Error:
        return None
    return None if any(name in words for name in NO_WORKERS) else child


def open_gpu():
    """A function that returns (share of time with a kernel, GB used) of the first visible GPU; None without NVML."""
    pynvml, handle = _first_gpu()
    if handle is None:
        return None

    def read():
        try:
            share = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            return share, pynvml.nvmlDeviceGetMemoryInfo(handle).used / 1e9
        except pynvml.NVMLError:
            return None, None

    return read


def gpu_name():
    """The name of the first visible GPU; None without NVML."""
    pynvml, handle = _first_gpu()
    return None if handle is None else pynvml.nvmlDeviceGetName(handle)


def _first_gpu():
    """The module pynvml and its handle of the first visible GPU; None for what is not there."""
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
        return pynvml, _handle(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except pynvml.NVMLError as error:
        logger.debug("GPU utilisation is not measured: %s", error)
        return pynvml, None


def _handle(pynvml, visible):
    """NVML's handle of the first card that CUDA_VISIBLE_DEVICES (None: all) names; None when it hides every card."""
    name = "0" if visible is None else visible.split(",")[0].strip()
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name) if name.startswith(("GPU-", "MIG-")) else None


def _peak(values):
    return max((value for value in values if value is not None), default=None)
