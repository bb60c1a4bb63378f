"""An image of a data set at the size of the training, from its cache or from its file."""

from functools import lru_cache

import cv2

from utils.data.images.reading import read_image
from utils.system.files import printable


def load_image(dataset, index):
    """Image `index` of a LoadImagesAndLabels: (uint8 [h x w x 3] BGR, (height, width) in the file, (h, w)).

    h x w is the training size. A cached image is returned itself, not as a copy; it is read-only.
    """
    img = dataset.imgs[index]
    if img is not None:
        width0, height0 = dataset.shapes[index].tolist()
        return img, (int(height0), int(width0)), img.shape[:2]
    img = read_image(dataset.img_files[index])
    height0, width0 = img.shape[:2]
    height, width = resized_shape(height0, width0, dataset.img_size)
    if max(height0, width0) != dataset.img_size:
        shrinks = max(height0, width0) > dataset.img_size
        method = cv2.INTER_AREA if shrinks and not dataset.augment else cv2.INTER_LINEAR
        img = cv2.resize(img, (width, height), interpolation=method)
    return img, (height0, width0), (height, width)


@lru_cache(maxsize=2**14)  # a mosaic asks for four of them
def resized_shape(height, width, size):
    """(height, width) of an image whose long side becomes `size`; at least one pixel each.

    stock behaviour: truncated, so that rounding makes some long sides one pixel shorter than `size`.
    """
    gain = size / max(height, width)
    return max(int(height * gain), 1), max(int(width * gain), 1)


def load_scanned(dataset, index, shape):
    """The pixels of `load_image`, which must have the `shape` (height, width) that the scan of the labels tells."""
    img, _, found = load_image(dataset, index)
    if found != shape:
        raise ValueError(
            f"{printable(dataset.img_files[index])}: the image changed its size since the labels were scanned; "
            "start again, so that it is scanned anew"
        )
    return img
