"""--cache-images: all images of a split, at the training size, one after the other in one piece of memory.

Where each image lies follows from the sizes that the scan of the labels found. With `ram` the memory is shared with
the workers: a process that starts one need not copy the tables of a million pages, which an array for each image
would cost. With `disk` it is a file, mapped, with a small one beside it that carries the signature of the images;
ranks share the pages that they read, too, and the system drops pages when memory gets short.
"""

import hashlib
import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from utils.data.images import load_scanned, resized_shape
from utils.data.label_cache import cache_location, signature
from utils.system.files import atomic_write, printable, remove_leftovers, replacement
from utils.system.memory import check_memory, describe_bytes, give_back, shared_array

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1  # raise it whenever the pixels of the same image change
PORTION = 16  # images that a thread reads at a time
RESERVE = 100e6  # bytes that stay free on the disk
ADVICE = "--cache-images disk needs none; a smaller --img-size, or no --cache-images, needs less"


def use_memory_cache(dataset, prefix=""):
    """Read all images into memory, `dataset.imgs`. Raises ValueError when there is too little of it."""
    shapes, ends = _layout(dataset, dataset.img_size)
    num_bytes = int(ends[-1])
    check_memory(num_bytes, "--cache-images needs {}", ADVICE)
    pixels = shared_array((num_bytes,), np.uint8)
    _fill(dataset, _views(pixels, shapes, ends), f"{prefix}Caching images ({describe_bytes(num_bytes)})")
    dataset.memory_cache = pixels
    pixels.flags.writeable = False
    dataset.imgs = _views(pixels, shapes, ends)


def check_memory_for(dataset, img_size):
    """Raise ValueError when a later memory cache, of another `img_size`, will not fit in place of the present one."""
    now, then = (int(_layout(dataset, size)[1][-1]) for size in (dataset.img_size, img_size))
    check_memory(then - now, f"--cache-images needs {{}} more when the images have {img_size} px", ADVICE)


def give_back_memory(dataset):
    """Free the memory cache, if there is one, of a data set that is not used any more."""
    if dataset.memory_cache is not None:
        give_back(dataset.memory_cache)


def use_disk_cache(dataset, prefix=""):
    """Let `dataset.imgs` be read from the file, which is made first unless it fits the present images.

    Raises ValueError when the disk has no room or cannot be written to.
    """
    shapes, ends = _layout(dataset, dataset.img_size)
    kind = f"version {FORMAT_VERSION}, {dataset.img_size} px, augment {dataset.augment}"
    expected = {"kind": kind, "signature": signature(dataset.img_files, ()), "bytes": int(ends[-1])}
    path = _location(dataset, kind)
    if _read_stamp(path) != expected:
        _make(dataset, path, shapes, ends, prefix)
        with atomic_write(_stamp(path), "w") as file:
            json.dump(expected, file)
    pixels = np.memmap(path, np.uint8, mode="r")
    logger.info("%spictures are read from %s (%.1f GB)", prefix, printable(path), ends[-1] / 1e9)
    dataset.imgs = _views(pixels, shapes, ends)


def _layout(dataset, img_size):
    """(height, width) of each image at `img_size` pixels, and where the bytes of each end."""
    shapes = [resized_shape(height, width, img_size) for width, height in dataset.shapes.tolist()]
    return shapes, np.cumsum([3 * height * width for height, width in shapes])


def _location(dataset, kind):
    """Beside the label cache; another size, order or way of resizing has a file of its own."""
    digest = hashlib.sha256(f"{kind}, rect {dataset.rect}".encode()).hexdigest()[:8]
    labels = cache_location(dataset.path, dataset.label_files)
    return labels.with_name(f"{labels.stem}.{dataset.img_size}.{digest}.pixels.cache")


def _stamp(path):
    return path.with_name(f"{path.stem}.json.cache")


def _read_stamp(path):
    """What the file was made from; None if it is not there or not whole."""
    try:
        stamp = json.loads(_stamp(path).read_text())
        return stamp if path.stat().st_size == stamp["bytes"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _views(pixels, shapes, ends):
    starts = ends - [3 * height * width for height, width in shapes]
    return [pixels[a:b].reshape(*shape, 3) for a, b, shape in zip(starts, ends, shapes, strict=True)]


def _make(dataset, path, shapes, ends, prefix):
    """Write the file under another name, and give it its own when it is complete."""
    _stamp(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    _check_room(path.parent, int(ends[-1]))
    remove_leftovers(path.parent, path.name)
    try:
        with replacement(path) as unfinished:
            pixels = np.memmap(unfinished, np.uint8, mode="w+", shape=(int(ends[-1]),))
            _fill(dataset, _views(pixels, shapes, ends), f"{prefix}Caching images on disk")
            pixels.flush()
    except OSError as error:
        raise ValueError(f"--cache-images disk: {printable(path.parent)} cannot be written to ({error})") from error


def _fill(dataset, views, title):
    def read(numbers):
        for i in numbers:
            views[i][:] = load_scanned(dataset, i, views[i].shape[:2])
        return len(numbers)

    portions = (range(i, min(i + PORTION, dataset.n)) for i in range(0, dataset.n, PORTION))
    with ThreadPoolExecutor(8) as pool, tqdm(desc=title, total=dataset.n) as progress:
        try:
            for count in pool.map(read, portions):
                progress.update(count)
        except BaseException:  # nobody needs the others any more
            pool.shutdown(cancel_futures=True)
            raise


def _check_room(folder, num_bytes):
    free = shutil.disk_usage(folder).free
    if num_bytes + RESERVE > free:
        raise ValueError(
            f"--cache-images disk needs {num_bytes / 1e9:.1f} GB in {printable(folder)}, where {free / 1e9:.1f} GB are "
            "free; make room, use a smaller --img-size, or --cache-images ram"
        )
