"""utils/ops/polygons.py: ragged arrays of polygons, and boxes of outlines from the points that decide."""

import numpy as np
import pytest

from utils.data.affine import Affine
from utils.ops.boxes import resample_segments, segment2box
from utils.ops.polygons import MAX_VERTICES, NUM_STEPS, Polygons, edge_table

TRIANGLE = np.array([[0, 0], [9, 0], [0, 9]], np.float32)
SQUARE = np.array([[1, 1], [2, 1], [2, 2], [1, 2]], np.float32)
NONE = np.zeros((0, 2), np.float32)


def test_polygons_are_a_sequence():
    polygons = Polygons.of([TRIANGLE, NONE, SQUARE])
    assert len(polygons) == 3
    assert polygons.counts.tolist() == [3, 0, 4]
    assert polygons.starts().tolist() == [0, 3, 3]
    for k, expected in enumerate((TRIANGLE, NONE, SQUARE)):
        assert np.array_equal(polygons[k], expected)
    assert [len(points) for points in polygons] == [3, 0, 4]
    assert np.array_equal(polygons[-1], SQUARE)
    with pytest.raises(IndexError):
        polygons[3]


def test_polygons_chosen_by_a_mask():
    chosen = Polygons.of([TRIANGLE, NONE, SQUARE]).chosen(np.array([False, True, True]))
    assert chosen.counts.tolist() == [0, 4]
    assert np.array_equal(chosen.points, SQUARE)


def test_no_polygons():
    empty = Polygons.of([])
    assert len(empty) == 0
    assert list(empty) == []
    assert empty.points.shape == (0, 2)
    assert Polygons.of(empty) is empty


@pytest.mark.parametrize("num_vertices", [1, 2, 3, 4, 27, 333, 499, MAX_VERTICES])
def test_ends_on_edges_are_those_that_interp_takes_from_them(num_vertices):
    first, last = edge_table(num_vertices)[:2]
    steps = np.linspace(0, num_vertices, NUM_STEPS)
    edges = np.arange(num_vertices)
    for edge in edges:
        on_it = steps[:-1][(steps[:-1] >= edge) & (steps[:-1] < edge + 1)]
        assert (first[edge], last[edge]) == (on_it[0] - edge, on_it[-1] - edge)
    # how the points between them are computed: the same numbers
    assert (np.arange(NUM_STEPS - 1) * (num_vertices / (NUM_STEPS - 1)) == steps[:-1]).all()


def random_polygons(rng, num, dtype):
    """Around the borders of a picture of 100 x 80, some on whole pixels, some clipped at 0, some tiny."""
    polygons = []
    for k in range(num):
        points = rng.uniform(-1, 1, (rng.integers(1, 45), 2)) * rng.uniform(0.1, 60) + rng.uniform(-40, 150, 2)
        points = np.round(points) if k % 3 == 0 else points
        polygons.append((points.clip(0, 120) if k % 2 else points).astype(dtype))
    return polygons


