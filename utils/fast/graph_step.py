"""The training step as two CUDA graphs, captured once and replayed (--cuda-graph).

One graph holds the work from the bytes of the images to the collected gradients, for one image shape; the other the
optimiser step and the moving average, for all shapes. Whatever changes from step to step lies in tensors that are
written before a replay: images, the loss's candidates, learning rates, momentum and averaging weights. The loss scale
never leaves the device.

Between the two, several processes exchange their gradients, by an ordinary operation. So no process has to capture or
replay at the same time as the others, and the watchdogs of the communication library see every exchange.

The first steps of every shape are ordinary ones, so that cuDNN chooses its kernels and all state exists; capturing
itself executes nothing. So neither disturbs the statistics of BatchNorm, the momentum or the average.

The graph of a shape has room for the candidates of the largest batch so far and some more (`PaddedSizes`); a larger
batch makes it be captured again, an exceptionally crowded one is trained without it. Graphs keep the memory of their
work. What finds too little memory beside them (the last batch of an epoch, a validation, a checkpoint) is done again
without them, and at last without those of the validation (`with_room`); they are captured again when their next batch
comes. A capture that finds too little memory is done again without those of the validation.
"""

import gc
import logging
from contextlib import contextmanager
from functools import partial

import torch

from utils.fast.train_step import FastSteps
from utils.loss.batched import grid_shapes
from utils.ops.cuda_graph import (
    MAX_KEYS,
    WARM_UP_CALLS,
    Captured,
    PaddedSizes,
    free_all_graphs,
    holders,
    record,
)
from utils.system.files import counted
from utils.system.memory import is_out_of_memory

logger = logging.getLogger(__name__)


class ImageShape:
    """What is known of the batches of one image shape: their number, the sizes of their candidates, their graph."""

    def __init__(self):
        self.num_steps, self.padded, self.captured = 0, PaddedSizes(), None


