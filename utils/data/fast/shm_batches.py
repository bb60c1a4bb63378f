"""Batches that workers write straight into shared memory (--worker-tensor).

A ring of slabs, each with room for the images of one batch, is allocated once and page-locked where CUDA is. A task is
(slab, start, stop): a worker makes those samples, writes their pixels into the slab, and answers with labels, paths and
shapes. The main process stacks nothing, copies no image and pins nothing; what it yields is a view of the slab.

Collation therefore happens inside the workers: pixels where they are written, and a group of --quad by the worker that
made its four samples. `collate_fn` of the data set is not called.

A batch is valid until the next one is asked for. Then its slab goes back, on a GPU only after all work that was queued
until then (its copy to the device above all) has been done.
"""

import logging
import math
import os
from collections import deque
from dataclasses import dataclass, field
from threading import Thread

import numpy as np
import torch

from utils.data.fast.device_augment import Later, Unfinished
from utils.data.fast.worker_pool import WorkerPool
from utils.data.sampler import EndlessBatches
from utils.data.worker_errors import LoaderError
from utils.system.memory import in_words, shared_array

logger = logging.getLogger(__name__)


class Ring:
    """`count` slabs: `num_bytes` for images, and for each sample a recipe (see finishing) and a key (epoch, number)."""

    def __init__(self, count, num_bytes, batch_size, recipe_bytes=0):
        self.num_bytes, self.recipes_shape = num_bytes, (batch_size, recipe_bytes)
        self.pixels = shared_array((count, num_bytes + batch_size * recipe_bytes), np.uint8)
        self.keys = shared_array((count, batch_size, 2), np.int64)
        self.free, self.leaving = deque(range(count)), deque()
        self.count, self.is_locked, self.locking = count, False, None

    def lock_pages(self):
        """Page-lock the slabs, so that copies to the GPU run by themselves. A refusal only costs speed.

        A thread does it, while the workers make the first batches; until then the copies wait for themselves.
        """
        self.is_locked = True  # from here on a copy may be on its way when its slab is released
        device = torch.cuda.current_device()  # a thread begins with the first one, where it would make a context
        locking = Thread(target=self._lock_pages, args=(device,), name="page-locking")
        locking.start()
        self.locking = locking

    def _lock_pages(self, device):
        try:
            torch.cuda.set_device(device)
            status = torch.cuda.cudart().cudaHostRegister(self.pixels.ctypes.data, self.pixels.nbytes, 1)
        except RuntimeError as error:
            status = error
        self.is_locked = not isinstance(status, RuntimeError) and int(status) == 0
        if not self.is_locked:
            logger.warning("%s of batch buffers could not be page-locked (%s): copies to the GPU will be slower",
                           in_words(self.pixels.nbytes), status)  # fmt: skip

    def unlock_pages(self):
        """Undo `lock_pages`; the memory must not go before."""
        if self.locking:
            self.locking.join()
        if self.is_locked:
            self.is_locked = False
            torch.cuda.cudart().cudaHostUnregister(self.pixels.ctypes.data)

    def take(self, wait=False):
        """A slab that nobody holds, or None; with `wait` the oldest copy to the device is waited for."""
        while self.leaving and (wait or self.leaving[0][1].query()):
            slab, copied = self.leaving.popleft()
            copied.synchronize()
            self.free.append(slab)
            wait = False
        return self.free.popleft() if self.free else None

    def release(self, slab, stream=None):
        """The consumer is done with `slab`, apart from work that it has queued on a CUDA stream (None: the current)."""
        if self.is_locked:
            copied = torch.cuda.Event()
            copied.record(stream or torch.cuda.current_stream())
            self.leaving.append((slab, copied))
        else:
            self.free.append(slab)

    def place(self, slab, position, shape):
        """Where image number `position` of a batch goes [uint8, `shape`]; all images of a batch have one shape."""
        size = math.prod(shape)
        start = position * size
        if start + size > self.num_bytes:
            raise ValueError(f"an image of {' x '.join(map(str, shape))} is larger than those of its batch")
        return self.pixels[slab, start : start + size].reshape(shape)

    def recipes(self, slab):
        """The recipes of the samples in `slab` [batch size x recipe_bytes]."""
        return self.pixels[slab, self.num_bytes :].reshape(self.recipes_shape)

    def images(self, slab, num_images, shape):
        """The batch in `slab` as a tensor [num_images x 3 x h x w] on the same memory."""
        size = num_images * math.prod(shape)
        return torch.from_numpy(self.pixels[slab, :size].reshape(num_images, *shape))


