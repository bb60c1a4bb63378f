"""utils/data/transforms.py and utils/data/paste.py against stock's arrays, and against values computed by hand."""

import random

import cv2
import numpy as np
import pytest

from tests import golden_data, parity
from tests.golden_data import check_cut_out, check_labels, check_pixels, check_streams, numbered, seed_both
from utils.data import transforms
from utils.data.paste import Sample, pastein, sample_segments
from utils.data.transforms import (
    Warp,
    augment_hsv,
    blended,
    box_candidates,
    copy_paste,
    draw_warp,
    letterbox,
    mixup,
    random_perspective,
    warp_labels,
)
from utils.ops.boxes import resample_segments, segment2box


def test_letterbox_golden():
    entry, arrays = golden_data.load("c_letterbox")
    assert entry["cases"]
    for k, case in enumerate(entry["cases"]):
        options = {key: case[key] for key in ("auto", "scaleFill", "scaleup", "stride")}
        img, ratio, pad = letterbox(arrays["input"], tuple(case["new_shape"]), **options)
        parity.check("data letterbox", f"out{k}", img, arrays[f"out{k}"])
        parity.check("data letterbox", f"ratio{k}", ratio, case["ratio"])
        parity.check("data letterbox", f"pad{k}", pad, case["pad"])


@pytest.mark.parametrize("gain", [0.0, 0.1, 0.3, 0.5, 0.7123456, 0.99999, 1.0, 1.00001, 1.37, 1.9999, 2.0, 300.0])
def test_colour_gains_cut_off_what_exceeds_whole_numbers(gain):
    plane = np.arange(256, dtype=np.uint8).reshape(16, 16)
    expected = [min(int(level * gain), 255) for level in range(256)]
    colours = transforms.Colours(1, gain, gain)
    assert colours.tables()[1].tolist() == colours.tables()[2].tolist() == expected
    if transforms._scaled_truncated(plane, gain, colours.tables()[1]):
        assert plane.ravel().tolist() == expected
    else:
        assert plane.ravel().tolist() == list(range(256))


def test_warp_is_what_opencv_makes_of_three_channels():
    img = np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    for matrix in ([[0.7, 0, 3], [0, 0.7, -9.3], [0, 0, 1]], [[1.2, 0.3, -30], [-0.2, 0.9, 11], [0, 0, 1]]):
        matrix, grey = np.array(matrix), (114, 114, 114)
        direct = cv2.warpAffine(img, matrix[:2], (64, 48), borderValue=grey)
        assert np.array_equal(Warp(matrix, 1.0, 64, 48, False).image(img), direct)
        direct = cv2.warpPerspective(img, matrix, (64, 48), borderValue=grey)
        assert np.array_equal(Warp(matrix, 1.0, 64, 48, True).image(img), direct)


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


@pytest.mark.parametrize("ratio", [0.5, 0.37, 0.3, 0.1 + 0.2, 1 / 3, 0.70000001, 0.25, 0.99, 0.123456789])
def test_blending_cuts_off_like_the_exact_sum(ratio):
    """For every pair of levels, also where nothing quicker than a table gives them (3/10, 1/4: many whole numbers)."""
    first, second = (np.repeat(levels.ravel(), 3).reshape(256, 256, 3) for levels in np.indices((256, 256), np.uint8))
    expected = (first * ratio + second * (1 - ratio)).astype(np.uint8)
    assert np.array_equal(blended(first, second, ratio), expected)


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


# values computed by hand


@pytest.fixture
def draws_in_the_middle(monkeypatch):
    """random.uniform gives the middle of its range."""
    monkeypatch.setattr(random, "uniform", lambda low, high: (low + high) / 2)


def test_draw_warp_by_hand(draws_in_the_middle):
    """Middle draws: no angle, scale 1.05, and the centre of the source goes to the centre of the output."""
    warp = draw_warp(200, 100, degrees=10, translate=0.1, scale=0.5, shear=5, perspective=0.0, border=(-50, 0))
    assert (warp.width, warp.height, warp.scale) == (100, 100, 1.05)
    np.testing.assert_allclose(warp.matrix, [[1.05, 0, 50 - 52.5], [0, 1.05, 50 - 105], [0, 0, 1]])


def shift_by(dx, dy, width=100, height=100, has_perspective=False):
    matrix = np.array([[1.0, 0, dx], [0, 1, dy], [0, 0, 1]])
    return Warp(matrix, 1.0, width, height, has_perspective)


def test_warped_boxes_are_clipped_to_the_output():
    boxes = shift_by(-10, 20).boxes(np.array([[0, 0, 30, 40], [50, 70, 90, 90]], np.float32))
    assert boxes.tolist() == [[0, 20, 20, 60], [40, 90, 80, 100]]


def test_polygon_boxes_hold_the_visible_part_of_the_outline():
    """A right triangle with its corner outside: what is left of it is cut at the outline, not at the corner."""
    triangle = np.array([[-50, 0], [50, 0], [-50, 100]], np.float64)
    far_away = triangle + (500, 0)
    boxes = shift_by(0, 0).polygon_boxes([triangle, far_away])
    np.testing.assert_allclose(boxes[0], [0, 0, 50, 50], atol=0.4)  # the outline is sampled every 0.3 pixels
    assert boxes[1].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("has_perspective", [False, True])
