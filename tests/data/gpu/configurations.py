"""The configurations whose batches are compared with the reference loader's, and a store of their images."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from tests import golden_data
from utils.data.gpu.store import ImageStore
from utils.data.subset import first, random_part
from utils.data.training_size import load_image
from utils.datasets import LoadImagesAndLabels, create_dataloader

BATCH = 5  # does not divide the 12 images
STRAIGHT = {"degrees": 0, "shear": 0, "paste_in": 0, "mixup": 0}
WEIGHTED = {"image_weights": True}

# name: changes of golden_data.ALL_AUGMENTATIONS, arguments of `open_loader`
CONFIGURATIONS = {
    "everything": ({}, {}),
    "mosaics, straight": ({**STRAIGHT, "mosaic": 1}, {}),
    "mosaics of polygons, mixed": ({"mosaic": 1, "mixup": 1, "paste_in": 0}, {"images": "polys"}),
    "mosaics of boxes, turned": ({"mosaic": 1, "mixup": 0, "paste_in": 0, "degrees": 90}, {"images": "boxes"}),
    "objects pasted into all": ({"paste_in": 1}, {"images": "polys"}),
    "letterboxes, straight": ({**STRAIGHT, "mosaic": 0}, {}),
    "letterboxes, turned": ({"mosaic": 0}, {}),
    "all flips, no colours": ({"hsv_h": 0, "hsv_s": 0, "hsv_v": 0, "flipud": 1, "fliplr": 1}, {}),
    "shrunk to a tenth": ({"scale": 0.9, "translate": 0.4}, {}),
    "rect": ({}, {"rect": True}),
    "image weights": ({}, WEIGHTED),
    "a subset": ({}, {"subset_filter": partial(random_part, count=7, seed=3)}),
    "the first ones": ({}, {"subset_filter": partial(first, count=6)}),
    "a later size": ({}, {"img_size": 96, "first_epoch": 3}),
    "one class, a batch an epoch": ({}, {"single_cls": True, "max_batches": 1}),
    "no augmentation, rect": ({}, {"augment": False, "rect": True}),
    "two ranks": ({}, {"rank": 1, "world_size": 2}),
}
ON_THE_HOST = {  # what no kernel makes
    "perspective": ({"perspective": 0.001}, {}),
    "copy-paste": ({"copy_paste": 0.5}, {"images": "polys"}),
    "quad": ({}, {"quad": True}),
}


def hyp_of(changes):
    return golden_data.ALL_AUGMENTATIONS | changes


def open_loader(folder, changes, images="all", img_size=64, augment=True, single_cls=False, workers=1, **options):
    """(loader, data set) of a configuration."""
    return create_dataloader(
        str(folder / f"{images}.txt"), img_size, BATCH, 32, SimpleNamespace(single_cls=single_cls),
        hyp=hyp_of(changes), augment=augment, workers=workers, seed=7, **options,
    )  # fmt: skip


def drawn_weights(dataset, epoch):
    """Indices as --image-weights draws them before an epoch."""
    dataset.indices = np.random.default_rng(epoch).integers(0, dataset.n, dataset.n).tolist()


def store_of(dataset, device="cpu"):
    """An ImageStore of all images of `dataset`."""
    images = [load_image(dataset, i)[0] for i in range(len(dataset))]
    pixels = torch.from_numpy(np.concatenate([img.ravel() for img in images]))
    return ImageStore(pixels.to(device), [img.shape[:2] for img in images])


def dataset_of(folder, changes, images="all", img_size=64, augment=True, rect=False, subset_filter=None,
               single_cls=False, **_):  # fmt: skip
    """The data set of a configuration, with a store on the host."""
    dataset = LoadImagesAndLabels(
        str(folder / f"{images}.txt"), img_size, BATCH, augment=augment, hyp=hyp_of(changes), rect=rect,
        subset_filter=subset_filter, single_cls=single_cls,
    )  # fmt: skip
    dataset.image_store = store_of(dataset)
    return dataset
