"""utils/augment.py and utils/paste_in.py against stock's arrays, and against values computed by hand."""

import cv2
import numpy as np
import pytest

from tests import golden_data, parity
from tests.golden_data import check_labels, check_pixels, check_streams, numbered, seed_both
from utils.augment import (
    augment_hsv,
    copy_paste,
    letterbox,
    mixup,
    random_perspective,
)
from utils.paste_in import Sample, pastein, sample_segments


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


@pytest.mark.parametrize("name", golden_data.names("c_random_perspective"))
def test_random_perspective_golden(name):
    entry, arrays = golden_data.load(name)
    seed_both(entry["seed"])
    img, labels = random_perspective(arrays["input"], arrays["targets"], numbered(arrays, "seg"), **entry["kwargs"])
    check_pixels("data warp", name, img, arrays["img"])
    check_labels("data warp labels", name, labels, arrays["labels"])
    check_streams(name, entry["after"])


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


@pytest.mark.parametrize("name", golden_data.names("c_copy_paste"))
def test_copy_paste_golden(name):
    entry, arrays = golden_data.load(name)
    seed_both(entry["seed"])
    img, labels, segments = copy_paste(
        arrays["input"].copy(), arrays["labels"], numbered(arrays, "in_seg"), entry["probability"]
    )
    parity.check("data copy-paste", name, img, arrays["img"])
    check_labels("data copy-paste", f"{name} labels", labels, arrays["out_labels"])
    expected = numbered(arrays, "out_seg")
    assert len(segments) == len(expected)
    for k, (points, golden) in enumerate(zip(segments, expected, strict=True)):
        check_labels("data copy-paste", f"{name} segment {k}", points, golden)
    check_streams(name, entry["after"])


def test_sample_segments_golden():
    entry, arrays = golden_data.load("c_sample_segments")
    seed_both(entry["seed"])
    samples = sample_segments(arrays["input"], arrays["labels"], numbered(arrays, "seg"), entry["probability"])
    parity.check("data samples", "classes", [s.category for s in samples], arrays["sample_labels"])
    for k, sample in enumerate(samples):
        parity.check("data samples", f"image{k}", sample.cut_out(), arrays[f"image{k}"])
        parity.check("data samples", f"mask{k}", sample.cut_out(), arrays[f"mask{k}"])
    check_streams("c_sample_segments", entry["after"])


def test_pastein_without_samples_golden():
    entry, arrays = golden_data.load("c_pastein_empty")
    seed_both(entry["seed"])
    img = arrays["input"].copy()
    labels = pastein(img, arrays["labels"], [])
    parity.check("data paste-in", "empty img", img, arrays["img"])
    parity.check("data paste-in", "empty labels", labels, arrays["out_labels"])
    check_streams("c_pastein_empty", entry["after"])


def test_cut_out_is_what_a_mask_on_the_whole_canvas_gives():
    """Drawn on the outline's own area only, the mask is the same to the last pixel, also across the canvas' edge."""
    rng = np.random.default_rng(0)
    canvas = rng.integers(0, 256, (96, 128, 3), dtype=np.uint8)
    for _ in range(200):
        points = rng.uniform(-30, 150, (rng.integers(3, 12), 2))
        if rng.random() < 0.5:
            points = points.clip(0, (128, 96))
        outline = points.astype(np.int32)
        x1, x2 = sorted(rng.choice(127, 2, replace=False).tolist())
        y1, y2 = sorted(rng.choice(95, 2, replace=False).tolist())
        mask = np.zeros((96, 128, 3), np.uint8)
        cv2.drawContours(mask, [outline], -1, (255, 255, 255), cv2.FILLED)
        expected = np.where((mask & canvas) > 0, canvas, mask)[y1:y2, x1:x2]
        actual = Sample(0, (x1, y1, x2, y2), outline, canvas).cut_out()
        assert np.array_equal(actual, expected)
