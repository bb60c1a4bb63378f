"""Batches that workers write straight into shared memory (--worker-tensor).

A ring of slots, each with room for the images of one batch, is allocated once and page-locked where CUDA is. A task is
(slot, start, stop): a worker makes those samples, writes their pixels into the slot, and answers with labels, paths and
shapes. The main process stacks nothing, copies no image and pins nothing; what it yields is a view of the slot.

Collation therefore happens inside the workers: pixels where they are written, and a group of --quad by the worker that
made its four samples. `collate_fn` of the data set is not called.

A batch is valid until the next one is asked for. Then its slot is free again; with a GPU only when all work that was
queued until then is done, above all its copy to the device.
"""

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Thread
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler

from utils.data.dataset import numbered
from utils.data.fast.worker_pool import WorkerPool
from utils.data.keyed_dataset import KeyedDataset
from utils.data.sampler import EndlessBatches, ShortEpochs
from utils.data.worker_errors import LoaderError
from utils.system.memory import describe_bytes, give_back, shared_array

logger = logging.getLogger(__name__)


class LateSteps(NamedTuple):
    """Steps of the samples that workers write down, for a GPU to do: `num_bytes` a sample.

    `dataset(data set)` is the form of a data set whose samples write them where its `begin` says, and
    `batch(pixels, steps)` what the loader yields as images. The place of a sample in a batch holds `room` images.
    With `at_once` the data set has no `begin`. When all samples of a task are made, its `finish(samples, number, steps,
    begin)` writes their `steps` [n x num_bytes] and returns their targets [n x 6]. `number` is the place of the first
    sample in its batch; `finish` calls `begin(number)` before work that can fail because of that sample.
    """

    num_bytes: int
    dataset: Callable
    batch: Callable
    room: int = 1
    at_once: bool = False


class BatchRing:
    """`count` slots: `num_bytes` for images, and for each sample `num_step_bytes` and a key (epoch, position)."""

    def __init__(self, count, num_bytes, batch_size, num_step_bytes=0):
        self.num_bytes, self.num_step_bytes = num_bytes, num_step_bytes
        # Anonymous, not in /dev/shm: that is small in containers, and what crashes there leaves files behind.
        self.pixels = shared_array((count, num_bytes + batch_size * num_step_bytes), np.uint8)
        self.keys = shared_array((count, batch_size, 2), np.int64)
        self.free, self.leaving = deque(range(count)), deque()
        self.count, self.is_locked, self.locking = count, False, None

    def lock_pages(self):
        """Page-lock the slots, so that copies to the GPU run by themselves. A refusal only costs speed.

        A thread does it; until then the copies wait for themselves. It is quick when the workers have written to the
        slots before; otherwise it fills them with zeros first, and whoever forks or takes memory meanwhile waits.
        """
        self.is_locked = True  # from here on a copy may be on its way when its slot is released
        device = torch.cuda.current_device()  # a thread begins with the first one, where it would make a context
        self.locking = Thread(target=self._lock_pages, args=(device,), name="page-locking")
        self.locking.start()

    def _lock_pages(self, device):
        try:
            torch.cuda.set_device(device)
            status = torch.cuda.cudart().cudaHostRegister(self.pixels.ctypes.data, self.pixels.nbytes, 1)
        except RuntimeError as error:
            status = error
        self.is_locked = not isinstance(status, RuntimeError) and int(status) == 0
        if not self.is_locked:
            logger.warning("%s of batch buffers could not be page-locked (%s): copies to the GPU will be slower",
                           describe_bytes(self.pixels.nbytes), status)  # fmt: skip

    def unlock_pages(self):
        """Undo `lock_pages`; the memory must not go before."""
        if self.locking:
            self.locking.join()
        if self.is_locked:
            self.is_locked = False
            torch.cuda.cudart().cudaHostUnregister(self.pixels.ctypes.data)

    def take(self, wait=False):
        """A slot that nobody holds, or None; with `wait` the oldest copy to the device is waited for."""
        while self.leaving and (wait or self.leaving[0][1].query()):
            slot, copied = self.leaving.popleft()
            copied.synchronize()
            self.free.append(slot)
            wait = False
        return self.free.popleft() if self.free else None

    def release(self, slot, stream=None):
        """The consumer is done with `slot`, apart from work that it has queued on a CUDA stream (None: the current)."""
        if self.is_locked:  # the copy of locked pages goes on by itself, and must not find the next batch there
            copied = torch.cuda.Event()
            copied.record(stream or torch.cuda.current_stream())
            self.leaving.append((slot, copied))
        else:
            self.free.append(slot)

    def place(self, slot, position, shape):
        """Where image number `position` of a batch goes [uint8, `shape`]; all images of a batch have one shape."""
        size = math.prod(shape)
        start = position * size
        if start + size > self.num_bytes:
            raise ValueError(f"an image of {' x '.join(map(str, shape))} is larger than those of its batch")
        return self.pixels[slot, start : start + size].reshape(shape)

    def steps(self, slot):
        """The late steps of the samples in `slot` [batch size x num_step_bytes]."""
        return self.pixels[slot, self.num_bytes :].reshape(-1, self.num_step_bytes)

    def images(self, slot, num_images, shape):
        """The batch in `slot` on the same memory: uint8 [num_images, *shape]."""
        size = num_images * math.prod(shape)
        return torch.from_numpy(self.pixels[slot, :size].reshape(num_images, *shape))


