"""Progress bars on the standard error: they leave no trace when they are done, and are rare where nobody watches."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

SECONDS_IN_A_FILE = 30.0  # between two lines of a bar that goes into a file, or to a program


def progress(items: Iterable | None = None, **options: Any) -> tqdm:
    """`items` in a bar of tqdm, with its `options`; what it came to is for its caller to log."""
    interval = {} if sys.stderr.isatty() else {"mininterval": SECONDS_IN_A_FILE, "maxinterval": SECONDS_IN_A_FILE}
    return tqdm(items, **{"leave": False, "dynamic_ncols": True} | interval | options)
