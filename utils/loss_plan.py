"""What a loss needs to know before it sees a prediction, as tensors of fixed size.

Which cells are candidates, and which of them compete, follows from the targets, anchors and grids alone. So it is
worked out on the host while the model runs, packed into two buffers, and copied once. Rounded sizes repeat from batch
to batch, which keeps an allocator calm and lets a CUDA graph be replayed: copy the next Plan of equal Sizes over the
static one.

Padding is harmless by position: the last target row is nobody's, the last candidate is never taken, and a padded cell
repeats the first one.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from utils import assign
from utils.boxes import xywh2xyxy

# Padded sizes are multiples of this, so that rows of every layer are aligned in memory as they are in a layer alone:
# a sum over classes then adds in the same order, to the last bit.
SMALLEST = 64


class Layout(NamedTuple):
    """The parts of a Plan: t targets sorted by image, u distinct cells by layer, m candidates by image."""

    target_class: torch.Tensor  # [t] int64
    first_candidate: torch.Tensor  # [t] of the target's image
    num_candidates: torch.Tensor  # [t] of the target's image
    num_pairs: torch.Tensor  # [t] the same, and what remains of the capacity for the last target
    cell_index: torch.Tensor  # [u] within the layer, flattened
    cell_position: torch.Tensor  # [u] within all layers in a row
    cell_of_candidate: torch.Tensor  # [m]
    layer_of_candidate: torch.Tensor  # [m]
    proposer: torch.Tensor  # [m] the target that made it a candidate, -1 for padding
    target_box: torch.Tensor  # [t x 4: x, y, w, h normalised]
    target_xyxy: torch.Tensor  # [t x 4] in pixels of the network input
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


def _round_up(count):
    """The next of 64, 128, 192, ..., 512, 640, 768, ... (eight steps to a doubling): from 512 on at most 25 % more."""
    step = max(SMALLEST, 1 << max(count - 1, 0).bit_length() >> 3)
    return max(-(-count // step), 1) * step


@dataclass
class Plan:
    """Everything that a loss knows about a batch before its predictions; made by `prepare`."""

    sizes: Sizes
    shapes: tuple  # of the predictions, one for each layer
    ints: torch.Tensor
    floats: torch.Tensor
    blocks: tuple  # Block of every image that has candidates
    target_rows: torch.Tensor  # [targets] on the host: the rows of the caller's targets, sorted by image
    padded: bool  # to fixed shapes, which those who compute with it then keep

    def to(self, device):
        """The same with its buffers on `device`; to a GPU they travel without waiting."""
        if device.type == "cpu":
            return self
        ints, floats = (_ready_for(device, buffer).to(device, non_blocking=True) for buffer in (self.ints, self.floats))
        return Plan(self.sizes, self.shapes, ints, floats, self.blocks, self.target_rows, self.padded)

    def copy_(self, other):
        """Take over the values of a Plan of equal sizes and shapes, without waiting."""
        if (self.sizes, self.shapes, self.padded) != (other.sizes, other.shapes, other.padded):
            raise ValueError(f"a plan for {self.sizes} and {self.shapes} cannot hold one for {other.sizes}")
        self.ints.copy_(_ready_for(self.ints.device, other.ints), non_blocking=True)
        self.floats.copy_(_ready_for(self.floats.device, other.floats), non_blocking=True)
        self.blocks, self.target_rows = other.blocks, other.target_rows
        return self

    def layout(self):
        """The parts, as views of the two buffers."""
        targets, cells, candidates = self.sizes.targets, sum(self.sizes.cells), self.sizes.candidates
        ints = self.ints.split([targets] * 4 + [cells] * 2 + [candidates] * 3)
        boxes, corners, geometry = self.floats.split([targets * 4, targets * 4, cells * 7])
        return Layout(*ints, boxes.view(-1, 4), corners.view(-1, 4), geometry.view(-1, 7))


def _ready_for(device, buffer):
    """`buffer` where a GPU may read it while the host goes on."""
    return buffer.pin_memory() if device.type == "cuda" and buffer.device.type == "cpu" else buffer


@torch.no_grad()
def prepare(
    targets, shapes, anchors, strides, image_size, *, anchor_threshold=4.0, reach=0.5, padded=True, at_least=None
):
    """The Plan, on the host, for `targets` [N x 6: image, class, x, y, w, h normalised] on the host.

    shapes      of the predictions, per layer (batch, anchors, ny, nx, 5+classes)
    anchors     [layers x anchors x 2: width, height] in grid units, on the host
    strides     [layers] pixels per cell
    image_size  (height, width) of the network input in pixels
    anchor_threshold, reach  as for `assign.plain`, which names the candidates
    padded      round the sizes up, to at least the Sizes `at_least` if given
    """
    shapes = tuple(map(tuple, shapes))
    order = _stable_order(targets[:, 0].long())
    targets = targets[order]
    grids = [torch.empty(shape, device="meta") for shape in shapes]
    candidates = assign.plain(grids, targets, anchors, anchor_threshold=anchor_threshold, reach=reach)

    distinct = [_distinct_cells(candidates, layer, shape) for layer, shape in enumerate(shapes)]
    image = torch.cat(candidates.image)
    in_image = torch.bincount(image, minlength=shapes[0][0])  # [batch] candidates
    targets_in_image = torch.bincount(targets[:, 0].long(), minlength=shapes[0][0])
    used = Sizes(
        len(targets), tuple(len(cells) for cells, _ in distinct), len(image), int((in_image * targets_in_image).sum())
    )
    sizes = used.rounded(at_least) if padded else used

    plan = _empty_plan(sizes, shapes, _blocks(targets_in_image.tolist(), in_image.tolist()), order, padded)
    layout = plan.layout()
    _write_targets(layout, targets, in_image, image_size)
    if padded:
        layout.num_pairs[-1] = sizes.pairs - used.pairs
    table = _geometry(shapes, anchors, torch.as_tensor(strides).tolist())
    cell_of_candidate = _write_cells(layout, distinct, shapes, sizes, table)
    by_image = _stable_order(image)
    layout.cell_of_candidate[: len(image)] = cell_of_candidate[by_image]
    numbers = [torch.full_like(target, layer) for layer, target in enumerate(candidates.target)]
    layout.layer_of_candidate[: len(image)] = torch.cat(numbers)[by_image]
    layout.proposer[: len(image)] = torch.cat(candidates.target)[by_image]
    layout.proposer[len(image) :] = -1
    return plan


def _empty_plan(sizes, shapes, blocks, target_rows, padded):
    """A Plan full of zeros."""
    targets, cells = sizes.targets, sum(sizes.cells)
    ints = torch.zeros(4 * targets + 2 * cells + 3 * sizes.candidates, dtype=torch.long)
    return Plan(sizes, shapes, ints, torch.zeros(8 * targets + 7 * cells), blocks, target_rows, padded)


def _stable_order(numbers):
    """The rows that sort `numbers` [n], int64 and small; NumPy sorts 16-bit numbers by their digits, in linear time."""
    keys = numbers.numpy()
    if len(keys) and keys.max() < 1 << 15:
        keys = keys.astype(np.int16)
    return torch.from_numpy(keys.argsort(kind="stable"))


def _distinct_cells(candidates, layer, shape):
    """The distinct cells of `layer`, flattened and ascending [u], and which of them each candidate is [m]."""
    _, num_anchors, ny, nx, _ = shape
    image, anchor, y, x = candidates.cells(layer)
    return (((image * num_anchors + anchor) * ny + y) * nx + x).unique(return_inverse=True)


def _write_targets(layout, targets, in_image, image_size):
    """What concerns the `targets` [N x 6], sorted by image; a padded one starts at the last candidate and has none."""
    count, image = len(targets), targets[:, 0].long()
    layout.target_class[:count] = targets[:, 1]
    layout.first_candidate[:count] = (in_image.cumsum(0) - in_image)[image]
    layout.first_candidate[count:] = max(len(layout.proposer) - 1, 0)
    layout.num_candidates[:count] = in_image[image]
    layout.num_pairs[:count] = in_image[image]
    height, width = image_size or (1, 1)
    boxes = targets[:, 2:6]
    layout.target_box[:count] = boxes
    layout.target_xyxy[:count] = xywh2xyxy(boxes * boxes.new_tensor((width, height, width, height)))


def _write_cells(layout, distinct, shapes, sizes, table):
    """What concerns the distinct cells, layer by layer; returns which of them each candidate is [m], in layer order."""
    places, start, kind_start, position_start = [], 0, 0, 0
    for (cells, inverse), shape, size in zip(distinct, shapes, sizes.cells, strict=True):
        here, per_image = slice(start, start + len(cells)), math.prod(shape[1:4])
        layout.cell_index[here] = cells
        layout.cell_position[here] = cells + position_start
        layout.geometry[here] = table.index_select(0, cells % per_image + kind_start)
        places.append(inverse + start)
        start, kind_start, position_start = start + size, kind_start + per_image, position_start + shape[0] * per_image
    return torch.cat(places)


def _geometry(shapes, anchors, strides):
    """The rows of Layout.geometry for every anchor and cell of one image, layer after layer."""
    key = tuple(shape[1:4] for shape in shapes), tuple(anchors.flatten().tolist()), tuple(strides)
    return _geometry_table(*key)


@lru_cache(maxsize=32)
def _geometry_table(grids, anchor_sides, strides):
    tables, anchors = [], torch.tensor(anchor_sides).view(len(grids), -1, 2)
    for (num_anchors, ny, nx), layer_anchors, stride in zip(grids, anchors, strides, strict=True):
        table = torch.empty(num_anchors, ny, nx, 7)
        table[..., 0], table[..., 1] = torch.arange(nx), torch.arange(ny)[:, None]
        table[..., 2:4] = layer_anchors[:, None, None]
        table[..., 4], table[..., 5], table[..., 6] = nx, ny, stride
        tables.append(table.view(-1, 7))
    return torch.cat(tables)


def _blocks(targets_in_image, in_image):
    """A Block for each image with targets and candidates."""
    first_target = accumulate(targets_in_image, initial=0)
    first_candidate = accumulate(in_image, initial=0)
    blocks = map(Block, first_target, targets_in_image, first_candidate, in_image)
    return tuple(block for block in blocks if block.num_candidates)
