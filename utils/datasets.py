"""create_dataloader, and the other public names that stock YOLOv7 has in this module."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from utils.data.affine import box_candidates, random_perspective
from utils.data.dataset import LoadImagesAndLabels, collate_fn, collate_fn4
from utils.data.epoch_loader import InfiniteDataLoader
from utils.data.labels.image_list import img2label_paths
from utils.data.labels.scan import ScannedDataset
from utils.data.mosaic import load_mosaic, load_mosaic9, load_samples
from utils.data.paste import copy_paste, pastein, sample_segments
from utils.data.sampler import EpochOrder, Positions
from utils.data.stream import LoadImages
from utils.data.training_size import load_image
from utils.data.transforms import augment_hsv, letterbox
from utils.data.worker_errors import end_with_a_lost_batch
from utils.system.distributed import first_on_each_machine
from utils.system.memory import warn_about_shared_memory

__all__ = [
    "InfiniteDataLoader", "LoadImages", "LoadImagesAndLabels", "augment_hsv", "box_candidates", "collate_fn",
    "collate_fn4", "copy_paste", "create_dataloader", "img2label_paths", "letterbox", "load_image", "load_mosaic",
    "load_mosaic9", "load_samples", "pastein", "random_perspective", "sample_segments",
]  # fmt: skip

STUCK = 600  # seconds without a batch after which workers are given up: one that finds /dev/shm full is silent for ever


def create_dataloader(
    path: str | Path | Sequence[str | Path],
    imgsz: int,
    batch_size: int,
    stride: int,
    opt: Any,
    hyp: dict[str, Any] | None = None,
    augment: bool = False,
    cache: bool | str | None = False,
    pad: float = 0.0,
    rect: bool = False,
    rank: int = -1,
    world_size: int = 1,
    workers: int = 8,
    image_weights: bool = False,
    quad: bool = False,
    prefix: str = "",
    subset_filter: Callable[[ScannedDataset], ScannedDataset] | None = None,
    keypoints: tuple | None = None,
    share: tuple[int, int] | None = None,
    row_forms: dict | None = None,
    persistent_workers: bool = False,
    worker_tensor: bool = False,
    **fast: Any,
) -> tuple[Any, LoadImagesAndLabels]:
    """The (loader, dataset) for `path` (folder, list file, or list of those). `opt` needs only `.single_cls`.

    `fast`: further fields of data.fast.loader.LoaderOptions; with any of them, or a flag, that module makes the loader.
    `share` (rank, processes) is given by all processes, each of which reads its part of the batches, in their order.
    stock behaviour: a single process (rank -1) takes the images in their order, without shuffling.
    """
    # OpenCV's own threads would compete with the workers, and do not survive the fork that makes them.
    cv2.setNumThreads(0)
    # the first process of a machine writes the caches, the others read them
    with first_on_each_machine(share[0] if share else rank):
        dataset = LoadImagesAndLabels(
            path, imgsz, batch_size, augment=augment, hyp=hyp, rect=rect, image_weights=image_weights,
            cache_images=cache, single_cls=opt.single_cls, stride=int(stride), pad=pad, prefix=prefix,
            subset_filter=subset_filter, keypoints=keypoints, share=share, row_forms=row_forms,
        )  # fmt: skip
    if not len(dataset):  # more processes than batches
        return [], dataset
    batch_size = min(batch_size, len(dataset))
    workers = min((os.cpu_count() or 1) // world_size, batch_size if batch_size > 1 else 0, workers)
    if persistent_workers or worker_tensor or fast:
        from utils.data.fast.loader import LoaderOptions, build_loader  # here: a run without flags never imports it

        options = LoaderOptions(persistent_workers, worker_tensor, **fast)
        return build_loader(
            dataset, batch_size, workers, options, rank=rank, world_size=world_size, image_weights=image_weights,
            collate_fn=collate_fn, collate_fn4=collate_fn4 if quad else None,
        ), dataset  # fmt: skip
    sampler = _reference_sampler(dataset, rank, world_size)
    return _reference_loader(dataset, batch_size, workers, sampler, image_weights, quad), dataset


def _reference_sampler(dataset, rank, world_size):
    """The order of a process among several; None (that of the data set) for a single one."""
    if rank == -1:
        return None
    if dataset.rect and len(np.unique(dataset.batch_shapes, axis=0)) > 1:  # a batch of images of one shape stays whole
        return Positions(EpochOrder(len(dataset), rank=rank, world_size=world_size, blocks=dataset.batch))
    return DistributedSampler(dataset)


def _reference_loader(dataset, batch_size, workers, sampler, image_weights, quad):
    warn_about_shared_memory(workers * 2 * batch_size * 3 * dataset.max_pixels)
    # Weighted indices change every epoch, so their workers must start anew; all others live for ever.
    loader_class = DataLoader if image_weights else InfiniteDataLoader
    return loader_class(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        collate_fn=collate_fn4 if quad else collate_fn,
        timeout=STUCK if workers else 0,
        worker_init_fn=end_with_a_lost_batch,
    )
