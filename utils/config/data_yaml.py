"""The data yaml: where the images are and what the classes are called.

Keys: `train`, `val`, `test` (each a folder, a list file, or a list of those), `names` (list, or dict with the keys
0, 1, 2, ...), and optionally `nc`, `path` (what the entries are relative to), `annotations` (COCO json of `val`).

An entry is looked for in this order, and the first place that exists is taken:
1. below `path`, if that key is there; a relative `path` counts from the yaml's folder, then from the working directory;
2. as written, from the working directory (stock behaviour: the only place);
3. from the yaml's own folder;
4. from the yaml's own folder without the leading `../` (Roboflow writes `../train/images` beside `train/`).
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import yaml

from utils.system.files import counted, printable, read_text, shown, stand_in

logger = logging.getLogger(__name__)

# Of brackets: PyYAML looks at all that are open for each further one, for seconds where they are thousands.
MAX_DEPTH = 200
MAX_ENTRIES = 200_000  # a few lines with aliases can stand for more entries than fit into memory

# YAML 1.1 makes 8 of 010, 1.1 of 1.10, 750 of 12:30, true of yes, and a date of 2024-01-05. A class or a folder of that
# name keeps its text; `null`, `~` and nothing say that a path is not there, but may be the name of a class.
_STR = "tag:yaml.org,2002:str"
_TYPES = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "timestamp", "value", "merge"))
PATH_TEXT = _TYPES
NAME_TEXT = _TYPES | {"tag:yaml.org,2002:null"}
PATH_KEYS = ("path", "train", "val", "test", "annotations", "download")
DATA_TEXTS = dict.fromkeys(PATH_KEYS, PATH_TEXT) | {"names": NAME_TEXT}


@dataclass(frozen=True)
class DataConfig:
    """A data yaml with its paths resolved."""

    train: str | list | None
    val: str | list | None
    test: str | list | None
    nc: int
    names: list  # nc strings
    is_coco: bool  # COCO itself: predictions get COCO's 91 category numbers and a COCO score
    annotations: str | None  # COCO json of the val split
    keypoints: tuple | None = None  # kpt_shape (number of keypoints, 2 or 3 numbers each) where labels are of poses


def load_data_yaml(path: str | Path, single_cls: bool = False, needed: Sequence = ("train", "val")) -> DataConfig:
    """Read the data yaml at `path`; `single_cls` merges all classes into one.

    The entries named in `needed` must exist; the others are resolved if they do. Raises ValueError, naming the file,
    for broken yaml, missing entries (with every place that was tried), and for `nc` and `names` that disagree. Nothing
    is downloaded and no command in the file is run.
    """
    raw = read_yaml(path, DATA_TEXTS)
    nc, names = _classes(path, raw, single_cls)
    if repeated := repeated_names(names):
        logger.warning("%s: %s", printable(path), repeated)
    return DataConfig(
        **{key: _resolve_key(path, raw, key, key in needed) for key in ("train", "val", "test")},
        nc=nc,
        names=names,
        is_coco=str(path).endswith("coco.yaml"),  # stock behaviour: the name decides
        annotations=_resolve_key(path, raw, "annotations", False),
        keypoints=_keypoints(path, raw.get("kpt_shape")),
    )


def repeated_names(names: Sequence) -> str:
    """A sentence about class names that several classes share; empty if there are none."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if not repeated:
        return ""
    ids = " and ".join(str(index) for index, name in enumerate(names) if name == repeated[0])
    more = f" (and {len(repeated) - 1} more such names)" if len(repeated) > 1 else ""
    return f"{shown(repeated[0])} is the name of the classes {ids}{more}; give each class a name of its own"


def check_same_names(data: DataConfig, names: Sequence | None, source: str, strict: bool, same_data: bool):
    """Warn when `names`, the classes of the model in the file `source`, are not those of the data yaml at their ids.

    With `same_data` (a test, a resumed run) every other name counts, else only one that is another id's name here: a
    model may be trained further on other classes. With `strict` it is a ValueError. Nothing is said of another number
    of classes, nor of a model whose classes have no names but their numbers.
    """
    theirs = [str(name) for name in names] if isinstance(names, (list, tuple)) else []
    if len(theirs) != data.nc or theirs in ([str(c) for c in range(data.nc)], data.names):
        return
    pairs = [(c, old, new) for c, (old, new) in enumerate(zip(theirs, data.names, strict=True)) if old != new]
    moved = [(c, old, new) for c, old, new in pairs if old in data.names]
    if not moved and not same_data:
        return
    c, old, new = (moved or pairs)[0]
    where = f", which calls class {data.names.index(old)} so" if moved else ""
    problem = (
        f"{printable(source)}: class {c} is called {shown(old)} by the model but {shown(new)} by the data yaml{where} "
        f"({len(pairs)} of {data.nc} names differ); put `names` and the class ids of the labels in the model's order"
    )
    if strict:
        raise ValueError(f"--strict-data: {problem}")
    logger.warning("%s", problem)


