"""What a loss needs to know before it sees a prediction, as tensors of fixed size.

Which cells are candidates, and which of them compete, follows from the targets, anchors and grids alone. So it is
worked out on the host while the model runs, packed into two buffers, and copied once. Rounded sizes repeat from batch
to batch, which keeps an allocator calm and lets a CUDA graph be replayed: copy the next Plan of equal Sizes over the
static one.

Padding is harmless by position: the last target row is nobody's, the last candidate is never taken, and a padded cell
repeats the first one.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

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
    corner: torch.Tensor  # [u x 2: x, y] of the cell, in cells
    anchor_size: torch.Tensor  # [u x 2: width, height] in cells
    grid_size: torch.Tensor  # [u x 2: nx, ny]
    stride: torch.Tensor  # [u x 1] pixels per cell


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

    def to(self, device):
        """The same with its buffers on `device`; to a GPU they travel without waiting."""
        if device.type == "cpu":
            return self
        ints, floats = (_ready_for(device, buffer).to(device, non_blocking=True) for buffer in (self.ints, self.floats))
        return Plan(self.sizes, self.shapes, ints, floats, self.blocks, self.target_rows)

    def copy_(self, other):
        """Take over the values of a Plan of equal sizes and shapes, without waiting."""
        if (self.sizes, self.shapes) != (other.sizes, other.shapes):
            raise ValueError(f"a plan for {self.sizes} and {self.shapes} cannot hold one for {other.sizes}")
        self.ints.copy_(_ready_for(self.ints.device, other.ints), non_blocking=True)
        self.floats.copy_(_ready_for(self.floats.device, other.floats), non_blocking=True)
        self.blocks, self.target_rows = other.blocks, other.target_rows
        return self

    def layout(self):
        """The parts, as views of the two buffers."""
        targets, cells, candidates = self.sizes.targets, sum(self.sizes.cells), self.sizes.candidates
        ints = self.ints.split([targets] * 4 + [cells] * 2 + [candidates] * 3)
        widths = (targets, 4), (targets, 4), (cells, 2), (cells, 2), (cells, 2), (cells, 1)
        floats = self.floats.split([rows * columns for rows, columns in widths])
        return Layout(*ints, *(part.view(shape) for part, shape in zip(floats, widths, strict=True)))


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
    order = targets[:, 0].argsort(stable=True)
    targets = targets[order]
    grids = [torch.empty(shape, device="meta") for shape in shapes]
    candidates = assign.plain(grids, targets, anchors, anchor_threshold=anchor_threshold, reach=reach)

    layers = [_distinct_cells(candidates, layer, shape) for layer, shape in enumerate(shapes)]
    cells, cell_of_candidate = zip(*layers, strict=True)
    image = torch.cat(candidates.image)
    by_image = image.argsort(stable=True)
    in_image = torch.bincount(image, minlength=shapes[0][0])  # [batch] candidates
    targets_in_image = torch.bincount(targets[:, 0].long(), minlength=shapes[0][0])
    used = Sizes(len(targets), tuple(map(len, cells)), len(image), int((in_image * targets_in_image).sum()))
    sizes = used.rounded(at_least) if padded else used

    ints = [
        *_target_parts(targets, in_image, used, sizes),
        *_cell_parts(cells, shapes, sizes),
        *_candidate_parts(candidates, cell_of_candidate, by_image, sizes),
    ]
    floats = [
        *_box_parts(targets, image_size, sizes),
        *_geometry_parts(cells, shapes, anchors, torch.as_tensor(strides).tolist(), sizes),
    ]
    blocks = _blocks(targets_in_image.tolist(), in_image.tolist())
    return Plan(sizes, shapes, torch.cat(ints), torch.cat([part.reshape(-1) for part in floats]), blocks, order)


def _distinct_cells(candidates, layer, shape):
    """The distinct cells of `layer`, flattened and ascending [u], and which of them each candidate is [m]."""
    _, num_anchors, ny, nx, _ = shape
    image, anchor, y, x = candidates.cells(layer)
    return (((image * num_anchors + anchor) * ny + y) * nx + x).unique(return_inverse=True)


def _padded(values, size, fill=0):
    """`values` [n x ...] with rows of `fill` up to `size` rows."""
    if len(values) == size:
        return values
    return torch.cat((values, values.new_full((size - len(values), *values.shape[1:]), fill)))


def _target_parts(targets, in_image, used, sizes):
    """The four integer parts of length t."""
    image = targets[:, 0].long()
    num_candidates = _padded(in_image[image], sizes.targets)
    num_pairs = num_candidates.clone()
    first = _padded((in_image.cumsum(0) - in_image)[image], sizes.targets, fill=max(sizes.candidates - 1, 0))
    if sizes.targets > used.targets:
        num_pairs[-1] = sizes.pairs - used.pairs
    return _padded(targets[:, 1].long(), sizes.targets), first, num_candidates, num_pairs


def _cell_parts(cells, shapes, sizes):
    """Index and position of the cells, padded layer by layer."""
    starts = accumulate((_num_cells(shape) for shape in shapes), initial=0)
    padded = [_padded(index, size) for index, size in zip(cells, sizes.cells, strict=True)]
    return torch.cat(padded), torch.cat([index + start for index, start in zip(padded, starts, strict=False)])


def _num_cells(shape):
    batch, num_anchors, ny, nx, _ = shape
    return batch * num_anchors * ny * nx


def _candidate_parts(candidates, cell_of_candidate, by_image, sizes):
    """The three integer parts of length m."""
    starts = accumulate(sizes.cells, initial=0)
    cell = torch.cat([inverse + start for inverse, start in zip(cell_of_candidate, starts, strict=False)])
    layer = torch.cat([torch.full_like(target, number) for number, target in enumerate(candidates.target)])
    proposer = torch.cat(candidates.target)
    return (
        _padded(cell[by_image], sizes.candidates),
        _padded(layer[by_image], sizes.candidates),
        _padded(proposer[by_image], sizes.candidates, fill=-1),
    )


def _box_parts(targets, image_size, sizes):
    height, width = image_size or (1, 1)
    boxes = targets[:, 2:6]
    corners = xywh2xyxy(boxes * boxes.new_tensor((width, height, width, height)))
    return _padded(boxes, sizes.targets), _padded(corners, sizes.targets)


def _geometry_parts(cells, shapes, anchors, strides, sizes):
    """Corner, anchor size, grid size and stride of the cells, padded layer by layer."""
    parts = []
    for index, shape, layer_anchors, stride, size in zip(cells, shapes, anchors, strides, sizes.cells, strict=True):
        _, num_anchors, ny, nx, _ = shape
        index = _padded(index, size)
        corner = torch.stack((index % nx, index // nx % ny), 1).float()
        anchor_size = layer_anchors[index // (ny * nx) % num_anchors]
        constants = corner.new_tensor((nx, ny, stride)).expand(size, 3)
        parts.append((corner, anchor_size, constants[:, :2], constants[:, 2:]))
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def _blocks(targets_in_image, in_image):
    """A Block for each image with targets and candidates."""
    first_target = accumulate(targets_in_image, initial=0)
    first_candidate = accumulate(in_image, initial=0)
    blocks = map(Block, first_target, targets_in_image, first_candidate, in_image)
    return tuple(block for block in blocks if block.num_candidates)
