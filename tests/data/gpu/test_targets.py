"""utils/data/gpu/targets.py: the labels of many mosaics at once are those of each by itself, to the bit."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from utils.data.affine import draw_affine, warp_labels
from utils.data.gpu.targets import targets_of, warped_labels
from utils.data.mosaic import draw_mosaic4, draw_mosaic9
from utils.ops.boxes import segments2boxes
from utils.ops.polygons import MAX_VERTICES, Polygons
from utils.system.random_state import seed_generators

NUM_IMAGES = 12


def drawn_object(rng, kind):
    """(label [5], polygon [m x 2]) of a mere box, an ordinary outline, a very long one, a flat one, or a point."""
    if kind == "box":
        size = rng.uniform(0, 0.6, 2)
        return (7, *rng.uniform(size / 2, 1 - size / 2), *size), np.zeros((0, 2), np.float32)
    num_points = MAX_VERTICES + rng.integers(-9, 99) if kind == "long" else rng.integers(3, 60)
    points = rng.uniform(0, 1, 2) + rng.uniform(0.001, 0.6) * rng.uniform(-1, 1, (num_points, 2))
    points = points.clip(0, 1).astype(np.float32)
    if kind == "flat":
        points[:, 0] = points[0, 0]
    if kind == "point":
        points[:] = 0
    return (3, *segments2boxes([points])[0]), points


def drawn_set(rng, size):
    """What mosaics need of a data set: images of all shapes with boxes, with outlines, with both, and without any."""
    labels, segments = [], []
    for k in range(NUM_IMAGES):
        kinds = rng.choice(["box", "outline", "long", "flat", "point"], rng.choice([0, 1, 8, 30]),
                           p=[[1, 0, 0, 0, 0], [0, 0.9, 0, 0.1, 0], [0.4, 0.5, 0.02, 0.04, 0.04]][k % 3])  # fmt: skip
        objects = [drawn_object(rng, kind) for kind in kinds]
        labels.append(np.array([label for label, _ in objects], np.float32).reshape(-1, 5))
        segments.append(Polygons.of([points for _, points in objects] if k % 3 else []))
    shapes = rng.integers(40, 900, (NUM_IMAGES, 2)).astype(float)
    return SimpleNamespace(
        img_size=size, mosaic_border=(-size // 2, -size // 2), indices=range(NUM_IMAGES), labels=labels,
        segments=segments, shapes=shapes,
    )  # fmt: skip


def drawn_layers(dataset, count, scale, translate):
    layers = []
    for k in range(count):
        canvas = random.choice((draw_mosaic4, draw_mosaic9))(dataset, k % NUM_IMAGES)
        ranges = {"degrees": 0, "shear": 0, "scale": scale, "translate": translate, "border": dataset.mosaic_border}
        layers.append((canvas, draw_affine(canvas.side, canvas.side, **ranges)))
    return layers


def of_the_reference(canvas, affine):
    labels = canvas.labels()
    near = affine.may_show(labels[:, 1:])
    return warp_labels(labels[near], canvas.segments(near), affine)


@pytest.mark.parametrize("scale", [0, 0.5, 0.9, 1])
@pytest.mark.parametrize(("size", "translate"), [(64, 0.5), (333, 0.1), (640, 0.2)])
def test_labels_of_many_mosaics(size, scale, translate):
    for trial in range(5):
        seed_generators(6, trial)
        layers = drawn_layers(drawn_set(np.random.default_rng(trial), size), 1 + 6 * trial, scale, translate)
        found, wanted = warped_labels(layers), [of_the_reference(*layer) for layer in layers]
        assert [labels.tobytes() for labels in found] == [labels.tobytes() for labels in wanted]
        assert sum(map(len, wanted)) > 3 and {labels.dtype for labels in found} == {np.dtype(np.float32)}


def drawn_sample(labels, shape, flips):
    return SimpleNamespace(labels=labels, image=np.zeros((*shape, 3), np.uint8), flips=flips)


def test_nothing_to_see():
    dataset = drawn_set(np.random.default_rng(0), 64)
    dataset.labels, dataset.segments = [np.zeros((0, 5), np.float32)] * NUM_IMAGES, [Polygons.of([])] * NUM_IMAGES
    seed_generators(1)
    layers = drawn_layers(dataset, 3, 0.5, 0.1)
    assert [labels.shape for labels in warped_labels(layers)] == [(0, 5)] * 3
    assert warped_labels([]) == []
    samples = [drawn_sample(labels, (64, 64), [False, True]) for labels in warped_labels(layers)]
    assert targets_of(samples).shape == (0, 6)


def test_targets_by_hand():
    """Known labels of two samples, the second one upside down and mirrored."""
    labels = np.array([[5, 10, 20, 30, 80]], np.float32)
    samples = [drawn_sample(labels, (100, 50), [False, False]), drawn_sample(labels, (200, 50), [True, True])]
    assert np.allclose(targets_of(samples, 3), [[3, 5, 0.4, 0.5, 0.4, 0.6], [4, 5, 0.6, 0.75, 0.4, 0.3]])
