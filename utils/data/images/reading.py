"""Images on disk: read them as 8-bit BGR, know their size without decoding, find the broken ones.

Every reader here agrees on one thing: the EXIF orientation (1 to 8) is applied, so the size that `image_size` and
`verify_image` report is the size of the array that `read_image` returns.

How other sample types become 8-bit BGR:
* gray and palette are spread over three channels, alpha is dropped, CMYK is converted: what cv2.imread does.
* 16 bit: the upper byte (value >> 8), what cv2.imread does.
* 32-bit integer: negative values become 0, then the smallest shift by 0, 8, 16 or 24 bits after which the greatest
  value of the image fits into 8 bits.
* float: NaN becomes 0; the range is taken to be 0..1, or 0..255 if a value exceeds 1, or 0..65535 if one exceeds 255;
  scaled to 0..255, clipped, rounded.
"""

import io
import logging
import os
import stat
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin

from utils.data.images.exif import ORIENTATION, TIFF_MAGIC, read_orientation, turn, upright
from utils.system.files import printable, stand_in

logging.getLogger("PIL.TiffImagePlugin").setLevel(logging.CRITICAL)  # what is wrong with a file is said here

IMAGE_SUFFIXES = ("bmp", "jpg", "jpeg", "png", "tif", "tiff", "dng", "webp", "mpo")
VIDEO_SUFFIXES = ("mov", "avi", "mp4", "mpg", "mpeg", "m4v", "wmv", "mkv")

READABLE_FORMATS = ("BMP", "JPEG", "PNG", "TIFF", "WEBP", "MPO")  # by content, whatever the suffix says
MIN_SIDE = 10  # pixels
MAX_BANDS = 4  # of a TIFF
FIRST_BYTES = {  # in small letters; for messages
    b"<svg": "an SVG drawing", b"<?xml": "an XML file (an SVG drawing?)", b"%pdf": "a PDF",
    b"pk\x03\x04": "a zip archive", b"\x1f\x8b": "a gzip archive", b"\xff\x0a": "a JPEG XL image",
    b"\x00\x00\x00\x0cjxl ": "a JPEG XL image", b"fujifilm": "a raw file of a camera", b"riff": "a film or a sound",
}  # fmt: skip
JPEG_TAIL = 4096  # bytes at the end in which a healthy JPEG has its end marker
JPEG_END = b"\xff\xd9"


def read_image(path):
    """The image [height x width x 3, uint8, BGR, contiguous], turned upright; ValueError if it cannot be read."""
    try:
        data = np.fromfile(path, np.uint8)  # Python opens the file, so any path works on any system
    except OSError as error:
        raise ValueError(f"{printable(path)}: cannot be opened ({error.strerror})") from error
    if not data.size:
        raise ValueError(f"{printable(path)}: the file is empty")
    image = _read_with_opencv(path, data)
    if image is None:
        image = _read_with_pillow(path, data)
    return np.ascontiguousarray(image)


