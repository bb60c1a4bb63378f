"""utils/data/transforms.py against stock's arrays."""

import numpy as np
import pytest

from tests import golden_data, parity
from tests.golden_data import check_pixels, check_streams, seed_both
from utils.data.transforms import augment_hsv, letterbox, mixup


def test_letterbox_golden():
    entry, arrays = golden_data.load("c_letterbox")
    assert entry["cases"]
    for k, case in enumerate(entry["cases"]):
        options = {key: case[key] for key in ("auto", "scaleFill", "scaleup", "stride")}
        img, ratio, pad = letterbox(arrays["input"], tuple(case["new_shape"]), **options)
        parity.check("data letterbox", f"out{k}", img, arrays[f"out{k}"])
        parity.check("data letterbox", f"ratio{k}", ratio, case["ratio"])
        parity.check("data letterbox", f"pad{k}", pad, case["pad"])


def test_letterbox_keeps_a_line_of_pixels():
    img, _, _ = letterbox(np.zeros((2, 4000, 3), np.uint8), 64, auto=False)
    assert img.shape == (64, 64, 3)
    assert (img == 0).any()


@pytest.mark.parametrize("name", golden_data.names("c_augment_hsv"))
def test_augment_hsv_golden(name):
    entry, arrays = golden_data.load(name)
    seed_both(entry["seed"])
    img = arrays["input"].copy()
    augment_hsv(img, *entry["gains"])
    check_pixels("data colours", name, img, arrays["img"])
    check_streams(name, entry["after"])


def test_mixup_golden():
    entry, arrays = golden_data.load("c_mixup")
    np.random.seed(entry["np_seed"])
    img, labels = mixup(arrays["a"], np.zeros((1, 5)), arrays["b"], np.ones((2, 5)))
    parity.check("data mixup", "img", img, arrays["img"])
    assert labels[:, 0].tolist() == [0, 1, 1]
    check_streams("c_mixup", entry["after"], generators=("np",))
