"""Captions of boxes: beside their box, within the image, and never where they hide another object."""

import numpy as np
import pytest

from utils.plots.captions import MOST_HIDDEN, Captions
from utils.plots.images import draw_detections
from utils.plots.style import PALETTE, class_colour


def test_above_else_below_else_inside():
    assert Captions(100, 100, [[20, 40, 60, 80]]).beside(0, 30, 10) == (20, 30)
    assert Captions(100, 100, [[20, 5, 60, 50]]).beside(0, 30, 10) == (20, 50)
    assert Captions(100, 100, [[20, 5, 60, 95]]).beside(0, 30, 10) == (20, 5), "inside"
    assert Captions(100, 100, [[0, 0, 100, 100]]).beside(0, 30, 10) == (0, 0)
    assert Captions(100, 100, [[90, 40, 99, 80]]).beside(0, 30, 10) == (70, 30)
    assert Captions(20, 20, [[5, 5, 15, 15]]).beside(0, 30, 10) is None, "wider than the image"


def test_no_room_between_others():
    boxes = [[40, 40, 60, 60], [0, 20, 100, 40], [0, 60, 100, 80]]
    assert Captions(100, 100, boxes[:1]).beside(0, 25, 10) == (40, 30)
    assert Captions(100, 100, boxes).beside(0, 25, 15) is None
    large = [[40, 40, 60, 60], [0, 0, 100, 100]]
    assert Captions(100, 100, large).beside(0, 25, 10) == (40, 30), "a small part of a large object"


@pytest.mark.parametrize("seed", range(5))
def test_a_crowd_stays_visible(seed):
    """Of 120 objects none is hidden by the captions of others, which do not overlap each other."""
    rng = np.random.default_rng(seed)
    corners = rng.uniform(0, 300, (120, 2))
    boxes = np.c_[corners, corners + rng.uniform(4, 60, (120, 2))]
    captions, places = Captions(320, 320, boxes), []
    for index in range(len(boxes)):
        corner = captions.beside(index, 34, 12)
        if corner is None:
            continue
        x, y = corner
        place = np.array([x, y, x + 34, y + 12])
        others = np.delete(boxes, index, 0)
        for rows, limit in ((others, MOST_HIDDEN), (np.reshape(places, (-1, 4)), 0.0)):
            sides = np.minimum(place[2:], rows[:, 2:]) - np.maximum(place[:2], rows[:, :2])
            covered = np.maximum(sides, 0).prod(1) / np.maximum((rows[:, 2:] - rows[:, :2]).prod(1), 1)
            assert (covered <= limit + 1e-9).all()
        assert 0 <= x <= 320 - 34 and 0 <= y <= 320 - 12
        places.append(place)
    assert 5 < len(places) < 120


def test_the_caption_of_an_image_takes_the_emptiest_corner():
    assert Captions(100, 100, np.zeros((0, 4))).in_a_corner(30, 10) == (0, 0)
    assert Captions(100, 100, [[0, 0, 20, 20]]).in_a_corner(30, 10) == (70, 0)
    everywhere = [[0, 0, 20, 20], [80, 0, 100, 20], [0, 80, 30, 100], [95, 80, 100, 100]]
    assert Captions(100, 100, everywhere).in_a_corner(30, 10) == (70, 90), "where it hides the least"


def test_boxes_lie_over_text():
    """The outline of the second object is whole, though the caption of the first one is there."""
    boxes = np.array([[40.0, 60, 80, 90, 0.9, 0], [20, 20, 110, 110, 0.8, 1]])
    drawn = draw_detections(np.zeros((120, 120, 3), np.uint8), boxes, ["long name", "b"])
    orange = [int(class_colour(1)[k : k + 2], 16) for k in (5, 3, 1)]
    for row in (20, 110):
        assert (drawn[row, 20:111] == orange).all()
    for column in (20, 110):
        assert (drawn[20:111, column] == orange).all()


def test_a_class_has_one_colour():
    assert [class_colour(k) for k in (0, 7, 8, np.float64(9.0))] == [PALETTE[0], PALETTE[7], PALETTE[0], PALETTE[1]]
