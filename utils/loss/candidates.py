"""What a loss needs to know before it sees a prediction, as one buffer of fixed size.

Which cells are candidates, and which of them compete, follows from the targets, anchors and grids alone. So it is
worked out on the host while the model runs (in NumPy: many small steps, no device), written into one buffer, and copied
once. Rounded sizes repeat from batch to batch, which keeps an allocator calm and lets a CUDA graph be replayed: copy
the next Plan of equal Sizes over the static one.

Padding is harmless by position: the last target row is nobody's, the last candidate is never taken, and a padded cell
repeats the first one.
"""

import threading
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from utils.loss.assigner import NEIGHBOUR_STEPS
from utils.ops.boxes import xywh2xyxy

# Padded sizes are multiples of this, so that rows of every layer are aligned in memory as they are in a layer alone:
# a sum over classes then adds in the same order, to the last bit.
SMALLEST = 64


class Layout(NamedTuple):
    """The parts of a Plan: t targets sorted by image, u distinct cells by layer, m candidates by image."""

    target_class: torch.Tensor  # [t] int64
    num_candidates: torch.Tensor  # [t] of the target's image
    num_pairs: torch.Tensor  # [t] the same, and what remains of the capacity for the last target
    first_pair: torch.Tensor  # [t] the sum of num_pairs before
    first_candidate: torch.Tensor  # [t] of the target's image
    cell_index: torch.Tensor  # [u] within the layer, flattened
    cell_position: torch.Tensor  # [u] within all layers in a row
    cell_of_candidate: torch.Tensor  # [m]
    layer_of_candidate: torch.Tensor  # [m]
    proposer: torch.Tensor  # [m] the target that made it a candidate, -1 for padding
    target_box: torch.Tensor  # [t x 4: x, y, w, h normalised] float32
    target_xyxy: torch.Tensor  # [t x 5: x1, y1, x2, y2 in pixels of the network input, area]
    geometry: torch.Tensor  # [u x 7] of the cells, see the properties

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


class Block(NamedTuple):
    """One image with candidates: the ranges of its targets and candidates."""

    first_target: int
    num_targets: int
    first_candidate: int
    num_candidates: int


@dataclass(frozen=True)
class Sizes:
    """How much a Plan holds, padding included; `cells` has one number for each layer."""

    targets: int
    cells: tuple
    candidates: int
    pairs: int  # of a target and a candidate of its image

    def rounded(self, at_least=None):
        """The next sizes up of a coarse scale, with room for padding; not below `at_least`."""
        sizes = Sizes(
            _round_up(self.targets + 1),
            tuple(map(_round_up, self.cells)),
            _round_up(self.candidates + 1),
            _round_up(self.pairs + 1),
        )
        return sizes if at_least is None else sizes.or_more(at_least)

    def or_more(self, other):
        """The larger of each."""
        cells = tuple(map(max, self.cells, other.cells))
        return Sizes(
            max(self.targets, other.targets),
            cells,
            max(self.candidates, other.candidates),
            max(self.pairs, other.pairs),
        )

    def of_parts(self):
        """How many numbers the parts of a Layout have: int64 ones, then float32 ones."""
        cells = sum(self.cells)
        return (*[self.targets] * 5, cells, cells, *[self.candidates] * 3), (
            self.targets * 4,
            self.targets * 5,
            cells * 7,
        )


