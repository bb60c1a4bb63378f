"""Hyper-parameter files: reading with defaults, checking, and the scaling that a run applies to the loss gains."""

import logging
import math
from contextlib import suppress
from pathlib import Path

import yaml

from utils.config import limits
from utils.config.data_yaml import read_yaml
from utils.system.files import printable, shown

logger = logging.getLogger(__name__)

# What a key means when a file lacks it: the values of data/hyp.scratch.p5.yaml, with augmentation switched off.
DEFAULTS = {
    "lr0": 0.01,
    "lrf": 0.1,
    "momentum": 0.937,
    "weight_decay": 0.0005,
    "warmup_epochs": 3.0,
    "warmup_momentum": 0.8,
    "warmup_bias_lr": 0.1,
    "box": 0.05,
    "cls": 0.3,
    "cls_pw": 1.0,
    "obj": 0.7,
    "obj_pw": 1.0,
    "iou_t": 0.2,
    "anchor_t": 4.0,
    "fl_gamma": 0.0,
    "hsv_h": 0.0,
    "hsv_s": 0.0,
    "hsv_v": 0.0,
    "degrees": 0.0,
    "translate": 0.0,
    "scale": 0.0,
    "shear": 0.0,
    "perspective": 0.0,
    "flipud": 0.0,
    "fliplr": 0.0,
    "mosaic": 0.0,
    "mixup": 0.0,
    "copy_paste": 0.0,
    "paste_in": 0.0,
    "loss_ota": 1,
}
# Keys that a file may have beside these: anchors per level for a new head; our floor under the warm-up length.
OPTIONAL = ("anchors", "warmup_min_iters")


def load_hyp(path):
    """Hyper-parameters of a YAML file as a dict in the file's order; missing keys take DEFAULTS, named in one warning.

    Unknown keys are kept (they are written back to hyp.yaml) and named in a warning.

    Raises ValueError when the file is no YAML mapping of numbers, or a number is out of range.
    """
    hyp = read_yaml(path)
    where = printable(path)
    for key in (*DEFAULTS, *OPTIONAL):
        if key in hyp:
            hyp[key] = _number(hyp[key], key, where)
    limits.check(hyp, limits.HYP, lambda key: f"{where}: {key}")

    missing = [key for key in DEFAULTS if key not in hyp]
    if missing:
        logger.warning("%s lacks %s; used: %s", where, _listing(missing), {key: DEFAULTS[key] for key in missing})
    unknown = [key for key in hyp if key not in DEFAULTS and key not in OPTIONAL]
    if unknown:
        logger.warning("%s has keys that nothing here reads: %s", where, _listing(unknown))
    return hyp | {key: value for key, value in DEFAULTS.items() if key not in hyp}


def _number(value, key, where):
    """A YAML scalar as a number; YAML itself reads 1e-3 (without a dot) as text."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float, str)) else value
    with suppress(ValueError, OverflowError):  # the second for whole numbers that no float can hold
        if math.isfinite(float(number)):
            return float(number) if isinstance(number, str) else number
    raise ValueError(f"{where}: {key} has to be a number, not {shown(value)}")


def _listing(keys):
    return printable(", ".join(map(str, keys)))[:500]


def save_hyp(hyp, path):
    """Write hyper-parameters as YAML, in their order."""
    Path(path).write_text(yaml.safe_dump(hyp, sort_keys=False), encoding="utf-8")


def scale_hyp(hyp, num_layers, num_classes, image_size, label_smoothing=0.0):
    """A new dict with the gains that the losses use: balanced for the layers, classes and image size of this run.

    `image_size` is the training size in pixels (one number). The reference point is 3 layers, 80 classes, 640 px.
    """
    return hyp | {
        "box": hyp["box"] * (3.0 / num_layers),
        "cls": hyp["cls"] * (num_classes / 80.0 * 3.0 / num_layers),
        "obj": hyp["obj"] * ((image_size / 640) ** 2 * 3.0 / num_layers),
        "label_smoothing": label_smoothing,
    }
