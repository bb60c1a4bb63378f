"""Healthy files of every kind that the programs read, and ways to break them: the material of tests/fuzz.py."""

import io
import json
import random
from copy import deepcopy
from functools import partial

import cv2
import numpy as np
import yaml
from PIL import Image

from tests.engine.hostile_checkpoints import HEAVY, HOSTILE
from tests.engine.pickle_code import pickle_broken, random_file
from tests.small_run import ANCHORS, BACKBONE, HYP
from utils.config.options import train_parser

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
LABELS = [
    "0 0.5 0.5 0.2 0.4\n1 0.2 0.2 0.1 0.1\n",
    "1 0.1 0.1 0.3 0.1 0.3 0.3\r\n0 0.5 0.5 0.2 0.4\r\n",
    "0,0.5,0.5,0.2,0.4\n\n# nothing\n0\t0.25 0.25 0.1 0.1 0.9\n",
    "0 0.5 0.5 0.2 0.4 .5 .5 2 .4 .4 1\n1 0.2 0.2 0.1 0.1 .2 .2 0 .1 .1 2\n",  # boxes with keypoints
    "0 0.5 0.5 0.2 0.4 0.9 17\n1 0.2 0.2 0.1 0.1 0.8 18\n",  # with a confidence and a track id
    "",
]
LISTS = ["00.png\n./01.png\n", "# pictures\r\n01.png  \r\n\r\n00.png\r\n"]
DATA = [
    "train: .\nval: .\nnc: 2\nnames: [red, green]\n",
    "path: .\ntrain: [., .]\nval: list.txt\nnames:\n  0: red\n  1: green\ndownload: touch canary\n",
    "base: &b {0: 010, 1: yes}\npath: &p .\ntrain: [*p]\nval: *p\nnames: {<<: *b, 02: ~}\nkpt_shape: [2, 3]\n",
]
HYPS = [yaml.safe_dump(HYP), "lr0: 1e-2\nanchors: 3\nmosaic: 1.0\n"]
OPTIONS = [yaml.safe_dump(vars(train_parser().parse_args([])))]


COCO = {
    "images": [{"id": 7, "file_name": "00.png", "width": 24, "height": 16}, {"id": 9, "file_name": "images/01.png"}],
    "annotations": [
        {"id": 0, "image_id": 7, "category_id": 3, "bbox": [2, 2, 10, 10], "area": 90.5, "iscrowd": 0,
         "segmentation": [[2, 2, 12, 2, 12, 12]]},
        {"id": 1, "image_id": 9, "category_id": 1, "bbox": [0.5, 0, 8, 8], "iscrowd": 1,
         "segmentation": {"counts": "PPYo0", "size": [16, 24]}},
        {"id": 2, "image_id": 9, "category_id": 1, "bbox": [4, 4, 8, 8]},
    ],
    "categories": [{"id": 1, "name": "green", "supercategory": "x"}, {"id": 3, "name": "Red"}],
}  # fmt: skip
COCOS = [json.dumps(COCO), json.dumps(COCO, indent=1).replace('id": 7', 'id": "7"').replace('id": 1', 'id": 1.0')]


def cfgs():
    """Texts of small model yamls."""
    plain = {"nc": 2, "depth_multiple": 1.0, "width_multiple": 1.0, "anchors": ANCHORS, "backbone": BACKBONE,
             "head": [[[2, 3, 4], 1, "Detect", ["nc", "anchors"]]]}  # fmt: skip
    head = [[-1, 1, "nn.Upsample", ["None", 2, "nearest"]], [[-1, 3], 1, "Concat", [1]],
            [-1, 2, "Conv", [64, 1, 1, "None", 1, "nn.LeakyReLU(0.1)"]],
            [[2, 7, 4], 1, "IDetect", ["nc", "anchors"]]]  # fmt: skip
    return [yaml.safe_dump(plain), yaml.safe_dump(plain | {"head": head, "anchors": 3}, default_flow_style=None)]


def picture(width=24, height=16, channels=3, kind=np.uint8):
    """Noise [height x width x channels] of any sample type; floats lie in 0..1."""
    values = np.random.default_rng(0).random((height, width, channels))
    values = values if np.dtype(kind).kind == "f" else values * np.iinfo(kind).max
    return values.astype(kind)


def encoded(suffix, image):
    """A picture in the format of `suffix`, by OpenCV."""
    done, data = cv2.imencode(suffix, image)
    assert done
    return data.tobytes()


def saved(image, kind, **options):
    """A picture in the format `kind`, by Pillow."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def oriented(kind, orientation):
    """A picture with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(Image.fromarray(picture()), kind, exif=exif)


