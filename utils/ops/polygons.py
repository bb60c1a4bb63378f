"""Many polygons in one array, and the boxes round what an output image shows of them.

Stock walks 1000 points along each outline and takes the extremes of those inside the image. Along an edge x and y
only rise or only fall, so the first and the last point on it tell as much as all between them, unless the border of
the image cuts the edge; there those beside the border are looked at as well. The boxes are the same.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

NUM_STEPS = 1000  # points along an outline, both ends included; the last is the first again
MAX_VERTICES = NUM_STEPS // 2  # with fewer, each edge has a point of the outline
LEAST_SPAN = 1e-6  # pixels; where an edge spans less along an axis, rounding may decide which points are inside


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
def edge_tables(most):
    """The `edge_table` of polygons of 1, 2, ... `most` vertices, one after the other [6 x ...]."""
    return np.concatenate([edge_table(num_vertices) for num_vertices in range(1, most + 1)], axis=1)


def edge_table(num_vertices):
    """What is known of the edges of a polygon before its vertices are, float64 [6 x num_vertices].

    Rows: where the first and the last point of the outline on each edge lie, 0 to 1 of its length; the numbers of
    those two points; the points' distance along the outline; the edge's number. The last of all points is left out,
    being the first again.
    """
    steps = np.linspace(0, num_vertices, NUM_STEPS)[:-1]
    edges = np.arange(num_vertices)
    begins = steps.searchsorted(edges)
    lasts = np.append(begins[1:], len(steps)) - 1
    distance = np.full(num_vertices, num_vertices / (NUM_STEPS - 1))
    return np.stack((steps[begins] - edges, steps[lasts] - edges, begins, lasts, distance, edges))


def outline_boxes(polygons, move, width, height):
    """Boxes round the points of each outline that `move` takes into a `width` x `height` image [4 x n, xyxy].

    `move(points, edges)` maps points, x and y as rows [2 x k], on edges of those numbers [k], None for all edges one
    after the other, perhaps in place, and is affine for each polygon. No polygon is empty or has more than
    MAX_VERTICES. An outline that is not seen has an infinite box.
    """
    starts, corner = polygons.starts(), np.ascontiguousarray(polygons.points.T, np.float64)
    side = np.empty_like(corner)
    np.subtract(corner[:, 1:], corner[:, :-1], out=side[:, :-1])
    last = starts + polygons.counts - 1
    side[:, last] = corner.take(starts, 1) - corner.take(last, 1)

    tables = edge_tables(1 << int(polygons.counts.max() - 1).bit_length())
    begins = polygons.counts * (polygons.counts - 1) // 2  # in the tables, behind those of fewer vertices
    edges = (begins - starts).repeat(polygons.counts) + np.arange(corner.shape[1])
    first, second = (move(side * part.take(edges) + corner, None) for part in tables[:2])
    low, high = np.minimum(first, second), np.maximum(first, second)
    limit = np.array([[width], [height]], np.float64)
    in_full = (low >= 0) & (high <= limit)
    if not in_full.all():
        hidden, near = ~(in_full[0] & in_full[1]), (high >= 0) & (low <= limit)
        cut = np.flatnonzero(hidden & near[0] & near[1])
        low, high = np.where(hidden, np.inf, low), np.where(hidden, -np.inf, high)
        if len(cut):
            rows = tables[2:].take(edges.take(cut), 1), corner.take(cut, 1), side.take(cut, 1)
            ends = first.take(cut, 1), second.take(cut, 1)
            low[:, cut], high[:, cut] = _extremes_of_cut(cut, *rows, *ends, move, limit)
    return np.concatenate((np.minimum.reduceat(low, starts, axis=1), np.maximum.reduceat(high, starts, axis=1)))


def _extremes_of_cut(cut, edges, corner, side, begin, end, move, limit):
    """Lowest and highest [2 x e each] of the points inside on edges that the border of the image cuts.

    `cut` [e] are the numbers of the edges, `edges` [4 x e] rows of their `edge_table`, `begin` and `end` [2 x e] their
    first and last point. Only the points beside the border are looked at; all points where rounding may decide.
    """
    first, last, distance, place = edges
    beside, is_certain = _beside_border(begin, end, side, first, last, limit)
    num_points = np.where(is_certain, len(beside), last - first + 1).astype(np.int64)
    begins = num_points.cumsum() - num_points
    rows = np.concatenate(([first - begins, distance, place], corner, side)).repeat(num_points, axis=1)
    number = np.arange(rows.shape[1]) + rows[0]
    number[is_certain.repeat(num_points)] = beside.T[is_certain].ravel()
    points = move(rows[5:] * (number * rows[1] - rows[2]) + rows[3:5], cut.repeat(num_points))
    inside = ((points >= 0) & (points <= limit)).all(0)
    return (
        np.minimum.reduceat(np.where(inside, points, np.inf), begins, axis=1),
        np.maximum.reduceat(np.where(inside, points, -np.inf), begins, axis=1),
    )


def _beside_border(begin, end, side, first, last, limit):
    """Numbers [4 x e] of the two points where each edge enters the image, and of the two where it leaves it.

    Also returns whether no other point of the edge can be nearer to the border [e]. Edges go from `begin` to `end`
    [2 x e], which are the points number `first` and `last` [e]; their directions were `side` [2 x e] before.
    """
    span = end - begin
    is_flat = abs(span) < LEAST_SPAN
    # An edge that only the transform made flat: rounding puts its points on both sides of the line between its ends.
    is_certain = (~is_flat | (span == 0) & (side == 0)).all(0)
    span[is_flat] = 1  # whatever is not 0: it enters and leaves by the other axis
    one, other = -begin / span, (limit - begin) / span
    enters = np.where(is_flat, 0, np.minimum(one, other)).max(0)
    leaves = np.where(is_flat, 1, np.maximum(one, other)).min(0)
    enters, leaves = np.rint(first + enters * (last - first)), np.rint(first + leaves * (last - first))
    beside = np.array((enters, enters + 1, leaves - 1, leaves))
    return beside.clip(first, last, out=beside), is_certain
