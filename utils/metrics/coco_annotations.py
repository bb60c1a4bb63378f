"""A COCO annotation file of the user: find it, read it, say what is wrong with it, match it with images and classes.

Every field that is used is checked, and an error names the entry: `annotations[3] has no bbox`. Ids are whole numbers
or words; a text or float that is a whole number counts as that number.
"""

import json
import logging
import math
import os
import posixpath
import re
from collections import Counter, defaultdict
from pathlib import Path

from utils.system.files import printable, read_text, shown, stand_in

logger = logging.getLogger(__name__)

LONGEST_SIDE = 1e5  # pixels; the scorers ignore areas above its square
MAX_NAMED = 5  # files or classes in a message


def find_annotations(entries, split="val", named=None):
    """(the annotation file of a split, or None; all places that were looked at).

    That is the file which the data yaml has `named`; else instances_<split>2017.json or instances_<split>.json in a
    folder `annotations` two levels above or beside one of `entries` (the split's folders or list files).
    """
    places = [Path(named)] if named else []
    for entry in () if named else entries if isinstance(entries, list) else [entries]:
        two_up = os.path.join(entry, "..", "..", "annotations")  # a link is followed before going up
        for folder in (two_up, os.path.normpath(two_up), Path(entry).parent / "annotations"):
            places += [Path(folder) / f"instances_{split}{year}.json" for year in ("2017", "")]
    places = list(dict.fromkeys(places))
    return next((place.resolve() for place in places if place.is_file()), None), places


# Reading ------------------------------------------------------------------------------------------------------------


