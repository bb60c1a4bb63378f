"""Hyper-parameters, one row each; their files; and the scaling that a run applies to the gains of the loss."""

import logging
import math
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import yaml

from utils.config.data_yaml import read_yaml
from utils.config.limits import SHARE, SHARE_BELOW_ONE, Range, above, at_least
from utils.system.files import atomic_write, printable, shown

logger = logging.getLogger(__name__)


class HyperParameter(NamedTuple):
    """One key of a hyper-parameter file."""

    meaning: str
    default: float | None  # where a file lacks the key; None: it may be missing
    range: Range
    mutation: tuple | None = None  # of --evolve: gain 0..1, lowest and highest value; None: not searched
    is_augmentation: bool = False


def _augmentation(meaning, limits, mutation):
    """One of stock's augmentations: off where a file lacks it, with a warning."""
    return HyperParameter(meaning, 0.0, limits, mutation, is_augmentation=True)


# The order counts: --evolve draws random numbers for the keys, and names the columns of its table, in this order.
HYPER_PARAMETERS = {
    "lr0": HyperParameter("learning rate after the warm-up", 0.01, above(0), (1, 1e-5, 1e-1)),
    "lrf": HyperParameter("learning rate at the end, as a share of lr0", 0.1, at_least(0), (1, 0.01, 1.0)),
    "momentum": HyperParameter("of SGD; beta1 of Adam", 0.937, SHARE_BELOW_ONE, (0.3, 0.6, 0.98)),
    "weight_decay": HyperParameter("L2 penalty per 64 images", 0.0005, at_least(0), (1, 0.0, 0.001)),
    "warmup_epochs": HyperParameter("epochs of warm-up", 3.0, at_least(0), (1, 0.0, 5.0)),
    "warmup_momentum": HyperParameter("momentum of the first iteration", 0.8, SHARE_BELOW_ONE, (1, 0.0, 0.95)),
    "warmup_bias_lr": HyperParameter("learning rate of biases, first iteration", 0.1, at_least(0), (1, 0.0, 0.2)),
    "warmup_min_iters": HyperParameter("fewest iterations of the warm-up, 1000 if missing", None, at_least(0)),
    "box": HyperParameter("weight of the box loss", 0.05, at_least(0), (1, 0.02, 0.2)),
    "cls": HyperParameter("weight of the class loss", 0.3, at_least(0), (1, 0.2, 4.0)),
    "cls_pw": HyperParameter("weight of positives in the class loss", 1.0, at_least(0), (1, 0.5, 2.0)),
    "obj": HyperParameter("weight of the objectness loss", 0.7, at_least(0), (1, 0.2, 4.0)),
    "obj_pw": HyperParameter("weight of positives in the objectness loss", 1.0, at_least(0), (1, 0.5, 2.0)),
    "iou_t": HyperParameter("unused; hyp files carry it", 0.2, SHARE, (0, 0.1, 0.7)),
    "anchor_t": HyperParameter("largest factor between a box side and its anchor's", 4.0, above(1), (1, 2.0, 8.0)),
    "anchors": HyperParameter("anchors per level of a new head", None, Range(1, 100), (2, 2.0, 10.0)),
    "fl_gamma": HyperParameter("focal loss exponent; 0: off", 0.0, Range(0, 10), (0, 0.0, 2.0)),
    "hsv_h": _augmentation("hue, +- share of the circle", SHARE, (1, 0.0, 0.1)),
    "hsv_s": _augmentation("saturation, +- share", SHARE, (1, 0.0, 0.9)),
    "hsv_v": _augmentation("brightness, +- share", SHARE, (1, 0.0, 0.9)),
    "degrees": _augmentation("rotation, +- degrees", Range(0, 360), (1, 0.0, 45.0)),
    "translate": _augmentation("shift, +- share of the side", SHARE, (1, 0.0, 0.9)),
    "scale": _augmentation("zoom, factor 1 - scale to 1.1 + scale", SHARE, (1, 0.0, 0.9)),
    "shear": _augmentation("shear, +- degrees", Range(0, 90, open_high=True), (1, 0.0, 10.0)),
    "perspective": _augmentation("perspective, +- this", Range(0, 0.01), (0, 0.0, 0.001)),
    "flipud": _augmentation("probability of an upside-down flip", SHARE, (1, 0.0, 1.0)),
    "fliplr": _augmentation("probability of a left-right flip", SHARE, (0, 0.0, 1.0)),
    "mosaic": _augmentation("probability of a mosaic of 4 or 9 images", SHARE, (1, 0.0, 1.0)),
    "mixup": _augmentation("probability of blending a mosaic with another one", SHARE, (1, 0.0, 1.0)),
    "copy_paste": _augmentation("share of the polygons pasted once more, mirrored", SHARE, (1, 0.0, 1.0)),
    "paste_in": _augmentation("probability of pasting objects from other images", SHARE, (1, 0.0, 1.0)),
    "loss_ota": HyperParameter("1: OTA assigns the targets, 0: the plain loss", 1, Range(0, 1, whole=True)),
}
DEFAULTS = {name: row.default for name, row in HYPER_PARAMETERS.items() if row.default is not None}
AUGMENTATION_KEYS = tuple(name for name, row in HYPER_PARAMETERS.items() if row.is_augmentation)


