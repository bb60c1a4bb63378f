"""How many CPU cores this process may use."""

import math
import os
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores():
    """Of the machine's cores those that the affinity of this process and the limits of its container leave; at least 1.

    A limit such as 3.5 cores counts as 4: that many processes find work.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = container_limit()
    return max(cores if limit is None else min(cores, math.ceil(limit)), 1)


def container_limit(cgroup=CGROUP):
    """Cores of the CPU time that the container `cgroup` may take, as a float; None without a limit."""
    with suppress(OSError, ValueError):  # cgroup version 2: "max 100000" or "350000 100000"
        quota, period = (cgroup / "cpu.max").read_text().split()
        return int(quota) / int(period) if quota != "max" else None
    with suppress(OSError, ValueError):  # version 1; a quota of -1 is none
        quota, period = (int((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else None
    return None