def read_annotations(path):
    """The content of an annotation file, checked: {"images": [...], "annotations": [...], "categories": [...]}.

    Raises ValueError, naming the file, the entry and the key, if it is not one.
    """
    try:
        content = _parse(path)
        _check_named("images", content["images"], "file_name", (str,), "the name of a file")
        _check_named("categories", content["categories"], "name", (str, int, float), "the name of a class")
        for number, entry in enumerate(content["annotations"]):
            check_annotation(f"annotations[{number}]", entry)
    except OSError as error:
        raise ValueError(f"{printable(path)} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) if isinstance(error, ValueError) else "it is nested too deeply or too large"
        raise ValueError(f"{printable(path)} is no usable COCO annotation file: {reason}") from error
    return content


def _parse(path):
    """The object in a json file, with the three lists that are used."""
    with Path(path).open("rb") as file:
        if file.read(2) == b"\x1f\x8b":
            raise ValueError("it is compressed by gzip, unpack it")
    text = read_text(path)
    if not text.strip():
        raise ValueError("it is empty")
    if kind := stand_in(text):
        raise ValueError(f"it is {kind}")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        lines = ", one json object is wanted, not one on each line" if error.msg == "Extra data" else ""
        raise ValueError(f"line {error.lineno}: {error.msg}{lines}") from error
    if not isinstance(content, dict):
        raise ValueError("one object with images, annotations and categories is wanted")
    missing = [key for key in ("images", "annotations", "categories") if key not in content]
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    for key in ("images", "annotations", "categories"):
        if not isinstance(content[key], list):
            raise ValueError(f"{key} is {_described(content[key])}, not a list")
    return content


def _check_named(key, entries, of_name, kinds, wanted):
    """Raise ValueError unless each of the `entries` under `key` has an id of its own, and a name of one of `kinds`."""
    known = {}
    for number, entry in enumerate(entries):
        place = f"{key}[{number}]"
        own, name = _id_field(place, entry, "id"), _field(place, entry, of_name)
        if own in known:
            raise ValueError(f"{place}.id is {shown(own)}, as that of {key}[{known[own]}]")
        known[own] = number
        if not isinstance(name, kinds) or isinstance(name, bool) or (key == "images" and not name.strip()):
            raise ValueError(f"{place}.{of_name} is {_described(name)}, not {wanted}")


def check_annotation(place, entry):
    """Raise ValueError unless the scorers can use the annotation `entry`; `place` is its name in messages."""
    for key in ("image_id", "category_id"):
        _id_field(place, entry, key)
    box = _field(place, entry, "bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        raise ValueError(f"{place}.bbox is {_described(box)}, not four numbers: x, y, width, height")
    if min(box[2:]) < 0 or max(map(abs, box)) > LONGEST_SIDE:
        raise ValueError(f"{place}.bbox is {_described(box)}, which is no box in pixels: x, y, width, height")
    area = entry.get("area")
    if area is not None and not (_is_number(area) and 0 <= area <= LONGEST_SIDE**2):
        raise ValueError(f"{place}.area is {_described(area)}, not a number of pixels")
    crowd = entry.get("iscrowd")
    if crowd is not None and not (_is_number(crowd, bools=True) and crowd in (0, 1)):
        raise ValueError(f"{place}.iscrowd is {_described(crowd)}, not 0 or 1")


def _field(place, entry, key):
    if not isinstance(entry, dict):
        raise ValueError(f"{place} is {_described(entry)}, not an object")
    if key not in entry:
        raise ValueError(f"{place} has no {key}")
    return entry[key]


def _id_field(place, entry, key):
    found = as_id(_field(place, entry, key))
    if found is None:
        raise ValueError(f"{place}.{key} is {_described(entry[key])}, not an id")
    return found


def as_id(value):
    """The id that a value of a json means: an int, or a text that is no whole number; None for anything else."""
    if isinstance(value, str):
        word = value.strip()
        number = re.fullmatch(r"(-?\d{1,18})(\.0*)?", word)
        return int(number[1]) if number else word or None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_number(value, bools=False):
    """Whether a value of a json is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return bools and isinstance(value, bool)
    return abs(value) <= 1e300 and math.isfinite(value)


def _described(value):
    """A value of a json for a message."""
    names = {dict: "an object", type(None): "null", bool: "a truth value"}
    if isinstance(value, list) and len(value) > 8:
        return f"a list of {len(value)} entries"
    if isinstance(value, (list, str)) or type(value) not in names:
        return shown(value, 80)
    return names[type(value)]


# Images -------------------------------------------------------------------------------------------------------------


def match_images(image_files, images, source):
    """{path: image id} of those `image_files` that the entries `images` of the file `source` name.

    A file name matches a path that ends with it, its folders included; of several the longest counts. An image with two
    such entries has none, and so have two images with one. Raises ValueError if no image is left; logs how many are
    missing.
    """
    entries = _by_last_part(images)
    chosen = {str(path): _entry_of(path, entries) for path in image_files}
    named = {path: number for path, number in chosen.items() if number is not None}
    # the same file may be there under two paths
    claims = Counter(dict(zip(map(os.path.abspath, named), named.values(), strict=True)).values())
    matched = {path: images[number]["id"] for path, number in named.items() if claims[number] == 1}
    missing = [path for path in chosen if path not in matched]
    shared = (
        f" and has one entry for several of them ({len(named) - len(matched)})" if len(matched) < len(named) else ""
    )
    if not matched:
        example = f"; an entry is {shown(images[0]['file_name'])}, an image {printable(missing[0])}" if images else ""
        raise ValueError(f"{printable(source)} names none of the {len(chosen)} images{shared}{example}")
    if missing:
        logger.warning(
            "%s does not name %d of the %d images%s: they are left out of the json and of the COCO score (%s)",
            printable(source), len(missing), len(chosen), shared, listing(missing),
        )  # fmt: skip
    return matched


def _by_last_part(images):
    """{last part of a file name: [(its parts, index in `images`)]}.

    An absolute file name of another machine counts from the last folder that all absolute ones share.
    """
    names = [entry["file_name"].strip().replace("\\", "/") for entry in images]
    absolute = [_is_absolute(name) for name in names]
    folders = [name.split("/")[:-1] for name, is_absolute in zip(names, absolute, strict=True) if is_absolute]
    root = max(len(os.path.commonprefix(folders)) - 1, 0)  # its number of parts
    entries = defaultdict(list)
    for number, (name, is_absolute) in enumerate(zip(names, absolute, strict=True)):
        parts = posixpath.normpath(name).split("/")
        if is_absolute and not os.path.isfile(name):
            parts = parts[root:]
        parts = tuple(part for part in parts if part not in ("", ".", ".."))
        if parts:
            entries[parts[-1]].append((parts, number))
    return entries


def _is_absolute(name):
    """Whether a file name begins at a root: /a, C:/a, https://a."""
    return name.startswith("/") or ":/" in name


def _entry_of(path, entries):
    """The index of the entry that names the image `path`, None if there is none or more than one."""
    own = Path(os.path.abspath(path)).parts
    fitting = [(len(parts), number) for parts, number in entries.get(own[-1], ()) if own[-len(parts) :] == parts]
    longest = max(fitting, default=(0, None))[0]
    numbers = [number for length, number in fitting if length == longest]
    return numbers[0] if len(numbers) == 1 else None


def why_other_size(place, entry, image_shape, path):
    """A sentence if the image `entry`, called `place`, is of another size than its file of (height, width); else ""."""
    for key, found in zip(("height", "width"), image_shape, strict=True):
        said = entry.get(key)
        if _is_number(said) and said > 0 and said != found:
            return f"{place}.{key} is {said:g}, that of {printable(path)} {found:g}: are its boxes those of this image?"
    return ""


# Categories ---------------------------------------------------------------------------------------------------------


def match_categories(names, categories, source):
    """Category ids [nc] for the class `names`, from the `categories` of the file `source`.

    By name (capitals do not matter) if every class is found, and is the only one of its name. Otherwise by place,
    categories in the order of their ids, if there are as many as classes and no name that is found says otherwise.
    Else ValueError.
    """
    categories = in_order(categories)
    ids = [category["id"] for category in categories]
    known = [str(category["name"]).strip().casefold() for category in categories]
    wanted = [name.strip().casefold() for name in names]
    if len(set(known)) == len(known) and len(set(wanted)) == len(wanted) and set(wanted) <= set(known):
        return [ids[known.index(name)] for name in wanted]

    strangers = [name for name, key in zip(names, wanted, strict=True) if key not in known]
    in_place = all(a == b for a, b in zip(wanted, known, strict=False) if a in known)
    if len(known) != len(wanted) or not in_place:
        reason = f"not found: {listing(strangers)}" if strangers else "names that are not unique, in another order"
        raise ValueError(f"the categories of {printable(source)} are not the {len(names)} classes ({reason})")
    if strangers:
        logger.warning("%s has no categories called %s: classes are matched by their order",
                       printable(source), listing(strangers))  # fmt: skip
    return ids


def order_of(value):
    """The sort key of an id: numbers, then texts."""
    known = as_id(value)
    return isinstance(known, str), known


def in_order(categories):
    """The categories in the order of their ids, which is that of the classes."""
    return sorted(categories, key=lambda category: order_of(category["id"]))


def listing(values, separator=", "):
    """The first of `values`, for a message."""
    return separator.join([*map(printable, values[:MAX_NAMED]), *["..."] * (len(values) > MAX_NAMED)])
