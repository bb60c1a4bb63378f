"""Samples without pixels: a worker makes the random draws and writes a recipe, from which the GPU makes the image.

A recipe is RECIPE bytes: HEADER, then two layers; the second one is used by mixup. A layer is LAYER, the transform from
a pixel of the image back to a canvas, then TILES_MOST times TILE, the stored images that lie on the canvas. The kernel
(compose_triton.py) reads them from an ImageStore. The targets of a whole micro-batch are made at once (`finish`).

What a worker still has to make lies in the sample's place among the pixels of the batch: pasted objects, each of them
OBJECT and then its pixels, up to a multiple of ALIGNMENT bytes; or, in a recipe without layers, the whole image, if a
step is asked for that no kernel makes with the same bytes (perspective, copy-paste, resizing in a letterbox).

    HEADER  int32 number of layers, whether colours change, upside down, mirrored, number of objects, bytes of the
            place that are in use; int64 where these begin among those of the batch, which the consumer fills in;
            float64 factors of hue, saturation and value, share of the first layer
    LAYER   float64 [2 x 3] from (column, row, 1) of the image to (x, y) of the canvas;
            int32 number of tiles, 0
    TILE    int64 position in the store of the byte that would be at (0, 0) of the canvas; int32 width of the image in
            the store, box x1, y1, x2, y2 of what it covers, ends excluded, 0
    OBJECT  int32 x, y, width, height
"""

import math
import random
import struct

import cv2
import numpy as np

from utils.data.affine import draw_affine, make_matrices
from utils.data.dataset import LoadImagesAndLabels
from utils.data.gpu.targets import targets_of, tile_numbers, warped_labels
from utils.data.mosaic import Mosaic, Tile, draw_mosaic4, draw_mosaic9, load_mosaic9
from utils.data.paste import paste_visible, pastein
from utils.data.pixel_ops import blended
from utils.data.training_size import resized_shape
from utils.data.transforms import draw_colours, letterbox_layout, mixup

HEADER, LAYER, TILE, OBJECT = (struct.Struct(form) for form in ("<6iq4d", "<6d2i", "<q6i", "<4i"))
TILES_MOST, ALIGNMENT = 9, 16
LAYER_BYTES = LAYER.size + TILES_MOST * TILE.size
RECIPE = HEADER.size + 2 * LAYER_BYTES
USED, START = 5 * 4, 6 * 4  # bytes of the header in front of these two
UNMOVED = 1.0, 0.0, 0.0, 0.0, 1.0, 0.0
REUSED_BYTES = 2**24  # see RecipeDataset
NO_LABELS = np.zeros((0, 5), np.float32)


class DrawnSample:
    """What a sample has in the place of its targets, to be completed by `RecipeDataset.finish`.

    `image` is a DrawnImage, or its pixels; `labels` [n x 5: class, x1, y1, x2, y2], None for those of the layers;
    `place` the pixels' place in the batch; `generator` the state of Python's random numbers, if objects are still to be
    pasted in.
    """

    __slots__ = ("flips", "generator", "image", "labels", "place")

    def __init__(self, image, labels):
        self.image, self.labels, self.flips = image, labels, [False, False]
        self.place = self.generator = None


