"""Which detection head of a 1B4H model learns which classes: the yaml behind --head-config.

    nc: 80                        # classes of the data set
    heads: 4
    grouping: standard            # a label for people
    full_head: false              # true: every head has a column for each class, and only its own count
    one_class_score: learned      # 1: at inference the class score of a head with a single class is 1
    head_assignments:
      head_0:
        classes: [0, 24, 25, 26]  # ids in the data set; their order is that of the head's outputs
        weight: 1.0               # of this head's loss
        name: people
      head_1: ...

Every class belongs to exactly one head. The same file may be a data yaml as well.
"""

import difflib
from pathlib import Path

from utils.config.data_yaml import NAME_TEXT, read_yaml
from utils.system.files import counted, folded, printable

KEYS = {"nc", "heads", "grouping", "full_head", "one_class_score", "head_assignments"}
HEAD_KEYS = {"classes", "weight", "name"}
# What a data yaml, or a person, may add.
PASSED_OVER = {"train", "val", "test", "names", "path", "annotations", "download", "comment", "description"}
PASSED_OVER_IN_HEAD = {"nc", "sample_count", "sample_ratio", "comment", "description"}
ONE_CLASS_SCORES = ("learned", 1)
SLIP = 0.75  # likeness from which an unknown key is taken for a known one that was mistyped
TEXTS = dict.fromkeys(("names", "name", "grouping"), NAME_TEXT)  # 010 and yes are words there


class HeadConfig:
    """The heads of a model.

    `nc` classes; `num_heads`; of each head `head_classes` (ids in local order), `head_nc_list` (their number),
    `weights` and `head_names`; of each class `head_map` (its head) and `local_id_map` (its place there); `full_head`,
    `one_class_score` and `grouping` as in the file.

    Raises ValueError that names the file `path` and everything that is wrong with its groups. `full_head` overrides the
    file.
    """

    def __init__(self, path, full_head=None):
        if not Path(path).is_file():
            raise ValueError(
                f"{printable(path)}: this head configuration does not exist; give a file such as "
                "data/coco_320_1b4h_standard.yaml, or make one with tools/group_classes.py"
            )
        self._read(read_yaml(path, TEXTS), printable(path), full_head)

    @classmethod
    def from_description(cls, content, path="the head configuration"):
        """From the mapping that such a file holds; `path` is how messages call it."""
        config = cls.__new__(cls)
        config._read(content, path)
        return config

    def _read(self, content, path, full_head=None):
        self.path = path
        self.ignored = _unknown_keys(content, KEYS, PASSED_OVER, path)
        self.nc = _count(content.get("nc", 80), f"{path}: nc", "the number of classes")
        self.num_heads = _count(content.get("heads", 4), f"{path}: heads", "the number of heads")
        self.grouping = str(content.get("grouping", "standard"))
        self.full_head = _flag(content.get("full_head", False), path) if full_head is None else full_head
        self.one_class_score = content.get("one_class_score", "learned")
        if self.one_class_score not in ONE_CLASS_SCORES or self.one_class_score is True:
            raise ValueError(f"{path}: one_class_score must be learned or 1, not {self.one_class_score!r}")
        heads = _heads(content.get("head_assignments"), self.num_heads, path)
        for head in range(self.num_heads):
            entry, where = content["head_assignments"][f"head_{head}"], f"{path}: head_{head}"
            self.ignored += _unknown_keys(entry, HEAD_KEYS, PASSED_OVER_IN_HEAD, where)
        self.head_classes = [classes for classes, _, _ in heads]
        self.weights = [weight for _, weight, _ in heads]
        self.head_names = [name for _, _, name in heads]
        _check_partition(self.head_classes, self.nc, content.get("names"), path)
        self.head_nc_list = [len(classes) for classes in self.head_classes]
        self.head_map = {c: head for head, classes in enumerate(self.head_classes) for c in classes}
        self.local_id_map = {c: local for classes in self.head_classes for local, c in enumerate(classes)}

    def description(self):
        """The mapping to make an equal HeadConfig from: plain values, as in the file."""
        columns = zip(self.head_classes, self.weights, self.head_names, strict=True)
        return {
            "nc": self.nc,
            "heads": self.num_heads,
            "grouping": self.grouping,
            "full_head": self.full_head,
            "one_class_score": self.one_class_score,
            "head_assignments": {
                f"head_{head}": {"classes": list(classes), "weight": weight, "name": name}
                for head, (classes, weight, name) in enumerate(columns)
            },
        }

    def get_head_id(self, class_id):
        return self.head_map[class_id]

    def get_local_id(self, class_id):
        return self.local_id_map[class_id]

    def get_head_info(self, class_id):
        """(head, place among its classes) of a class."""
        return self.head_map[class_id], self.local_id_map[class_id]

    def get_head_weight(self, head):
        return self.weights[head]

    def get_head_classes(self, head):
        return list(self.head_classes[head])

    def get_head_nc(self, head):
        return self.head_nc_list[head]

    def get_head_name(self, head):
        return self.head_names[head]

    def summary(self):
        """A few lines for the log."""
        kind = ", full heads" if self.full_head else ""
        lines = [
            f"{self.path}: {counted(self.num_heads, 'head')} for "
            f"{counted(self.nc, 'class', 'classes')}, grouping {self.grouping}{kind}"
        ]
        if self.ignored:
            ignored = printable(", ".join(dict.fromkeys(self.ignored)))
            lines.append(folded(f"  passed over, without a meaning here: {ignored}"))
        for head, name in enumerate(self.head_names):
            num_classes = counted(self.head_nc_list[head], "class", "classes")
            ids = id_ranges(self.head_classes[head])
            lines.append(folded(f"  head {head} ({name}): {num_classes}, weight {self.weights[head]:g}, ids {ids}"))
        return "\n".join(lines)


