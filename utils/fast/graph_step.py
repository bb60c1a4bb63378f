"""The whole training step as a CUDA graph, captured once and replayed (--cuda-graph).

A graph holds the work of `FastSteps.work`, from the bytes of the images to the moving average, for one image shape,
with or without the optimiser step at the end of an accumulation. Whatever changes from step to step lies in tensors
that are written before a replay: images, the loss's candidates, learning rates, momentum and averaging weights. The
loss scale never leaves the device.

The first steps of every shape are ordinary ones, so that cuDNN chooses its kernels and all state exists; capturing
itself executes nothing. So neither disturbs the statistics of BatchNorm, the momentum or the average.

The graph has room for the candidates of the largest batch so far and some more (`PaddedSizes`); a larger batch makes it
be captured again, an exceptionally crowded one is trained without it.
"""

import logging
from contextlib import contextmanager
from functools import partial

import torch

from utils.fast.prefetcher import as_float
from utils.fast.train_step import FastSteps
from utils.loss import batched_assigner
from utils.ops.cuda_graph import MAX_KEYS, WARM_UP_CALLS, Captured, PaddedSizes, record
from utils.system.files import counted

logger = logging.getLogger(__name__)


class ImageShape:
    """What is known of the batches of one image shape: their number, the sizes of their candidates, their graphs."""

    def __init__(self):
        self.num_steps, self.padded, self.graphs = 0, PaddedSizes(), {}  # graphs: {is_update: Captured}


class GraphSteps(FastSteps):
    """FastSteps that replays a graph where it can. The loss has to be one of `loss.batched`.

    Everything happens on a stream of its own, because the current one cannot be captured; others may go on as if it
    were the current stream.
    """

    def __init__(self, trainer, interval=10):
        super().__init__(trainer, interval)
        self.is_off = None if self.is_sgd else "the optimiser is not SGD"
        self.loss, self.shapes = None, {}
        self.counts = {"replayed": 0, "captured": 0, "ordinary": 0}
        if self.is_off:
            logger.warning("--cuda-graph: %s; steps are made without a graph", self.is_off)
        self.open_stream()

    def open_stream(self):
        self.stream, self.pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()

    def begin_epoch(self):
        super().begin_epoch()
        if self.average is None or self.trainer.compute_loss is not self.loss:  # graphs would use what is gone
            self.loss, self.shapes = self.trainer.compute_loss, {}

    def finish(self):
        super().finish()
        logger.info(
            "CUDA graph: %s", ", ".join(f"{counted(count, 'step')} {kind}" for kind, count in self.counts.items())
        )

    def items(self, batch, is_update):
        with self.on_stream():
            return self._items(batch, is_update)

    def _items(self, batch, is_update):
        key = tuple(batch.images.shape)
        if self.is_off or (key not in self.shapes and len(self.shapes) >= MAX_KEYS):
            return self._ordinary(batch, is_update)
        shape = self.shapes.setdefault(key, ImageShape())
        shape.num_steps += 1
        candidate_sets = self._prepare(batch, shape)
        sizes = [candidates.sizes for candidates in candidate_sets]
        if shape.num_steps <= WARM_UP_CALLS or shape.padded.is_crowded(sizes, batched_assigner.MAX_PAIRS):
            return self._ordinary(batch, is_update)
        captured = shape.graphs.get(is_update)
        if captured is None or not shape.padded.fits(sizes):
            captured, candidate_sets = self._capture_for(batch, sizes, shape, is_update)
            if captured is None:
                return self._ordinary(batch, is_update)
        return self.replay(captured, batch.images, candidate_sets)

    def replay(self, captured, images, candidate_sets):
        """Queue the captured step on a batch; returns its items, valid until the next one."""
        self.counts["replayed"] += 1
        return captured.replay(inputs(images, candidate_sets))

    def _ordinary(self, batch, is_update):
        self.counts["ordinary"] += 1
        return super().items(batch, is_update)

    def _prepare(self, batch, shape):
        """The CandidateSets of a batch, with the padded sizes of its image shape if they are large enough."""
        head, (num_images, _, height, width) = self.loss.head, batch.images.shape
        grids = [(num_images, head.na, height // s, width // s, head.no) for s in map(int, head.stride.tolist())]
        return self.loss.prepare(batch.targets, grids, (height, width), at_least=shape.padded.sizes)

    def _capture_for(self, batch, sizes, shape, is_update):
        """(Captured, CandidateSets of its sizes) with room for `sizes`; (None, ...) if that fails, then for good."""
        if not shape.padded.fits(sizes):
            shape.padded.grow(sizes)
            self.wait()
            shape.graphs.clear()  # they are too small for what may come
        candidate_sets = self._prepare(batch, shape)
        try:
            shape.graphs[is_update] = captured = self._capture(batch.images, candidate_sets, is_update)
        except RuntimeError as error:
            self.is_off, self.shapes = str(error).splitlines()[0], {}
            logger.warning("--cuda-graph: the step cannot be captured (%s); the run goes on without", self.is_off)
            return None, candidate_sets
        self.counts["captured"] += 1
        images = " x ".join(map(str, batch.images.shape))
        logger.info("CUDA graph %d captured: images %s, %s optimiser step, room for %s", self.counts["captured"],
                    images, "with" if is_update else "without", shape.padded.sizes)  # fmt: skip
        return captured, candidate_sets

    def _capture(self, images, candidate_sets, is_update):
        images = torch.empty_like(images)
        static = [candidates.to(self.device) for candidates in candidate_sets]
        body = partial(self.work_on_bytes, images, partial(self.loss.compute, candidate_sets=static), is_update)
        return Captured(self.record, body, inputs(images, static))

    def work_on_bytes(self, images, compute_loss, is_update):
        return self.work(as_float(images), compute_loss, is_update)

    def record(self, body):
        """Capture `body`; returns the graph and what `body` returned, which each replay writes anew."""
        return record(body, self.pool, self.stream)

    def wait(self):
        """Until the device has done all work, so that no graph goes while it runs."""
        torch.cuda.synchronize(self.device)

    def on_stream(self):
        """A context in which work goes to our stream, after what the current stream holds, which then waits for it."""
        return _detour(self.stream)


def inputs(images, candidate_sets):
    """What changes from replay to replay: the other numbers are in tensors that `FastSteps.step` writes itself."""
    return [images, *(candidates.buffer for candidates in candidate_sets)]


@contextmanager
def _detour(stream):
    outer = torch.cuda.current_stream()
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        yield
    outer.wait_stream(stream)