class RecipeDataset(LoadImagesAndLabels):
    """`dataset`, whose `image_store` a kernel reads: its samples have a DrawnSample in the place of their targets.

    `finish` makes the labels of a whole micro-batch at once. Paste-in needs the labels, so `finish` does it, too. With
    rotation, shear, perspective or copy-paste the reference makes the labels, in `__getitem__`.
    """

    def __init__(self, dataset):
        vars(self).update(vars(dataset))  # the same lists and images; nothing is read again
        # Freeing this raises glibc's mmap threshold: later arrays up to this size reuse memory, and need no new pages.
        np.empty(REUSED_BYTES, np.uint8)
        self.labels_wait = not any(self.hyp.get(key) for key in ("degrees", "shear", "perspective", "copy_paste"))

    def __getitem__(self, index):
        """The place of the pixels [h x w x 3], DrawnSample, path and shapes; the reference's draws in their order."""
        index, shapes = self.indices[index], None
        if self.mosaic and random.random() < self.hyp["mosaic"]:
            img, labels = (self._drawn_mosaics if self.labels_wait else self._mosaic_sample)(index)
        else:
            img, labels, shapes = self._plain_sample(index)
        sample = DrawnSample(img, labels)
        if self.augment:
            colours = draw_colours(self.hyp["hsv_h"], self.hyp["hsv_s"], self.hyp["hsv_v"])
            is_pasting = random.random() < self.hyp["paste_in"]
            sample.image = self.recolour(img, colours, now=is_pasting)
            if is_pasting and labels is None:
                sample.generator = random.getstate()
                random.seed(random.getrandbits(64))  # or the next sample, without --seed, would draw the same numbers
            else:
                self._paste_and_flip(sample, is_pasting)
        sample.place = self.pixels(sample.image)
        return sample.place, sample, self.img_files[index], shapes

    def _paste_and_flip(self, sample, is_pasting):
        if is_pasting:
            sample.labels = pastein(sample.image, sample.labels, self.samples_to_paste(), self.paste)
        for axis, key in enumerate(("flipud", "fliplr")):
            if random.random() < self.hyp[key]:
                sample.image, sample.flips[axis] = self.flip(sample.image, axis), True

    def finish(self, samples, first, recipes, begin=lambda number: None):
        """Write the `recipes` [n x RECIPE] of DrawnSamples, and return their targets [n x 6], numbered from `first`.

        `begin(number)` is called before objects are pasted into a sample, for which files may be read.
        """
        waiting = [sample for sample in samples if sample.labels is None]
        made = iter(warped_labels([layer for sample in waiting for layer in sample.image.layers]))
        for sample in waiting:
            parts = [next(made) for _ in sample.image.layers]
            sample.labels = parts[0] if len(parts) == 1 else np.concatenate(parts)
        for number, sample in enumerate(samples, first):
            if sample.generator:
                begin(number)
                random.setstate(sample.generator)
                self._paste_and_flip(sample, is_pasting=True)
                if not sample.image.write_objects(sample.place):
                    sample.place[:] = sample.image
        write_recipes([sample.image for sample in samples], recipes, self.image_store.offsets)
        return targets_of(samples, first)

    def _drawn_mosaics(self, index):
        """As `_mosaic_sample`, with None for the labels."""
        img = self._drawn_mosaic(self._draw_layout(), index)
        if random.random() < self.hyp["mixup"]:
            other = self._drawn_mosaic(self._draw_layout(), random.randint(0, self.n - 1))
            img, _ = mixup(img, NO_LABELS, other, NO_LABELS, self.blended)
        return img, None

    def _drawn_mosaic(self, layout, index):
        canvas = (draw_mosaic9 if layout is load_mosaic9 else draw_mosaic4)(self, index)
        ranges = self.affine_ranges
        return DrawnImage(canvas, draw_affine(canvas.side, canvas.side, **ranges, border=self.mosaic_border))

    def letterboxed(self, index, shape):
        """As the reference, the image a DrawnImage unless the letterbox resizes it."""
        width0, height0 = self.shapes[index].tolist()
        resized = height, width = resized_shape(height0, width0, self.img_size)
        layout = letterbox_layout(resized, shape, auto=False, scaleFill=False, scaleup=self.augment)
        if layout.shape != resized:
            return super().letterboxed(index, shape)
        top, bottom, left, right = layout.borders()
        canvas = Letterbox(self, Tile(index, left, top, width, height), height + top + bottom, width + left + right)
        return DrawnImage(canvas), layout.ratio, layout.pad, (int(height0), int(width0)), resized

    def warped(self, mosaic, affine):
        return super().warped(mosaic, affine) if affine.has_perspective else DrawnImage(mosaic, affine)

    def moved(self, img, affine):
        if affine.has_perspective or not isinstance(img, DrawnImage):
            return super().moved(np.asarray(img), affine)
        return DrawnImage(img.layers[0][0], affine)

    def blended(self, img, other, ratio):
        if not (isinstance(img, DrawnImage) and isinstance(other, DrawnImage)):
            return super().blended(img, other, ratio)
        img.layers += other.layers
        img.ratio = ratio
        return img

    def recolour(self, img, colours, now):
        if not isinstance(img, DrawnImage):
            return super().recolour(img, colours, now)
        img.colours = colours
        return img

    def paste(self, img, pixels, x, y):
        if isinstance(img, DrawnImage):
            img.objects.append((pixels, x, y))
        else:
            super().paste(img, pixels, x, y)

    def flip(self, img, axis):
        if not isinstance(img, DrawnImage):
            return super().flip(img, axis)
        img.flips[axis] = True
        return img

    def pixels(self, img):
        """The place [h x w x 3] of the sample, with what its recipe needs in it."""
        place = self.new_image(img.shape, np.uint8)
        if not (isinstance(img, DrawnImage) and img.write_objects(place)):
            place[:] = img
        return place


class Letterbox(Mosaic):
    """A canvas [height x width] with the image `tile` on it."""

    def __init__(self, dataset, tile, height, width):
        super().__init__(dataset, [tile])
        self.shape = height, width, 3

    def painted(self, visible_area):
        """All of it [height x width x 3]."""
        canvas = np.empty(self.shape, np.uint8)
        self.paint(canvas, 0, 0)
        return canvas


