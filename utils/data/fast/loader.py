"""Which loader the flags --persistent-workers, --worker-tensor, --prefetch-factor, --seed and --max-iter make."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.utils.data import BatchSampler

from utils.data.dataset import LoadImagesAndLabels
from utils.data.epoch_loader import EpochLoader, NamedErrors
from utils.data.fast.deferred import CAPACITY, STEPS, DeferredDataset, rounding_mode, steps_bytes
from utils.data.fast.device_augment import DeferredBatch, agrees_with_table, gpu_agrees
from utils.data.fast.shm_batches import LateSteps, SharedMemoryLoader, choose_micro_batch, ring_length
from utils.data.keyed_dataset import KeyedDataset, SeededQuad, WithKeys
from utils.data.sampler import EpochOrder, ShortEpochs
from utils.data.worker_errors import end_with_a_lost_batch
from utils.system.memory import check_memory, warn_about_shared_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoaderOptions:
    """What the flags ask of a loader. `timeout` in seconds; `seed` None: no generator is seeded.

    `max_batches` is the length of an epoch at most; None: the whole data set. `compose(dataset, workers, with_groups)`
    reads all images to where a GPU makes the samples of them, and returns the LateSteps for that; None if it cannot.
    """

    persistent_workers: bool = False
    worker_tensor: bool = False
    micro_batch_size: int = 0
    prefetch_factor: int | None = None
    timeout: float = 300
    seed: int | None = None
    first_epoch: int = 0
    defer_steps: bool = False  # the consumer understands a DeferredBatch
    max_batches: int | None = None
    compose: Callable[[LoadImagesAndLabels, int, bool], LateSteps | None] | None = None


def build_loader(dataset: LoadImagesAndLabels, batch_size: int, workers: int, options: LoaderOptions, *,
                 rank: int = -1, world_size: int = 1, image_weights: bool = False, collate_fn: Callable,
                 collate_fn4: Callable | None = None) -> SharedMemoryLoader | EpochLoader:  # fmt: skip
    """The loader of `dataset` that `options` ask for; `collate_fn4` is given under --quad.

    stock behaviour: weighted indices (`image_weights`) are drawn anew before each epoch, so nothing is prefetched
    across its end.
    """
    source = KeyedDataset(dataset, options.seed if dataset.augment else None)
    sampler = EpochOrder(
        len(dataset), source.seed, shuffle=not dataset.rect, rank=rank, world_size=world_size,
        first_epoch=options.first_epoch, blocks=dataset.batch if dataset.rect else None,
    )  # fmt: skip
    batches: BatchSampler | ShortEpochs = BatchSampler(sampler, batch_size, drop_last=False)
    if options.max_batches:
        batches = ShortEpochs(batches, options.max_batches, options.first_epoch)
    options = possible_options(options, workers, warn=dataset.augment)
    late = None
    if options.compose:  # before there are workers, which inherit the images
        late = options.compose(dataset, workers if options.worker_tensor else 0, collate_fn4 is not None)
    if image_weights and options.persistent_workers:
        source.share_indices()
    if not options.worker_tensor:
        return _torch_loader(source, batches, batch_size, workers, options, image_weights, collate_fn, collate_fn4)
    if late is None and options.defer_steps:
        late = _deferred_steps(dataset, collate_fn4)
    return _shared_memory_loader(source, batches, batch_size, workers, options, image_weights, collate_fn4, late)


def _deferred_steps(dataset, collate_group):
    """The LateSteps of the samples, or None; a step that this GPU makes with other results is left to the workers."""
    for with_affine in (True, False):
        num_bytes = deferred_bytes(dataset, collate_group, with_affine)
        if num_bytes and gpu_agrees(dataset.img_size, num_bytes > STEPS):
            return LateSteps(num_bytes, DeferredDataset, DeferredBatch, CAPACITY if num_bytes > STEPS else 1)
    return None


def _shared_memory_loader(source, batches, batch_size, workers, options, image_weights, collate_fn4, late):
    batch_bytes = _batch_bytes(source.dataset, batch_size, collate_fn4) * (late.room if late else 1)
    micro_batch = min(options.micro_batch_size or choose_micro_batch(batch_size, workers), batch_size)
    if not source.dataset.augment:  # a validation is over after one pass
        workers = min(workers, len(batches) * -(-batch_size // micro_batch))
    prefetch = options.prefetch_factor or 2
    check_memory(
        ring_length(workers, prefetch, micro_batch, batch_size) * batch_bytes, "--worker-tensor needs {} for its "
        "batch buffers", "choose a smaller --batch-size or --prefetch-factor, or fewer --workers",
    )  # fmt: skip
    return SharedMemoryLoader(
        source, batches, batch_size, batch_bytes, workers, micro_batch=micro_batch, prefetch=prefetch,
        timeout=options.timeout, collate_group=collate_fn4, endless=not image_weights,
        persistent=options.persistent_workers, lock_pages=torch.cuda.is_available(), late=late,
    )  # fmt: skip


def _torch_loader(source, batches, batch_size, workers, options, image_weights, collate_fn, collate_fn4):
    named = samples = NamedErrors(source, workers)
    collate = collate_fn4 or collate_fn
    if collate_fn4 and source.seed is not None:
        samples, collate = WithKeys(samples), SeededQuad(source, collate_fn4)
    prefetch = options.prefetch_factor
    warn_about_shared_memory(workers * (prefetch or 2) * _batch_bytes(source.dataset, batch_size, collate_fn4))
    return EpochLoader(
        source, batches, endless=not image_weights, in_work=named.in_work, dataset=samples, batch_size=batch_size,
        num_workers=workers, collate_fn=collate, pin_memory=torch.cuda.is_available(),
        worker_init_fn=partial(_enter, source), timeout=options.timeout if workers else 0,
        prefetch_factor=prefetch if workers else None, persistent_workers=options.persistent_workers,
        # What `shared_array` shares, and images in RAM, only a fork hands on; it is not the default everywhere.
        multiprocessing_context="fork" if workers else None,
    )  # fmt: skip


def _enter(source, worker_id):
    end_with_a_lost_batch(worker_id)
    source.enter_worker(worker_id)


def _batch_bytes(dataset, batch_size, collate_fn4):
    """Bytes of the largest batch; under --quad even a single sample becomes an image of four times its size."""
    return 3 * dataset.max_pixels * (max(batch_size, 4) if collate_fn4 else batch_size)


def deferred_bytes(dataset, collate_group, defer_affine):
    """Bytes of the deferred steps of a sample; 0 if whole batches on a GPU would not get the same pixels."""
    size = dataset.img_size
    if not dataset.augment or dataset.rect or collate_group or not agrees_with_table(size):
        return 0
    return steps_bytes(size, with_affine=defer_affine and dataset.mosaic and rounding_mode(size) is not None)


def possible_options(options, workers, warn=True):
    """`options` without what cannot be done here; one warning says what that is."""
    if options.micro_batch_size and not options.worker_tensor and warn:
        logger.warning("--micro-batch-size has no effect without --worker-tensor")
    names = [name for name in ("persistent_workers", "worker_tensor") if getattr(options, name)]
    if not names or workers:
        return options
    if warn:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in names)
        logger.warning("%s: there are no loader workers (--workers 0, or a batch of one); the reference loader is used",
                       flags)  # fmt: skip
    return replace(options, persistent_workers=False, worker_tensor=False, micro_batch_size=0, defer_steps=False)
