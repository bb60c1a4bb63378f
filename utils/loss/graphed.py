"""CUDA graphs for the part of a loss that runs from fixed tensors to fixed tensors: `BatchedLoss.loss_and_gradients`.

It is hundreds of small kernels, which take longer to start than to run. A graph holds them for one graph key: shapes
and type of the predictions, autocast, settings of the loss. A replay copies the gathered predictions and the candidates
to where the graph reads; what it wrote is copied away, so that a later step cannot change what a backward pass still
needs. Replays of one loss have to follow each other, as all work of a stream does.

The graph has room for the largest batch so far and some more (`PaddedSizes`); a larger batch makes it be captured
again, an exceptionally crowded one goes without.
"""

import logging
from dataclasses import replace
from functools import partial

import torch

from utils.ops.cuda_graph import MAX_KEYS, WARM_UP_CALLS, Captured, PaddedSizes, record

logger = logging.getLogger(__name__)

MAX_PAIRS = 4_000_000  # of a target and a candidate, about 350 MB that a graph would keep; then little is won


class LossGraphs:
    """The graphs of a loss by graph key; they replay its `loss_and_gradients` and share their passing memory."""

    def __init__(self, loss_and_gradients):
        self.loss_and_gradients, self.by_key, self.is_off = loss_and_gradients, {}, False
        self.counts = {"replayed": 0, "captured": 0, "ordinary": 0}

    def find(self, predictions, settings):
        """The LossGraph for such `predictions`; None where no graph is to be used."""
        if self.is_off or not self.can_capture(predictions[0].device):
            return None
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        key = *((p.shape, p.dtype) for p in predictions), *autocast, *settings
        if key not in self.by_key and len(self.by_key) < MAX_KEYS:
            self.by_key[key] = LossGraph(self)
        return self.by_key.get(key)

    @staticmethod
    def can_capture(device):
        """Whether work on `device` may be captured here; inside a graph or a compiled function it is part of that."""
        if device.type != "cuda" or torch.compiler.is_compiling():
            return False
        return not torch.cuda.is_current_stream_capturing()

    def capture(self, gathered, candidate_sets):
        """A Captured for such arguments of `loss_and_gradients`; None if that fails, and then for good."""
        try:
            copies = [type(part)(*(None if t is None else t.clone() for t in part)) for part in gathered]
            static = [replace(candidates, buffer=candidates.buffer.clone()) for candidates in candidate_sets]
            body = partial(self.loss_and_gradients, copies, static)
            captured = Captured(self.record, body, inputs(copies, static))
        except RuntimeError as error:
            self.is_off, self.by_key = True, {}
            reason = str(error).splitlines()[0]
            logger.warning("--fast-loss: the loss cannot be captured (%s); the run goes on without its graph", reason)
            return None
        self.counts["captured"] += 1
        return captured

    def record(self, body):
        """Capture `body`, in the memory of the other graphs; it goes when the last of them does."""
        others = [graph.captured.graph for graph in self.by_key.values() if graph.captured]
        return record(body, others[0].pool() if others else None)

    @staticmethod
    def wait():
        """Until the device has done all work, so that no graph goes while it runs."""
        torch.cuda.synchronize()


class LossGraph:
    """`loss_and_gradients` for batches of one graph key."""

    def __init__(self, graphs):
        self.graphs, self.padded, self.num_calls, self.captured = graphs, PaddedSizes(), 0, None

    def loss_and_gradients(self, gathered, candidate_sets):
        """As that of the loss; replayed where the candidates have the padded sizes."""
        self.num_calls += 1
        sizes = [candidates.sizes for candidates in candidate_sets]
        if not self.padded.fits(sizes):
            if not self.padded.is_crowded(sizes, MAX_PAIRS):
                self._grow(sizes)  # this batch has its own sizes still; the next one will be padded to these
        elif self.captured is None and self.num_calls > WARM_UP_CALLS and not self.graphs.is_off:
            self.captured = self.graphs.capture(gathered, candidate_sets)
        if self.captured is None or not self.padded.fits(sizes):
            self.graphs.counts["ordinary"] += 1
            return self.graphs.loss_and_gradients(gathered, candidate_sets)
        self.graphs.counts["replayed"] += 1
        outputs = self.captured.replay(inputs(gathered, candidate_sets))
        return [type(part)(*(tensor.clone() for tensor in part)) for part in outputs]

    def _grow(self, sizes):
        if self.captured:
            self.graphs.wait()
        self.captured = None  # too small for what may come
        self.padded.grow(sizes)


def inputs(gathered, candidate_sets):
    """All tensors of the arguments of `loss_and_gradients`."""
    tensors = [tensor for part in gathered for tensor in part if tensor is not None]
    return tensors + [candidates.buffer for candidates in candidate_sets]
