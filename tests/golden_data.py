"""The golden data set and arrays of the data pipeline, and how equal pixels have to be."""

import json
import random
import shutil
from functools import cache

import cv2
import numpy as np

from tests import parity
from utils.datasets import LoadImagesAndLabels

FOLDER = parity.GOLDEN / "data"
SAME_OPENCV = cv2.__version__.startswith("5.")


@cache
def index():
    return json.loads((FOLDER / "index.json").read_text())


def names(prefix, *without):
    """Names of the golden files that are there, for parametrize."""
    found = sorted(path.stem for path in FOLDER.glob(f"{prefix}*.npz"))
    found = [name for name in found if not any(word in name for word in without)]
    assert found, f"no golden file {prefix}*.npz in {FOLDER}"
    return found


def load(name):
    """(entry of the index, arrays) of a golden file."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return index()[name], dict(file)


def numbered(arrays, prefix):
    """The arrays prefix0, prefix1, ... as a list."""
    found = []
    while f"{prefix}{len(found)}" in arrays:
        found.append(arrays[f"{prefix}{len(found)}"])
    return found


def copy_dataset(folder):
    """The golden data set in `folder`, where its label cache may be written; returns the folder."""
    shutil.copytree(FOLDER / "dataset", folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    for path in (folder, *folder.rglob("*/")):
        path.chmod(0o755)
    return folder


def seed_both(seed):
    random.seed(seed)
    np.random.seed(seed)


def check_streams(name, after, generators=("py", "np")):
    """The next number of each generator tells that exactly stock's draws were made."""
    if "py" in generators:
        parity.check("data streams", f"{name} py", random.random(), after["py_next"])
    if "np" in generators:
        parity.check("data streams", f"{name} np", np.random.random_sample(), after["np_next"])


def check_pixels(group, name, actual, expected):
    """Pixels that OpenCV has interpolated or converted: its versions and instruction sets round differently."""
    actual = np.asarray(actual)
    if SAME_OPENCV:
        parity.check(group, name, actual, expected, atol=0, max_outlier_share=0.01)
        assert np.abs(actual.astype(int) - expected).max(initial=0) <= 3, name
    else:
        parity.check(group, name, actual, expected, atol=3, max_outlier_share=0.005)
        assert np.abs(actual.astype(int) - expected).mean() <= 0.25, name


def check_cut_out(name, actual, expected):
    """Pixels of an object inside its outline; OpenCV 4 draws a few pixels of an outline's edge elsewhere."""
    parity.check("data samples", name, actual, expected, max_outlier_share=0.0 if SAME_OPENCV else 0.05)


def check_labels(group, name, actual, expected):
    parity.check(group, name, actual, expected, atol=1e-5)


def relative(paths, folder):
    return [str(path).replace(f"{folder}/", "") for path in paths]


def load_list(folder, name, **options):
    return LoadImagesAndLabels(str(folder / f"{name}.txt"), **options)


ALL_AUGMENTATIONS = {
    "hsv_h": 0.02, "hsv_s": 0.6, "hsv_v": 0.5, "degrees": 12.0, "translate": 0.15, "scale": 0.4, "shear": 6.0,
    "perspective": 0.0, "flipud": 0.4, "fliplr": 0.5, "mosaic": 0.7, "mixup": 0.5, "copy_paste": 0.0, "paste_in": 0.5,
}  # fmt: skip


def write_dataset(folder, contents):
    """`contents` maps a name to (height, width, text of the label file or None); returns the folder of the images."""
    images, labels = folder / "images", folder / "labels"
    images.mkdir(), labels.mkdir()
    rng = np.random.default_rng(0)
    for name, (height, width, text) in contents.items():
        cv2.imwrite(str(images / f"{name}.png"), rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        if text is not None:
            (labels / f"{name}.txt").write_text(text)
    return str(images)
