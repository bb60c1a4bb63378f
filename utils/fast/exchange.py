"""What the processes of a run on several cards tell each other under --fast-step, in place of DistributedDataParallel.

Each process trains the bare model on its share of a batch. Before an optimiser step the gradients, which lie in one
flat tensor, are added over all processes in one operation; then all of them make the same step. DDP multiplies each
loss by the number of processes and takes the mean of the gradients; adding gradients of losses that are not multiplied
is the same. Overflow is looked for after the addition, so that all processes leave out the same steps.

DDP also sends the statistics of BatchNorm from rank 0 to the others before each forward pass. They do not enter a
forward pass in training, and those of rank 0 are never changed by others: to send them at the end of an epoch leaves
rank 0, which validates and saves, with the same.
"""

import torch
import torch.distributed as dist

from utils.system.distributed import broadcast_tensors, cannot_exchange, unwrap
from utils.system.watch import START, Watch


class Alone:
    """The exchange of a run with a single process: there is nobody to talk to."""

    world_size = 1

    def __init__(self, device: torch.device):
        self.device = device

    def begin_epoch(self, trainer) -> None:
        """Before the steps of an epoch; the first time everybody receives the model and the average of rank 0."""

    def add_gradients(self, gradient: torch.Tensor, iteration: int) -> None:
        """Replace `gradient` [n] by its sum over all processes, queued on the current stream."""

    def end_epoch(self, buffers: list, state: dict) -> None:
        """Send the flat `buffers` of rank 0 to all; raise ValueError if a tensor of `state` {name: float32} differs."""

    def finish(self) -> None:
        """The run is over."""


class Exchange(Alone):
    """Talks to the other processes of the group, and ends this one if they are silent for `timeout` seconds.

    Raises ValueError when not even a first number can be exchanged.
    """

    def __init__(self, device: torch.device, timeout: float):
        super().__init__(device)
        self.world_size = dist.get_world_size()
        self.is_started, self.length = False, None
        self.watch = Watch.of_process(dist.get_rank(), self.world_size, timeout, device)
        self._try()

    def _try(self):
        """Exchange a number, so that what is missing or broken is told now, and as a sentence."""
        try:
            with self.watch.exchange("a first number"):
                found = self._differ([1])
        except RuntimeError as error:
            raise cannot_exchange(error, self.device) from error
        assert not any(found)

    def begin_epoch(self, trainer):
        self.watch.allow_waiting()  # rank 0 may still validate
        with self.watch.exchange("the beginning of an epoch"):
            self._differ([1])
        self.watch.allow_waiting(START)  # somebody may compile new shapes
        if not self.is_started:
            models = unwrap(trainer.model), trainer.ema.ema
            broadcast_tensors([tensor for model in models for tensor in (*model.parameters(), *model.buffers())])
            self.is_started = True

    def add_gradients(self, gradient, iteration):
        if self.length is None:
            self.length = len(gradient)
            if any(self._differ([self.length])):
                raise ValueError(
                    "the processes train different parameters, because some had no gradient in the first step of one "
                    "process; train without --fast-step, --cuda-graph and --fast"
                )
        with self.watch.exchange("the gradients", iteration):
            dist.all_reduce(gradient)

    def end_epoch(self, buffers, state):
        with self.watch.exchange("the end of an epoch"):
            for buffer in buffers:
                dist.broadcast(buffer, 0)
            found = self._differ([tensor.view(torch.int32).sum() for tensor in state.values()])
        different = [name for name, is_different in zip(state, found, strict=True) if is_different]
        if different:
            raise ValueError(
                f"the processes do not have the same {', '.join(different)} any more, so a GPU computes wrongly; "
                "train.py --resume goes on after the last complete epoch"
            )

    def finish(self):
        self.watch.stop()

    def _differ(self, numbers):
        """For each of `numbers`, whole ones or tensors of one, whether it is not the same in all processes."""
        numbers = torch.stack([torch.as_tensor(n, dtype=torch.int64, device=self.device) for n in numbers])
        extremes = torch.cat((numbers, -numbers))
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        most, minus_least = extremes.chunk(2)
        return (most + minus_least != 0).tolist()