class BatchWriter:
    """What a worker does: makes the samples of a task and writes them into its slot.

    With `collate_group` four samples become one image. Otherwise the data set writes pixels where they belong; its
    LateSteps, if there are any, are written down instead of made.
    """

    def __init__(self, source, ring, collate_group=None, late=None):
        self.source, self.ring, self.collate_group, self.late = source, ring, collate_group, late
        self.group_size = 4 if collate_group else 1
        self.current = -1, -1  # slot and position of the sample that is being made
        self.is_placed = False  # whether its pixels lie where they belong

    def enter(self):
        """Called in the worker: the data set of the main process stays as it is."""
        if self.late:
            self.source.dataset = self.late.dataset(self.source.dataset)
        self.source.enter_worker()
        if not self.collate_group:
            self.source.dataset.new_image = self._place

    def _place(self, shape, dtype):
        assert dtype == np.uint8, "slots hold bytes"
        self.is_placed = True
        return self.ring.place(*self.current, shape)

    def __call__(self, task, doing):
        """Answer to (slot, start, stop): targets [n x 6], image shape, paths and shapes of the samples."""
        slot, start, stop = task
        targets, paths, shapes = [], [], []
        keys = {position: tuple(key) for position, key in enumerate(self.ring.keys[slot, start:stop].tolist(), start)}
        steps, at_once = (self.ring.steps(slot), self.late.at_once) if self.late else (None, False)

        def begin(position):
            doing[:] = self.current = slot, position

        for number in range(start // self.group_size, -(-stop // self.group_size)):
            first = number * self.group_size
            samples = []
            for position in range(first, min(first + self.group_size, stop)):
                self.is_placed = False
                begin(position)  # first: if this sample ends the worker, its name is known
                if self.late and not at_once:
                    self.source.dataset.begin(steps[position])
                samples.append(self.source[keys[position]])
            image, rows, _, _ = samples[0]
            if self.collate_group:
                images, rows, _, _ = self.source.collate_group(self.collate_group, keys[first], samples)
                image = images[0]
            if not self.is_placed:  # a group, or of a data set with memory of its own
                self.ring.place(slot, number, image.shape)[:] = image
            targets.append(rows)
            paths += [path for _, _, path, _ in samples]
            shapes += [shape for _, _, _, shape in samples]
        first = start // self.group_size
        if at_once:
            targets = self.source.dataset.finish(targets, first, steps[start:stop], begin)
        else:
            targets = numbered(targets, first).numpy()
        return targets, tuple(image.shape), paths, shapes

    def describe(self, slot, position):
        """The file of a sample, for messages."""
        return self.source.path(self.ring.keys[slot, position].tolist()) if slot >= 0 else "nothing"


@dataclass
class PendingBatch:
    """A batch on its way: `parts` are the answers by their start, `num_open` those that are missing."""

    num_samples: int
    num_open: int
    parts: dict = field(default_factory=dict)


class SharedMemoryLoader:
    """A loader of (images uint8 [b x 3 x h x w], targets [n x 6], paths, shapes) as `collate_fn` makes them.

    `batches` is a batch sampler over keys. `endless`: the workers go on with the next epoch before it is asked for;
    otherwise each pass waits for its first batch, and `persistent` decides whether the workers stay between passes.
    With LateSteps the images are what these say, and some steps are left to the consumer.
    The images of a batch are valid until the next batch is asked for. `copy_stream`: the CUDA stream that reads them,
    if it is another one than the current stream at that moment.
    """

    def __init__(self, source: KeyedDataset, batches: BatchSampler | ShortEpochs, batch_size: int, batch_bytes: int,
                 workers: int, *, micro_batch: int = 8, prefetch: int = 2, timeout: float = 300,
                 collate_group: Callable | None = None, endless: bool = True, persistent: bool = True,
                 lock_pages: bool = False, late: LateSteps | None = None):  # fmt: skip
        self.dataset, self.source, self.batches, self.sampler = source.dataset, source, batches, batches.sampler
        self.batch_size, self.num_workers, self.timeout = batch_size, workers, timeout
        self.endless, self.persistent, self.copy_stream = endless, persistent or endless, None
        self.group_size = 4 if collate_group else 1
        self.micro_batch = -(-micro_batch // self.group_size) * self.group_size  # a group is the work of one worker
        count = ring_length(workers, prefetch, self.micro_batch, batch_size)
        self.late, self.ring = late, BatchRing(count, batch_bytes, batch_size, late.num_bytes if late else 0)
        self.writer = BatchWriter(source, self.ring, collate_group, late)
        self.keys, self.pool, self.owner = iter(()), None, os.getpid()
        self.pending: dict[int, PendingBatch] = {}  # by slot, the oldest first
        if endless:
            self._start_workers()
        self.lock_pages = lock_pages

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator:
        self._begin_pass()
        for _ in range(len(self)):
            batch, slot = self._next_batch()
            try:
                yield batch
            finally:  # the next batch is asked for, or the pass is left
                self.ring.release(slot, self.copy_stream)
        if not self.persistent:
            self.close()

    def begin(self) -> None:
        """Let the workers of an endless loader begin before the first pass asks for a batch."""
        if self.endless:
            self._hand_out()

    def close(self) -> None:
        """End the workers and forget what they were at; the next pass starts them anew."""
        if self.pool is not None:
            self.pool.close()
        self.pool, self.keys = None, iter(())
        self.ring.free.extend(self.pending)
        self.pending.clear()

    def end(self) -> None:
        """After the last pass: end the workers and free the memory of the batches."""
        self.close()
        self.ring.unlock_pages()
        give_back(self.ring.pixels)

    def __del__(self):
        if os.getpid() == getattr(self, "owner", None):  # neither a forked copy, nor left incomplete
            self.close()
            self.ring.unlock_pages()

    def _start_workers(self):
        self.pool = WorkerPool(self.writer, self.num_workers, self.timeout)
        self.keys = iter(EndlessBatches(self.batches)) if self.endless else iter(())

    def _begin_pass(self):
        if self.pool is None:
            self._start_workers()
        if self.lock_pages and not self.ring.locking:  # after the fork: the workers need no part of it
            self.ring.lock_pages()
        if self.endless:
            return
        while self.pending:  # of a pass that was left; the indices may change only when no worker reads them
            self.ring.release(self._next_batch()[1])
        self.source.publish_indices()
        self.keys = iter(self.batches)

    def _hand_out(self, wait=False):
        """Let the workers fill every slot that nobody holds."""
        while (slot := self.ring.take(wait)) is not None:
            keys = next(self.keys, None)
            if keys is None:
                self.ring.free.appendleft(slot)
                return
            wait = False
            self.ring.keys[slot, : len(keys)] = keys
            # of a batch of --quad the samples that complete no group are left out
            num_samples = len(keys) if len(keys) < self.group_size else len(keys) // self.group_size * self.group_size
            starts = range(0, num_samples, self.micro_batch)
            self.pending[slot] = PendingBatch(num_samples, len(starts))
            for start in starts:
                self.pool.submit((slot, start, min(start + self.micro_batch, num_samples)))

    def _next_batch(self):
        """(batch, slot) of the oldest pending batch, complete."""
        self._hand_out()
        if not self.pending:  # otherwise there are batches to take, and no need to wait for a copy
            self._hand_out(wait=True)
        if not self.pending:
            raise LoaderError("all batch buffers are held by passes that were neither finished nor closed")
        oldest, batch = next(iter(self.pending.items()))
        try:
            while batch.num_open:
                for (slot, start, _), result in self.pool.answers():  # of later batches as well
                    self.pending[slot].parts[start] = result
                    self.pending[slot].num_open -= 1
        except LoaderError:
            self.close()
            raise
        del self.pending[oldest]
        return self._collected(batch, oldest), oldest

    def _collected(self, batch, slot):
        targets, image_shapes, paths, shapes = zip(*(batch.parts[k] for k in sorted(batch.parts)), strict=True)
        if len(set(image_shapes)) > 1:
            raise LoaderError(f"images of different shapes in one batch: {sorted(set(image_shapes))}")
        num_images = max(batch.num_samples // self.group_size, 1)
        paths, shapes = (tuple(entry for part in parts for entry in part)[:num_images] for parts in (paths, shapes))
        images = self.ring.images(slot, num_images, image_shapes[0])
        if self.late:
            images = self.late.batch(images, torch.from_numpy(self.ring.steps(slot)[:num_images]))
        return images, torch.from_numpy(np.concatenate(targets)), paths, shapes


def ring_length(workers, prefetch, micro_batch, batch_size):
    """Slots: what the workers prepare ahead (`prefetch` micro-batches each), one in use, one on its way to the GPU."""
    return max(-(-workers * prefetch * micro_batch // batch_size), 2) + 2


def choose_micro_batch(batch_size, workers):
    """Samples in a micro-batch: a share of the batch for each worker, but so many that messages cost little."""
    return min(max(-(-batch_size // max(workers, 1)), 8), 32, batch_size)