def load_hyp(path: str | Path) -> dict:
    """Hyper-parameters of a YAML file as a dict in the file's order; missing keys take DEFAULTS, named in one warning.

    Unknown keys are kept (they are written back to hyp.yaml) and named in a warning.

    Raises ValueError when the file is no YAML mapping of numbers, or a number is out of range.
    """
    hyp = read_yaml(path)
    where = printable(path)
    if hyp and not any(key in HYPER_PARAMETERS for key in hyp):  # a data yaml or the like, trained with defaults
        raise ValueError(f"{where} has none of the hyper-parameters (lr0, box, mosaic, ...) but {_listing(hyp)}; "
                         "give a file such as data/hyp.scratch.tiny.yaml")  # fmt: skip
    for key in HYPER_PARAMETERS:
        if key in hyp:
            hyp[key] = checked(key, hyp[key], f"{where}: {key}")

    missing = [key for key in DEFAULTS if key not in hyp]
    if missing:
        logger.warning("%s lacks %s; used: %s", where, _listing(missing),
                       ", ".join(f"{key}: {DEFAULTS[key]:g}" for key in missing))  # fmt: skip
    unknown = [key for key in hyp if key not in HYPER_PARAMETERS]
    if unknown:
        logger.warning("%s has keys that nothing here reads: %s", where, _listing(unknown))
    return hyp | {key: DEFAULTS[key] for key in missing}


def checked(key: str, value: object, where: str) -> float:
    """The value of a hyper-parameter as a number; ValueError, which begins with `where`, unless it is in its range."""
    number = _number(value, where)
    HYPER_PARAMETERS[key].range.check(where, number)
    return number


def _number(value, where):
    """A YAML scalar as a number; YAML itself reads 1e-3 (without a dot) as text."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float, str)) else value
    with suppress(ValueError, OverflowError):  # the second for whole numbers that no float can hold
        if math.isfinite(float(number)):
            return float(number) if isinstance(number, str) else number
    raise ValueError(f"{where} has to be a number, not {shown(value)}")


def _listing(keys):
    return printable(", ".join(map(str, keys)))[:500]


def save_hyp(hyp: dict, path: str | Path) -> None:
    """Write hyper-parameters as YAML, in their order."""
    with atomic_write(path, "w") as file:
        yaml.safe_dump(hyp, file, sort_keys=False)


def scale_hyp(hyp: dict, num_layers: int, num_classes: int, image_size: int, label_smoothing: float = 0.0) -> dict:
    """A new dict with the gains that the losses use: balanced for the layers, classes and image size of this run.

    `image_size` is the training size in pixels (one number). The reference point is 3 layers, 80 classes, 640 px.
    """
    return hyp | {
        "box": hyp["box"] * (3.0 / num_layers),
        "cls": hyp["cls"] * (num_classes / 80.0 * 3.0 / num_layers),
        "obj": hyp["obj"] * ((image_size / 640) ** 2 * 3.0 / num_layers),
        "label_smoothing": label_smoothing,
    }