def direct_boxes(warp, polygons):
    """Each polygon alone, with all its 1000 points."""
    boxes = [segment2box(warp.points(resample_segments([p])[0]), warp.width, warp.height) for p in polygons]
    return np.array(boxes)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("scale_x", "scale_y", "shift_x", "shift_y"), [
    (1, 1, 0, 0), (1, 1, -20, 3), (0.613, 0.871, 11.3, -9.7), (1.93, 1.93, -33.1, -40.2), (-0.7, 0.7, 90, 0),
])  # fmt: skip
def test_boxes_equal_those_of_all_points_when_scaled_and_shifted(dtype, scale_x, scale_y, shift_x, shift_y):
    polygons = random_polygons(np.random.default_rng(3), 300, dtype)
    warp = Affine(np.array([[scale_x, 0, shift_x], [0, scale_y, shift_y], [0, 0, 1]], float), 1.0, 100, 80, False)
    assert warp.is_axis_aligned
    boxes = warp.polygon_boxes(polygons)
    assert np.array_equal(boxes, direct_boxes(warp, polygons))
    hidden = (boxes == 0).all(1)
    assert 20 < hidden.sum() < 280


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_boxes_of_edges_along_the_border(shift):
    """They change by so little that rounding decides which of their points are inside."""
    rng, polygons = np.random.default_rng(6), []
    for k in range(400):
        points = rng.uniform(-30, 130, (rng.integers(2, 60), 2))
        border = (0, (100, 80)[k % 2])[k // 2 % 2] - shift
        points[:, k % 2] = border + rng.choice([0, 1e-14, 1e-13, 1e-11, 1e-8, 1e-5]) * rng.uniform(-1, 1, len(points))
        polygons.append(points)
    warp = Affine(np.array([[1, 0, shift], [0, 1, shift], [0, 0, 1]]), 1.0, 100, 80, False)
    boxes = warp.polygon_boxes(polygons)
    assert np.array_equal(boxes, direct_boxes(warp, polygons))
    assert 10 < (boxes == 0).all(1).sum() < 100


def test_boxes_equal_those_of_all_points_when_turned():
    """Rounding along an edge may then differ in the last place."""
    polygons = random_polygons(np.random.default_rng(4), 300, np.float32)
    warp = Affine(np.array([[0.9, 0.2, -3], [-0.3, 1.1, 5], [0, 0, 1]]), 1.0, 100, 80, False)
    assert not warp.is_axis_aligned
    np.testing.assert_allclose(warp.polygon_boxes(polygons), direct_boxes(warp, polygons), rtol=0, atol=1e-11)


def test_boxes_of_edges_that_turn_onto_the_border():
    """Their ends have equal coordinates there, but rounding takes some of the points between them out of the image."""
    rng, num_flat = np.random.default_rng(1), 0
    for angle, *shift in rng.uniform((0, -32, -32), (2 * np.pi, 96, 96), (400, 3)):
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        triangle = (np.array([[-20, 0], [rng.uniform(10, 60), 0], [20, -30]]) - shift) @ turn
        warp = Affine(np.block([[turn, np.array(shift)[:, None]], [0, 0, 1]]), 1.0, 64, 64, False)
        first, second, _ = warp.points(triangle)
        if first[1] == second[1] >= 0:
            num_flat += 1
            np.testing.assert_allclose(
                warp.polygon_boxes([triangle]), direct_boxes(warp, [triangle]), rtol=0, atol=1e-9
            )
    assert num_flat > 50


def test_polygons_of_many_vertices_take_the_direct_way():
    angles = np.linspace(0, 2 * np.pi, 1500, endpoint=False)
    round_one = np.stack((40 + 30 * np.cos(angles), 50 + 45 * np.sin(angles)), axis=1).astype(np.float32)
    warp = Affine(np.array([[1.1, 0, 3], [0, 1.1, -2], [0, 0, 1]]), 1.1, 100, 80, False)
    boxes = warp.polygon_boxes([round_one, TRIANGLE])
    assert np.array_equal(boxes, direct_boxes(warp, [round_one, TRIANGLE]))


def test_scaling_and_shifting_equals_the_matrix_product():
    """Whatever order of summation the linear algebra library has, the terms that are zero change nothing."""
    rng = np.random.default_rng(5)
    warp = Affine(np.array([[0.613, 0, 11.3], [0, 0.871, -9.7], [0, 0, 1]]), 1.0, 100, 80, False)
    for count in (1, 3, 8, 100, 5000):
        points = rng.uniform(-50, 700, (count, 2)).astype(np.float32)
        homogeneous = np.concatenate((points, np.ones((count, 1))), axis=1)
        np.testing.assert_allclose(warp.points(points), (homogeneous @ warp.matrix.T)[:, :2], rtol=1e-15, atol=1e-13)
