"""What a number may be, and the sentence about one that is out of range.

A range bars what cannot work or makes no sense; what is merely unwise is the user's business.
"""

import math
from typing import NamedTuple

from utils.system.files import shown


class Range(NamedTuple):
    """`low` to `high`, both included unless `open_low` or `open_high`; `whole`: no fractions."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    whole: bool = False

    def check(self, name: str, value) -> None:
        """Raise ValueError when `value`, or a number in the list `value`, lies outside; None and text pass."""
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, (int, float)) and not isinstance(number, bool) and not self.holds(number):
                raise ValueError(f"{name} {shown(number)} is {self.fault(number)}: it has to be {self}")

    def holds(self, value: float) -> bool:
        """Whether the number `value` is finite and inside."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below and _fits(value) and not (self.whole and value % 1)

    def fault(self, value: float) -> str:
        """What is wrong with a `value` that the range does not hold."""
        if value < self.low or (self.open_low and value == self.low):
            return "too small"
        if value >= self.high:
            return "too large"
        return "not usable" if _fits(value) or isinstance(value, float) else "too large for 64 bits"

    def __str__(self):
        low = "" if self.low == -math.inf else f"{'above' if self.open_low else 'at least'} {self.low:g}"
        high = "" if self.high == math.inf else f"{'below' if self.open_high else 'at most'} {self.high:g}"
        return f"{'a whole number, ' if self.whole else ''}{' and '.join(filter(None, (low, high)))}"


def _fits(value):
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 2**63


def at_least(low: float) -> Range:
    """From `low`, included, upwards."""
    return Range(low)


def above(low: float) -> Range:
    """From `low`, excluded, upwards."""
    return Range(low, open_low=True)


SHARE = Range(0, 1)
SHARE_BELOW_ONE = Range(0, 1, open_high=True)
SIDE = Range(1, 16000)  # pixels; OpenCV cannot warp a mosaic of twice that
SEED = Range(0, 2**63 - 1)