def of_options(opt, nc):
    """The HeadConfig that --heads and --head-config ask for in a run with `nc` classes; None without them."""
    if not opt.heads and not opt.head_config:
        return None
    if not opt.heads or not opt.head_config:
        raise ValueError("--heads N and --head-config FILE belong together; give both, or neither for one head")
    config = HeadConfig(opt.head_config)
    if config.num_heads != opt.heads:
        raise ValueError(f"--heads is {opt.heads}, but {config.path} describes {config.num_heads}; let them agree")
    if config.nc != nc:
        raise ValueError(f"{config.path} groups {config.nc} classes, but {opt.data} has {nc}; let them agree")
    return config


def of_model_yaml(cfg, source):
    """The HeadConfig that the yaml of a saved model holds, None if it has one head; `source` is its file."""
    content = (cfg or {}).get("head_config")
    return HeadConfig.from_description(content, f"the head configuration in {source}") if content else None


def description_in_model(attributes):
    """The mapping to make a HeadConfig from, out of a model that was saved with one; None if it has none.

    `attributes` are those of the model, as plain values. Files of other programs say it only in the detection layer.
    """
    for layer in _layers(attributes):
        config = vars(layer).get("head_config")
        if config is None:
            continue
        stored = {"grouping": "standard", "full_head": False, "one_class_score": "learned"} | vars(config)
        stored["full_head"] = bool(vars(layer).get("full_head", stored["full_head"]))
        for name in ("head_classes", "weights", "head_names"):  # lists, or {head: entry} of other programs
            stored[name] = [stored[name][head] for head in range(stored["num_heads"])]
        heads = HeadConfig.__new__(HeadConfig)
        vars(heads).update(stored)
        return heads.description()
    return None


def _layers(attributes):
    """The layers of the saved model."""
    sequence = attributes.get("_modules", {}).get("model")
    return vars(sequence).get("_modules", {}).values() if sequence is not None else ()


