"""Memory that processes share, and how much of it there is."""

import ctypes
import logging
import mmap
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np

from utils.system.cores import CGROUP, OWN_CGROUP, cgroup_folders

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
# For both versions of cgroup: controller, limit, use, and the part of the use that is cached files, which can go.
MEMORY_LIMITS = (("", "memory.max", "memory.current", "inactive_file"),
                 ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))  # fmt: skip

# For glibc's mallopt: what is larger than M_MMAP_THRESHOLD is taken from the system each time; what is free at the end
# of a heap goes back to it if it is more than M_TRIM_THRESHOLD.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MALLOC_LIMITS = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20}  # bytes

# What libraries say, beside torch's own class of error, where the GPU or the host has no memory left.
FULL_SIGNS = ("CUDA error: out of memory", "Triton Error [CUDA]: out of memory", "STATUS_ALLOC_FAILED",
              "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")  # fmt: skip


def is_out_of_memory(error):
    """Whether an error of torch or of a library of the GPU says that the GPU or the host had no memory left."""
    return type(error).__name__ == "OutOfMemoryError" or any(sign in str(error) for sign in FULL_SIGNS)


def shared_array(shape, dtype):
    """Zeros in memory that processes forked later share. It has no name and no file: nothing of it can be left."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype, count=int(np.prod(shape))).reshape(shape)


def give_back(array):
    """Take the pages of a `shared_array` away, which other processes may map for long; whoever reads it sees zeros."""
    while not isinstance(array, mmap.mmap):
        array = array.obj if isinstance(array, memoryview) else array.base
    address = ctypes.c_void_p(np.frombuffer(array, np.uint8).ctypes.data)
    with suppress(AttributeError, OSError):  # not Linux
        # Not by `array.madvise`, which keeps Python's lock: a gigabyte takes a tenth of a second.
        ctypes.CDLL(None).madvise(address, ctypes.c_size_t(len(array)), mmap.MADV_REMOVE)


def keep_freed_memory():
    """Let glibc keep what threads free, for what they allocate next.

    Otherwise each image of a megabyte is taken from the system, page by page, and given back: 40 % of the time of
    decoding; and all threads, and the driver of the GPU, wait for each other at it.
    """
    with suppress(AttributeError, OSError):  # another library of C
        for option, num_bytes in MALLOC_LIMITS.items():
            ctypes.CDLL(None).mallopt(option, num_bytes)


def check_memory(num_bytes, what, advice):
    """Raise ValueError when `num_bytes` are more than is free; `what` says who needs {}, `advice` what to do."""
    available = available_memory()
    if available is not None and num_bytes > available:
        raise ValueError(
            f"{what.format(describe_bytes(num_bytes))}, and {describe_bytes(available)} of memory are free; {advice}"
        )


def describe_bytes(num_bytes):
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def available_memory(cgroup=CGROUP, own=OWN_CGROUP):
    """Bytes that this process can have without swapping, within the limits of its groups; None where that is unknown.

    `cgroup`, `own` as in `cores.cgroup_folders`.
    """
    found = []
    with suppress(OSError, ValueError):  # no Linux
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for controller, *names, cached in MEMORY_LIMITS:
        for folder in cgroup_folders(controller, cgroup, own):
            with suppress(OSError, ValueError, KeyError):  # another version, or no limit
                limit, used = (int((folder / name).read_text()) for name in names)
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                found.append(limit - used + int(statistics[cached]))
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