class GraphSteps(FastSteps):
    """FastSteps that replays graphs where it can. The loss has to be one of `loss.batched`.

    Everything happens on a stream of its own, because the current one cannot be captured; others may go on as if it
    were the current stream.
    """

    def __init__(self, trainer, *args, **options):
        super().__init__(trainer, *args, **options)
        self.is_off = None if self.is_sgd else "the optimiser is not SGD"
        self.loss, self.shapes = None, {}
        self.num_updates, self.captured_update = 0, None
        self.counts = {"replayed": 0, "captured": 0, "ordinary": 0}
        if self.is_off:
            logger.warning("--cuda-graph: %s; steps are made without a graph", self.is_off)
        self.open_stream()
        holders.add(self)

    def open_stream(self):
        self.stream, self.pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()

    def begin_epoch(self):
        super().begin_epoch()
        if self.average is None:  # graphs would use what is gone
            self.shapes, self.num_updates, self.captured_update = {}, 0, None
        if self.trainer.compute_loss is not self.loss:
            self.loss, self.shapes = self.trainer.compute_loss, {}

    def finish(self):
        super().finish()
        free_all_graphs()  # for what follows, such as the official score
        logger.info(
            "CUDA graph: %s", ", ".join(f"{counted(count, 'step')} {kind}" for kind, count in self.counts.items())
        )

    def work(self, batch, iteration, is_update):
        with self.on_stream():
            super().work(batch, iteration, is_update)

    def backward(self, batch):
        key = tuple(batch.images.shape)
        if self.is_off or (key not in self.shapes and len(self.shapes) >= MAX_KEYS):
            return self._ordinary(batch)
        shape = self.shapes.setdefault(key, ImageShape())
        shape.num_steps += 1
        candidate_sets = self._prepare(batch, shape)
        sizes = [candidates.sizes for candidates in candidate_sets]
        if shape.num_steps <= WARM_UP_CALLS or shape.padded.is_crowded(sizes):
            return self._ordinary(batch)
        if shape.captured is None or not shape.padded.fits(sizes):
            candidate_sets = self._capture_for(batch, sizes, shape)
            if self.is_off:
                return self._ordinary(batch)
        self.counts["replayed"] += 1
        return self.replay(shape.captured, inputs(batch.images, candidate_sets))

    def update(self):
        self.num_updates += 1
        if self.captured_update is None and self.num_updates > WARM_UP_CALLS and not self.is_off:
            self.captured_update = self._capture(super().update, [], "optimiser step and moving average")
        if self.captured_update is None:
            super().update()
        else:
            self.replay(self.captured_update, [])

    def replay(self, captured, new_inputs):
        """Queue captured work on `new_inputs`; returns what it returned, valid until the next time."""
        return captured.replay(new_inputs)

    def _ordinary(self, batch):
        self.counts["ordinary"] += 1
        # BatchNorm counts a batch twice that fails behind it.
        return self.with_room(super().backward)(batch)

    def with_room(self, call):
        """`call`, which is called once more, without the graphs, when there is too little memory."""
        # Those of a validation as well, if ours were not enough.
        return partial(self._with_room, (self.free_graphs, free_all_graphs), call)

    def _with_room(self, ways, call, *args, **options):
        ways = iter(ways)
        while True:
            try:
                return call(*args, **options)
            except RuntimeError as error:
                if not is_out_of_memory(error) or not any(free() for free in ways):
                    raise
            # Outside of the handler: the error keeps what `call` had allocated.
            logger.info("CUDA graphs have given their memory back, which other work needs; they are captured again")
            self.trainer.optimizer.zero_grad()  # of a step that has failed
            gc.collect()
            torch.cuda.empty_cache()

    def free_graphs(self):
        """Let the graphs go, whose memory is of no use to other work; returns whether there was one.

        They are captured again when their next batch comes.
        """
        captured = [shape for shape in self.shapes.values() if shape.captured]
        if not captured and self.captured_update is None:
            return False
        self.wait()
        for shape in captured:
            shape.captured = None
        self.captured_update = None
        return True

    def _prepare(self, batch, shape):
        """The CandidateSets of a batch, with the padded sizes of its image shape if they are large enough."""
        grids, image_size = grid_shapes(self.loss.head, batch.images.shape), tuple(batch.images.shape[2:])
        return self.loss.prepare(batch.targets, grids, image_size, at_least=shape.padded.sizes)

    def _capture_for(self, batch, sizes, shape):
        """Capture the graph of `shape` with room for `sizes`; returns the CandidateSets of the batch, as large."""
        if not shape.padded.fits(sizes):
            shape.padded.grow(sizes)
            self.wait()
            shape.captured = None  # it is too small for what may come
        candidate_sets = self._prepare(batch, shape)
        images = torch.empty_like(batch.images)
        static = [candidates.to(self.device) for candidates in candidate_sets]
        body = partial(self.forward_backward, images, partial(self.loss.compute, candidate_sets=static))
        size = " x ".join(map(str, images.shape))
        shape.captured = self._capture(body, inputs(images, static), f"images {size}, room for {shape.padded.sizes}")
        return candidate_sets

    def _capture(self, body, static_inputs, description):
        """A Captured of `body`; None if that fails, and then nothing is captured or replayed any more."""
        try:
            others_freed = partial(free_all_graphs, kept=self)
            captured = self._with_room([others_freed], Captured, self.record, body, static_inputs)
        except RuntimeError as error:
            self.wait()
            self.trainer.optimizer.zero_grad()  # a backward pass that was not executed may have left some
            self.is_off, self.shapes, self.captured_update = str(error).splitlines()[0], {}, None
            logger.warning("--cuda-graph: the step cannot be captured (%s); the run goes on without", self.is_off)
            return None
        self.counts["captured"] += 1
        logger.info("CUDA graph %d captured: %s", self.counts["captured"], description)
        return captured

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
