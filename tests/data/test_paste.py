"""utils/data/paste.py: copy-paste and paste-in against stock's arrays, and against values computed by hand."""

import cv2
import numpy as np
import pytest

from tests import golden_data, parity
from tests.golden_data import check_cut_out, check_labels, check_pixels, check_streams, numbered, seed_both
from tests.label_sets import mixed_labels
from utils.data.paste import Sample, copy_paste, pastein, sample_segments


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
        check_cut_out(f"image{k}", sample.cut_out(), arrays[f"image{k}"])
        check_cut_out(f"mask{k}", sample.cut_out(), arrays[f"mask{k}"])
    check_streams("c_sample_segments", entry["after"])


@pytest.mark.parametrize("name", golden_data.names("c_pastein", "empty"))
def test_pastein_golden(name, folder):
    entry, arrays = golden_data.load(name)
    source = entry["samples_from"]
    dataset = golden_data.load_list(
        folder, source["list"], img_size=source["img"], augment=True, hyp=golden_data.ALL_AUGMENTATIONS
    )
    seed_both(source["seed"])
    samples = dataset.samples_to_paste()
    parity.check("data paste-in", f"{name} classes", [s.category for s in samples], arrays["sample_labels"])
    for k, golden in enumerate(numbered(arrays, "image")):
        check_cut_out(f"{name} image{k}", samples[k].cut_out(), golden)
    seed_both(entry["seed"])
    img = arrays["input"].copy()
    labels = pastein(img, arrays["labels"], samples)
    check_pixels("data paste-in", f"{name} img", img, arrays["img"])
    check_labels("data paste-in", f"{name} labels", labels, arrays["out_labels"])
    check_streams(name, entry["after"])


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


def test_mere_boxes_are_never_sampled_or_pasted():
    labels, polygons = mixed_labels()
    segments = [points if row in (2, 7) else np.zeros((0, 2)) for row, points in enumerate(polygons)]
    canvas = np.full((128, 128, 3), 9, np.uint8)
    samples = sample_segments(canvas, labels, segments, probability=1.0)
    assert sorted(sample.category for sample in samples) == [2, 7]
    _, pasted, pasted_segments = copy_paste(canvas.copy(), labels[:0].copy(), [], 1.0)
    assert len(pasted) == len(pasted_segments) == 0
    _, pasted, pasted_segments = copy_paste(canvas.copy(), labels, segments, 1.0)
    assert len(pasted) == len(pasted_segments)
    assert set(pasted[12:, 0]) <= {2, 7}


def test_copy_paste_by_hand():
    """One object on the left appears mirrored on the right; its black channel is not copied."""
    img = np.full((40, 100, 3), 50, np.uint8)
    img[10:21, 10:21] = 0, 200, 100
    labels = np.array([[3, 10, 10, 20, 20]], np.float32)
    square = np.array([[10, 10], [20, 10], [20, 20], [10, 20]], np.float32)
    img, labels, segments = copy_paste(img, labels, [square], 1.0)
    assert labels.tolist() == [[3, 10, 10, 20, 20], [3, 80, 10, 90, 20]]
    assert segments[1].tolist() == [[90, 10], [80, 10], [80, 20], [90, 20]]
    assert img[15, 84].tolist() == [50, 200, 100]
    assert img[15, 95].tolist() == [50, 50, 50]


def test_copy_paste_hides_no_label():
    """An object in the middle would cover itself."""
    labels = np.array([[0, 40, 0, 60, 20]], np.float32)
    outline = np.array([[40, 0], [60, 0], [60, 20], [40, 20]], np.float32)
    img, after, _ = copy_paste(np.ones((40, 100, 3), np.uint8), labels, [outline], 1.0)
    assert len(after) == 1
    assert (img == 1).all()


def test_cut_out_by_hand():
    """Inside the outline black becomes white, outside everything is black."""
    canvas = np.full((20, 20, 3), 7, np.uint8)
    canvas[10, 10] = 0
    outline = np.array([[8, 8], [12, 8], [12, 12], [8, 12]], np.int32)
    pixels = Sample(0, (5, 5, 15, 15), outline, canvas).cut_out()
    assert pixels.shape == (10, 10, 3)
    assert pixels[0, 0].tolist() == [0, 0, 0]
    assert pixels[3, 3].tolist() == [7, 7, 7]
    assert pixels[5, 5].tolist() == [255, 255, 255]


def test_pastein_hides_no_label_and_stays_inside():
    seed_both(5)
    outline = np.array([[0, 0], [40, 0], [40, 40], [0, 40]], np.int32)
    sample = Sample(6, (0, 0, 40, 40), outline, np.full((50, 50, 3), 200, np.uint8))
    img = np.zeros((160, 160, 3), np.uint8)
    labels = pastein(img, np.array([[1, 0, 0, 160, 50]], np.float32), [sample])
    added = labels[1:]
    assert len(added) > 0
    assert (added[:, 0] == 6).all()
    assert added[:, 1:].min() >= 0
    assert added[:, 1:].max() <= 160
    for _, x1, y1, x2, y2 in added.astype(int):
        assert (img[y1:y2, x1:x2] == 200).any()
    whole_image = np.array([[1, 0, 0, 160, 160]], np.float32)
    seed_both(5)
    for row in pastein(img, whole_image, [sample])[1:]:
        assert (row[3] - row[1]) * (row[4] - row[2]) < 0.3 * 160 * 160


def test_pastein_into_a_tiny_image_is_no_crash():
    labels = pastein(np.zeros((8, 8, 3), np.uint8), np.zeros((0, 5), np.float32), [])
    assert labels.shape == (0, 5)