class DrawnImage:
    """An image [h x w x 3: BGR] of which only the random draws exist; NumPy makes the image when it reads this.

    `layers` are (canvas, Affine or None), the second one with mixup; then come colours, objects and flips. `used` are
    the bytes that the objects take in the place of the sample, None if that has no room for them.
    """

    def __init__(self, canvas, affine=None):
        self.shape = (affine.height, affine.width, 3) if affine else canvas.shape
        self.layers, self.ratio, self.colours, self.flips = [(canvas, affine)], 1.0, None, [False, False]
        self.objects, self.used = [], 0

    def __array__(self, dtype=None, copy=None):
        """The image, made by the steps of the reference."""
        images = [
            affine.image(canvas.painted(affine.source_area())) if affine else canvas.painted(None)
            for canvas, affine in self.layers
        ]
        img = blended(*images, self.ratio) if len(images) == 2 else images[0]
        if self.colours:
            self.colours.apply(img)
        for pixels, x, y in self.objects:
            paste_visible(img, pixels, x, y)
        for axis in (0, 1):
            img = cv2.flip(img, axis) if self.flips[axis] else img
        return img

    def write_objects(self, place):
        """Write the objects to `place` [h x w x 3]; whether there is room for them."""
        if not self.objects:  # of most samples
            return True
        place, end = place.reshape(-1), 0
        for pixels, x, y in self.objects:
            start, size = end + OBJECT.size, pixels.size
            end = -(-(start + size) // ALIGNMENT) * ALIGNMENT
            if end > len(place):
                self.used = None
                return False
            OBJECT.pack_into(place, start - OBJECT.size, x, y, *pixels.shape[1::-1])
            place[start : start + size] = pixels.ravel()
        self.used = end
        return True


def write_recipes(images, recipes, offsets):
    """Write the `recipes` [n x RECIPE] of images whose objects or pixels have been written.

    `offsets` [images] are those of the ImageStore.
    """
    layers, places = [], []  # and in which byte of the recipes each of them begins
    for start, image in zip(range(0, recipes.size, RECIPE), images, strict=True):
        if not isinstance(image, DrawnImage) or image.used is None:
            HEADER.pack_into(recipes, start, 0, 0, 0, 0, 0, math.prod(image.shape), 0, 1, 1, 1, 1)
            continue
        HEADER.pack_into(
            recipes, start, len(image.layers), image.colours is not None, *image.flips, len(image.objects), image.used,
            0, *(image.colours or (1.0, 1.0, 1.0)), image.ratio,
        )  # fmt: skip
        places += range(start + HEADER.size, start + RECIPE, LAYER_BYTES)[: len(image.layers)]
        layers += image.layers
    if layers:
        _write_layers(layers, np.array(places), recipes.reshape(-1).view(np.int64), offsets)


def _write_layers(layers, places, recipes, offsets):
    """Write LAYER and tiles of all `layers`, the first byte of each at `places` [n]; `recipes` int64 [bytes / 8]."""
    canvases, affines = zip(*layers, strict=True)
    make_matrices([affine for affine in affines if affine])
    backs = [cv2.invertAffineTransform(affine.matrix[:2]).ravel() if affine else UNMOVED for affine in affines]
    layer, (image, *box) = tile_numbers(canvases)
    window, end = np.array([(canvas.window or (0, 0), canvas.shape[1::-1]) for canvas in canvases]).transpose(1, 2, 0)
    corner, size = np.array(box).reshape(2, 2, -1)
    corner = corner - window.take(layer, 1)  # in pixels of the canvas
    low, high = np.maximum(corner, 0), np.minimum(corner + size, end.take(layer, 1))

    tiles = np.zeros((len(layer), TILE.size // 4), np.int32)
    tiles.view(np.int64)[:, 0] = offsets.take(image) - 3 * (corner[1] * size[0] + corner[0])
    tiles[:, 2], tiles[:, 3:5], tiles[:, 5:7] = size[0], low.T, high.T
    shown = (low < high).all(0)
    tiles, layer = tiles[shown], layer[shown]
    begins = layer.searchsorted(np.arange(len(layers) + 1))  # where the tiles of each layer begin

    heads = np.zeros((len(layers), LAYER.size // 8))
    heads[:, :-1], heads.view(np.int32)[:, -2] = backs, np.diff(begins)
    recipes[_words(places, LAYER)] = heads.view(np.int64)
    number = np.arange(len(layer)) - begins.take(layer)
    recipes[_words(places.take(layer) + LAYER.size + number * TILE.size, TILE)] = tiles.view(np.int64)


def _words(places, form):
    """Indices [n x words] into an int64 array: the words of structs `form` that begin at the bytes `places` [n]."""
    return places[:, None] // 8 + np.arange(form.size // 8)
