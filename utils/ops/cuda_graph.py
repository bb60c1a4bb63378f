"""Capturing work in CUDA graphs, and padding its inputs so that one graph serves batches of changing size.

A graph reads and writes fixed tensors of fixed sizes. It is captured once for a graph key (shapes, types, settings:
whatever changes the work) after `WARM_UP_CALLS` ordinary calls. A replay copies new inputs over those that it reads.
"""

import gc
from weakref import WeakSet

import torch

WARM_UP_CALLS = 3  # before the first capture: cuDNN chooses its kernels, and all state comes to exist
MAX_KEYS = 8  # graph keys of one user; further ones go without a graph
CROWDED_RATIO = 1.5  # times the work of the padded sizes: such a batch goes without a graph,
MAX_CROWDED = 20  # unless there were so many of them: then the graph is enlarged

holders: WeakSet = (
    WeakSet()
)  # all that have graphs; their `free_graphs()` lets these go, and says whether there were any


def free_all_graphs(kept: object = None) -> bool:
    """Let all graphs go but those of `kept`: no other work can use their memory. Returns whether there were any."""
    freed = [holder.free_graphs() for holder in tuple(holders) if holder is not kept]
    return any(freed)


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


class Captured:
    """A graph of `body`, the tensors `inputs` that it reads, and `outputs`, what `body` returned at the capture."""

    def __init__(self, record, body, inputs):
        self.inputs = inputs
        self.graph, self.outputs = record(body)

    def replay(self, new_inputs):
        """Queue the work on `new_inputs`, tensors like `inputs`; returns `outputs`, valid until the next replay."""
        for mine, new in zip(self.inputs, new_inputs, strict=True):
            mine.copy_(new, non_blocking=True)
        self.graph.replay()
        return self.outputs


class PaddedSizes:
    """The sizes that the inputs of one graph key are padded to, one for each input; None before the first `grow`.

    A size knows `with_spare()`, itself with room for larger inputs to come, `work`, what a replay of it costs, and
    `is_too_large`, whether a graph would hold too much memory for it.
    """

    def __init__(self):
        self.sizes, self.num_crowded = None, 0

    def fits(self, sizes):
        return sizes == self.sizes

    def grow(self, sizes):
        """Make room for inputs of `sizes` and larger ones."""
        larger = [size.with_spare() for size in sizes]
        self.sizes, self.num_crowded = sizes if any(size.is_too_large for size in larger) else larger, 0

    def is_crowded(self, sizes):
        """Whether a batch is not worth a larger graph. Such batches are counted; when they are many, it is."""
        if any(size.is_too_large for size in sizes):
            return True
        if self.sizes is None or all(
            size.work <= CROWDED_RATIO * mine.work for size, mine in zip(sizes, self.sizes, strict=True)
        ):
            return False
        self.num_crowded += 1
        return self.num_crowded <= MAX_CROWDED
