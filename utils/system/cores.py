"""How many CPU cores this process may use, and with how many threads torch does."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
_usual_threads: dict[int, int] = {}  # of torch, before `one_thread`, by process: a forked one has not its threads


def usable_cores():
    """Of the machine's cores those that the affinity of this process and the limits of its container leave; at least 1.

    A limit such as 3.5 cores counts as 4: that many processes find work.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = container_limit()
    return max(cores if limit is None else min(cores, math.ceil(limit)), 1)


def container_limit(cgroup=CGROUP, own=OWN_CGROUP):
    """How many cores' time the groups of this process may take, as a float; None without a limit."""
    limits = []
    for folder in cgroup_folders("", cgroup, own):
        with suppress(OSError, ValueError):  # "max 100000" or "350000 100000"
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            limits.append(quota / period)
    for folder in cgroup_folders("cpu", cgroup, own):
        with suppress(OSError, ValueError):  # a quota of -1 is none
            quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            limits += [quota / period] if quota > 0 else []
    return min(limits, default=None)


def cgroup_folders(controller: str, cgroup: Path = CGROUP, own: Path = OWN_CGROUP) -> Iterator[Path]:
    """The folders whose limits hold for this process, the outermost first; some may not exist.

    `cgroup` is where the kernel shows all groups, `own` the file that names those of this process. `controller` is one
    of version 1 (memory, cpu), empty for version 2. A container mostly sees its own limits in the first folder; jobs of
    a batch system or of systemd have theirs further down.
    """
    folder = cgroup / controller
    yield folder
    with suppress(OSError):
        for line in own.read_text(errors="surrogateescape").splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                for part in PurePosixPath(path).parts[1:]:
                    folder /= part
                    yield folder


def one_thread() -> None:
    """From here on torch has one thread for an operation on the host: several would wait for each other."""
    import torch  # which programs that only ask for cores do without

    _usual_threads.setdefault(os.getpid(), torch.get_num_threads())
    torch.set_num_threads(1)


@contextmanager
def usual_threads() -> Iterator[None]:
    """Within, torch has the threads that it had before `one_thread`, if that was called: for work of minutes."""
    if os.getpid() not in _usual_threads:
        yield
        return
    import torch

    now = torch.get_num_threads()
    torch.set_num_threads(_usual_threads[os.getpid()])
    try:
        yield
    finally:
        torch.set_num_threads(now)