def read_yaml(path: str | Path, texts: dict | None = None) -> dict:
    """The mapping in a yaml file; ValueError with file and line if it is not one.

    `texts` are keys, at any depth, of which the values are text whatever YAML takes them for: PATH_TEXT or NAME_TEXT.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise ValueError(f"{printable(path)}: cannot be read ({error.strerror})") from error
    if kind := stand_in(text):
        raise ValueError(f"{printable(path)} is {kind}")
    try:
        if _bracket_depth(text) > MAX_DEPTH:
            raise RecursionError
        root = _compose(text)
        root = _with_texts(root, texts, frozenset(), {}) if root and texts else root
        content = yaml.SafeLoader("").construct_document(root) if root else None
    except Exception as error:  # PyYAML lets through whatever int(), float() and the like raise for a value
        raise ValueError(f"{printable(path)}:{_line_of(error, text)}: not valid yaml: {_problem(error)}") from error
    if not is_bounded(content):
        raise ValueError(f"{printable(path)}: more than {MAX_ENTRIES} entries once its *aliases are written out")
    if not isinstance(content, dict):
        found = "nothing, the file is empty" if content is None else type(content).__name__
        raise ValueError(f"{printable(path)}: expected `key: value` lines, found {found}")
    for key, line in _repeated_keys(root):
        logger.warning("%s:%d: %s stands here once more; the last one counts", printable(path), line, shown(key))
    return content


def _compose(text):
    """The nodes of a yaml text: by libyaml, which takes a tenth of the time; PyYAML alone says best what is wrong."""
    with suppress(Exception):
        return yaml.compose(text, yaml.CSafeLoader)
    return yaml.compose(text, yaml.SafeLoader)


def _with_texts(node, texts, tags, copies):
    """A copy of a yaml node in which scalars of `tags`, and below the keys `texts` those of their tags, are text."""
    if isinstance(node, yaml.ScalarNode):
        return yaml.ScalarNode(_STR, node.value, node.start_mark, node.end_mark) if node.tag in tags else node
    if (id(node), tags) in copies:  # aliases lead to the same node, perhaps to one that holds them
        return copies[id(node), tags]
    copy = copies[id(node), tags] = type(node)(node.tag, [], node.start_mark, node.end_mark)
    if isinstance(node, yaml.SequenceNode):
        copy.value += [_with_texts(entry, texts, tags, copies) for entry in node.value]
    else:
        for key, value in node.value:
            of_value = texts.get(key.value, tags) if isinstance(key, yaml.ScalarNode) else tags
            if tags and isinstance(key, yaml.ScalarNode) and re.fullmatch(r"0\d+", key.value):  # an id, not octal
                key = yaml.ScalarNode(_STR, key.value, key.start_mark, key.end_mark)
            copy.value.append((key, _with_texts(value, texts, of_value, copies)))
    return copy


def _repeated_keys(root):
    """(key, line) of every key that its mapping has already; PyYAML takes the last one without a word."""
    waiting, seen, found = [root], set(), []
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.ScalarNode) or id(node) in seen:  # aliases lead to the same node
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        waiting += [value for _, value in node.value]
        count = Counter()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]:
            count[key.tag, key.value] += 1
            if count[key.tag, key.value] > 1:
                found.append((key.value, key.start_mark.line + 1))
    return found


def _bracket_depth(text):
    """How deep brackets are nested at most, those in quotes counted too."""
    return max(accumulate((1 if bracket in "[{" else -1 for bracket in re.findall(r"[\[\]{}]", text)), initial=0))


def is_bounded(content):
    """Whether lists and mappings hold at most MAX_ENTRIES things, those counted again that are named again."""
    waiting, count = [content], 0
    while waiting and count <= MAX_ENTRIES:
        entry = waiting.pop()
        if isinstance(entry, (list, tuple, dict)):
            count += len(entry)
            waiting += entry.values() if isinstance(entry, dict) else entry
    return count <= MAX_ENTRIES


def _line_of(error, text):
    mark = getattr(error, "problem_mark", None)
    return mark.line + 1 if mark else text.count("\n", 0, getattr(error, "position", 0)) + 1


def _problem(error):
    if isinstance(error, yaml.reader.ReaderError):
        return f"{error.reason}; save the file as UTF-8 text"
    if isinstance(error, RecursionError):
        return "brackets nested too deeply"
    problem = str(getattr(error, "problem", None) or error)
    if "unknown escape character" in problem or "expected escape sequence" in problem:
        problem += " (a backslash inside double quotes? use single quotes, or /)"
    return shown(problem)[1:-1]


def _classes(path, raw, single_cls):
    """(nc, names) from the keys of the same name."""
    names = _names(path, raw.get("names"))
    if single_cls:
        return 1, names if len(names) == 1 else ["item"]
    found = raw.get("nc", len(names))
    nc = _whole_number(found)
    if nc is None or nc < 1:
        raise ValueError(f"{printable(path)}: nc must be a whole number of at least 1, found {shown(found)}")
    if nc != len(names):
        raise ValueError(
            f"{printable(path)}: nc is {shown(nc)} but names has {counted(len(names), 'entry', 'entries')}; correct one"
        )
    return nc, names


def _whole_number(value):
    """An int that a yaml may also write as 2.0 or '2'; None for anything else. The int may be beyond any float."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _names(path, names):
    """Class names as a list of strings, from a list or from a dict with the keys 0, 1, 2, ..."""
    if isinstance(names, dict):
        by_id = {}
        for key, name in names.items():
            try:
                by_id[_class_id(key)] = name
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{printable(path)}: the keys of names must be numbers, found {shown(key)}; write 0: NAME, 1: NAME"
                ) from error
        if len(by_id) < len(names):
            raise ValueError(f"{printable(path)}: two keys of names are the same number, with and without quotes")
        missing = sorted(set(range(len(names))) - set(by_id))
        if missing:
            raise ValueError(
                f"{printable(path)}: names has the keys {sorted(by_id)[:10]}, but class ids run from 0 without gaps; "
                f"missing: {', '.join(map(str, missing[:10]))}"
            )
        names = [by_id[index] for index in range(len(by_id))]
    if not isinstance(names, list) or not names:
        raise ValueError(f"{printable(path)}: names must be a list of class names, found {shown(names)}")
    for index, name in enumerate(names):
        if name == "" or isinstance(name, (list, dict)):
            problem = f"is read as {shown(name)}; put the name in quotes" if name else "is empty; give it a name"
            logger.warning("%s: names[%d] %s", printable(path), index, problem)
    return [str(name) for name in names]


