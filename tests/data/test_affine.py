"""utils/data/affine.py against stock's arrays, and against values computed by hand."""

import random

import cv2
import numpy as np
import pytest

from tests import golden_data
from tests.golden_data import check_labels, check_pixels, check_streams, numbered, seed_both
from tests.label_sets import mixed_labels
from utils.data.affine import Affine, box_candidates, draw_affine, random_perspective, warp_labels
from utils.ops.boxes import resample_segments, segment2box


def test_warp_is_what_opencv_makes_of_three_channels():
    img = np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    for matrix in ([[0.7, 0, 3], [0, 0.7, -9.3], [0, 0, 1]], [[1.2, 0.3, -30], [-0.2, 0.9, 11], [0, 0, 1]]):
        matrix, grey = np.array(matrix), (114, 114, 114)
        direct = cv2.warpAffine(img, matrix[:2], (64, 48), borderValue=grey)
        assert np.array_equal(Affine(matrix, 1.0, 64, 48, False).image(img), direct)
        direct = cv2.warpPerspective(img, matrix, (64, 48), borderValue=grey)
        assert np.array_equal(Affine(matrix, 1.0, 64, 48, True).image(img), direct)


@pytest.mark.parametrize("name", golden_data.names("c_random_perspective"))
def test_random_perspective_golden(name):
    entry, arrays = golden_data.load(name)
    seed_both(entry["seed"])
    img, labels = random_perspective(arrays["input"], arrays["targets"], numbered(arrays, "seg"), **entry["kwargs"])
    check_pixels("data warp", name, img, arrays["img"])
    check_labels("data warp labels", name, labels, arrays["labels"])
    check_streams(name, entry["after"])


@pytest.fixture
def draws_in_the_middle(monkeypatch):
    """random.uniform gives the middle of its range."""
    monkeypatch.setattr(random, "uniform", lambda low, high: (low + high) / 2)


def test_draw_affine_by_hand(draws_in_the_middle):
    """Middle draws: no angle, scale 1.05, and the centre of the source goes to the centre of the output."""
    affine = draw_affine(200, 100, degrees=10, translate=0.1, scale=0.5, shear=5, perspective=0.0, border=(-50, 0))
    assert (affine.width, affine.height, affine.scale) == (100, 100, 1.05)
    np.testing.assert_allclose(affine.matrix, [[1.05, 0, 50 - 52.5], [0, 1.05, 50 - 105], [0, 0, 1]])


def shift_by(dx, dy, width=100, height=100, has_perspective=False):
    matrix = np.array([[1.0, 0, dx], [0, 1, dy], [0, 0, 1]])
    return Affine(matrix, 1.0, width, height, has_perspective)


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
    affine = Affine(matrix, 1.0, 100, 100, has_perspective)
    alone = [segment2box(affine.points(resample_segments([points])[0]), 100, 100) for points in polygons]
    boxes = affine.polygon_boxes(polygons)
    assert 0 < (boxes.sum(1) == 0).sum() < 200
    np.testing.assert_allclose(boxes, alone, rtol=0, atol=1e-9)


def test_source_area_is_all_that_the_warp_reads():
    """Pixels outside of it may change at will."""
    seed_both(3)
    rng = np.random.default_rng(3)
    for perspective in (0.0, 0.001):
        affine = draw_affine(128, 128, 20, 0.2, 0.5, 5, perspective, border=(-32, -32))
        img = rng.integers(0, 256, (128, 128, 3), dtype=np.uint8)
        x1, y1, x2, y2 = (int(value) for value in np.clip(affine.source_area(), 0, 128))
        assert (x2 - x1) * (y2 - y1) < 128 * 128
        only_area = np.zeros_like(img)
        only_area[y1 : y2 + 1, x1 : x2 + 1] = img[y1 : y2 + 1, x1 : x2 + 1]
        assert np.array_equal(affine.image(img), affine.image(only_area))


def test_source_area_is_everything_when_the_horizon_shows():
    affine = Affine(np.array([[1.0, 0, 0], [0, 1, 0], [0.02, 0, 1]]), 1.0, 100, 100, True)
    assert np.isinf(affine.source_area()).all()


def test_unchanged_image_is_handed_through():
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


def test_each_row_of_a_mixed_set_is_warped_by_what_it_is():
    """Polygon rows come out as in a set of polygons alone, box rows as in a set of boxes alone."""
    labels, polygons = mixed_labels()
    has_polygon = np.arange(12) % 3 != 0
    segments = [points if own else np.zeros((0, 2)) for points, own in zip(polygons, has_polygon, strict=True)]
    seed_both(4)
    affine = draw_affine(128, 128, 10, 0.1, 0.3, 3, border=(-32, -32))
    of_polygons, of_boxes = warp_labels(labels, polygons, affine), warp_labels(labels, (), affine)
    expected = [row for row in of_polygons if has_polygon[int(row[0])]]
    expected += [row for row in of_boxes if not has_polygon[int(row[0])]]
    assert len(expected) >= 4
    actual = warp_labels(labels, segments, affine)
    assert actual.tolist() == sorted(row.tolist() for row in expected)


def test_warp_labels_without_labels():
    labels = np.zeros((0, 5), np.float32)
    assert warp_labels(labels, [], shift_by(0, 0)).shape == (0, 5)
