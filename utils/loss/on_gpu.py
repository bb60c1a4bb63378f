"""The batched losses on a GPU with Triton: candidates, assignment, losses and gradients in kernels of our own.

    sets = [target_set(...) for reach in reaches]        # on the host: the targets, sorted by image, and little else
    loss, items = compute(loss, branches, sets)          # on the device; may be captured in a CUDA graph

It takes the place of `candidates`, `batched_assigner` and `gradients`, which are the same in torch's operations: that
form runs everywhere, and tests compare both with the reference. Nothing but the number of targets has to be known on
the host, and a graph has room for a number of targets. Maps are read as the head leaves them, [batch x anchors x ny x
nx x 5+nc] with the last dimension dense, in channels-last order or not; their gradients are written once, in the same
type and order.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from utils.loss import assign_kernels, loss_kernels
from utils.loss.assigner import NEIGHBOUR_STEPS, dynamic_k
from utils.loss.batched_assigner import cut
from utils.loss.candidates import SPARE, InOneBuffer, round_up
from utils.loss.criterion import AUXILIARY_WEIGHT, smooth_labels

logger = logging.getLogger(__name__)

MOST_LAYERS = 5
# Most scores of candidates [slots x classes] that an assignment holds at once: two float32 tensors, 1 GB. With more,
# images are assigned in chunks. With 80 classes and three layers 37,000 targets have so many.
MOST_SCORES = 1 << 27
EXACT = {"enable_fp_fusion": False}  # arithmetic operation by operation, as torch's


# --- what the device is told -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capacity:
    """How many `targets` fit, whose candidates have at most so many `scores` each."""

    targets: int
    scores: int

    @property
    def work(self):
        """Grows with what computing costs."""
        return self.targets

    @property
    def is_too_large(self):
        """Whether they are assigned in chunks, which no graph can hold."""
        return self.targets * self.scores > MOST_SCORES

    def or_more(self, other):
        return replace(self, targets=max(self.targets, other.targets))

    def with_spare(self):
        """With room for larger batches to come."""
        return replace(self, targets=round_up(int(self.targets * SPARE)))


class TargetTensors(NamedTuple):
    """Parts of the buffer; see `assign_kernels`."""

    targets: Tensor  # [t x 6] float32, by image
    first: Tensor  # [images + 1] int32
    integers: Tensor  # [layers x 4] int32
    numbers: Tensor  # [layers x 2 + 2 * anchors] float32


@dataclass
class TargetSet(InOneBuffer):
    """The targets of a batch with all that their candidates depend on; made by `target_set`."""

    sizes: Capacity
    shapes: tuple  # of the predictions, one for each layer
    image_size: tuple  # (height, width) in pixels
    threshold: float  # of the anchors
    reach: float
    buffer: Tensor  # int32, with float32 parts
    ends: np.ndarray  # [images] where the targets of each image end, on the host
    tensors: TargetTensors = field(init=False, repr=False)  # views of the buffer

    def __post_init__(self):
        sizes = _part_sizes(self.sizes, self.shapes)
        edges = list(accumulate(map(_aligned, sizes), initial=0))
        parts = [self.buffer[start : start + size] for start, size in zip(edges, sizes, strict=False)]
        self.tensors = TargetTensors(
            parts[0].view(torch.float32).view(-1, 6), parts[1], parts[2].view(-1, 4),
            parts[3].view(torch.float32).view(len(self.shapes), -1),
        )  # fmt: skip

    @property
    def slots(self):
        """How many candidates a target can have."""
        return _slots(self.shapes)

    def copy_(self, other):
        super().copy_(other).ends = other.ends
        return self


def _slots(shapes):
    return len(shapes) * len(NEIGHBOUR_STEPS) * shapes[0][1]


def _part_sizes(capacity, shapes):
    """How many numbers each of the TargetTensors has."""
    (batch, num_anchors, *_), num_layers = shapes[0], len(shapes)
    return capacity.targets * 6, batch + 1, num_layers * 4, num_layers * (2 + 2 * num_anchors)


def _aligned(size):
    """Parts begin at multiples of 16 bytes."""
    return -(-size // 4) * 4


def target_set(
    targets: Tensor, shapes: Sequence, anchors: Tensor, strides: Tensor | Sequence[float],
    image_size: Sequence[int] | None, *, balance: Sequence[float], anchor_threshold: float = 4.0, reach: float = 0.5,
    at_least: Capacity | None = None, pinned: bool = False,
) -> TargetSet:  # fmt: skip
    """The TargetSet, on the host, for `targets` [N x 6: image, class, x, y, w, h normalised] on the host.

    balance  of the layers in the objectness loss; the other arguments are those of `candidates.find_candidates`
    """
    shapes, rows = tuple(map(tuple, shapes)), targets.float().numpy()
    image = rows[:, 0].astype(np.int64)
    if (np.diff(image) < 0).any():
        order = image.argsort(kind="stable")
        rows, image = rows[order], image[order]
    capacity = Capacity(round_up(len(rows)), _slots(shapes) * (shapes[0][4] - 5))
    capacity = capacity if at_least is None else capacity.or_more(at_least)
    buffer = torch.empty(sum(map(_aligned, _part_sizes(capacity, shapes))), dtype=torch.int32, pin_memory=pinned)
    buffer.numpy().fill(0)  # torch would use all its threads, which then keep the cores busy for milliseconds
    ends = np.bincount(image, minlength=shapes[0][0]).cumsum()
    made = TargetSet(capacity, shapes, tuple(image_size or (1, 1)), anchor_threshold, reach, buffer, ends)
    parts = [part.numpy() for part in made.tensors]  # views, to be written to
    parts[0][: len(rows)] = rows
    parts[0][len(rows) :, 0] = -1
    parts[1][1:] = ends
    parts[2][:], parts[3][:] = _layer_table(shapes, tuple(anchors.flatten().tolist()),
                                            tuple(torch.as_tensor(strides).tolist()), tuple(balance))  # fmt: skip
    return made


@lru_cache(maxsize=32)
def _layer_table(shapes, anchor_sides, strides, balance):
    """TargetTensors.integers and .numbers."""
    batch, num_anchors = shapes[0][:2]
    anchors = np.array(anchor_sides, dtype=np.float32).reshape(len(shapes), -1)
    sides = [shape[2:4] for shape in shapes]
    cells = [num_anchors * ny * nx for ny, nx in sides]  # of an image
    before = np.cumsum([0, *cells[:-1]])
    integers = np.column_stack((np.array(sides), before, before * batch)).astype(np.int32)
    weights = np.array(balance) / (batch * np.array(cells))
    return integers, np.column_stack((np.array(strides), weights, anchors)).astype(np.float32)


# --- candidates and assignment ---------------------------------------------------------------------------------------


class Slots(NamedTuple):
    """Candidates or matches, image after image; those of an image lie at the beginning of the room of its targets."""

    cells: Tensor  # [n] int32, counted through the layers of an image
    targets: Tensor  # [n] int32
    counts: Tensor  # [images] int32, how many there are
    per_layer: Tensor  # [layers] int32, in the whole batch
    room: int  # for each target


class Maps(NamedTuple):
    """The maps of a branch of the head, as kernels take them."""

    tensors: tuple  # one for each layer; their last dimension is the innermost, with nothing between its numbers
    channels_last: bool  # anchors inside of cells: rows in the order image, y, x, anchor; else image, anchor, y, x
    gap: int = 0  # numbers between the last anchor of a cell and the next cell

    @classmethod
    def of(cls, predictions):
        """The maps as they are, if all have one layout and the columns of a row lie side by side; else copies."""
        for channels_last in (True, False):
            gaps = {_gap(prediction, channels_last) for prediction in predictions}
            if all(_is_one_cell(p.shape) for p in predictions if _gap(p, channels_last) == 0):
                gaps = gaps - {0} or gaps  # a map of one cell fits every gap
            if len(gaps) == 1 and None not in gaps:
                return cls(tuple(predictions), channels_last, *gaps)
        return cls(tuple(p.contiguous() for p in predictions), False)

    @property
    def addresses(self):
        """The maps, and so many times the first that there are MOST_LAYERS: kernels take a fixed number."""
        return *self.tensors, *[self.tensors[0]] * (MOST_LAYERS - len(self.tensors))


def _is_one_cell(shape):
    return _num_cells(shape) == shape[1]


def _gap(prediction, channels_last):
    """The gap of a map [batch x anchors x ny x nx x 5+nc], or None if it is laid out in another way."""
    if not channels_last:
        return 0 if prediction.is_contiguous() else None
    if prediction.permute(0, 2, 3, 1, 4).is_contiguous():
        return 0
    _, num_anchors, ny, nx, num_columns = prediction.shape
    step = prediction.stride(3 if nx > 1 else 2 if ny > 1 else 0)
    wanted = (ny * nx * step, num_columns, nx * step, step, 1)
    axes = zip(prediction.shape, prediction.stride(), wanted, strict=True)
    regular = all(size == 1 or mine == other for size, mine, other in axes)
    return step - num_anchors * num_columns if regular and step > num_anchors * num_columns else None


def find_candidates(batch: TargetSet) -> Slots:
    """Every candidate of `batch`, with the target that it lies near."""
    shapes, tensors = batch.shapes, batch.tensors
    num_slots = len(tensors.targets) * batch.slots
    found = _new_slots(batch, num_slots, batch.slots)
    assign_kernels.candidates_kernel[(shapes[0][0],)](
        *tensors, found.cells, found.targets, found.counts, found.per_layer, batch.threshold, batch.reach,
        L=len(shapes), A=shapes[0][1], BLOCK=512, num_warps=4, **EXACT,
    )  # fmt: skip
    return found


def _new_slots(batch, num_slots, room):
    new, first = batch.buffer.new_empty, batch.tensors.first
    counts, per_layer = torch.empty_like(first[1:]), batch.buffer.new_zeros(len(batch.shapes))
    return Slots(new(num_slots), new(num_slots), counts, per_layer, room)


def assign(batch: TargetSet, candidates: Slots, maps: Maps, num_ious: int) -> Slots:
    """The candidates that OTA assigns, each with the target that it is assigned to; `maps` of the lead heads."""
    (_, first, *table), shapes = batch.tensors, batch.shapes
    num_targets, edges = batch.sizes.targets, [0, batch.sizes.targets]
    assigned = torch.empty_like(candidates.cells)
    if batch.sizes.is_too_large:
        assert not (assigned.is_cuda and torch.cuda.is_current_stream_capturing()), "a graph would repeat these chunks"
        edges = cut(batch.ends, max(MOST_SCORES // batch.sizes.scores, 1))[1]
        assigned.fill_(-1)  # of the padding
    for begin, end in pairwise(edges):
        if begin < end:  # not for a chunk of images without targets
            _assign_targets(begin, end, batch, candidates, maps, num_ious, assigned)
    matches = _new_slots(batch, num_targets * num_ious, num_ious)
    assign_kernels.matches_kernel[(shapes[0][0],)](
        first, candidates.counts, *table, candidates.cells, assigned, matches.cells, matches.targets, matches.counts,
        matches.per_layer, batch.slots, num_ious, L=len(shapes), A=shapes[0][1], BLOCK=256, num_warps=4,
    )  # fmt: skip
    return matches


def _assign_targets(begin, end, batch, candidates, maps, num_ious, assigned):
    """Write to `assigned` [slots] what OTA assigns to the targets `begin` to `end`, which are those of whole images."""
    (targets, first, *table), shapes, room = batch.tensors, batch.shapes, batch.slots
    num_layers, num_anchors, num_classes = len(shapes), shapes[0][1], maps.tensors[0].shape[-1] - 5
    # Kernels count targets and slots from the first one of the chunk.
    targets, first, slots = targets[begin:end], first - begin if begin else first, slice(begin * room, end * room)
    cells, assigned = candidates.cells[slots], assigned[slots]
    num_targets, num_slots = len(targets), len(cells)
    height, width = map(float, batch.image_size)
    boxes, best = targets.new_empty(4, num_slots), targets.new_empty(num_targets, num_ious)
    log_rests, logits = targets.new_empty(num_slots, num_classes), targets.new_empty(num_slots, num_classes)
    classes = min(triton.next_power_of_2(num_classes), 128)
    assign_kernels.predictions_kernel[(triton.cdiv(num_slots, 8),)](
        targets, first, candidates.counts, *table, cells, *maps.addresses, boxes, log_rests, logits,
        num_slots, num_classes, maps.gap, L=num_layers, A=num_anchors, CHANNELS_LAST=maps.channels_last, ROWS=8,
        CLASSES=classes, num_warps=4, **EXACT,
    )  # fmt: skip
    # Summed up by torch, as in the reference: another order might round a cost to another side of its neighbour's.
    known = targets, first, candidates.counts, boxes
    costs = log_rests.sum(1), logits
    assign_kernels.best_overlaps_kernel[(num_targets,)](
        *known, best, num_slots, width, height, room, NUM_IOUS=num_ious, BLOCK=512, num_warps=2, **EXACT)  # fmt: skip
    thresholds = torch.empty(num_targets, dtype=torch.long, device=targets.device)
    assign_kernels.thresholds_kernel[(num_targets,)](
        *known, *costs, dynamic_k(best), thresholds, num_slots, num_classes, width, height, room,
        BLOCK=512, num_warps=2, **EXACT,
    )  # fmt: skip
    assign_kernels.assign_kernel[(triton.cdiv(num_slots, 128),)](
        *known, *costs, thresholds, assigned, num_slots, num_classes, width, height, room,
        BLOCK=128, num_warps=4, **EXACT,
    )  # fmt: skip
    if begin:
        assigned += begin * (assigned >= 0)


# --- loss and gradients ----------------------------------------------------------------------------------------------


class BranchGradients(NamedTuple):
    """The gradients of the maps of a branch, before they are written into maps."""

    objectness: Tensor  # [cells of all layers, in the order of memory] without any object
    rows: Tensor  # [matches] int32 of the cells with objects, through all layers; -1 for further matches of a cell
    values: Tensor  # [matches x columns] in these rows, instead


def loss_of_maps(loss, batch: TargetSet, matches: Slots, maps: Maps, share: float):
    """items [5: box, objectness, class loss, their sum, that times the batch size] and BranchGradients.

    `loss` has the settings; `share` of it is that of these maps.
    """
    (targets, first, *table), shapes, hyp = batch.tensors, batch.shapes, loss.hyp
    num_layers, num_anchors, num_columns = len(shapes), shapes[0][1], maps.tensors[0].shape[-1]
    num_cells, num_matches, batch_size = sum(map(_num_cells, shapes)), len(matches.cells), shapes[0][0]
    gains = [share * hyp[gain] for gain in ("box", "obj", "cls")]
    box_gain, object_gain, class_gain = (gain * batch_size for gain in gains)  # of the gradients
    positive, negative = (torch.tensor(label, dtype=maps.tensors[0].dtype).item()
                          for label in smooth_labels(hyp.get("label_smoothing", 0.0)))  # fmt: skip
    layers = {"L": num_layers, "A": num_anchors, "FOCAL": hyp["fl_gamma"] > 0}
    new = targets.new_empty

    programs = triton.cdiv(num_cells, 1024)
    sums, items = new(programs), new(5)
    found = BranchGradients(new(num_cells), torch.empty_like(matches.cells), new(num_matches, num_columns))
    loss_kernels.objectness_kernel[(programs,)](
        *table, *maps.addresses, found.objectness, sums, num_cells, num_columns, maps.gap, object_gain,
        float(hyp["obj_pw"]), float(hyp["fl_gamma"]), **layers, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    terms = new(3, len(targets))
    loss_kernels.matches_loss_kernel[(len(targets),)](
        targets, first, matches.counts, matches.per_layer, *table, matches.cells, matches.targets, *maps.addresses,
        terms, found.rows, found.values, num_columns - 5, maps.gap, matches.room, box_gain, object_gain, class_gain,
        positive, negative, float(hyp["obj_pw"]), float(hyp["cls_pw"]), float(hyp["fl_gamma"]), float(loss.gr),
        **layers, CHANNELS_LAST=maps.channels_last, CLASSES=triton.next_power_of_2(num_columns - 5), BLOCK=128,
        num_warps=1 if num_columns <= 256 else 4,
    )  # fmt: skip
    loss_kernels.items_kernel[(1,)](
        terms.sum(1), sums, items, programs, *gains, float(batch_size), BLOCK=1024, num_warps=4)  # fmt: skip
    return items, found


def _num_cells(shape):
    batch, num_anchors, ny, nx = shape[:4]
    return batch * num_anchors * ny * nx


class WrittenGradients(torch.autograd.Function):
    """(items, batch, matches, BranchGradients, layout, *maps) -> the loss [1], whose gradients are known.

    They are as large as the maps, so they are written once, when they are asked for: scaled, in their type and layout.
    """

    @staticmethod
    def forward(ctx, items, batch, matches, found, layout, *tensors):
        ctx.known, ctx.layout = (batch, matches, found), layout  # layout: channels_last, gap
        ctx.kinds = [(t.shape, t.stride(), t.dtype) for t in tensors]
        return items[4:].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):
        batch, matches, found = ctx.known
        tensors, scale = batch.tensors, scale.contiguous()
        results = Maps(tuple(_with_gaps(*kind, *ctx.layout, scale.device) for kind in ctx.kinds), *ctx.layout)
        _, num_anchors, *_, num_columns = results.tensors[0].shape
        in_a_step = num_anchors if results.channels_last else 1
        step = in_a_step * num_columns + results.gap
        start = 0
        for result in results.tensors:
            num_cells = result.numel() // num_columns
            size = num_cells // in_a_step * step
            loss_kernels.dense_kernel[(triton.cdiv(size, 4096),)](
                found.objectness[start : start + num_cells], scale, result, size,
                A=in_a_step, STEP=step, COLUMNS=num_columns, BLOCK=4096, num_warps=4,
            )  # fmt: skip
            start += num_cells
        loss_kernels.rows_kernel[(len(tensors.targets),)](
            tensors.targets, tensors.first, matches.counts, tensors.integers, found.rows, found.values, scale,
            *results.addresses, num_columns, results.gap, matches.room, L=len(results.tensors), A=num_anchors,
            COLUMNS=triton.next_power_of_2(num_columns), num_warps=1,
        )  # fmt: skip
        return None, None, None, None, None, *results.tensors


def _with_gaps(shape, strides, dtype, channels_last, gap, device):
    """An empty map; also its last cell has a gap after it, so that it can be taken for a matrix with whole rows."""
    in_a_step = shape[1] if channels_last else 1
    size = _num_cells(shape) // in_a_step * (in_a_step * shape[4] + gap)
    return torch.empty(size, dtype=dtype, device=device).as_strided(shape, strides)


def compute(loss, branches, batches: Sequence[TargetSet]):
    """Loss [1] and items [4] over all branches of the head; `loss` is one of `batched`."""
    total = None
    maps = [Maps.of(predictions) for predictions in branches]
    for own, batch, share in zip(maps, batches, (1.0, AUXILIARY_WEIGHT), strict=False):
        with torch.no_grad(), torch.autocast(batch.buffer.device.type, enabled=False):
            matches = find_candidates(batch)
            if loss.NUM_IOUS is not None:
                matches = assign(batch, matches, maps[0], loss.NUM_IOUS)
            items, found = loss_of_maps(loss, batch, matches, own, share)
        value = WrittenGradients.apply(items, batch, matches, found, own[1:], *own.tensors)
        total = (value, items[:4]) if total is None else (total[0] + value, total[1] + items[:4])
    return total


# --- whether it runs here --------------------------------------------------------------------------------------------


@cache
def can_run(device, num_layers, num_anchors):
    """Whether Triton compiles for `device` and a head of that kind; if not, the reason is logged once."""
    try:
        shapes, ones = [(1, num_anchors, 1, 1, 6)] * num_layers, [1.0] * num_layers
        anchors = torch.ones(num_layers, num_anchors, 2)
        nothing = target_set(torch.zeros(0, 6), shapes, anchors, ones, None, balance=ones)
        find_candidates(nothing.to(device)).counts.cpu()
    except Exception as error:  # compilers fail in any way; the other form needs none
        reason = " ".join(str(error).split())[:200]
        logger.warning("--fast-loss: Triton does not work here (%s), so the loss takes more kernels of torch", reason)
        return False
    return True