def test_leaving_out_far_polygons_changes_nothing(has_perspective):
    rng = np.random.default_rng(1)
    polygons = [rng.uniform(-40, 40, (5, 2)) + rng.uniform(-150, 250, 2) for _ in range(200)]
    matrix = np.array([[0.8, 0.3, 5], [-0.2, 1.1, -7], [1e-4 * has_perspective, 0, 1]])
    warp = Warp(matrix, 1.0, 100, 100, has_perspective)
    alone = [segment2box(warp.points(resample_segments([points])[0]), 100, 100) for points in polygons]
    boxes = warp.polygon_boxes(polygons)
    assert 0 < (boxes.sum(1) == 0).sum() < 200
    np.testing.assert_allclose(boxes, alone, rtol=0, atol=1e-9)


def test_source_area_is_all_that_the_warp_reads():
    """Pixels outside of it may change at will."""
    seed_both(3)
    rng = np.random.default_rng(3)
    for perspective in (0.0, 0.001):
        warp = draw_warp(128, 128, 20, 0.2, 0.5, 5, perspective, border=(-32, -32))
        img = rng.integers(0, 256, (128, 128, 3), dtype=np.uint8)
        x1, y1, x2, y2 = (int(value) for value in np.clip(warp.source_area(), 0, 128))
        assert (x2 - x1) * (y2 - y1) < 128 * 128
        only_area = np.zeros_like(img)
        only_area[y1 : y2 + 1, x1 : x2 + 1] = img[y1 : y2 + 1, x1 : x2 + 1]
        assert np.array_equal(warp.image(img), warp.image(only_area))


def test_source_area_is_everything_when_the_horizon_shows():
    warp = Warp(np.array([[1.0, 0, 0], [0, 1, 0], [0.02, 0, 1]]), 1.0, 100, 100, True)
    assert np.isinf(warp.source_area()).all()


def test_unchanged_picture_is_handed_through():
    img = np.zeros((100, 100, 3), np.uint8)
    assert shift_by(0, 0).image(img) is img
    assert shift_by(1, 0).image(img) is not img


def test_box_candidates_by_hand():
    before = np.array([[0, 0, 100, 100]] * 5).T
    after = np.array(
        [
            [0, 0, 40, 40],  # 16 % are left
            [0, 0, 30, 30],  # 9 %
            [0, 0, 2, 100],  # too narrow
            [0, 0, 90, 4.4],  # thinner than 1 : 20
            [0, 0, 90, 12],  # 1 : 7.5
        ]
    ).T
    assert box_candidates(before, after).tolist() == [True, False, False, False, True]
    assert box_candidates(before, after, area_thr=0.01).tolist() == [True, True, False, False, True]


# rows that are only a box beside rows with a polygon


def mixed_labels():
    rng = np.random.default_rng(2)
    corner = rng.uniform(0, 90, (12, 2))
    labels = np.concatenate((np.arange(12)[:, None], corner, corner + rng.uniform(8, 40, (12, 2))), axis=1)
    labels = labels.astype(np.float32)
    polygons = [
        np.array([[x1, y1], [x2, y1], [(x1 + x2) / 2, y2]], np.float32) for x1, y1, x2, y2 in labels[:, 1:].tolist()
    ]
    return labels, polygons


def test_each_row_of_a_mixed_set_is_warped_by_what_it_is():
    """Polygon rows come out as in a set of polygons alone, box rows as in a set of boxes alone."""
    labels, polygons = mixed_labels()
    has_polygon = np.arange(12) % 3 != 0
    segments = [points if own else np.zeros((0, 2)) for points, own in zip(polygons, has_polygon, strict=True)]
    seed_both(4)
    warp = draw_warp(128, 128, 10, 0.1, 0.3, 3, border=(-32, -32))
    of_polygons, of_boxes = warp_labels(labels, polygons, warp), warp_labels(labels, (), warp)
    expected = [row for row in of_polygons if has_polygon[int(row[0])]]
    expected += [row for row in of_boxes if not has_polygon[int(row[0])]]
    assert len(expected) >= 4
    actual = warp_labels(labels, segments, warp)
    assert actual.tolist() == sorted(row.tolist() for row in expected)


def test_warp_labels_without_labels():
    labels = np.zeros((0, 5), np.float32)
    assert warp_labels(labels, [], shift_by(0, 0)).shape == (0, 5)


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


# copy-paste and paste-in


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
    whole_picture = np.array([[1, 0, 0, 160, 160]], np.float32)
    seed_both(5)
    for row in pastein(img, whole_picture, [sample])[1:]:
        assert (row[3] - row[1]) * (row[4] - row[2]) < 0.3 * 160 * 160


def test_pastein_into_a_tiny_picture_is_no_crash():
    labels = pastein(np.zeros((8, 8, 3), np.uint8), np.zeros((0, 5), np.float32), [])
    assert labels.shape == (0, 5)
