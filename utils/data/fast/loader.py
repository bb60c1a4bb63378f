"""Which loader the flags --persistent-workers, --worker-tensor, --prefetch-factor, --seed and --max-iter make."""

import logging
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.utils.data import BatchSampler

from utils.data.epoch_loader import EpochLoader, NamedErrors
from utils.data.fast.deferred import ROOM, way_of_warping
from utils.data.fast.device_augment import agrees_with_table, gpu_agrees
from utils.data.fast.recipe import RECIPE, recipe_bytes
from utils.data.fast.shm_batches import SlabLoader, choose_micro_batch, ring_length
from utils.data.fast.worker_pool import can_fork
from utils.data.keyed_dataset import KeyedDataset, SeededQuad, WithKeys
from utils.data.sampler import EpochOrder, ShortEpochs
from utils.data.worker_errors import end_with_a_lost_batch
from utils.system.memory import check_memory, warn_about_shared_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What the flags ask of a loader. `timeout` in seconds; `seed` None: the generators go their own way.

    `max_batches` is the length of an epoch at most; None: the whole data set.
    """

    persistent_workers: bool = False
    worker_tensor: bool = False
    micro_batch_size: int = 0
    prefetch_factor: int | None = None
    timeout: float = 300
    seed: int | None = None
    first_epoch: int = 0
    finish_later: bool = False  # the consumer understands Unfinished batches
    warp_later: bool = True  # and may warp them
    max_batches: int | None = None


def build_loader(dataset, batch_size, workers, settings, *, rank=-1, world_size=1, image_weights=False, collate_fn,
                 collate_fn4=None):  # fmt: skip
    """The loader of `dataset` that `settings` ask for; `collate_fn4` is given under --quad.

    stock behaviour: weighted indices (`image_weights`) are drawn anew before each epoch, so nothing is prefetched
    across its end.
    """
    source = KeyedDataset(dataset, settings.seed if dataset.augment else None)
    sampler = EpochOrder(
        len(dataset), source.seed, shuffle=not dataset.rect, rank=rank, world_size=world_size,
        first_epoch=settings.first_epoch, blocks=dataset.batch if dataset.rect else None,
    )  # fmt: skip
    batches = BatchSampler(sampler, batch_size, drop_last=False)
    if settings.max_batches:
        batches = ShortEpochs(batches, settings.max_batches, settings.first_epoch)
    settings = settings_that_work(settings, workers, warn=dataset.augment)
    if image_weights and settings.persistent_workers:
        source.share_indices()
    batch_bytes = 3 * dataset.max_pixels * (max(batch_size, 4) if collate_fn4 else batch_size)
    if settings.worker_tensor:
        recipe = recipe_for(dataset, collate_fn4, settings.warp_later) if settings.finish_later else 0
        batch_bytes *= ROOM if recipe > RECIPE else 1
        micro_batch = min(settings.micro_batch_size or choose_micro_batch(batch_size, workers), batch_size)
        prefetch = settings.prefetch_factor or 2
        check_memory(
            ring_length(workers, prefetch, micro_batch, batch_size) * batch_bytes,
            "--worker-tensor needs {} for its batch buffers", "choose a smaller --batch-size or --prefetch-factor, or "
            "fewer --workers",
        )  # fmt: skip
        generator = torch.get_rng_state()
        loader = SlabLoader(
            source, batches, batch_size, batch_bytes, workers,
            micro_batch=micro_batch, prefetch=prefetch, timeout=settings.timeout, collate_group=collate_fn4,
            endless=not image_weights, persistent=settings.persistent_workers, lock_pages=torch.cuda.is_available(),
            recipe_bytes=recipe,
        )  # fmt: skip
        if not recipe or gpu_agrees(dataset.img_size, recipe > RECIPE):  # found out while the workers are at work
            return loader
        loader.close()
        del loader  # or the workers of the next one would keep its slabs
        torch.set_rng_state(generator)
        less = replace(settings, warp_later=False, finish_later=recipe > RECIPE)
        return build_loader(
            dataset, batch_size, workers, less, rank=rank, world_size=world_size, image_weights=image_weights,
            collate_fn=collate_fn, collate_fn4=collate_fn4,
        )  # fmt: skip
    named = samples = NamedErrors(source, workers)
    collate = collate_fn4 or collate_fn
    if collate_fn4 and source.seed is not None:
        samples, collate = WithKeys(samples), SeededQuad(source, collate_fn4)
    warn_about_shared_memory(workers * (settings.prefetch_factor or 2) * batch_bytes)
    return EpochLoader(
        source, batches, endless=not image_weights, in_work=named.in_work,
        dataset=samples, batch_size=batch_size, num_workers=workers,
        collate_fn=collate, pin_memory=torch.cuda.is_available(), worker_init_fn=partial(_enter, source),
        timeout=settings.timeout if workers else 0, prefetch_factor=settings.prefetch_factor if workers else None,
        persistent_workers=settings.persistent_workers,
    )  # fmt: skip


def recipe_for(dataset, collate_group, warp_later):
    """Bytes that tell the last steps of a sample; 0 if whole batches on a GPU would not get the same pixels."""
    size = dataset.img_size
    if not dataset.augment or dataset.rect or collate_group or not agrees_with_table(size):
        return 0
    return recipe_bytes(size, warp_later=warp_later and dataset.mosaic and way_of_warping(size) is not None)


def _enter(source, worker_id):
    end_with_a_lost_batch(worker_id)
    source.enter_worker(worker_id)


def settings_that_work(settings, workers, warn=True):
    """`settings` without what cannot be done here, which is answered with one warning."""
    if settings.micro_batch_size and not settings.worker_tensor and warn:
        logger.warning("--micro-batch-size has no effect without --worker-tensor")
    names = [name for name in ("persistent_workers", "worker_tensor") if getattr(settings, name)]
    if not names or (workers and can_fork()):
        return settings
    if warn:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in names)
        why = "this system cannot fork" if workers else "there are no loader workers (--workers 0, or a batch of one)"
        logger.warning("%s: %s; the reference loader is used", flags, why)
    return replace(settings, persistent_workers=False, worker_tensor=False, micro_batch_size=0, finish_later=False)