def _round_up(count):
    """The next of 64, 128, 192, ..., 512, 640, 768, ... (eight steps to a doubling): from 512 on at most 25 % more."""
    step = max(SMALLEST, 1 << max(count - 1, 0).bit_length() >> 3)
    return max(-(-count // step), 1) * step


@dataclass
class Plan:
    """Everything that a loss knows about a batch before its predictions; made by `prepare`."""

    sizes: Sizes
    shapes: tuple  # of the predictions, one for each layer
    buffer: torch.Tensor  # int64, with float32 parts at its end
    padded: bool  # to fixed shapes, which those who compute with it then keep
    target_rows: np.ndarray  # [targets] the rows of the caller's targets, sorted by image
    per_image: tuple  # numbers of targets [batch] and of candidates [batch], arrays on the host
    layout: Layout = field(init=False, repr=False)  # the parts, as views of the buffer

    def __post_init__(self):
        ints, floats = self.sizes.of_parts()
        whole, rest = self.buffer.split([sum(ints), len(self.buffer) - sum(ints)])
        boxes, corners, geometry = rest.view(torch.float32)[: sum(floats)].split(floats)
        self.layout = Layout(*whole.split(ints), boxes.view(-1, 4), corners.view(-1, 5), geometry.view(-1, 7))

    def to(self, device):
        """The same with its buffer on `device`; to a GPU it travels without waiting."""
        if device.type == "cpu":
            return self
        return replace(self, buffer=_ready_for(device, self.buffer).to(device, non_blocking=True))

    def copy_(self, other):
        """Take over the values of a Plan of equal sizes and shapes, without waiting."""
        if (self.sizes, self.shapes, self.padded) != (other.sizes, other.shapes, other.padded):
            raise ValueError(f"a plan for {self.sizes} and {self.shapes} cannot hold one for {other.sizes}")
        self.buffer.copy_(_ready_for(self.buffer.device, other.buffer), non_blocking=True)
        self.target_rows, self.per_image = other.target_rows, other.per_image
        return self

    def blocks(self):
        """A Block for each image with targets and candidates."""
        num_targets, num_candidates = (counts.tolist() for counts in self.per_image)
        starts = (accumulate(counts, initial=0) for counts in (num_targets, num_candidates))
        blocks = map(Block, next(starts), num_targets, next(starts), num_candidates)
        return [block for block in blocks if block.num_candidates]


def _ready_for(device, buffer):
    """`buffer` where a GPU may read it while the host goes on."""
    wants = device.type == "cuda" and buffer.device.type == "cpu" and not buffer.is_pinned()
    return buffer.pin_memory() if wants else buffer


def prepare(
    targets, shapes, anchors, strides, image_size, *,
    anchor_threshold=4.0, reach=0.5, padded=True, at_least=None, pinned=False,
):  # fmt: skip
    """The Plan, on the host, for `targets` [N x 6: image, class, x, y, w, h normalised] on the host.

    shapes      of the predictions, per layer (batch, anchors, ny, nx, 5+classes)
    anchors     [layers x anchors x 2: width, height] in grid units, on the host
    strides     [layers] pixels per cell
    image_size  (height, width) of the network input in pixels
    anchor_threshold, reach  as for `assign.plain`, which names the candidates
    padded      round the sizes up, to at least the Sizes `at_least` if given
    pinned      in page-locked memory; torch keeps such memory and hands it out again once its copy is done
    """
    shapes, anchors = tuple(map(tuple, shapes)), anchors.float().numpy()
    targets = targets.float().numpy()
    order = _stable_order(targets[:, 0])
    targets = targets[order]
    image, grids = targets[:, 0].astype(np.int64), _Grids(shapes)
    position, target, layer = _candidates(targets[:, 2:6], image, anchors, grids, anchor_threshold, reach)
    cells = _distinct(position)
    edges = cells.searchsorted(grids.starts)  # [layers + 1] where the cells of each layer begin

    in_image = np.bincount(image[target], minlength=grids.batch)  # candidates
    targets_in_image = np.bincount(image, minlength=grids.batch)
    used = Sizes(len(targets), tuple(np.diff(edges).tolist()), len(target), int(in_image @ targets_in_image))
    sizes = used.rounded(at_least) if padded else used
    plan = _bare_plan(sizes, shapes, pinned, padded=padded, target_rows=order, per_image=(targets_in_image, in_image))
    parts = Layout(*(part.numpy() for part in plan.layout))
    _write_targets(parts, targets, image, in_image, image_size, sizes)
    _write_cells(parts, cells, edges, sizes, grids, _geometry(shapes, anchors, torch.as_tensor(strides).tolist()))
    place = _looked_up(position, cells, _places(edges, sizes), grids.num_cells)
    _write_candidates(parts, place, target, layer, _stable_order(image.take(target)))
    return plan


class _Grids:
    """Sizes of the layers of `shapes`, as arrays."""

    def __init__(self, shapes):
        self.batch, self.num_anchors = shapes[0][:2]
        sides = np.array([shape[2:4] for shape in shapes], dtype=np.int32)
        self.height, self.width = sides.T[:, :, None]  # [layers x 1] each
        self.per_anchor = self.height * self.width  # [layers x 1]
        self.per_image = (self.num_anchors * self.per_anchor)[:, 0].tolist()
        starts = [0, *accumulate(self.batch * cells for cells in self.per_image)]
        self.num_cells, self.starts = starts[-1], np.array(starts, dtype=np.int32)  # [layers + 1]


def _bare_plan(sizes, shapes, pinned, **rest):
    """A Plan without values."""
    ints, floats = map(sum, sizes.of_parts())
    buffer = torch.empty(ints + -(-floats // 2), dtype=torch.long, pin_memory=pinned)
    if floats % 2:
        buffer[-1] = 0  # half of which is in no part
    return Plan(sizes, shapes, buffer, **rest)


def _put(part, values, padding=0):
    """Write `values` to the beginning of `part`, and `padding` to the rest."""
    part[: len(values)], part[len(values) :] = values, padding


def _stable_order(numbers):
    """The rows that sort `numbers` [n], whole and not negative; NumPy sorts 8 and 16 bits by digits, in linear time."""
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0)))).argsort(kind="stable")


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def _candidates(boxes, image, anchors, grids, threshold, reach):
    """Position among all cells, target and layer [m each] of what `assign.plain` names, in its order, layer by layer.

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


def _distinct(positions):
    """The distinct `positions` [m], ascending [u]."""
    in_order = np.sort(positions)
    is_first = np.ones(len(in_order), dtype=bool)
    np.not_equal(in_order[1:], in_order[:-1], out=is_first[1:])
    return in_order[is_first]


def _places(edges, sizes):
    """Where the Plan has each distinct cell [u], of which those of a layer lie between `edges`; before: padding."""
    used = np.diff(edges)
    padding = np.array(sizes.cells) - used
    return np.arange(edges[-1], dtype=np.int32) + (padding.cumsum() - padding).astype(np.int32).repeat(used)


_notes = threading.local()


def _looked_up(positions, cells, places, num_cells):
    """For each of `positions` [m] the one of `places` [u] that belongs to this one of `cells` [u].

    They are looked up in notes about all cells, which are kept from call to call: quicker than to search.
    """
    if getattr(_notes, "num_cells", 0) < num_cells:
        _notes.num_cells, _notes.place = num_cells, np.empty(num_cells, dtype=np.int32)
    _notes.place[cells] = places
    return _notes.place.take(positions)


def _write_targets(parts, targets, image, in_image, image_size, sizes):
    """What concerns the `targets` [N x 6], sorted by image; a padded one starts at the last candidate and has none."""
    count = len(targets)
    height, width = image_size or (1, 1)
    num_candidates = in_image[image]
    _put(parts.target_class, targets[:, 1])
    _put(parts.num_candidates, num_candidates)
    _put(parts.num_pairs, num_candidates)
    _put(parts.first_candidate, (in_image.cumsum() - in_image)[image], padding=max(sizes.candidates - 1, 0))
    parts.first_pair[:1] = 0
    np.cumsum(parts.num_pairs[:-1], out=parts.first_pair[1:])
    if sizes.targets > count:
        parts.num_pairs[-1] = sizes.pairs - parts.first_pair[-1]
    _put(parts.target_box, targets[:, 2:6])
    corners = xywh2xyxy(targets[:, 2:6] * np.array((width, height, width, height), dtype=np.float32))
    _put(parts.target_xyxy[:, :4], corners)
    _put(parts.target_xyxy[:, 4], (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1]))


def _write_cells(parts, cells, edges, sizes, grids, table):
    """What concerns the distinct `cells` [u, positions], layer by layer between `edges`."""
    start = kind_start = 0
    for layer, size in enumerate(sizes.cells):
        position = cells[edges[layer] : edges[layer + 1]]
        here, per_image = slice(start, start + size), grids.per_image[layer]
        index = position - grids.starts[layer]
        _put(parts.cell_position[here], position)
        _put(parts.cell_index[here], index)
        kind = index - index // per_image * per_image + kind_start
        table.take(kind, axis=0, out=parts.geometry[start : start + len(kind)], mode="clip")
        parts.geometry[here][len(kind) :] = 0
        start, kind_start = start + size, kind_start + per_image


def _write_candidates(parts, place, target, layer, by_image):
    """What concerns the candidates [m], in the order `by_image`; `place` among the distinct cells."""
    _put(parts.cell_of_candidate, place.take(by_image))
    _put(parts.layer_of_candidate, layer.take(by_image))
    _put(parts.proposer, target.take(by_image), padding=-1)


def _geometry(shapes, anchors, strides):
    """The rows of Layout.geometry for every anchor and cell of one image, layer after layer."""
    return _geometry_table(tuple(shape[1:4] for shape in shapes), tuple(anchors.ravel().tolist()), tuple(strides))


@lru_cache(maxsize=32)
def _geometry_table(grids, anchor_sides, strides):
    tables, anchors = [], np.array(anchor_sides, dtype=np.float32).reshape(len(grids), -1, 1, 1, 2)
    for (num_anchors, ny, nx), layer_anchors, stride in zip(grids, anchors, strides, strict=True):
        table = np.empty((num_anchors, ny, nx, 7), dtype=np.float32)
        table[..., 0], table[..., 1] = np.arange(nx), np.arange(ny)[:, None]
        table[..., 2:4] = layer_anchors
        table[..., 4], table[..., 5], table[..., 6] = nx, ny, stride
        tables.append(table.reshape(-1, 7))
    return np.concatenate(tables)
