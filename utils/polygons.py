"""Many polygons in one array, and the boxes round what an output picture shows of them.

Stock walks 1000 points along each outline and takes the extremes of those inside the picture. Along an edge x and y
only rise or only fall, so the first and the last point on it tell as much as all between them, unless the border of
the picture cuts the edge; only there all of them are looked at. The boxes are the same.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

NUM_STEPS = 1000  # points along an outline, both ends included; the last is the first again
MAX_VERTICES = NUM_STEPS // 2  # with fewer, each edge has a point of the outline


class Polygons(Sequence):
    """A sequence of polygons [m x 2]: `counts` [n] vertices each of `points` [k x 2], one after the other.

    A mere box has a place with no vertices.
    """

    __slots__ = ("counts", "points")

    def __init__(self, points, counts):
        self.points, self.counts = points, counts

    @classmethod
    def of(cls, polygons):
        """`polygons`, a list of arrays [m x 2], in one; what is Polygons already stays as it is."""
        if isinstance(polygons, cls):
            return polygons
        points = np.concatenate(polygons) if len(polygons) else np.zeros((0, 2), np.float32)
        return cls(points, np.fromiter(map(len, polygons), np.int64, len(polygons)))

    def __len__(self):
        return len(self.counts)

    def __getitem__(self, index):
        start = int(self.counts[:index].sum())
        return self.points[start : start + int(self.counts[index])]

    def __iter__(self):
        ends = np.cumsum(self.counts).tolist()
        return (self.points[start:end] for start, end in zip([0, *ends], ends))  # noqa: B905 - one start too many

    def chosen(self, mask):
        """Those where `mask` [n] is true."""
        return Polygons(self.points[np.repeat(mask, self.counts)], self.counts[mask])

    def starts(self):
        """Where each begins in `points` [n]."""
        return np.cumsum(self.counts) - self.counts


@cache
def points_on_edges(num_vertices):
    """Numbers of the first and the last point of the outline on each edge [num_vertices x 2], all 1000 but the last."""
    edges = np.linspace(0, num_vertices, NUM_STEPS)[:-1].searchsorted(np.arange(num_vertices + 1))
    return np.stack((edges[:-1], edges[1:] - 1), axis=1)


class Outlines:
    """The 1000 points along each of `polygons` after a warp, of which only those that decide are computed.

    `move` takes points [k x 2] to pixels of the output and is affine; no polygon is empty or has over 500 vertices.
    """

    def __init__(self, polygons, move, width, height):
        self.move, self.limits = move, np.array((width, height), np.float64)
        self.starts = polygons.starts()
        self.corner = polygons.points.astype(np.float64)
        following = np.arange(1, len(self.corner) + 1)
        following[self.starts + polygons.counts - 1] = self.starts
        self.side = self.corner[following] - self.corner
        self.step = np.repeat(polygons.counts / (NUM_STEPS - 1), polygons.counts)
        self.number = np.arange(len(self.corner)) - np.repeat(self.starts, polygons.counts)
        self.on_edge = np.concatenate([points_on_edges(count) for count in polygons.counts.tolist()])

    def boxes(self):
        """(boxes [n x 4, xyxy, float64] round the points inside the output, [n] whether there are any that count)."""
        edges = np.arange(len(self.corner))
        ends = np.stack([self._points(edges, self.on_edge[:, k]) for k in (0, 1)])
        below, above = ends < 0, ends > self.limits
        outside = (below | above).any(2)
        low, high, seen = self._extremes(ends, ~outside)
        beside = (below.all(0) | above.all(0)).any(1)
        cut = np.flatnonzero(outside.any(0) & ~beside)
        if len(cut):
            low[cut], high[cut], seen[cut] = self._extremes_of_cut(cut)
        boxes = np.concatenate((np.minimum.reduceat(low, self.starts), np.maximum.reduceat(high, self.starts)), axis=1)
        return boxes, np.logical_or.reduceat(seen, self.starts)

    def _points(self, edges, numbers):
        """Points of the outline, by number, that lie on `edges` [k], in pixels of the output [k x 2]."""
        along = numbers * self.step[edges] - self.number[edges]
        return self.move(self.side[edges] * along[:, None] + self.corner[edges])

    def _extremes(self, points, inside, reduce=lambda ufunc, values: ufunc.reduce(values)):
        """Lowest and highest of the points inside [e x 2 each], and whether one of them counts [e]."""
        low = reduce(np.minimum, np.where(inside[..., None], points, np.inf))
        high = reduce(np.maximum, np.where(inside[..., None], points, -np.inf))
        # stock behaviour: an outline that shows only at x = 0 does not count
        return low, high, reduce(np.logical_or, inside & (points[..., 0] != 0))

    def _extremes_of_cut(self, edges):
        """The same of `edges` [e] that the border of the output cuts, from all points on them."""
        first, last = self.on_edge[edges].T
        counts = last - first + 1
        begins = np.cumsum(counts) - counts
        points = self._points(np.repeat(edges, counts), np.arange(counts.sum()) + np.repeat(first - begins, counts))
        inside = ((points >= 0) & (points <= self.limits)).all(1)
        return self._extremes(points, inside, lambda ufunc, values: ufunc.reduceat(values, begins))
