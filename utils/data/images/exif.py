"""EXIF orientation: which one OpenCV obeys, and how a stored raster is turned upright.

Not Pillow's own reading, because the two differ, and the size that the scan reports has to be that of the pixels which
OpenCV returns later: of an entry of any type OpenCV takes the first two bytes, libpng passes over chunks with a prefix,
and an orientation in XMP does not count. To ask OpenCV by decoding would halve the speed of the scan.
"""

import os
import struct

from PIL import ExifTags

TIFF_MAGIC = {b"II*\0": "<", b"MM\0*": ">"}  # how TIFF files and EXIF data begin, and the order of their bytes
ORIENTATION = ExifTags.Base.Orientation
SIDES_SWAPPED = (5, 6, 7, 8)  # EXIF orientations that turn the image by a quarter


def upright(width, height, orientation):
    """(width, height) of the upright image whose raster is stored with `width` x `height` pixels."""
    return (height, width) if orientation in SIDES_SWAPPED else (width, height)


def read_orientation(image, file):
    """EXIF orientation (1 to 8) of an `image` that Pillow opened from `file`; 1 when there is none."""
    data = (_png_exif(file) if image.format == "PNG" else image.info.get("exif")) or b""
    data = data.removeprefix(b"Exif\0\0")
    order = TIFF_MAGIC.get(data[:4])
    if order is None:
        return 1
    try:
        (first,) = struct.unpack_from(f"{order}I", data, 4)
        (count,) = struct.unpack_from(f"{order}H", data, first)
        for entry in range(first + 2, first + 2 + 12 * count, 12):
            tag, value = struct.unpack_from(f"{order}H6xH", data, entry)
            if tag == ORIENTATION:
                return value
    except struct.error:  # a broken EXIF block is no reason to refuse the image; OpenCV ignores it, too
        pass
    return 1


def _png_exif(file):
    """The EXIF chunk of a PNG; it may lie behind the pixels, where Pillow looks only while decoding."""
    file.seek(8)
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind == b"eXIf":
            data = file.read(length)
            if data[:4] in TIFF_MAGIC:  # libpng passes over any other
                return data
            length = 0
        file.seek(length + 4, os.SEEK_CUR)
    return None


def turn(image, orientation):
    """Turn a stored raster [h x w x 3] upright according to its EXIF orientation."""
    if orientation in SIDES_SWAPPED:
        image = image.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    return image
