"""The network of validation as CUDA graphs, one for each shape of its batches (--fast-val with --cuda-graph).

The fused form of yolov7-tiny is over two hundred kernels. To start them takes the host 18 ms, longer than the GPU needs
for a small batch; to start a graph of them takes next to nothing. The shapes of a validation set are the same in each
epoch. What a graph reads has to stay where it was at the capture: images are copied there, and so are the weights of
each epoch, because it is always the same copy of the average that is evaluated (`KeptHalfCopy`). All that is computed
from weights alone, such as folded norms, is computed within the graph.

A capture costs more than an ordinary pass. So a shape is captured when it comes for the fourth time: in the first epoch
if many batches have it, in the fourth if only one has, and never in a shorter run. The graphs share one pool of memory
and one place for images: they run one after the other, and the output of one is read before the next one runs.
"""

import logging
from collections import Counter
from functools import partial

import torch
from torch import nn

from utils.ops.cuda_graph import WARM_UP_CALLS, Captured, holders, record
from utils.system.memory import describe_bytes

logger = logging.getLogger(__name__)

MOST_SHAPES = 32  # graphs at most; rectangular batches of COCO have fewer shapes at any size
RESERVE = 0.1  # share of the card's memory that has to stay free beside the graphs, for what training takes in between


def replayed(fuse, model):
    """A GraphNetwork of `fuse(model)`; `fuse(model)` itself if it does not take images as bytes."""
    network = fuse(model)
    return GraphNetwork(network) if getattr(network, "takes_bytes", False) else network


class GraphNetwork(nn.Module):
    """Does what `network` does, by graphs where it can; the output of a call is valid until the next one.

    `network` takes images as bytes, is in evaluation mode, and keeps its tensors where they are.
    """

    takes_bytes = True

    def __init__(self, network):
        super().__init__()
        self.network, self.is_off = network, False
        self.num_calls, self.graphs = Counter(), {}  # by image shape
        self.pool, self.room = None, None  # the memory of all graphs; the place [bytes] for the images of any of them
        holders.add(self)

    def forward(self, images):
        """The output of `network` for images uint8 [b x ch x h x w] on its device."""
        shape = tuple(images.shape)
        self.num_calls[shape] += 1
        if self.is_wanted(shape):
            self._capture(images)
        return self.graphs[shape].replay([images]) if shape in self.graphs else self.network(images)

    def is_wanted(self, shape):
        """Whether images of that shape have come so often that a graph pays, and there is none."""
        is_late = self.num_calls[shape] > WARM_UP_CALLS and len(self.graphs) < MOST_SHAPES
        return is_late and not self.is_off and shape not in self.graphs

    def _capture(self, images):
        static = self._place(images)
        try:
            captured = Captured(self.record, partial(self.network, static), [static])
        except RuntimeError as error:
            self._give_up(str(error).splitlines()[0])
            return
        self.graphs[tuple(images.shape)] = captured
        free, total = self.memory(images.device)
        if free < RESERVE * total:
            self._give_up(f"only {describe_bytes(free)} of {describe_bytes(total)} would stay free")

    def _place(self, images):
        """Where a graph finds images of that shape."""
        needed = max(torch.Size(shape).numel() for shape in self.num_calls)
        if self.room is None or len(self.room) < needed:  # graphs that are there keep the old one
            self.room = torch.empty(needed, dtype=torch.uint8, device=images.device)
        return self.room[: images.numel()].view(images.shape)

    def _give_up(self, reason):
        logger.warning("--fast-val: the network runs without CUDA graphs (%s)", reason)
        self.is_off = True
        self.free_graphs()

    def free_graphs(self):
        """Let the graphs go; they are captured again when their shapes come. Returns whether there were any."""
        self.wait()
        had_any, self.graphs, self.room = bool(self.graphs), {}, None
        return had_any

    def record(self, body):
        """Capture `body`; returns the graph and what `body` returned, which each replay writes anew."""
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        return record(body, self.pool)

    def memory(self, device):
        """Bytes of the card that are free, and all."""
        return torch.cuda.mem_get_info(device)

    def wait(self):
        """Wait for all work of the device: a graph must not be freed while it runs."""
        torch.cuda.synchronize()