class Assembly:
    """What a worker does: makes the samples of a task and writes them into its slab.

    `source` is a KeyedDataset. With `collate_group` four samples become one image; otherwise the data set is told to
    write its pixels where they belong, and with `finish_later` to write down its last steps instead of making them.
    """

    def __init__(self, source, ring, collate_group=None, finish_later=False):
        self.source, self.ring, self.collate_group = source, ring, collate_group
        self.finish = Later() if finish_later else None
        self.current = -1, -1  # slab and position of the sample that is being made

    def enter(self):
        self.source.enter_worker()
        dataset = self.source.dataset
        if not self.collate_group:
            dataset.new_image = self._place
        if self.finish:  # its steps in place of the data set's own
            self.finish.new_image = self._place
            for step in ("warped", "recolour", "flip", "pixels"):
                setattr(dataset, step, getattr(self.finish, step))

    def _place(self, shape, dtype):
        assert dtype == np.uint8, "slabs hold bytes"
        return self.ring.place(*self.current, shape)

    def __call__(self, task, doing):
        """Answer to (slab, start, stop): targets [n x 6], image shape, paths and shapes of the samples."""
        slab, start, stop = task
        if self.collate_group:
            return self._assemble_groups(slab, start, stop, doing)
        targets, paths, shapes = [], [], []
        for position in range(start, stop):
            doing[:] = self.current = slab, position
            if self.finish:
                self.finish.begin(self.ring.recipes(slab)[position])
            image, rows, path, shape = self.source[self._key(slab, position)]
            rows[:, 0] = position
            place = self.ring.place(slab, position, image.shape)
            if image.data_ptr() != place.ctypes.data:  # of a data set with memory of its own
                place[:] = image
            targets.append(rows.numpy()), paths.append(path), shapes.append(shape)
        return np.concatenate(targets), tuple(image.shape), paths, shapes

    def _assemble_groups(self, slab, start, stop, doing):
        targets, paths, shapes = [], [], []
        for first in range(start, stop, 4):
            samples = []
            for position in range(first, min(first + 4, stop)):
                doing[:] = slab, position
                samples.append(self.source[self._key(slab, position)])
            images, rows, _, _ = self.source.collate_group(self.collate_group, self._key(slab, first), samples)
            rows[:, 0] = first // 4
            self.ring.place(slab, first // 4, images[0].shape)[:] = images[0]
            targets.append(rows.numpy())
            paths += [sample[2] for sample in samples]
            shapes += [sample[3] for sample in samples]
        return np.concatenate(targets), tuple(images[0].shape), paths, shapes

    def describe(self, slab, position):
        """The file of a sample, for messages."""
        return self.source.path(self._key(slab, position)) if slab >= 0 else "nothing"

    def _key(self, slab, position):
        return tuple(self.ring.keys[slab, position].tolist())


@dataclass
class Filling:
    """A batch on its way: `parts` are the answers by their start, `num_open` those that are missing."""

    slab: int
    num_samples: int
    num_open: int
    parts: dict = field(default_factory=dict)


class SlabLoader:
    """A loader of (images uint8 [b x 3 x h x w], targets [n x 6], paths, shapes) as `collate_fn` makes them.

    `batches` is a batch sampler over keys. `endless`: the workers go on with the next epoch before it is asked for;
    otherwise each pass waits for its first batch, and `persistent` decides whether the workers stay between passes.
    With recipes of `recipe_bytes` the images are Unfinished, their last steps are left to the consumer.
    The images of a batch are valid until the next batch is asked for. `copy_stream`: the CUDA stream that reads them,
    if it is another one than the current stream at that moment.
    """

    def __init__(self, source, batches, batch_size, batch_bytes, workers, *, micro_batch=8, prefetch=2, timeout=300,
                 collate_group=None, endless=True, persistent=True, lock_pages=False, recipe_bytes=0):  # fmt: skip
        self.dataset, self.source, self.batches, self.sampler = source.dataset, source, batches, batches.sampler
        self.batch_size, self.num_workers, self.timeout = batch_size, workers, timeout
        self.group_size = 4 if collate_group else 1
        self.micro_batch = -(-micro_batch // self.group_size) * self.group_size
        self.endless, self.persistent, self.copy_stream = endless, persistent or endless, None
        count = ring_length(workers, prefetch, self.micro_batch, batch_size)
        self.ring = Ring(count, batch_bytes, batch_size, recipe_bytes)
        self.assembly = Assembly(source, self.ring, collate_group, finish_later=recipe_bytes > 0)
        self.keys, self.workers, self.fillings = iter(()), None, deque()
        self.by_slab, self.owner = {}, os.getpid()
        if endless:
            self._start_workers()
            self._hand_out()
        if lock_pages:  # after the fork: the workers need no part of it
            self.ring.lock_pages()

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self._begin_pass()
        for _ in range(len(self)):
            batch, slab = self._next_batch()
            try:
                yield batch
            finally:  # the next batch is asked for, or the pass is left
                self.ring.release(slab, self.copy_stream)
        if not self.persistent:
            self.close()

    def close(self):
        """End the workers and forget what they were at; the next pass starts them anew."""
        if self.workers is not None:
            self.workers.close()
        self.workers, self.keys = None, iter(())
        self.ring.free.extend(filling.slab for filling in self.fillings)
        self.fillings.clear(), self.by_slab.clear()

    def __del__(self):
        if os.getpid() == getattr(self, "owner", None):  # neither a forked copy, nor left incomplete
            self.close()
            self.ring.unlock_pages()

    def _start_workers(self):
        self.workers = WorkerPool(self.assembly, self.num_workers, self.timeout)
        self.keys = iter(EndlessBatches(self.batches)) if self.endless else iter(())

    def _begin_pass(self):
        if self.endless:
            if self.workers is None:
                self._start_workers()
            return
        if self.workers is None:
            self._start_workers()
        while self.fillings:  # of a pass that was left
            self.ring.release(self._next_batch()[1])
        self.source.publish_indices()
        self.keys = iter(self.batches)

    def _hand_out(self, wait=False):
        """Let the workers fill every slab that nobody holds."""
        while (slab := self.ring.take(wait)) is not None:
            keys = next(self.keys, None)
            if keys is None:
                self.ring.free.appendleft(slab)
                return
            wait = False
            self.ring.keys[slab, : len(keys)] = keys
            # of a batch of --quad the samples that complete no group are left out
            num_samples = len(keys) if len(keys) < self.group_size else len(keys) // self.group_size * self.group_size
            starts = range(0, num_samples, self.micro_batch)
            filling = Filling(slab, num_samples, len(starts))
            self.fillings.append(filling)
            self.by_slab[slab] = filling
            for start in starts:
                self.workers.submit((slab, start, min(start + self.micro_batch, num_samples)))

    def _next_batch(self):
        """(batch, slab) of the oldest filling, complete."""
        self._hand_out()
        if not self.fillings:
            self._hand_out(wait=True)
        if not self.fillings:
            raise LoaderError("all batch buffers are held by passes that were neither finished nor closed")
        filling = self.fillings[0]
        try:
            while filling.num_open:
                for (slab, start, _), result in self.workers.answers():
                    self.by_slab[slab].parts[start] = result
                    self.by_slab[slab].num_open -= 1
        except LoaderError:
            self.close()
            raise
        self.fillings.popleft()
        del self.by_slab[filling.slab]
        return self._collected(filling), filling.slab

    def _collected(self, filling):
        targets, image_shapes, paths, shapes = zip(*(filling.parts[k] for k in sorted(filling.parts)), strict=True)
        if len(set(image_shapes)) > 1:
            raise LoaderError(f"images of different shapes in one batch: {sorted(set(image_shapes))}")
        num_images = max(filling.num_samples // self.group_size, 1)
        paths, shapes = (tuple(entry for part in parts for entry in part)[:num_images] for parts in (paths, shapes))
        images = self.ring.images(filling.slab, num_images, image_shapes[0])
        if self.assembly.finish:
            images = Unfinished(images, torch.from_numpy(self.ring.recipes(filling.slab)[:num_images]))
        return images, torch.from_numpy(np.concatenate(targets)), paths, shapes


def ring_length(workers, prefetch, micro_batch, batch_size):
    """Slabs: what the workers prepare ahead (`prefetch` micro-batches each), one in use, one on its way to the GPU."""
    return max(-(-workers * prefetch * micro_batch // batch_size), 2) + 2


def choose_micro_batch(batch_size, workers):
    """Samples in a micro-batch: a share of the batch for each worker, but no less than messages are worth."""
    return min(max(-(-batch_size // max(workers, 1)), 8), 32, batch_size)