def _class_id(key):
    """A key of `names`: decimal whatever zeros it begins with, or hexadecimal and the like as Python writes them."""
    text = str(key)
    return int(text, 0) if text[:2].lower() in ("0x", "0o", "0b") else int(text)


def _keypoints(path, kpt_shape):
    """(number, numbers each) of the keypoints in a label row; None if the data yaml knows of none."""
    if not kpt_shape:
        return None
    shape = [_whole_number(value) for value in kpt_shape] if isinstance(kpt_shape, list) else []
    if len(shape) != 2 or shape[0] is None or not 0 < shape[0] < MAX_ENTRIES or shape[1] not in (2, 3):
        raise ValueError(
            f"{printable(path)}: kpt_shape must be [number of keypoints, 2 or 3 numbers each], found "
            f"{shown(kpt_shape)}; correct it, or remove it if the labels are boxes or polygons"
        )
    return tuple(shape)


def _resolve_key(path, raw, key, needed):
    """The value of `key` with every entry replaced by the place where it exists."""
    value = raw.get(key)
    if value is None or value == "" or value == []:
        if needed:
            raise ValueError(f"{printable(path)}: the key `{key}` is missing; it says where the {key} images are")
        return None
    entries = value if isinstance(value, list) else [value]
    resolved = [_resolve(path, raw, key, entry, needed) for entry in entries]
    return resolved if isinstance(value, list) else resolved[0]


def _resolve(path, raw, key, entry, needed):
    if not isinstance(entry, str):
        raise ValueError(f"{printable(path)}: {key} must be a path or a list of paths, found {shown(entry)}")
    base = raw.get("path")
    if isinstance(base, (list, dict)):
        raise ValueError(f"{printable(path)}: path must be one folder, found {shown(base)}")
    below_base, elsewhere = _places(Path(path).parent, base, entry.strip())
    for place in (*below_base, *elsewhere):
        if os.path.exists(place):
            if base and place not in below_base:
                logger.warning("%s: %s: not found below path %s, %s is used", printable(path), key, base, place)
            return place
    if not needed:
        return entry
    download = printable(str(raw.get("download") or "").strip())[:200]
    advice = (
        f" The file has a download entry, which is never run here; fetch the data yourself: {download}"
        if download
        else ""
    )
    text = f"{base or ''}{entry}".strip()
    if printable(text) != text:
        advice += (
            " Its odd characters come of a backslash inside double quotes, or of several lines: "
            "use single quotes or /, and a list for several paths."
        )
    tried = dict.fromkeys(printable(os.path.abspath(place)) for place in (*below_base, *elsewhere))
    raise ValueError(f"{printable(path)}: {key}: {printable(entry)} does not exist. Tried: {', '.join(tried)}.{advice}")


def _places(yaml_folder, base, entry):
    """Candidates for `entry` in the order that the top of this file gives: those below `base`, and all others."""
    entry = os.path.expanduser(entry)
    base = os.path.expanduser(str(base).strip()) if base else None
    below_base, elsewhere = [], []
    for separator in ("\\", "/"):  # the second for files made on Windows
        text = entry.replace("\\", separator)
        if base:
            folder = base.replace("\\", separator)
            below_base += [os.path.join(yaml_folder, folder, text), os.path.join(folder, text)]
        elsewhere += [text, os.path.join(yaml_folder, text)]
        inside = text
        while inside.startswith("../"):
            inside = inside[3:]
        elsewhere.append(os.path.join(yaml_folder, inside))
    return below_base, elsewhere
