"""The whole training step as a CUDA graph, captured once and replayed (--cuda-graph).

A graph holds the work of `FastSteps.work`, from the bytes of the images to the moving average, for one image shape,
with or without the optimiser step at the end of an accumulation. Whatever changes from step to step lies in tensors
that are written before a replay: images, the loss's plan, learning rates, momentum and averaging weights. The loss
scale never leaves the device.

The first steps of every shape are ordinary ones, so that cuDNN chooses its kernels and all state exists; capturing
itself executes nothing. So neither disturbs the statistics of BatchNorm, the momentum or the average.

A plan has fixed sizes. The graph has room for the largest seen so far and some more; a larger batch makes it be
captured again, an exceptionally crowded one is trained without it.
"""

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from utils.fast.prefetcher import as_float
from utils.fast.train_step import FastSteps
from utils.loss import batched_assigner
from utils.loss.graphed import Room, record

logger = logging.getLogger(__name__)

ORDINARY_STEPS = 3  # of a shape before its first capture
MOST_SHAPES = 8  # further ones are trained without a graph


@dataclass
class Captured:
    """A graph and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    images: torch.Tensor  # [B x 3 x H x W] as they were handed over
    plans: list
    items: torch.Tensor  # [4]

    def fits(self, plans):
        return all(mine.sizes == new.sizes for mine, new in zip(self.plans, plans, strict=True))

    def run(self, images, plans):
        """Queue the step on a batch; the items are valid until the next one."""
        self.images.copy_(images, non_blocking=True)
        for mine, new in zip(self.plans, plans, strict=True):
            mine.copy_(new)
        self.graph.replay()
        return self.items


class Shape:
    """What is known of the batches of one image shape: how many there were, room for their plans, their graphs."""

    def __init__(self):
        self.num_steps, self.room, self.graphs = 0, Room(), {}


class GraphSteps(FastSteps):
    """FastSteps that replays a graph where it can. The loss has to be one of `loss_batched`.

    Everything happens on a stream of its own, because the current one cannot be captured; others may go on as if it
    were the current stream.
    """

    def __init__(self, training, interval=FastSteps.INTERVAL, twin=None):
        super().__init__(training, interval, twin)
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
        if self.average is None or self.training.compute_loss is not self.loss:  # graphs would use what is gone
            self.loss, self.shapes = self.training.compute_loss, {}

    def finish(self):
        super().finish()
        logger.info("CUDA graph: %s", ", ".join(f"{count} steps {kind}" for kind, count in self.counts.items()))

    def items(self, batch, is_update):
        with self.on_stream():
            return self._items(batch, is_update)

    def _items(self, batch, is_update):
        key = tuple(batch.images.shape)
        if self.is_off or (key not in self.shapes and len(self.shapes) >= MOST_SHAPES):
            return self._ordinary(batch, is_update)
        shape = self.shapes.setdefault(key, Shape())
        shape.num_steps += 1
        plans = self.loss.prepare(batch.targets, self._prediction_shapes(key), key[2:], at_least=shape.room.sizes)
        if shape.num_steps <= ORDINARY_STEPS or shape.room.is_crowded(plans, batched_assigner.FLAT_PAIRS):
            return self._ordinary(batch, is_update)
        captured = shape.graphs.get(is_update)
        if captured is None or not captured.fits(plans):
            captured, plans = self._capture_for(batch, plans, shape, is_update)
            if captured is None:
                return self._ordinary(batch, is_update)
        self.counts["replayed"] += 1
        return captured.run(batch.images, plans)

    def _ordinary(self, batch, is_update):
        self.counts["ordinary"] += 1
        return super().items(batch, is_update)

    def _capture_for(self, batch, plans, shape, is_update):
        """(Captured, plans with its sizes) with room for `plans`; (None, plans) if that fails, and then for good."""
        if not shape.room.fits(plans):
            shape.room.grow(plans)
            self.wait()
            shape.graphs.clear()  # they are too small for what may come
        size = tuple(batch.images.shape)
        plans = self.loss.prepare(batch.targets, self._prediction_shapes(size), size[2:], at_least=shape.room.sizes)
        try:
            captured = self._capture(batch.images, plans, is_update)
        except RuntimeError as error:
            self.is_off, self.shapes = str(error).splitlines()[0], {}
            logger.warning("--cuda-graph: the step cannot be captured (%s); the run goes on without", self.is_off)
            return None, plans
        shape.graphs[is_update] = captured
        self.counts["captured"] += 1
        logger.info("CUDA graph %d captured: images %s, %s optimiser step, room for %s", self.counts["captured"],
                    list(size), "with" if is_update else "without", shape.room.sizes)  # fmt: skip
        return captured, plans

    def _capture(self, images, plans, is_update):
        images = torch.empty_like(images)
        plans = [plan.to(self.device) for plan in plans]
        body = partial(self.work_on_bytes, images, partial(self.loss.compute, plans=plans), is_update)
        graph, items = self.record(body)
        return Captured(graph, images, plans, items)

    def work_on_bytes(self, images, compute_loss, is_update):
        return self.work(as_float(images), compute_loss, is_update)

    def record(self, body):
        """Capture `body`; returns the graph and what `body` returned, which each replay writes anew."""
        return record(body, self.pool, self.stream)

    def _prediction_shapes(self, shape):
        """Of the lead heads, for images of `shape`."""
        head, (batch, _, height, width) = self.loss.head, shape
        return [(batch, head.na, height // s, width // s, head.no) for s in map(int, head.stride.tolist())]

    def wait(self):
        """Until the device has done all work, so that no graph goes while it runs."""
        torch.cuda.synchronize(self.device)

    def on_stream(self):
        """A context in which work goes to our stream, after what the current stream holds, which then waits for it."""
        return _detour(self.stream)


@contextmanager
def _detour(stream):
    outer = torch.cuda.current_stream()
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        yield
    outer.wait_stream(stream)
