"""Where the captions of boxes go: beside their boxes, and only where they hide no other object."""

import numpy as np

MOST_HIDDEN = 0.1  # share of another object that a caption may cover
MOST_HIDDEN_OF_OWN = 0.3


class Captions:
    """Finds places for captions on an image of `width` x `height` pixels with the boxes `boxes_xyxy` [k x 4].

    A caption that has a place is there for those that follow. So the most important ones come first.
    """

    def __init__(self, width: int, height: int, boxes_xyxy: np.ndarray):
        self.width, self.height = width, height
        boxes = np.asarray(boxes_xyxy, np.float64).reshape(-1, 4)
        self.boxes = np.concatenate((np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])), 1)
        self.areas = np.maximum((self.boxes[:, 2:] - self.boxes[:, :2]).prod(1), 1.0)
        self.taken = np.zeros((0, 4))

    def beside(self, index: int, width: float, height: float) -> tuple[float, float] | None:
        """The left upper corner for a caption of box `index`; None where there is no room for it.

        Above the box, else below it, else inside; where it crosses the fewest outlines.
        """
        x1, y1, x2, y2 = self.boxes[index]
        corners = [(x1, y1 - height), (x2 - width, y1 - height), (x1, y2), (x2 - width, y2), (x1, y1)]
        limits = np.full(len(self.boxes), MOST_HIDDEN)
        limits[index] = MOST_HIDDEN_OF_OWN
        return self._best(corners, width, height, limits)

    def in_a_corner(self, width: float, height: float) -> tuple[float, float]:
        """The left upper corner for a caption of the whole image, in that corner of it which hides the least."""
        right, below = self.width - width, self.height - height
        corners = [(0.0, 0.0), (right, 0.0), (0.0, below), (right, below)]
        place = self._best(corners, width, height, np.full(len(self.boxes), MOST_HIDDEN))
        return place or min(corners, key=lambda c: float(_overlaps(_rectangle(c, width, height), self.boxes).sum()))

    def _best(self, corners, width, height, limits):
        """The first corner with the fewest crossings, among those that hide no more than `limits` of the boxes [k]."""
        found = []
        if width > self.width or height > self.height:
            return None
        for x, y in corners:
            corner = min(max(0.0, x), self.width - width), min(max(0.0, y), self.height - height)
            place = _rectangle(corner, width, height)
            hidden = _overlaps(place, self.boxes)
            if (hidden > limits * self.areas).any() or _overlaps(place, self.taken).any():
                continue
            crossings = int(((hidden > 0) & (hidden < 0.999 * width * height)).sum())
            found.append((crossings, len(found), corner, place))
        if not found:
            return None
        *_, corner, place = min(found, key=lambda entry: entry[:2])
        self.taken = np.concatenate((self.taken, place[None]))
        return corner


def _rectangle(corner, width, height):
    return np.array([*corner, corner[0] + width, corner[1] + height])


def _overlaps(place, boxes):
    """Area that a rectangle [4] has in common with each of `boxes` [k x 4], in square pixels."""
    sides = np.minimum(place[2:], boxes[:, 2:]) - np.maximum(place[:2], boxes[:, :2])
    return np.maximum(sides, 0.0).prod(1)
