"""Read a model configuration: a YAML mapping whose strings are looked up, never evaluated as code."""

import ast
import logging
import re
from copy import deepcopy
from pathlib import Path

from torch import nn

from utils.config.data_yaml import is_bounded, read_yaml
from utils.system.files import shown

logger = logging.getLogger(__name__)

ACTIVATIONS = {
    name: getattr(nn, name)
    for name in ("LeakyReLU", "SiLU", "ReLU", "ReLU6", "Hardswish", "Mish", "GELU", "Identity", "Sigmoid")
}
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
CALL = re.compile(r"(?:torch\.)?nn\.(\w+)\((.*)\)")
WORD = re.compile(r"[A-Za-z_]\w*")
MAX_CHANNELS = 100_000  # classes or channels; more are a slip of the finger that would fill the memory
MAX_INPUTS = 1000  # channels of an image
MAX_REPEATS = 1000  # of a layer
MAX_LAYERS = 5000  # repetitions and heads counted; the largest model of the family has 300
MAX_WEIGHTS = 700_000_000  # of a model; the largest one of the family has 166 million
MAX_ANCHORS = 100  # for a level
MAX_BASES = 3  # files that a configuration stands on
MAX_SIDE = 1e6  # of an anchor, pixels
REQUIRED_KEYS = ("nc", "depth_multiple", "width_multiple", "anchors", "backbone", "head")


def read_cfg(cfg, ch=3, nc=None, anchors=None):
    """The configuration `cfg` (path of a YAML file, or a dict) as a new, complete and checked dict.

    A file may stand on another one beside it: `base: yolov7-tiny.yaml`, and then only what differs.
    `nc` and `anchors` (their number per level) override the file; `ch` input channels are added unless the file has its
    own. Raises ValueError if the file is missing, is not YAML, is not a mapping, or lacks or misuses a key.
    """
    where = describe(cfg)
    if isinstance(cfg, dict) and not is_bounded(cfg):
        raise ValueError(f"{where} has too many entries: it is damaged, give another one")
    content = deepcopy(cfg) if isinstance(cfg, dict) else _load_with_base(Path(cfg), where)
    missing = [key for key in REQUIRED_KEYS if content.get(key) is None]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}; add it as in cfg/training/yolov7-tiny.yaml")
    content.setdefault("ch", ch)
    if nc and nc != content["nc"]:
        logger.info("%s: %s class%s instead of %s", where, nc, "" if nc == 1 else "es", content["nc"])
        content["nc"] = nc
    if anchors:
        logger.info("%s: %s anchors per level instead of its own", where, anchors)
        content["anchors"] = round(anchors) if _is_number(anchors) else anchors
    _check_values(content, where)
    return content


def _check_values(content, where):
    for key in ("backbone", "head"):
        if not isinstance(content[key], list):
            raise ValueError(f"{where}: {key} must be a list of rows [from, number, module, args]")
    for key in ("depth_multiple", "width_multiple"):
        if not _is_number(content[key]) or content[key] <= 0:
            raise ValueError(f"{where}: {key} must be a positive number, not {shown(content[key])}")
    for key, meaning, most in (
        ("nc", "classes", MAX_CHANNELS), ("ch", "input channels", MAX_INPUTS), ("heads", "detection heads", MAX_LAYERS),
    ):  # fmt: skip
        if key in content and (not is_count(content[key]) or content[key] > most):
            raise ValueError(f"{where}: {key} must be the number of {meaning}, not {shown(content[key])}")
    if not is_count(content["anchors"]) and not isinstance(content["anchors"], list):
        raise ValueError(f"{where}: anchors must be lists of pixels or their number, not {shown(content['anchors'])}")


def describe(cfg):
    """How a message calls the configuration `cfg`, a path or a dict."""
    return "the model configuration" if isinstance(cfg, dict) else f"model configuration {cfg}"


