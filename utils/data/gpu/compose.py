"""Batches of recipes (recipes.py), composed on the GPU from the images of an ImageStore.

The bytes are those that the data set itself makes on the host; `composes` checks that before they are used.
"""

import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from utils.data.affine import draw_affine
from utils.data.dataset import LoadImagesAndLabels
from utils.data.fast.deferred import rounding_mode
from utils.data.fast.device_augment import agrees_with_table, conversion_tables
from utils.data.fast.shm_batches import LateSteps
from utils.data.gpu.recipes import OBJECT, RECIPE, START, USED, DrawnImage, RecipeDataset, write_recipes
from utils.data.gpu.store import ImageStore
from utils.data.mosaic import draw_mosaic4, draw_mosaic9
from utils.data.transforms import Colours
from utils.system.random_state import generators_kept, seed_generators

logger = logging.getLogger(__name__)


class ComposedBatch(NamedTuple):
    """Images as recipes uint8 [b x RECIPE], and what workers made: pixels uint8 [b x h x w x 3]; on the host."""

    pixels: torch.Tensor
    recipes: torch.Tensor
    store: ImageStore

    def __len__(self) -> int:
        return len(self.recipes)

    def on_device(self, room: Callable) -> torch.Tensor:
        """The images [b x 3 x h x w: RGB] on the device of the store, in channels-last order.

        `room(number, shape)` gives the buffer of that number, a uint8 tensor there. Copies and work are queued on the
        current stream; pixels and recipes must stay as they are until that is done.
        """
        return self.uploaded(room)()

    def uploaded(self, room: Callable) -> Callable[[], torch.Tensor]:
        """Queue the copies of `on_device`; returns the work that is left, the kernel."""
        header = self.recipes.numpy()
        used = header[:, USED : USED + 4].view(np.int32)[:, 0].astype(np.int64)
        starts = used.cumsum() - used
        header[:, START : START + 8].view(np.int64)[:, 0] = starts
        pixels = room(0, (max(int(used.sum()), OBJECT.size),))
        for k in np.flatnonzero(used).tolist():
            start, size = int(starts[k]), int(used[k])
            pixels[start : start + size].copy_(self.pixels[k].view(-1)[:size], non_blocking=True)
        recipes = room(1, self.recipes.shape).copy_(self.recipes, non_blocking=True)
        images = room(2, self.pixels.shape)
        from utils.data.gpu.compose_triton import compose  # here: it needs Triton

        tables, mode = conversion_tables(images.device), rounding_mode(images.shape[2])

        def launch():
            compose(self.store.pixels, recipes, pixels, tables, mode, images)
            return images.permute(0, 3, 1, 2)

        return launch


def why_not_composed(dataset: LoadImagesAndLabels, with_groups: bool) -> str | None:
    """Why no GPU can make the samples of `dataset` with the host's bytes, in words; None if one can.

    `with_groups`: four samples become one image (--quad).
    """
    if with_groups:
        return "--quad makes one image of four"
    for key in ("perspective", "copy_paste"):
        if dataset.augment and dataset.hyp[key]:
            return f"{key} is not 0"
    widths = set(dataset.batch_shapes[:, 1].tolist()) if dataset.rect else {dataset.img_size}
    if not all(rounding_mode(width) and agrees_with_table(width) for width in widths):
        return "this OpenCV rounds in a way of its own"
    return None


def open_composing(dataset: LoadImagesAndLabels, with_groups: bool) -> LateSteps | None:
    """The LateSteps with which workers only draw the samples of `dataset`; None if its GPU does not make them.

    It has no `image_store` then, or its GPU makes other bytes than the host, which is said in a warning.
    """
    store = dataset.image_store
    if store is None or why_not_composed(dataset, with_groups) or not composes(dataset):
        return None
    return LateSteps(
        RECIPE, RecipeDataset, lambda pixels, recipes: ComposedBatch(pixels, recipes, store),
        at_once=True,
    )  # fmt: skip


def composes(dataset: LoadImagesAndLabels) -> bool:
    """Whether the GPU makes of images in the `image_store` of `dataset` what the host makes of them."""
    store = dataset.image_store
    try:
        with generators_kept():
            seed_generators(0)
            images = drawn_images(dataset)
        batch = written(images, store)
        rooms: dict[int, torch.Tensor] = {}
        found = batch.on_device(lambda number, shape: rooms.setdefault(number, store.pixels.new_empty(shape)))
        wanted = np.stack([np.asarray(image)[..., ::-1] for image in images])
        if np.array_equal(found.permute(0, 2, 3, 1).cpu().numpy(), wanted):
            return True
        reason = "it makes other pixels than the host"
    except Exception as error:  # compilers and drivers raise anything; the host can do the work
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    logger.warning("batches are not composed on the GPU but by the loader's workers; on this GPU, %s", reason)
    return False


def written(images: list[DrawnImage], store: ImageStore) -> ComposedBatch:
    """A ComposedBatch of `images` of one shape."""
    pixels, recipes = np.zeros((len(images), *images[0].shape), np.uint8), np.zeros((len(images), RECIPE), np.uint8)
    for image, place in zip(images, pixels, strict=True):
        assert image.write_objects(place), "there is room for its objects"
    write_recipes(images, recipes, store.offsets)
    return ComposedBatch(torch.from_numpy(pixels), torch.from_numpy(recipes), store)


def drawn_images(dataset: LoadImagesAndLabels, count: int = 8) -> list[DrawnImage]:
    """`count` square images from mosaics of some images of `dataset`, drawn with every step that recipes have."""
    size, numbers = dataset.img_size, np.linspace(0, len(dataset) - 1, 9).astype(int).tolist()
    some = SimpleNamespace(
        img_size=size, mosaic_border=(-size // 2, -size // 2), indices=numbers, shapes=dataset.shapes,
        imgs={number: dataset.image_store.read(number) for number in numbers},
    )  # fmt: skip
    images = []
    for k in range(count):
        slanted = {"degrees": 20 * (k % 3), "shear": 5 * (k % 3)}
        layers = []
        for _ in range(1 + k % 2):
            canvas = (draw_mosaic4, draw_mosaic9)[k // 2 % 2](some, numbers[k % len(numbers)])
            affine = draw_affine(2 * size, 2 * size, **slanted, translate=0.2, scale=0.7, border=some.mosaic_border)
            layers.append((canvas, affine))
        image = DrawnImage(*layers[0])
        image.layers, image.ratio, image.flips = layers, random.random(), [k % 4 > 1, k % 2 > 0]
        if k % 4:
            image.colours = Colours(random.uniform(0.95, 1.05), random.uniform(0.3, 1.7), random.uniform(0.6, 1.4))
        if k % 3 == 0:
            for x in (3, size // 3):
                image.objects.append((np.random.randint(0, 9, (size // 4, size // 3, 3)).astype(np.uint8), x, x))
        images.append(image)
    return images