def pictures():
    """Name: bytes of every kind of picture; the suffix of a name is not always that of the content."""
    found = {f"plain{suffix}": encoded(suffix, picture()) for suffix in (".jpg", ".png", ".bmp", ".tif", ".webp")}
    for suffix in (".png", ".tif"):
        found[f"16bit{suffix}"] = encoded(suffix, picture(kind=np.uint16))
        found[f"alpha{suffix}"] = encoded(suffix, picture(channels=4))
        found[f"gray16{suffix}"] = encoded(suffix, picture(channels=1, kind=np.uint16))
    for suffix in (".jpg", ".png", ".bmp", ".tif", ".webp"):
        found[f"gray{suffix}"] = encoded(suffix, picture(channels=1))
        found[f"thin{suffix}"] = encoded(suffix, picture(1, 40))
        found[f"long{suffix}"] = encoded(suffix, picture(16383 if suffix == ".webp" else 20000, 12))
    found["float.tif"] = encoded(".tif", picture(kind=np.float32))
    found["int32.tif"] = saved(Image.fromarray(picture(channels=1, kind=np.int32)[..., 0]), "TIFF")
    found["palette.png"] = saved(Image.fromarray(picture()).convert("P"), "PNG", transparency=3)
    found["bilevel.tif"] = saved(Image.fromarray(picture()).convert("1"), "TIFF", compression="group4")
    found["cmyk.jpg"] = saved(Image.fromarray(picture()).convert("CMYK"), "JPEG")
    found["cmyk.tif"] = saved(Image.fromarray(picture()).convert("CMYK"), "TIFF")
    found["progressive.jpg"] = saved(Image.fromarray(picture()), "JPEG", progressive=True)
    found["animation.webp"] = saved(Image.fromarray(picture()), "WEBP", save_all=True,
                                    append_images=[Image.fromarray(picture()[::-1])])  # fmt: skip
    for kind, suffix in (("JPEG", ".jpg"), ("PNG", ".png"), ("TIFF", ".tif"), ("WEBP", ".webp")):
        found |= {f"exif{turn}{suffix}": oriented(kind, turn) for turn in range(1, 9)}
    found |= {"png inside.jpg": found["plain.png"], "jpeg inside.png": found["plain.jpg"],
              "tiff inside.bmp": found["16bit.tif"], "webp inside.jpg": found["exif6.webp"],
              "gif inside.png": saved(Image.fromarray(picture()).convert("P"), "GIF"),
              "text.jpg": b"<html>404</html>", "empty.png": b""}  # fmt: skip
    return found


TOKENS = [
    "\0", "\ufeff", "\n", "\r", "\t", " ", ",", "#", ":", "- ", "-", "'", '"', "[", "]", "{", "}", "&a ", "*a", "~",
    "nan", "inf", "-inf", "1e999", "1" * 400, "0x10", "1_0", "1:30", "\u0661", "-1", "0", "2.5", "99999999", "1e-320",
    "true", "null", "2024-99-99", "2024-01-01", "!!int x", "!!float x", "!!timestamp x", "!!binary x", "!!set {a, b}",
    "!!python/object/apply:os.system ['touch canary']", "!!python/name:os.system ", "<<: 3", "? [a]\n: b\n", "%YAML 9",
    "; touch canary;", "$(touch canary)", "`touch canary`", "| touch canary", "../../../../etc/passwd", "/dev/zero",
    "[" * 3000, "{a: " * 3000, "a" * 10000, "\ud800", "\u2028", "é", "名",
    "nc: ", "names: ", "train: ", "lr0: ", "anchors: ", "ch: ", "nn.LeakyReLU(__import__('os').system('touch canary'))",
]  # fmt: skip


