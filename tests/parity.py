"""Compare a value with its golden twin and keep the books, so that the suite can print one parity table at its end.

The golden arrays live in tests/golden/{model,data,train}; the variable YOLOV7FAST_GOLDEN may name a larger collection
of the same layout.
"""

import os
from collections import defaultdict
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

GOLDEN = Path(os.environ.get("YOLOV7FAST_GOLDEN", Path(__file__).parent / "golden"))


@dataclass
class Tally:
    """What was compared in one group of golden arrays."""

    exact: int = 0
    within: int = 0
    largest_difference: float = 0.0
    where: str = ""

    def add(self, other):
        self.exact += other.exact
        self.within += other.within
        if other.largest_difference > self.largest_difference:
            self.largest_difference, self.where = other.largest_difference, other.where


TALLIES = defaultdict(Tally)


def check(group, name, actual, expected, rtol=0.0, atol=0.0, max_outlier_share=0.0):
    """Assert that `actual` equals `expected` (array-likes of one shape) within |a - e| <= atol + rtol * |e|.

    With `rtol` and `atol` 0 the comparison is exact; NaN equals NaN. `max_outlier_share` allows that share of the
    elements to lie outside. `group` is a row of the parity table, `name` says which array failed.
    """
    actual, expected = np.asarray(_numpy(actual)), np.asarray(_numpy(expected))
    assert actual.shape == expected.shape, f"{group}/{name}: shape {actual.shape}, golden {expected.shape}"
    tally = TALLIES[group]
    if actual.dtype.kind in "USO" or expected.dtype.kind in "USO":
        assert (actual == expected).all(), f"{group}/{name}: {actual} is not {expected}"
        tally.exact += 1
        return
    if np.array_equal(actual, expected, equal_nan=actual.dtype.kind == "f" and expected.dtype.kind == "f"):
        tally.exact += 1
        return
    actual, expected = np.atleast_1d(actual), np.atleast_1d(expected)
    difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    difference[np.isnan(actual.astype(np.float64)) & np.isnan(expected.astype(np.float64))] = 0
    outside = ~(difference <= atol + rtol * np.abs(expected.astype(np.float64)))
    share = outside.mean()
    assert share <= max_outlier_share, (
        f"{group}/{name}: {outside.sum()} of {outside.size} values differ, at most by {np.nanmax(difference):.3g} "
        f"(allowed {atol:g} + {rtol:g} |golden|, share {max_outlier_share:g})"
    )
    tally.within += 1
    if np.nanmax(difference) > tally.largest_difference:
        tally.largest_difference, tally.where = float(np.nanmax(difference)), name


def _numpy(value):
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def as_rows():
    """The books as (group, *fields of its Tally), for another process."""
    return [(group, *astuple(tally)) for group, tally in TALLIES.items()]


def add_rows(rows):
    """Add the books of another process."""
    for group, *fields in rows:
        TALLIES[group].add(Tally(*fields))


def table():
    """The parity table as lines of text, one row a group; empty if nothing was compared."""
    if not TALLIES:
        return []
    lines = [f"{'golden group':<28}{'arrays':>8}{'exact':>8}{'within':>8}{'largest difference':>20}  where"]
    for group, t in sorted(TALLIES.items()):
        lines.append(
            f"{group:<28}{t.exact + t.within:>8}{t.exact:>8}{t.within:>8}{t.largest_difference:>20.3g}  {t.where}"
        )
    return lines
