"""Augmentations of one training image that move no label: letterbox, colours, mixup.

Images are uint8 [h x w x 3] BGR. Colour gains and the mixup ratio are drawn from NumPy's global generator. Which draws
are made in which order is part of the contract: equal seeds give stock YOLOv7's batches.
"""

from typing import NamedTuple

import cv2
import numpy as np

from utils.data.affine import GREY
from utils.data.pixel_ops import LEVELS, apply_tables, blended


class LetterboxLayout(NamedTuple):
    """Where an image lies in its letterbox: its (height, width) there, (ratio x, ratio y) and (pad x, pad y).

    The pads are one side's, perhaps x.5.
    """

    shape: tuple
    ratio: tuple
    pad: tuple

    def borders(self):
        """Rows and columns beside the image: top, bottom, left, right."""
        pad_x, pad_y = self.pad
        return round(pad_y - 0.1), round(pad_y + 0.1), round(pad_x - 0.1), round(pad_x + 0.1)


def letterbox(img, new_shape=(640, 640), color=(GREY, GREY, GREY), auto=True, scaleFill=False, scaleup=True, stride=32):
    """Resize `img` into `new_shape` (side or (height, width)) keeping its aspect ratio, and fill up with borders.

    `auto` pads only to the next multiple of `stride`, `scaleFill` stretches instead, without `scaleup` a small image
    keeps its size. Returns (image, (ratio x, ratio y), (pad x, pad y)), where the pads are one side's, perhaps x.5.
    """
    layout = letterbox_layout(img.shape[:2], new_shape, auto, scaleFill, scaleup, stride)
    if layout.shape != img.shape[:2]:
        img = cv2.resize(img, layout.shape[::-1], interpolation=cv2.INTER_LINEAR)
    img = cv2.copyMakeBorder(img, *layout.borders(), cv2.BORDER_CONSTANT, value=color)
    return img, layout.ratio, layout.pad


def letterbox_layout(shape, new_shape, auto, scaleFill, scaleup, stride=32):
    """The LetterboxLayout that `letterbox` gives an image of `shape` (height, width)."""
    height, width = shape
    target_height, target_width = (new_shape, new_shape) if isinstance(new_shape, int) else new_shape

    gain = min(target_height / height, target_width / width)
    if not scaleup:
        gain = min(gain, 1.0)
    ratio = gain, gain
    inner_width, inner_height = max(round(width * gain), 1), max(round(height * gain), 1)
    pad_x, pad_y = target_width - inner_width, target_height - inner_height
    if auto:
        pad_x, pad_y = pad_x % stride, pad_y % stride
    elif scaleFill:
        pad_x, pad_y = 0.0, 0.0
        inner_width, inner_height = target_width, target_height
        ratio = target_width / width, target_height / height
    return LetterboxLayout((int(inner_height), int(inner_width)), ratio, (pad_x / 2, pad_y / 2))


class Colours(NamedTuple):
    """Factors for hue, saturation and value."""

    hue: float
    saturation: float
    value: float

    def tables(self):
        """The new hue, saturation and value for each old one [3 x 256 uint8]."""
        scaled = LEVELS * np.array(self)[:, None]
        np.remainder(scaled[0], 180, out=scaled[0])
        return np.minimum(np.maximum(scaled, 0, out=scaled), 255, out=scaled).astype(np.uint8)

    def apply(self, img):
        """Change `img` [h x w x 3: BGR], in place.

        stock behaviour: the (lossy) way to HSV and back is taken even if all gains are 0.
        """
        apply_tables(img, self.tables(), self)


def draw_colours(hgain, sgain, vgain):
    """Colours with factors from 1 - gain to 1 + gain."""
    hue, saturation, value = np.random.uniform(-1, 1, 3).tolist()
    return Colours(hue * hgain + 1, saturation * sgain + 1, value * vgain + 1)


def augment_hsv(img, hgain=0.5, sgain=0.5, vgain=0.5):
    """Scale hue, saturation and value of `img`, in place, by factors drawn from 1 - gain to 1 + gain."""
    draw_colours(hgain, sgain, vgain).apply(img)


def mixup(img1, labels1, img2, labels2, blend=blended):
    """Blend two images of equal size by a ratio drawn from Beta(8, 8); the labels of both are kept."""
    return blend(img1, img2, np.random.beta(8.0, 8.0)), np.concatenate((labels1, labels2))