def _read_with_opencv(path, data):
    """The image [h x w x 3, uint8, BGR], or None if OpenCV cannot read it; ValueError if nobody reads it right."""
    try:
        bits, bands, mixed = _tiff_samples(io.BytesIO(data)) if _is_tiff(data) else (0, 0, "")
        if mixed:
            raise ValueError(f"{printable(path)}: {mixed}")
        if bands > MAX_BANDS:  # Pillow takes the first three of some; OpenCV would print about it at every reading
            return None
        if bits > 16:  # which OpenCV does not convert to 8 bits itself
            samples = cv2.imdecode(data, cv2.IMREAD_UNCHANGED)  # for TIFF this applies the orientation as well
            return None if samples is None else _three_channels(to_8bit(samples))
        if _is_webp(data):  # its orientation is known to OpenCV 5, not to OpenCV 4.8
            image = cv2.imdecode(data, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
            return None if image is None else turn(image, _webp_orientation(data))
        return cv2.imdecode(data, cv2.IMREAD_COLOR)
    except cv2.error:  # for instance more pixels than OpenCV allows; Pillow may still read it
        return None


def image_size(path):
    """(width, height) in pixels of what `read_image` returns, from the header; ValueError if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            if _is_tiff(file.read(4)):
                return upright(*_tiff_header(file)[:3])
            with Image.open(file) as image:
                return upright(*image.size, read_orientation(image, file))
    except Exception as error:  # Pillow answers broken files with nearly every exception class there is
        raise ValueError(f"{printable(path)}: not a readable image{_detail(error)}") from error


def _detail(error):
    """What Pillow says, except where that is only the name of a Python object."""
    return "" if isinstance(error, Image.UnidentifiedImageError) else f" ({error})"


def verify_image(path):
    """(width, height) like `image_size`, after making sure that the whole image is there and can be used.

    Raises ValueError with the reason, without the path: empty or unreadable file, content that is not one of
    READABLE_FORMATS, a side below MIN_SIDE, truncated data. A JPEG is truncated when its end marker is missing, because
    decoders make up the rest. All images are decoded, a JPEG at an eighth of its size, which saves time. Nothing is
    printed and nothing on disk is changed.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe would wait for ever
            raise ValueError("cannot be opened (not a file)")
        with Path(path).open("rb") as file:
            try:
                size = _verify_open_file(path, file)
            except ValueError as error:
                _, bands, mixed = _tiff_samples(file)
                if bands > MAX_BANDS:
                    advice = f"at most {MAX_BANDS} are supported; write three of them to a file"
                    raise ValueError(f"TIFF with {bands} bands, {advice}") from error
                raise ValueError(mixed or str(error)) from error
    except OSError as error:
        raise ValueError(f"cannot be opened ({error.strerror or error})") from error
    if min(size) < MIN_SIDE:
        raise ValueError(f"smaller than {MIN_SIDE} pixels ({size[0]} x {size[1]})")
    return size


def _verify_open_file(path, file):
    """`verify_image` for an open file, without the test of the sides."""
    start = file.read(4)
    if not start:
        raise ValueError("empty file (0 bytes)")
    try:
        image = Image.open(file)
    except Image.DecompressionBombError as error:
        raise ValueError(f"more pixels than Pillow accepts ({error})") from error
    except Exception as error:  # see image_size
        if _is_tiff(start):  # OpenCV knows more kinds of TIFF than Pillow
            return _verify_rare_tiff(path)
        known = not isinstance(error, Image.UnidentifiedImageError)
        raise ValueError(f"broken header ({error})" if known else f"not an image{_kind_of(_start_of(file))}") from error
    if image.format not in READABLE_FORMATS:
        raise ValueError(f"content is {image.format}, which is not supported")
    if image.format in ("JPEG", "MPO") and not _jpeg_is_complete(file):
        raise ValueError("truncated JPEG (no end marker)")
    if image.format == "TIFF" and (mixed := _tiff_samples(file)[2]):
        raise ValueError(mixed)
    _decode_with_pillow(path)
    return image_size(path)


def _kind_of(start):
    """What a file that is no image says with its first 256 bytes that it is, as the rest of a message."""
    if start[4:8] == b"ftyp":
        brand = start[8:12].decode("latin-1").strip("\0 ")
        return f" but a file of the kind {brand} (HEIC, AVIF and films are such); convert it to jpg or png"
    kinds = [name for mark, name in FIRST_BYTES.items() if start.lstrip().lower().startswith(mark)]
    kind = stand_in(start.decode("latin-1")) or "".join(kinds[:1])
    return f" but {kind}" if kind else ""


def _start_of(file):
    file.seek(0)
    return file.read(256)


def _decode_with_pillow(path):
    """Raise ValueError if anything is missing; Pillow prints nothing. PNG check sums are compared first."""
    try:
        with Image.open(path) as image:
            if image.format == "PNG":
                image.verify()
        with Image.open(path) as image:
            image.draft(None, (image.width // 8, image.height // 8))  # means something for JPEG only
            image.load()
    except Exception as error:  # see image_size
        raise ValueError(f"truncated or broken ({error})") from error


def _verify_rare_tiff(path):
    try:
        image_size(path)  # a broken header is refused here, so that OpenCV does not print about it
        height, width = read_image(path).shape[:2]
    except ValueError as error:
        raise ValueError("not a readable TIFF") from error
    return width, height


def check_jpeg_end(path):
    """Raise ValueError for a JPEG that is cut off, of which `read_image` makes up the rest with OpenCV 4."""
    with Path(path).open("rb") as file:
        if file.read(3) == b"\xff\xd8\xff" and not _jpeg_is_complete(file):
            raise ValueError(f"{printable(path)}: truncated JPEG (no end marker)")


def _jpeg_is_complete(file):
    """Whether an end-of-image marker follows the start of the compressed data; bytes behind the marker are tolerated.

    Inside compressed data 0xff is always stuffed, so the two bytes of the marker cannot occur there by chance.
    The search starts at the scan, because a thumbnail in the header has an end marker of its own.
    """
    scan = _jpeg_scan_start(file)
    size = file.seek(0, os.SEEK_END)
    for start in (max(scan, size - JPEG_TAIL), scan):  # the tail first: nearly always enough
        file.seek(start)
        if JPEG_END in file.read():
            return True
    return False


def _jpeg_scan_start(file):
    """Offset of the first scan segment, found by walking the marker segments; the file's size if there is none."""
    position = 2
    while True:
        file.seek(position)
        head = file.read(4)
        if len(head) < 4:
            return file.seek(0, os.SEEK_END)
        if head[0] != 0xFF or head[1] == 0xFF:  # fill bytes between segments
            position += 1
        elif head[1] == 0xDA:
            return position
        else:
            position += 2 + int.from_bytes(head[2:], "big")


def _is_tiff(start):
    return bytes(start[:4]) in TIFF_MAGIC


def _tiff_header(file):
    """(width, height as stored, orientation, bits a sample, bands, bands apart) of the first image of an open TIFF."""
    file.seek(0)
    directory = TiffImagePlugin.ImageFileDirectory_v2(file.read(8))
    file.seek(directory.next)
    directory.load(file)
    bits = directory.get(TiffImagePlugin.BITSPERSAMPLE, 1)
    bits = max(bits) if isinstance(bits, tuple) else bits
    width, height = directory[TiffImagePlugin.IMAGEWIDTH], directory[TiffImagePlugin.IMAGELENGTH]
    bands = directory.get(TiffImagePlugin.SAMPLESPERPIXEL, 1)
    are_apart = directory.get(TiffImagePlugin.PLANAR_CONFIGURATION, 1) == 2
    return width, height, directory.get(ORIENTATION, 1), bits, bands, are_apart


def _tiff_samples(file):
    """(bits a sample, bands, why nobody reads them right) of an open TIFF file; zeros if it is none, or is broken."""
    try:
        file.seek(0)
        *_, bits, bands, are_apart = _tiff_header(file) if _is_tiff(file.read(4)) else (0, 0, False)
    except Exception:  # let the ordinary reader refuse it
        return 0, 0, ""
    is_mixed = are_apart and 1 < bands <= MAX_BANDS and bits > 8  # OpenCV mixes samples, and Pillow takes low bytes
    advice = "write it with the samples of a pixel together (rgb contig)"
    return bits, bands, f"TIFF of {bits} bits whose bands lie one after the other; {advice}" * is_mixed


def _is_webp(data):
    return bytes(data[:4]) == b"RIFF" and bytes(data[8:12]) == b"WEBP"


def _webp_orientation(data):
    file = io.BytesIO(data)
    with Image.open(file) as image:
        return read_orientation(image, file)


def _read_with_pillow(path, data):
    try:
        with Image.open(io.BytesIO(data)) as image:
            return pillow_pixels(image)
    except Exception as error:  # see image_size
        why = _kind_of(data[:256].tobytes()) or _detail(error)
        raise ValueError(f"{printable(path)}: not a readable image{why}") from error


def pillow_pixels(image):
    """The pixels [h x w x 3, uint8, BGR] of a Pillow image, turned upright; Pillow itself cuts all above 255 off."""
    image = ImageOps.exif_transpose(image)
    if image.mode[0] in "IF":  # integers or floats of more than 8 bits
        return _three_channels(to_8bit(np.asarray(image)))
    return np.asarray(image.convert("RGB"))[..., ::-1]


def to_8bit(samples):
    """Samples of any number type as uint8, by the rules at the top of this file."""
    if samples.dtype == np.uint8:
        return samples
    if samples.dtype.kind == "u" and samples.dtype.itemsize == 2:  # of either byte order
        return (samples >> 8).astype(np.uint8)
    if samples.dtype.kind == "f":
        samples = np.nan_to_num(samples.astype(np.float64), nan=0.0)
        greatest = samples.max(initial=0)
        full_range = 1 if greatest <= 1 else 255 if greatest <= 255 else 65535
        return np.rint(samples.clip(0, full_range) * (255 / full_range)).astype(np.uint8)
    samples = samples.astype(np.int64).clip(0)
    surplus_bits = max(int(samples.max(initial=0)).bit_length() - 8, 0)
    shift = -(-surplus_bits // 8) * 8  # rounded up to whole bytes
    return (samples >> shift).astype(np.uint8)


def _three_channels(samples):
    """uint8 samples [h x w], [h x w x 1..4] as BGR [h x w x 3]; alpha (channel 2 or 4) is dropped."""
    if samples.ndim == 2 or samples.shape[2] < 3:
        gray = samples if samples.ndim == 2 else samples[..., 0]
        return np.repeat(gray[..., None], 3, axis=2)
    return samples[..., :3]