def broken(data, rng, others=()):
    """`data` (bytes) after one to four random injuries; `others` are healthy files to take parts from."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        data = rng.choice(INJURIES)(bytearray(data), rng, others)
    return bytes(data)


VALUES = [
    None, True, -1, 0, 1, 2.5, 1e-320, 1e308, float("nan"), float("inf"), 10**30, 10**6, 4097, "", "x", "1e-3", "1_0",
    "nan", "None", "nc", "nn.GELU", "nn.LeakyReLU(1)", "nn.Softmax()", "Concat", "Detect", "IAuxDetect", "RepConv",
    "ReOrg", "SPPCSPC", "DownC", "Shortcut", "MP", "SP", [], {}, [[]], [-1], [0, 1], [-1, -2], [0, 0, 0], {"a": 1},
    {0: "a"}, {1: "a"}, b"x", "a" * 5000,
]  # fmt: skip


def broken_tree(data, rng, is_json=False):
    """A yaml or json with one to three values or keys of it replaced, removed, repeated or swapped; still valid."""
    content = json.loads(data) if is_json else yaml.safe_load(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_containers(content))
        if not places:
            break
        holder = rng.choice(places)
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        action = rng.randrange(6)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, list):
            holder.insert(key, deepcopy(holder[key]))
        elif action == 2:
            holder[key] = deepcopy(rng.choice(places))
        elif action == 3 and isinstance(holder, dict):
            holder[rng.choice(("unknown", 3, None, "nc", "path"))] = holder.pop(key)
        else:
            holder[key] = deepcopy(rng.choice(VALUES))
    if is_json:
        return json.dumps(content, default=str).encode()
    return yaml.safe_dump(content, sort_keys=False).encode()


def bombs(healthy):
    """Yaml texts each key of which stands, in its turn, for 400 million words, or for a list that holds itself."""
    for text in healthy.values():
        content = yaml.safe_load(text)
        for key in content:
            rest = yaml.safe_dump({k: v for k, v in content.items() if k != key}).encode()
            yield BOMB.encode() + rest + f"\n{key}: *h\n".encode()
            yield rest + f"\n{key}: &loop [*loop]\n".encode()


def _containers(node):
    """All lists and mappings of a tree that are not empty."""
    if isinstance(node, (list, dict)) and node:
        yield node
        for inner in node.values() if isinstance(node, dict) else node:
            yield from _containers(inner)


def _place(data, rng):
    return rng.randrange(len(data) + 1)


def _part(data, rng):
    start = _place(data, rng)
    return slice(start, min(start + rng.choice((1, 2, 4, 16, 64, 1024)), len(data)))


def flip_bit(data, rng, others):
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def set_byte(data, rng, others):
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 10, 32, 127, 128, 255, rng.randrange(256)))
    return data


def cut_off(data, rng, others):
    return data[: _place(data, rng)]


def remove_part(data, rng, others):
    del data[_part(data, rng)]
    return data


def repeat_part(data, rng, others):
    part = data[_part(data, rng)]
    at = _place(data, rng)
    return data[:at] + part * rng.choice((1, 2, 50)) + data[at:]


def clear_part(data, rng, others):
    part = _part(data, rng)
    data[part] = bytes(part.stop - part.start)
    return data


def insert_noise(data, rng, others):
    at = _place(data, rng)
    return data[:at] + rng.randbytes(rng.choice((1, 3, 30, 300))) + data[at:]


def insert_token(data, rng, others):
    at = _place(data, rng)
    return data[:at] + rng.choice(TOKENS).encode("utf-8", "surrogatepass") + data[at:]


def replace_field(data, rng, others):
    """Put a token where a word or number stands."""
    fields = bytes(data).split(b" ")
    fields[rng.randrange(len(fields))] = rng.choice(TOKENS).encode("utf-8", "surrogatepass")
    return bytearray(b" ".join(fields))


def shuffle_lines(data, rng, others):
    lines = bytes(data).split(b"\n")
    rng.shuffle(lines)
    return bytearray(b"\n".join(lines))


def change_encoding(data, rng, others):
    return bytearray(bytes(data).decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-16-le", "utf-32"))))


def splice(data, rng, others):
    """The beginning of one file and the end of another."""
    other = rng.choice(others) if others else bytes(data)
    return data[: _place(data, rng)] + other[rng.randrange(len(other) + 1) :]


INJURIES = (flip_bit, set_byte, cut_off, remove_part, repeat_part, clear_part, insert_noise, insert_token,
            replace_field, shuffle_lines, change_encoding, splice)  # fmt: skip


def broken_files(healthy, count, seed, is_tree=False, is_json=False):
    """`count` broken copies of `healthy` files ({name: bytes}) as (name, bytes), each from its own random stream.

    The first are the healthy files themselves. A yaml or json (`is_tree`) is broken as text or as a tree.
    """
    names = list(healthy)
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        name = names[number % len(names)]
        whole = number < len(names)
        if whole:
            yield name, healthy[name]
        elif is_tree and rng.random() < 0.7:
            yield name, broken_tree(healthy[name], rng, is_json)
        else:
            yield name, broken(healthy[name], rng, list(healthy.values()))


def hostile_files(healthy, count, seed):
    """`count` checkpoints as (name, function that returns its bytes): traps, random pickles, injured ones.

    Functions, because many of them are large; each has its own random stream.
    """
    quick = [name for name in HOSTILE if name not in HEAVY]
    for number in range(count):
        rng = random.Random(f"{seed} hostile {number}")
        if number < len(HOSTILE):
            name = list(HOSTILE)[number]
        else:
            name = (
                rng.choice(["random"] * 3 + ["injured"] * 3 + [rng.choice(quick)] * 2)
                if number % 40
                else rng.choice(HEAVY)
            )
        if name == "random":
            yield name, partial(random_file, rng)
        elif name == "injured":
            yield name, partial(pickle_broken, rng.choice(list(healthy.values())), rng, broken)
        else:
            yield name, partial(HOSTILE[name], rng)
