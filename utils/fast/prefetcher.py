"""Batches copied to the device ahead of the work on them, on a stream of their own (--fast-step).

The main process queues the work of a step and goes on; so it asks for the next batch while the device is still busy,
and the copy of that batch runs beside the work. Images cross the bus as bytes and become numbers on the device.

A ring of a few slots holds the images there. A slot is filled again only after all work on its last batch, which is
also what keeps the main process from running further ahead than the ring is long.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from utils.engine.batches import Batch

AHEAD = 3  # slots: one batch at work, one that waits for it, one that is being copied


class Slot:
    """Room for the images of one batch on `device`, and the events that tell who has it. No events on a CPU."""

    def __init__(self, device):
        self.device, self.is_cuda = device, device.type == "cuda"
        self.rooms = [torch.empty(0, dtype=torch.uint8, device=device)] * 3
        self.copied, self.released = (self._event() if self.is_cuda else None for _ in range(2))

    def wait(self):
        """Until the device has done all work on the last batch."""
        if self.is_cuda:
            self.released.synchronize()

    def fill(self, images, stream):
        """Queue the copy of `images` on `stream` and return them on the device, for work queued from now on.

        `images` are uint8 [B x 3 x H x W], or a DeferredBatch or ComposedBatch, which are finished there.
        """
        with self._work_on(stream):
            if isinstance(images, torch.Tensor):
                return self._room(0, images.shape).copy_(images, non_blocking=True)
            return images.on_device(self._room)

    def _room(self, number, shape):
        """A tensor of bytes; the slot is free, so nothing in it is needed any more."""
        size = math.prod(shape)
        if self.rooms[number].numel() < size:
            self.rooms[number] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self.rooms[number][:size].view(shape)

    @contextmanager
    def _work_on(self, stream):
        """A context whose work goes to `stream`, and that the current stream then waits for."""
        if not self.is_cuda:
            yield
            return
        with torch.cuda.stream(stream):
            yield
            self.copied.record(stream)
        torch.cuda.current_stream().wait_event(self.copied)

    def release(self):
        """The consumer is done with the batch, apart from work that it has queued."""
        if self.is_cuda:
            self.released.record(torch.cuda.current_stream())

    @staticmethod
    def _event():
        return torch.cuda.Event(blocking=True)  # whoever waits for it sleeps


class Prefetcher:
    """Called as `batches.plain`: yields a Batch for each loader batch, its images uint8 unless `floats` is asked for.

    The images of a batch are valid until the next one is asked for. `targets_device` is for a loss that wants its
    targets elsewhere.
    """

    def __init__(self, targets_device=None, floats=False, ahead=AHEAD):
        self.targets_device, self.floats, self.ahead = targets_device, floats, ahead
        self.slots, self.stream = None, None

    def __call__(self, loader: Iterable, device: torch.device) -> Iterator[Batch]:
        if self.slots is None:
            self.slots = [Slot(device) for _ in range(self.ahead)]
            self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if hasattr(loader, "copy_stream"):
            loader.copy_stream = self.stream
        for number, (images, targets, paths, _) in enumerate(loader):
            slot = self.slots[number % self.ahead]
            slot.wait()  # for the work on the batch that it held, `ahead` batches ago
            there = slot.fill(images, self.stream)
            targets = to_device(targets, self.targets_device or device)
            try:
                yield Batch(as_float(there) if self.floats else there, targets, paths)
            finally:  # the next batch is asked for, or the epoch is left
                slot.release()


def to_device(tensor, device):
    """`tensor` on `device`, without waiting for it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def as_float(images):
    """Images [B x 3 x H x W] uint8 as `images.float() / 255`, float32 in channels-last order; floats only reordered."""
    if images.is_floating_point():
        return images.contiguous(memory_format=torch.channels_last)
    numbers = torch.empty(images.shape, device=images.device, memory_format=torch.channels_last)
    return torch.div(images, 255, out=numbers)
