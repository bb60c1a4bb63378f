"""Progress on the standard error: a bar that leaves no trace on a terminal, now and then a line in a file."""

import math
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

SECONDS_IN_A_FILE = 30.0  # between two lines


def progress(items: Iterable | None = None, **options: Any) -> tqdm:
    """`items` in a bar of tqdm, with its `options`; what it came to is for its caller to log."""
    if sys.stderr.isatty():
        return tqdm(items, **{"leave": False, "dynamic_ncols": True} | options)
    interval = dict.fromkeys(("delay", "mininterval", "maxinterval"), SECONDS_IN_A_FILE)
    return _Lines(items, **options | interval | {"miniters": 1, "leave": False, "bar_format": None, "ncols": 0})


class _Lines(tqdm):
    """Where the standard error is no terminal: a whole line each SECONDS_IN_A_FILE, none for what is done sooner."""

    def display(self, msg=None, pos=None):
        self.fp.write(f"{self}\n")
        self.fp.flush()

    def clear(self, nolock=False):
        """Nothing has to go before a message is written."""

    def refresh(self, nolock=False, lock_args=None):
        """Without a lock tqdm asks for the bar again, below a message; else a line is due."""
        return None if nolock else super().refresh(nolock, lock_args)

    def close(self):
        self.delay = math.inf  # so that tqdm wipes nothing
        super().close()