def _load_with_base(path, where, depth=0):
    """The content of a file; what it says goes over that of the file `base`, `last_row` over the last row there."""
    if not path.is_file():
        raise ValueError(f"{where} does not exist; give the path of a YAML file, such as cfg/training/yolov7.yaml")
    content = read_yaml(path)
    if "base" not in content:
        return content
    base = content.pop("base")
    if not isinstance(base, str) or depth == MAX_BASES:
        raise ValueError(f"{where}: base must be the name of another model configuration, not {shown(base)}")
    below = _load_with_base(path.parent / base, f"{where}, base {base}", depth + 1)
    last_row = content.pop("last_row", None)
    if last_row is not None and isinstance(below.get("head"), list):
        below["head"] = [*below["head"][:-1], last_row]
    return below | content


def resolve_argument(argument, names):
    """The value of one argument of a row.

    Numbers, booleans and lists are themselves. Of the strings, `None`, `True`, `False` and the keys of `names` (nc,
    anchors) are replaced, a number is read as such, `nn.LeakyReLU(0.1)` and its like become a new module, and a plain
    word stays a string. Raises ValueError for anything else.
    """
    if not isinstance(argument, str):
        return argument
    text = argument.strip()
    constants = {"None": None, "True": True, "False": False, **names}
    if text in constants:
        return constants[text]
    if NUMBER.fullmatch(text):
        return ast.literal_eval(text)
    call = CALL.fullmatch(text)
    if call:
        return _activation(text, *call.groups())
    if WORD.fullmatch(text):
        return text
    known = "a number, a word, nor an activation such as nn.LeakyReLU(0.1)"
    raise ValueError(f"argument {shown(argument)} is neither {known}")


def _activation(text, name, inner):
    """A new activation module from `nn.name(inner)`, where `inner` holds literals, positional or as name=value."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {shown(text)}; known are {', '.join('nn.' + key for key in ACTIVATIONS)}")
    try:
        values = ast.parse(f"f({inner})", mode="eval").body
        positional = [ast.literal_eval(value) for value in values.args]
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in values.keywords}
        return ACTIVATIONS[name](*positional, **named)
    except (SyntaxError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"the arguments of {shown(text)} are not understood: {shown(str(error))}") from error


def check_row(row):
    """(sources, number, module name, args) of a row; raises ValueError unless it is [from, number, module, args]."""
    if not isinstance(row, list) or len(row) != 4:
        raise ValueError("a row is [from, number, module, args]")
    sources, number, name, args = row
    sources = sources if isinstance(sources, list) else [sources]
    if not sources or not all(type(source) is int for source in sources):
        raise ValueError(f"from must be a layer index or a list of them, not {shown(row[0])}")
    if not is_count(number):
        raise ValueError(f"number must be a positive integer, not {shown(number)}")
    if not isinstance(name, str) or not isinstance(args, list):
        raise ValueError("the module must be a name and args a list")
    return sources, number, name, args


def level_anchors(anchors, num_levels):
    """One flat list [w, h, w, h, ...] in pixels per level, from such lists or from the number of anchors per level.

    A number gives dummy values, to be replaced by auto-anchor. Raises ValueError if the lists do not fit the levels.
    """
    if is_count(anchors) and anchors <= MAX_ANCHORS:
        return [list(range(2 * anchors)) for _ in range(num_levels)]
    if not isinstance(anchors, list) or not all(isinstance(level, list) for level in anchors):
        raise ValueError(f"anchors must be a list of lists of pixels, or their number per level, not {shown(anchors)}")
    lengths = {len(level) for level in anchors}
    if len(anchors) != num_levels or len(lengths) != 1 or min(lengths) < 2 or min(lengths) % 2:
        wanted = f"{num_levels} levels need {num_levels} equally long anchor lists w,h,w,h,..."
        raise ValueError(f"{wanted}, not {shown(anchors)}")
    if not all(_is_number(side) and 0 < side < MAX_SIDE for level in anchors for side in level):
        raise ValueError(f"anchors must be numbers of pixels above 0 and below {MAX_SIDE:g}, not {shown(anchors)}")
    return anchors


def is_count(value):
    """Whether `value` is a positive integer (and not a boolean)."""
    return type(value) is int and value > 0


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)
