"""CUDA graphs for the part of a loss that runs from fixed tensors to fixed tensors (`learn` of `loss_batched`).

It is hundreds of small kernels, which take longer to start than to run. A graph holds them for one kind of batch:
shapes and type of the predictions, autocast, settings of the loss. A replay copies what was seen of the predictions,
and the plans, to where the graph reads; what it wrote is copied away, so that a later step cannot change what a
backward pass still needs. Replays of one loss have to follow each other, as all work of a stream does.

A plan has fixed sizes. There is room for the largest seen so far and some more (`Room`); a larger batch makes the graph
be captured again, an exceptionally crowded one goes without.
"""

import gc
import logging
from dataclasses import replace
from functools import partial

import torch

from utils.loss.candidates import Sizes

logger = logging.getLogger(__name__)

ORDINARY_CALLS = 3  # of a kind before its first capture; as many as of a whole step that is captured (`cuda_graph`)
MOST_KINDS = 8  # further ones go without a graph
MOST_PAIRS = 4_000_000  # of a target and a candidate, about 350 MB that a graph would keep; then little is won
SPARE = 1.25  # room in a graph, relative to the batch that made it be captured
CROWDED = 1.5  # times the pairs of the room: such a batch goes without a graph,
FEW = 20  # unless that has happened so often


class Room:
    """The sizes that the plans of one kind of batch are padded to; `sizes` is None or has one Sizes for each plan."""

    def __init__(self):
        self.sizes, self.num_crowded = None, 0

    def fits(self, plans):
        return self.sizes is not None and all(p.sizes == size for p, size in zip(plans, self.sizes, strict=True))

    def grow(self, plans):
        """Make room for `plans` and larger ones."""
        self.sizes, self.num_crowded = [with_spare(plan.sizes) for plan in plans], 0

    def is_crowded(self, plans, most_pairs):
        """Whether a batch is not worth a larger graph. Such batches are counted; when they are many, it is."""
        pairs = [plan.sizes.pairs for plan in plans]
        if max(pairs) > most_pairs:
            return True
        if self.sizes is None or all(n <= CROWDED * room.pairs for n, room in zip(pairs, self.sizes, strict=True)):
            return False
        self.num_crowded += 1
        return self.num_crowded <= FEW


def with_spare(sizes):
    """`sizes` and room for larger batches to come."""
    numbers = [int(n * SPARE) for n in (sizes.targets, sizes.candidates, sizes.pairs)]
    return Sizes(numbers[0], tuple(int(n * SPARE) for n in sizes.cells), *numbers[1:]).rounded()


def record(body, pool=None, stream=None):
    """Capture `body`; returns the graph and what `body` returned, which each replay writes anew."""
    gc.collect()  # a graph that is gone must not be cleaned up in the midst of this
    graph, outer = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            result = body()
    finally:
        torch.cuda.set_stream(outer)  # torch does not go back to it after a capture that failed
    return graph, result


class LossGraphs:
    """The graphs of a loss, whose `learn(seen, plans)` they replay. They share their passing memory."""

    def __init__(self, learn):
        self.learn, self.kinds, self.is_off = learn, {}, False
        self.counts = {"replayed": 0, "captured": 0, "ordinary": 0}

    def find(self, predictions, settings):
        """The LossGraph for such `predictions`; None where no graph is to be used."""
        if self.is_off or not self.can_capture(predictions[0].device):
            return None
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        kind = *((p.shape, p.dtype) for p in predictions), *autocast, *settings
        if kind not in self.kinds and len(self.kinds) < MOST_KINDS:
            self.kinds[kind] = LossGraph(self)
        return self.kinds.get(kind)

    @staticmethod
    def can_capture(device):
        """Whether work on `device` may be captured here; inside a graph or a compiled function it is part of that."""
        if device.type != "cuda" or torch.compiler.is_compiling():
            return False
        return not torch.cuda.is_current_stream_capturing()

    def capture(self, seen, plans):
        """A Captured for such arguments of `learn`; None if that fails, and then for good."""
        try:
            captured = Captured(self.learn, seen, plans, self.record)
        except RuntimeError as error:
            self.is_off, self.kinds = True, {}
            reason = str(error).splitlines()[0]
            logger.warning("--fast-loss: the loss cannot be captured (%s); the run goes on without its graph", reason)
            return None
        self.counts["captured"] += 1
        return captured

    def record(self, body):
        """Capture `body`, in the memory of the other graphs; it goes when the last of them does."""
        others = [kind.captured.graph for kind in self.kinds.values() if kind.captured]
        return record(body, others[0].pool() if others else None)

    @staticmethod
    def wait():
        """Until the device has done all work, so that no graph goes while it runs."""
        torch.cuda.synchronize()


class LossGraph:
    """`learn` for batches of one kind."""

    def __init__(self, graphs):
        self.graphs, self.room, self.num_calls, self.captured = graphs, Room(), 0, None

    def learn(self, seen, plans):
        """As `learn` of the loss; replayed where the plans have the sizes of `room`."""
        self.num_calls += 1
        if not self.room.fits(plans):
            if not self.room.is_crowded(plans, MOST_PAIRS):
                self._grow(plans)
        elif self.captured is None and self.num_calls > ORDINARY_CALLS and not self.graphs.is_off:
            self.captured = self.graphs.capture(seen, plans)
        if self.captured is None or not self.room.fits(plans):
            self.graphs.counts["ordinary"] += 1
            return self.graphs.learn(seen, plans)
        self.graphs.counts["replayed"] += 1
        return self.captured.run(seen, plans)

    def _grow(self, plans):
        if self.captured:
            self.graphs.wait()
        self.captured = None  # too small for what may come
        self.room.grow(plans)


class Captured:
    """A graph of `learn`, and the tensors that it reads and writes."""

    def __init__(self, learn, seen, plans, record):
        copies = [type(part)(*(None if tensor is None else tensor.clone() for tensor in part)) for part in seen]
        static_plans = [replace(plan, buffer=plan.buffer.clone()) for plan in plans]
        self.inputs = tensors(copies, static_plans)
        self.graph, self.learnt = record(partial(learn, copies, static_plans))

    def run(self, seen, plans):
        """What `learn` returns, in memory of its own."""
        torch._foreach_copy_(self.inputs, tensors(seen, plans))
        self.graph.replay()
        return [type(part)(*(tensor.clone() for tensor in part)) for part in self.learnt]


def tensors(seen, plans):
    """All tensors of the arguments of `learn`."""
    return [tensor for part in seen for tensor in part if tensor is not None] + [plan.buffer for plan in plans]
