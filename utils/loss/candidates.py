"""The candidates of a batch: what a loss needs to know before it sees a prediction, in one buffer of fixed size.

Which cells are candidates, and of which targets, follows from the targets, anchors and grids alone. So it is worked out
on the host while the device is busy with the model, written into one buffer, and copied once. Sizes are rounded up, so
that they repeat from batch to batch: torch's allocator finds memory of that size, and a CUDA graph can be replayed.

Padding does no harm: a padded target is of no image, a padded candidate belongs to no target, and a padded cell repeats
the first one.

`_plain_candidates` is `assigner.plain` again, in NumPy and for all layers at once: on the host that takes a fifth of
the time (0.12 ms against 0.68 ms for 64 images with 820 targets).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.loss import batched_assigner
from utils.loss.assigner import NEIGHBOUR_STEPS
from utils.ops.boxes import xywh2xyxy

# Padded sizes are multiples of this, so that rows of every layer are aligned in memory as they are in a layer alone:
# a sum over classes then adds in the same order, to the last bit.
SMALLEST = 64
SPARE = 1.25  # room in a CUDA graph, relative to the batch that made it be captured


class CandidateTensors(NamedTuple):
    """Parts of the buffer: t targets sorted by image, u distinct cells by layer, m candidates by image."""

    target_class: Tensor  # [t] int64
    num_candidates: Tensor  # [t] of the target's image
    num_pairs: Tensor  # [t] the same, and what remains of the capacity for the last target
    first_pair: Tensor  # [t] the sum of num_pairs before
    first_candidate: Tensor  # [t] of the target's image
    cell_index: Tensor  # [u] within the layer, flattened
    cell_position: Tensor  # [u] within all layers in a row
    cell_of_candidate: Tensor  # [m]
    layer_of_candidate: Tensor  # [m]
    target_of_candidate: Tensor  # [m] the target that made it a candidate, -1 for padding
    target_box: Tensor  # [t x 4: x, y, w, h normalised] float32
    target_xyxy: Tensor  # [t x 5: x1, y1, x2, y2 in pixels of the network input, area]
    geometry: Tensor  # [u x 7] of the cells, see the properties

    @property
    def corner(self):
        """[u x 2: x, y] of the cells, in cells."""
        return self.geometry[:, 0:2]

    @property
    def anchor_size(self):
        """[u x 2: width, height] in cells."""
        return self.geometry[:, 2:4]

    @property
    def grid_size(self):
        """[u x 2: nx, ny]."""
        return self.geometry[:, 4:6]

    @property
    def stride(self):
        """[u x 1] pixels per cell."""
        return self.geometry[:, 6:7]


@dataclass(frozen=True)
class Sizes:
    """How much a CandidateSet holds, padding included; `cells` has one number for each layer."""

    targets: int
    cells: tuple
    candidates: int
    pairs: int  # of a target and a candidate of its image

    @property
    def work(self):
        """What to compute with it costs; most of it is spent on the pairs."""
        return self.pairs

    @property
    def is_too_large(self):
        """Whether they are assigned in chunks, which no graph can hold."""
        return self.pairs > batched_assigner.MAX_PAIRS

    def _of_each(self, function, *others):
        """Sizes whose numbers are `function` of ours and those of `others`."""
        numbers = zip(*((s.targets, s.candidates, s.pairs, *s.cells) for s in (self, *others)), strict=True)
        targets, candidates, pairs, *cells = (function(*values) for values in numbers)
        return Sizes(targets, tuple(cells), candidates, pairs)

    def padded(self):
        """The next sizes up of a coarse scale, with at least one target, candidate and pair of padding."""
        return replace(self, targets=self.targets + 1, candidates=self.candidates + 1,
                       pairs=self.pairs + 1)._of_each(round_up)  # fmt: skip

    def or_more(self, other):
        """The larger of each."""
        return self._of_each(max, other)

    def with_spare(self):
        """Padded, with room for larger batches to come."""
        return self._of_each(lambda number: int(number * SPARE)).padded()

    def of_parts(self):
        """How many numbers the CandidateTensors have: int64 ones, then float32 ones."""
        cells = sum(self.cells)
        ints = [*[self.targets] * 5, cells, cells, *[self.candidates] * 3]
        return ints, [self.targets * 4, self.targets * 5, cells * 7]


def round_up(count):
    """The next of 64, 128, 192, ..., 512, 640, 768, ... (eight steps to a doubling): from 512 on at most 25 % more."""
    step = max(SMALLEST, 1 << max(count - 1, 0).bit_length() >> 3)
    return max(-(-count // step), 1) * step


class InOneBuffer:
    """What is known of a batch before its predictions, of `shapes`: a `buffer` of certain `sizes` holds all of it."""

    def to(self, device):
        """The same with its buffer on `device`; from pinned memory to a GPU it travels without waiting."""
        return self if device.type == "cpu" else replace(self, buffer=self.buffer.to(device, non_blocking=True))

    def copy_(self, other):
        """Take over the values of one of equal sizes and shapes, without waiting if those are pinned; returns self."""
        if (self.sizes, self.shapes) != (other.sizes, other.shapes):
            raise ValueError(f"a batch of {self.sizes} and {self.shapes} cannot hold one of {other.sizes}")
        self.buffer.copy_(other.buffer, non_blocking=True)
        return self


@dataclass
class CandidateSet(InOneBuffer):
    """Everything that a loss knows about a batch before its predictions; made by `find_candidates`."""

    sizes: Sizes
    shapes: tuple  # of the predictions, one for each layer
    buffer: Tensor  # int64, with float32 parts at its end
    pairs_of_target: np.ndarray  # [targets without padding] on the host
    tensors: CandidateTensors = field(init=False, repr=False)  # views of the buffer

    def __post_init__(self):
        ints, floats = self.sizes.of_parts()
        whole, rest = self.buffer.split([sum(ints), len(self.buffer) - sum(ints)])
        boxes, corners, geometry = rest.view(torch.float32)[: sum(floats)].split(floats)
        parts = (*whole.split(ints), boxes.view(-1, 4), corners.view(-1, 5), geometry.view(-1, 7))
        self.tensors = CandidateTensors(*parts)

    def copy_(self, other):
        super().copy_(other).pairs_of_target = other.pairs_of_target
        return self


def find_candidates(
    targets: Tensor, shapes: Sequence, anchors: Tensor, strides: Tensor | Sequence[float],
    image_size: Sequence[int] | None, *, anchor_threshold: float = 4.0, reach: float = 0.5,
    at_least: Sizes | None = None, pinned: bool = False,
) -> CandidateSet:  # fmt: skip
    """The CandidateSet, on the host, for `targets` [N x 6: image, class, x, y, w, h normalised] on the host.

    shapes      of the predictions, per layer (batch, anchors, ny, nx, 5+classes)
    anchors     [layers x anchors x 2: width, height] in grid units, on the host
    strides     [layers] pixels per cell
    image_size  (height, width) of the network input in pixels
    anchor_threshold, reach  as for `assigner.plain`, which names the candidates
    at_least    sizes to pad to, if these are larger
    pinned      in page-locked memory; torch keeps such memory and hands it out again once its copy is done
    """
    shapes, sides, rows = tuple(map(tuple, shapes)), anchors.float().numpy(), targets.float().numpy()
    rows = rows[_stable_order(rows[:, 0])]
    image, grids = rows[:, 0].astype(np.int64), _Grids(shapes)
    position, target, layer = _plain_candidates(rows[:, 2:6], image, sides, grids, anchor_threshold, reach)
    cells, cell_of_candidate = np.unique(position, return_inverse=True)
    edges = cells.searchsorted(grids.starts)  # [layers + 1] where the cells of each layer begin

    in_image = np.bincount(image[target], minlength=grids.batch)  # candidates
    num_candidates = in_image[image]  # [N]
    used = Sizes(len(rows), tuple(np.diff(edges).tolist()), len(target), int(num_candidates.sum()))
    sizes = used.padded() if at_least is None else used.padded().or_more(at_least)
    candidates = CandidateSet(sizes, shapes, _empty_buffer(sizes, pinned), num_candidates)
    parts = CandidateTensors._make(part.numpy() for part in candidates.tensors)  # views, to be written to
    _write_targets(parts, rows, image, in_image, image_size, sizes)
    layers = tuple(shape[1:4] for shape in shapes)
    geometry = _cell_geometry(layers, tuple(sides.ravel().tolist()), tuple(torch.as_tensor(strides).tolist()))
    _write_cells(parts, cells, edges, sizes, grids, geometry)
    padding = np.array(sizes.cells) - used.cells
    # in the buffer each layer's cells come after the padding of the layers before
    places = np.arange(len(cells)) + (padding.cumsum() - padding).repeat(used.cells)
    by_image = _stable_order(image[target])
    _put(parts.cell_of_candidate, places[cell_of_candidate[by_image]])
    _put(parts.layer_of_candidate, layer[by_image])
    _put(parts.target_of_candidate, target[by_image], padding=-1)
    return candidates


class _Grids:
    """Sizes of the layers of `shapes`, as arrays."""

    def __init__(self, shapes):
        self.batch, self.num_anchors = shapes[0][:2]
        sides = np.array([shape[2:4] for shape in shapes], dtype=np.int32)
        self.height, self.width = sides.T[:, :, None]  # [layers x 1] each
        self.per_anchor = self.height * self.width  # [layers x 1]
        self.per_image = (self.num_anchors * self.per_anchor)[:, 0].tolist()
        starts = accumulate((self.batch * cells for cells in self.per_image), initial=0)
        self.starts = np.array(list(starts), dtype=np.int32)  # [layers + 1]


def _empty_buffer(sizes, pinned):
    ints, floats = map(sum, sizes.of_parts())
    buffer = torch.empty(ints + -(-floats // 2), dtype=torch.long, pin_memory=pinned)
    if floats % 2:
        buffer[-1] = 0  # half of which is in no part
    return buffer


def _put(part, values, padding=0):
    """Write `values` to the beginning of `part`, and `padding` to the rest."""
    part[: len(values)], part[len(values) :] = values, padding


def _stable_order(numbers):
    """The rows that sort `numbers` [n], whole and not negative; NumPy sorts 8 and 16 bits by digits, in linear time."""
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0)))).argsort(kind="stable")


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def _plain_candidates(boxes, image, anchors, grids, threshold, reach):
    """Position among all cells, target and layer [m each] of what `assigner.plain` names, in its order, by layer.

    The same arithmetic in float32, for all layers, neighbours and anchors at once; boxes [N x 4, xywh normalised].
    """
    num_layers, num_anchors, count = len(anchors), grids.num_anchors, len(boxes)
    limits = np.stack((grids.width, grids.height)).astype(np.float32)  # [2 x layers x 1]
    centres, sides = boxes.T[:2, None] * limits, boxes.T[2:, None] * limits  # [2: x, y or w, h; layers x N]
    ratio = sides[:, :, None] / anchors.transpose(2, 0, 1)[..., None]  # [2 x layers x anchors x N]
    similar = ((ratio < np.float32(threshold)) & (1 / ratio < np.float32(threshold))).all(0)

    reach = np.float32(reach)
    joins = np.ones((num_layers, len(NEIGHBOUR_STEPS), count), dtype=bool)
    joins[:, 1:3], joins[:, 3:5] = (
        ((distance - np.floor(distance) < reach) & (distance > 1)).swapaxes(0, 1)
        for distance in (centres, limits - centres)
    )
    steps = np.array(NEIGHBOUR_STEPS, dtype=np.float32).T[:, None, :, None] * reach  # [2 x 1 x steps x 1]
    x, y = (centres[:, :, None] - steps).astype(np.int32)  # [layers x steps x N] each
    np.clip(x, 0, grids.width[:, None] - 1, out=x)
    np.clip(y, 0, grids.height[:, None] - 1, out=y)
    first = image.astype(np.int32) * (num_anchors * grids.per_anchor) + grids.starts[:-1, None]  # [layers x N]
    cell = first[:, None] + y * grids.width[:, None] + x
    anchor_shift = np.arange(num_anchors, dtype=np.int32) * grids.per_anchor  # [layers x anchors]
    positions = cell[:, :, None] + anchor_shift[:, None, :, None]  # [layers x steps x anchors x N]

    chosen = joins[:, :, None] & similar[:, None]  # [layers x steps x anchors x N]
    found = np.flatnonzero(chosen)
    num_rows = num_layers * len(NEIGHBOUR_STEPS) * num_anchors
    in_row = np.diff(found.searchsorted(np.arange(num_rows + 1) * count))
    row = np.arange(num_rows).repeat(in_row)
    per_layer = in_row.reshape(num_layers, -1).sum(1)
    return positions.ravel()[found], found - row * count, np.arange(num_layers).repeat(per_layer)


def _write_targets(parts, targets, image, in_image, image_size, sizes):
    """What concerns the `targets` [N x 6], sorted by image; a padded one starts at the last candidate and has none."""
    height, width = image_size or (1, 1)
    num_candidates = in_image[image]
    _put(parts.target_class, targets[:, 1])
    _put(parts.num_candidates, num_candidates)
    _put(parts.num_pairs, num_candidates)
    _put(parts.first_candidate, (in_image.cumsum() - in_image)[image], padding=sizes.candidates - 1)
    parts.first_pair[0] = 0
    np.cumsum(parts.num_pairs[:-1], out=parts.first_pair[1:])
    parts.num_pairs[-1] = sizes.pairs - parts.first_pair[-1]
    _put(parts.target_box, targets[:, 2:6])
    corners = xywh2xyxy(targets[:, 2:6] * np.array((width, height, width, height), dtype=np.float32))
    _put(parts.target_xyxy[:, :4], corners)
    _put(parts.target_xyxy[:, 4], (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1]))


def _write_cells(parts, cells, edges, sizes, grids, geometry):
    """What concerns the distinct `cells` [u, positions], layer by layer between `edges`."""
    start = first_row = 0  # of the layer, in `parts` and in `geometry`
    for layer, size in enumerate(sizes.cells):
        position = cells[edges[layer] : edges[layer + 1]]
        here, per_image = slice(start, start + size), grids.per_image[layer]
        index = position - grids.starts[layer]
        _put(parts.cell_position[here], position)
        _put(parts.cell_index[here], index)
        row = index % per_image + first_row
        _put(parts.geometry[here], geometry.take(row, axis=0))
        start, first_row = start + size, first_row + per_image


@lru_cache(maxsize=32)
def _cell_geometry(grids, anchor_sides, strides):
    """CandidateTensors.geometry for every anchor and cell of one image, layer after layer.

    grids  of each layer (anchors, ny, nx); anchor_sides  [layers * anchors * 2]; strides  [layers]; all of them tuples
    """
    tables, anchors = [], np.array(anchor_sides, dtype=np.float32).reshape(len(grids), -1, 1, 1, 2)
    for (num_anchors, ny, nx), layer_anchors, stride in zip(grids, anchors, strides, strict=True):
        table = np.empty((num_anchors, ny, nx, 7), dtype=np.float32)
        table[..., 0], table[..., 1] = np.arange(nx), np.arange(ny)[:, None]
        table[..., 2:4] = layer_anchors
        table[..., 4], table[..., 5], table[..., 6] = nx, ny, stride
        tables.append(table.reshape(-1, 7))
    return np.concatenate(tables)
