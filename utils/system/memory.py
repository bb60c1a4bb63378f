"""Memory that processes share, and how much of it there is."""

import logging
import mmap
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


def shared_array(shape, dtype):
    """Zeros in memory that processes forked later share. It has no name and no file: nothing of it can be left."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype, count=int(np.prod(shape))).reshape(shape)


def give_back(array):
    """Take the pages of a `shared_array` away, which other processes may map for long; whoever reads it sees zeros."""
    while not isinstance(array, mmap.mmap):
        array = array.obj if isinstance(array, memoryview) else array.base
    with suppress(AttributeError, OSError):  # not Linux
        array.madvise(mmap.MADV_REMOVE)


def check_memory(num_bytes, what, advice):
    """Raise ValueError when `num_bytes` are more than is free; `what` says who needs {}, `advice` what to do."""
    available = available_memory()
    if available is not None and num_bytes > available:
        raise ValueError(
            f"{what.format(describe_bytes(num_bytes))}, and {describe_bytes(available)} of memory are free; {advice}"
        )


def describe_bytes(num_bytes):
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def available_memory():
    """Bytes that can be had without swapping, of the machine or of this container; None where that is unknown."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit, used = (Path("/sys/fs/cgroup", name).read_text() for name in ("memory.max", "memory.current"))
        cached = next(line for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
                      if line.startswith("inactive_file "))  # fmt: skip
        found.append(int(limit) - int(used) + int(cached.split()[1]))
    except (OSError, ValueError, StopIteration):  # no Linux, or no limit
        pass
    return min(found, default=None)


def warn_about_shared_memory(num_bytes):
    """Say so when torch's workers may need more of /dev/shm than is free; --worker-tensor needs none."""
    if not num_bytes or not os.path.ismount(SHARED_MEMORY):
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    if num_bytes > free:
        logger.warning(
            "the loader may need %.1f GB of %s, and %.1f GB are free: a worker may be killed by a bus error; use "
            "--worker-tensor, which needs none, fewer --workers, or start the container with a larger --shm-size",
            num_bytes / 1e9, SHARED_MEMORY, free / 1e9,
        )  # fmt: skip
