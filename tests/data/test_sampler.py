"""Weights of classes and images by hand, and the draw of one epoch's images."""

import random

import numpy as np
import pytest
import torch

from utils.data.sampler import draw_image_indices, labels_to_class_weights, labels_to_image_weights


def rows(*classes):
    """[n x 5] labels of an image with boxes of these classes."""
    labels = np.full((len(classes), 5), 0.5, np.float32)
    labels[:, 0] = classes
    return labels


LABELS = [rows(0, 0, 1), rows(), rows(0, 2), rows(0)]


def test_class_weights_by_hand():
    weights = labels_to_class_weights(LABELS, 4)  # counts 4, 1, 1, none: as one
    assert weights.dtype == torch.float64
    assert weights.tolist() == pytest.approx([0.25 / 3.25, 1 / 3.25, 1 / 3.25, 1 / 3.25])


@pytest.mark.parametrize("labels", [[], [rows()], [rows(), rows()]])
def test_without_boxes_all_classes_weigh_the_same(labels):
    assert labels_to_class_weights(labels, 2).tolist() == [0.5, 0.5]


def test_image_weights_by_hand():
    weights = labels_to_image_weights(LABELS, 3, torch.tensor([0.1, 1.0, 10.0]))
    assert weights.tolist() == pytest.approx([1.2, 0.0, 10.1, 0.1])
    assert labels_to_image_weights([], 3, np.ones(3)).shape == (0,)
    assert labels_to_image_weights([rows()], 1, np.ones(1)).tolist() == [0.0]


def test_draw_uses_the_weights_by_hand():
    class_weights, maps = torch.tensor([0.3, 1.2, 1.5]), np.array([0.5, 0.0, 0.9])
    poor = [0.3 * 0.25 / 3, 1.2 / 3, 1.5 * 0.01 / 3]
    weights = [2 * poor[0] + poor[1], 0, poor[0] + poor[2], poor[0]]
    random.seed(4)
    expected = [random.choices(range(4), weights=weights, k=4) for _ in range(50)]
    after = random.getstate()
    random.seed(4)
    assert [draw_image_indices(LABELS, class_weights, maps) for _ in range(50)] == expected
    assert random.getstate() == after, "one draw from Python's generator an image"


def test_images_without_boxes_and_with_perfect_classes_are_not_drawn():
    random.seed(0)
    drawn = {i for _ in range(50) for i in draw_image_indices(LABELS, np.ones(3), np.array([1.0, 1.0, 0.0]))}
    assert drawn == {2}, "only the image with class 2"


def test_no_labelled_image():
    random.seed(0)
    drawn = [draw_image_indices([rows()] * 5, np.ones(2), np.zeros(2)) for _ in range(30)]
    assert all(len(indices) == 5 for indices in drawn) and {i for indices in drawn for i in indices} == set(range(5))
    everything_perfect = draw_image_indices(LABELS, np.ones(3), np.ones(3))
    assert len(everything_perfect) == 4 and set(everything_perfect) <= set(range(4))