def id_ranges(ids):
    """Class ids as text: 0, 24-28, 31."""
    parts, ids = [], sorted(ids)
    for position, c in enumerate(ids):
        if position and c == ids[position - 1] + 1:
            parts[-1][1] = c
        else:
            parts.append([c, c])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


# What may be wrong ---------------------------------------------------------------------------------------------------


def _unknown_keys(content, keys, passed_over, where):
    """The keys that mean nothing here; one that is nearly one of `keys` is a slip, and refused."""
    unknown = [str(key) for key in content if key not in keys | passed_over]
    nearly = {key: difflib.get_close_matches(key, sorted(keys), 1, SLIP) for key in unknown}
    slips = [f"{key} (meant {near[0]}?)" for key, near in nearly.items() if near]
    if slips:
        raise ValueError(f"{where}: unknown key {', '.join(slips)}; remove it, or call it comment")
    return unknown


def _count(value, where, meaning):
    if type(value) is not int or value < 1:
        raise ValueError(f"{where} must be {meaning}, at least 1, not {value!r}")
    return value


def _flag(value, path):
    if type(value) is not bool:
        raise ValueError(f"{path}: full_head must be true or false, not {value!r}")
    return value


def _heads(assignments, num_heads, path):
    """(classes, weight, name) of every head."""
    wanted = [f"head_{h}" for h in range(num_heads)]
    if not isinstance(assignments, dict):
        raise ValueError(f"{path}: head_assignments must be a mapping with the keys {', '.join(wanted)}")
    lacking = [key for key in wanted if key not in assignments]
    excess = [str(key) for key in assignments if key not in wanted]
    if lacking or excess:
        wrong = [f"lacks {', '.join(lacking)}"] * bool(lacking) + [f"also has {', '.join(excess)}"] * bool(excess)
        raise ValueError(f"{path}: heads is {num_heads}, but head_assignments {' and '.join(wrong)}")
    return [_head(assignments[key], h, f"{path}: {key}") for h, key in enumerate(wanted)]


def _head(entry, head, where):
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a mapping with the key classes, and optionally weight and name")
    classes = entry.get("classes")
    if not isinstance(classes, list) or not classes or not all(type(c) is int for c in classes):
        raise ValueError(f"{where}: classes must be a list of at least one class id, not {classes!r}")
    if entry.get("nc", len(classes)) != len(classes):
        raise ValueError(f"{where}: nc is {entry['nc']!r}, but classes has {len(classes)} ids; correct one of them")
    weight = entry.get("weight", 1.0)
    if type(weight) not in (int, float) or not 0 < weight < float("inf"):
        raise ValueError(f"{where}: weight must be a positive number, not {weight!r}")
    return list(classes), float(weight), str(entry.get("name") or f"Head {head}")


def _check_partition(head_classes, nc, names, path):
    """Every id of 0 to nc-1 exactly once; names the classes where the file knows them."""
    named = dict(enumerate(names)) if isinstance(names, list) else names if isinstance(names, dict) else {}

    def word(c):
        return f"{c} ({named[c]})" if c in named else str(c)

    heads_of = {}
    for head, classes in enumerate(head_classes):
        for c in classes:
            heads_of.setdefault(c, []).append(f"head_{head}")
    doubled = [f"{word(c)} in {' and '.join(heads)}" for c, heads in sorted(heads_of.items()) if len(heads) > 1]
    missing = [word(c) for c in range(nc) if c not in heads_of]
    outside = [str(c) for c in sorted(heads_of) if not 0 <= c < nc]
    problems = [
        f"{title}: {', '.join(found)}"
        for title, found in (
            ("classes that occur twice", doubled),
            ("classes that no head has", missing),
            (f"ids outside 0 to {nc - 1}", outside),
        )
        if found
    ]
    if problems:
        raise ValueError(f"{path}: every class must belong to exactly one head; {'; '.join(problems)}")
