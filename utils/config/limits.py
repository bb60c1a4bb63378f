"""What numbers may be: one row for each numeric option and hyper-parameter, one sentence for each that is out of range.

A row bars what cannot work or makes no sense; what is merely unwise is the user's business.
"""

import math
from typing import NamedTuple


class Range(NamedTuple):
    """`low` to `high`, both included unless `open_low` or `open_high`; `whole`: no fractions."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    whole: bool = False

    def holds(self, value):
        """Whether the number `value` is finite and inside."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below and math.isfinite(value) and not (self.whole and value % 1)

    def fault(self, value):
        """What is wrong with a `value` that the range does not hold."""
        if value < self.low or (self.open_low and value == self.low):
            return "too small"
        return "too large" if value >= self.high else "not usable"

    def __str__(self):
        low = "" if self.low == -math.inf else f"{'above' if self.open_low else 'at least'} {self.low:g}"
        high = "" if self.high == math.inf else f"{'below' if self.open_high else 'at most'} {self.high:g}"
        return f"{'a whole number, ' if self.whole else ''}{' and '.join(filter(None, (low, high)))}"


def at_least(low, **options):
    """From `low`, included, upwards."""
    return Range(low, **options)


def above(low):
    """From `low`, excluded, upwards."""
    return Range(low, open_low=True)


SHARE = Range(0, 1)
SHARE_BELOW_ONE = Range(0, 1, open_high=True)
MAX_SIDE = 16000  # pixels; OpenCV cannot warp a mosaic of twice that
SIDE = Range(1, MAX_SIDE)
SEED = Range(0, 2**63 - 1)

TRAIN_OPTIONS = {
    "epochs": at_least(1),
    "batch_size": at_least(-1),
    "img_size": SIDE,
    "freeze": at_least(0),
    "label_smoothing": SHARE_BELOW_ONE,
    "evolve": at_least(0),
    "workers": at_least(0),
    "micro_batch_size": at_least(0),
    "prefetch_factor": at_least(1),
    "loader_timeout": at_least(1),
    "seed": SEED,
    "ota_last": at_least(1),
    "test_batch_size": at_least(1),
    "sync_interval": at_least(1),
    "heads": at_least(0),
    "subset_size": at_least(0),
    "subset_seed": SEED,
    "max_iter": at_least(0),
    "eval_interval": at_least(0),
    "patience": at_least(0),
    "save_period": at_least(-1),
}
TEST_OPTIONS = {
    "img_size": SIDE,
    "batch_size": at_least(1),
    "conf_thres": SHARE,
    "iou_thres": SHARE,
}
HYP = {
    "lr0": above(0),
    "lrf": at_least(0),
    "momentum": SHARE_BELOW_ONE,
    "weight_decay": at_least(0),
    "warmup_epochs": at_least(0),
    "warmup_momentum": SHARE_BELOW_ONE,
    "warmup_bias_lr": at_least(0),
    "warmup_min_iters": at_least(0),
    "box": at_least(0),
    "cls": at_least(0),
    "cls_pw": at_least(0),
    "obj": at_least(0),
    "obj_pw": at_least(0),
    "iou_t": SHARE,
    "anchor_t": above(1),
    "anchors": Range(1, 100),
    "fl_gamma": at_least(0),
    "hsv_h": SHARE,
    "hsv_s": SHARE,
    "hsv_v": SHARE,
    "degrees": Range(0, 360),
    "translate": SHARE,
    "scale": SHARE,
    "shear": Range(0, 90, open_high=True),
    "perspective": Range(0, 0.01),
    "flipud": SHARE,
    "fliplr": SHARE,
    "mosaic": SHARE,
    "mixup": SHARE,
    "copy_paste": SHARE,
    "paste_in": SHARE,
    "loss_ota": Range(0, 1, whole=True),
}


def check(values, limits, name_in_words=str):
    """Raise ValueError for the first of `values` (a mapping) that lies outside its row of `limits`.

    A list is checked number by number; None, text, and what has no row pass.
    """
    for name, limit in limits.items():
        value = values.get(name)
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, (int, float)) and not isinstance(number, bool) and not limit.holds(number):
                raise ValueError(f"{name_in_words(name)} {number} is {limit.fault(number)}: it has to be {limit}")


def option_name(name):
    """How the command line spells the option that the parser calls `name`."""
    return f"--{name.replace('_', '-')}"
