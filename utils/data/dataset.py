"""The training data: images and labels of a data set, augmented sample by sample, and collated into batches.

A batch is (uint8 images [b x 3 x h x w] RGB, targets [n x 6: position in the batch, class, x, y, w, h normalised],
paths, shapes).
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import Dataset

from utils.config.hyp import AUGMENTATION_KEYS
from utils.data.affine import draw_affine, warp_labels
from utils.data.image_cache import use_disk_cache, use_memory_cache
from utils.data.labels.scan import ScannedDataset, scan_dataset
from utils.data.mosaic import load_mosaic, load_mosaic9, load_samples
from utils.data.paste import paste_visible, pastein
from utils.data.pixel_ops import blended
from utils.data.training_size import load_image
from utils.data.transforms import draw_colours, letterbox, mixup
from utils.ops.boxes import xywhn2xyxy, xyxy2xywh

AFFINE_KEYS = ("degrees", "translate", "scale", "shear", "perspective")
SAMPLES_TO_PASTE = 30  # objects collected before paste-in chooses among them


class LoadImagesAndLabels(Dataset):
    """Images and labels of a data set, one sample an image: (image, targets, path, shapes).

    `path` is a folder, a list file, or a list of those; `pad` is in strides; `hyp` is needed only for augmenting;
    `subset_filter(ScannedDataset)` may leave a part of it; `cache_images` is "disk", or true for memory; `keypoints`
    are those of DataConfig, `row_forms` those of the training set, which a validation set is read by; `share` (number,
    of how many) keeps a part of the batches, which stay what they are.

    `labels` float32 [n x 5: class, x, y, w, h normalised] and `segments` (polygons [m x 2] normalised, one for each
    label or none at all) are lists with one entry an image; `shapes` [n x 2] is (width, height) of the files.
    With `rect` the images are sorted by aspect ratio, and each batch has the smallest common shape.
    """

    new_image = staticmethod(np.empty)  # where pixels of a sample go; --worker-tensor knows a place in its batch
    image_store: Any = None  # the images where a GPU reads them (--cache-images gpu)

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        img_size: int = 640,
        batch_size: int = 16,
        augment: bool = False,
        hyp: dict[str, Any] | None = None,
        rect: bool = False,
        image_weights: bool = False,
        cache_images: bool | str | None = False,
        single_cls: bool = False,
        stride: int = 32,
        pad: float = 0.0,
        prefix: str = "",
        subset_filter: Callable[[ScannedDataset], ScannedDataset] | None = None,
        keypoints: tuple | None = None,
        share: tuple[int, int] | None = None,
        row_forms: dict | None = None,
    ) -> None:
        self.hyp = hyp or {}
        missing = [key for key in AUGMENTATION_KEYS if key not in self.hyp] if augment else []
        if missing:
            raise ValueError(
                f"augmenting needs the hyper-parameters {', '.join(missing)}; load_hyp() supplies them all"
            )
        self.path = path
        self.img_size = img_size
        self.augment = augment
        self.affine_ranges = {key: self.hyp[key] for key in AFFINE_KEYS} if augment else {}  # as draw_affine takes them
        self.image_weights = image_weights
        self.rect = rect and not image_weights
        self.mosaic = augment and not self.rect
        self.mosaic_border = (-img_size // 2, -img_size // 2)
        self.stride = stride

        scanned = scan_dataset(path, prefix, keypoints, row_forms)
        if subset_filter is not None:
            scanned = subset_filter(scanned)
        self.img_files, self.label_files = list(scanned.img_files), list(scanned.label_files)
        self.labels, self.segments = list(scanned.labels), list(scanned.segments)
        self.shapes, self.findings = np.asarray(scanned.shapes, np.float64), scanned.findings
        self.row_forms = scanned.row_forms
        if single_cls:
            self.labels = [_with_class_zero(labels) for labels in self.labels]

        self.n = len(self.img_files)
        self.indices = range(self.n)
        self.total = self.n  # of all shares
        self.batch = np.arange(self.n) // batch_size
        self.imgs = [None] * self.n
        self.memory_cache = None
        if self.rect:
            self._sort_by_aspect_ratio()
            self.batch_shapes = self._shapes_of_batches(pad)
        if cache_images == "disk":
            use_disk_cache(self, prefix)
        if share:
            self._keep_share(*share)
        if self.n and cache_images and cache_images != "disk":
            use_memory_cache(self, prefix)

    def _keep_share(self, number, count):
        """Keep part `number` of `count` parts of the batches: whole ones, one after the other, as they are."""
        batches = np.array_split(np.arange(self.batch[-1] + 1), count)[number]
        chosen = np.flatnonzero(np.isin(self.batch, batches))
        self._take(chosen)
        self.batch, self.n, self.indices = self.batch[chosen], len(chosen), range(len(chosen))

    def _sort_by_aspect_ratio(self):
        """Wide images first. The order of equal ratios is that of NumPy's default sort, as in stock."""
        self._take((self.shapes[:, 1] / self.shapes[:, 0]).argsort())

    def _take(self, chosen):
        """Leave the images of these indices, in their order."""
        for name in ("img_files", "label_files", "labels", "segments", "imgs"):
            entries = getattr(self, name)
            setattr(self, name, [entries[i] for i in chosen])
        self.shapes = self.shapes[chosen]

    def _shapes_of_batches(self, pad):
        """(height, width) of each batch in pixels [num batches x 2], multiples of the stride; `pad` in strides."""
        ratios = self.shapes[:, 1] / self.shapes[:, 0]
        units = np.ones((self.batch[-1] + 1, 2))
        for b, unit in enumerate(units):
            of_batch = ratios[self.batch == b]
            if of_batch.max() < 1:
                unit[0] = of_batch.max()
            elif of_batch.min() > 1:
                unit[1] = 1 / of_batch.min()
        return np.ceil(units * self.img_size / self.stride + pad).astype(int) * self.stride

    def __len__(self):
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, str, tuple | None]:
        """uint8 image [3 x h x w] RGB, targets [n x 6: 0, class, x, y, w, h normalised], path, and shapes.

        shapes is ((height, width) of the file, ((gain y, gain x), (pad x, pad y))), or None for a mosaic.
        """
        # Stock YOLOv7's samples for the same seeds: each draw keeps its place, its generator (Python's or NumPy's) and
        # its condition. No draw depends on pixels, so pixels may come later than their draws, or never.
        index = self.indices[index]
        if self.mosaic and random.random() < self.hyp["mosaic"]:
            img, labels = self._mosaic_sample(index)
            shapes = None
        else:
            img, labels, shapes = self._plain_sample(index)
        if self.augment:
            colours = draw_colours(self.hyp["hsv_h"], self.hyp["hsv_s"], self.hyp["hsv_v"])
            is_pasting = random.random() < self.hyp["paste_in"]  # before the objects, which draw mosaics of their own
            img = self.recolour(img, colours, now=is_pasting)
            if is_pasting:
                labels = pastein(img, labels, self.samples_to_paste(), self.paste)

        labels[:, 1:5] = xyxy2xywh(labels[:, 1:5]) / np.array(img.shape[1::-1] * 2, np.float32)
        if self.augment:
            img, labels = self._flipped(img, labels)

        targets = torch.from_numpy(np.concatenate((np.zeros_like(labels[:, :1]), labels), axis=1))
        return torch.from_numpy(self.pixels(img)), targets, self.img_files[index], shapes

    def _mosaic_sample(self, index):
        """A mosaic, perhaps mixed with a second one."""
        load = self._draw_layout()
        img, labels = load(self, index)
        if random.random() < self.hyp["mixup"]:
            load = self._draw_layout()
            # stock behaviour: the partner is any image, even when `indices` are weighted
            other, more = load(self, random.randint(0, self.n - 1))
            img, labels = mixup(img, labels, other, more, self.blended)
        return img, labels

    def _draw_layout(self):
        return load_mosaic if random.random() < 0.8 else load_mosaic9

    def _plain_sample(self, index):
        """One letterboxed image, warped when augmenting."""
        shape = self.batch_shapes[self.batch[index]] if self.rect else self.img_size
        img, ratio, pad, (height0, width0), (height, width) = self.letterboxed(index, shape)
        shapes = (height0, width0), ((height / height0, width / width0), pad)
        labels = self.labels[index].copy()
        labels[:, 1:] = xywhn2xyxy(labels[:, 1:], ratio[0] * width, ratio[1] * height, *pad)
        if self.augment:
            affine = draw_affine(*img.shape[:2], **self.affine_ranges)
            img, labels = self.moved(img, affine), warp_labels(labels, (), affine)
        return img, labels, shapes

    @property
    def max_pixels(self) -> int:
        """Pixels of the largest image that the data set makes."""
        return int(self.batch_shapes.prod(1).max()) if self.rect else self.img_size**2

    def samples_to_paste(self):
        """At least 30 objects from random mosaics; none if the first mosaic has none."""
        samples = []
        while len(samples) < SAMPLES_TO_PASTE:
            samples += load_samples(self, random.randint(0, self.n - 1))
            if not samples:
                break
        return samples

    def _flipped(self, img, labels):
        """Flip up-down and left-right, each with its own probability."""
        if random.random() < self.hyp["flipud"]:
            img = self.flip(img, 0)
            labels[:, 2] = 1 - labels[:, 2]
        if random.random() < self.hyp["fliplr"]:
            img = self.flip(img, 1)
            labels[:, 1] = 1 - labels[:, 1]
        return img, labels

    # The steps on pixels. They draw nothing, so that DeferredDataset and RecipeDataset may leave them to the GPU. A new
    # one needs its form there as well: what it is handed may lack its affine and its colours, or all pixels.

    def letterboxed(self, index, shape):
        """Image `index` in a letterbox: (image, ratio, pad, (height, width) in the file, that at the training size)."""
        img, in_file, resized = load_image(self, index)
        return *letterbox(img, shape, auto=False, scaleup=self.augment), in_file, resized

    def moved(self, img, affine):
        """The image [h x w x 3: BGR] that `affine` makes of a letterboxed `img`."""
        return affine.image(img)

    def warped(self, mosaic, affine):
        """The image [h x w x 3: BGR] that `affine` makes of a Mosaic."""
        return affine.image(mosaic.painted(affine.source_area()))

    def blended(self, img, other, ratio):
        """`ratio` of `img` and the rest of `other`."""
        return blended(np.asarray(img), np.asarray(other), ratio)  # deferred images are made here

    def paste(self, img, pixels, x, y):
        """Paste an object `pixels` [h x w x 3: BGR, 0 where nothing is] into `img`, in place, its corner at (x, y)."""
        paste_visible(img, pixels, x, y)

    def recolour(self, img, colours, now):
        """`img` [h x w x 3: BGR] with other Colours, perhaps changed in place; `now`: objects are pasted in next."""
        colours.apply(img)
        return img

    def flip(self, img, axis):
        """`img` upside down (axis 0) or mirrored (axis 1)."""
        return cv2.flip(img, axis)

    def pixels(self, img):
        """What a sample hands over of `img` [h x w x 3: BGR]: RGB planes [3 x h x w] in a `new_image`."""
        planes = self.new_image((3, *img.shape[:2]), np.uint8)
        cv2.split(img, planes[::-1])
        return planes

    @staticmethod
    def collate_fn(samples):
        """Samples to one batch; column 0 of the targets becomes the position in the batch."""
        images, targets, paths, shapes = zip(*samples, strict=True)
        return torch.stack(images), numbered(targets), paths, shapes

    @staticmethod
    def collate_fn4(samples):
        """A quarter as many images of twice the size: four tiled, or one enlarged, with equal chance (--quad).

        What is left over is dropped, unless the batch has fewer than four images: then its first one is enlarged.
        """
        images, targets, paths, shapes = zip(*samples, strict=True)
        num_groups = max(len(images) // 4, 1)
        big_images, big_targets = [], []
        for start in range(0, 4 * num_groups, 4):
            group = slice(start, start + 4)
            enlarge = random.random() < 0.5 or len(images) < 4
            image, labels = (_enlarged if enlarge else _tiled)(images[group], targets[group])
            big_images.append(image)
            big_targets.append(labels)
        # stock behaviour: paths and shapes are those of the first images of the batch, not of the groups
        return torch.stack(big_images), numbered(big_targets), paths[:num_groups], shapes[:num_groups]


def _with_class_zero(labels):
    labels = labels.copy()
    labels[:, 0] = 0
    return labels


def _enlarged(images, targets):
    """The first image at twice its size, with its labels."""
    image = torch.nn.functional.interpolate(
        images[0][None].float(), scale_factor=2.0, mode="bilinear", align_corners=False
    )
    return image[0].to(images[0].dtype), targets[0]


def _tiled(images, targets):
    """Four images in a square: first column the first and second, second column the third and fourth."""
    columns = [torch.cat(images[k : k + 2], dim=1) for k in (0, 2)]
    shifts = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    labels = []
    for rows, shift in zip(targets, shifts, strict=True):
        rows = rows.clone()
        rows[:, 2:4] += shift
        rows[:, 2:6] *= 0.5
        labels.append(rows)
    return torch.cat(columns, dim=2), torch.cat(labels)


def numbered(targets, first=0):
    """Concatenated targets with their position in the batch in column 0; `first` is that of the first image."""
    for position, rows in enumerate(targets, first):
        rows[:, 0] = position
    return torch.cat(targets)


collate_fn, collate_fn4 = LoadImagesAndLabels.collate_fn, LoadImagesAndLabels.collate_fn4
