"""--cache-images: all images of a split, at the training size, one after the other in one piece of memory.

Where each image lies follows from the sizes that the scan of the labels found. With `ram` the memory is shared with
the workers: a process that starts one need not copy the tables of a million pages, which an array for each image
would cost. With `disk` it is a file, mapped; ranks share the pages that they read, too, and the system drops pages when
memory gets short. Its name carries the signature of the images, in their order: a file of that name holds these pixels
and no others, and once it is there it is never changed.
"""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from utils.data.labels.cache import cache_location, signature
from utils.data.training_size import load_scanned, resized_shape
from utils.system.cores import usable_cores
from utils.system.files import atomic_write, link_to_nowhere, printable, remove_leftovers
from utils.system.memory import check_memory, describe_bytes, give_back, keep_freed_memory, shared_array
from utils.system.progress import progress

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1  # raise it whenever the pixels of the same image change
PORTION = 16  # images that a thread reads at a time
FEWEST_THREADS = 8  # that read: a disk may be slow where cores are few
SAMPLES = 16  # images of a cache file that are compared before it is used
MOST_LEVELS = 12  # of 255
ATTEMPTS = 5  # at a file that is gone, or cannot be mapped, as soon as it is written
RESERVE = 100e6  # bytes that stay free on the disk
ADVICE = "--cache-images disk needs none; a smaller --img-size, or no --cache-images, needs less"


def use_memory_cache(dataset, prefix=""):
    """Read all images into memory, `dataset.imgs`. Raises ValueError when there is too little of it."""
    shapes, ends = layout(dataset, dataset.img_size)
    num_bytes = int(ends[-1])
    check_memory(num_bytes, "--cache-images needs {}", ADVICE)
    pixels = shared_array((num_bytes,), np.uint8)
    _fill(dataset, views(pixels, shapes, ends), f"{prefix}Caching images ({describe_bytes(num_bytes)})")
    dataset.memory_cache = pixels
    pixels.flags.writeable = False
    dataset.imgs = views(pixels, shapes, ends)


def check_memory_for(dataset, img_size):
    """Raise ValueError when a later memory cache, of another `img_size`, will not fit in place of the present one."""
    now, then = (int(layout(dataset, size)[1][-1]) for size in (dataset.img_size, img_size))
    check_memory(then - now, f"--cache-images needs {{}} more when the images have {img_size} px", ADVICE)


def give_back_memory(dataset):
    """Free the memory cache, or the images beside the model, if any, of a data set that is not used any more."""
    if dataset.image_store is not None:
        dataset.image_store.close()
    if dataset.memory_cache is not None:
        give_back(dataset.memory_cache)


def use_disk_cache(dataset, prefix=""):
    """Let `dataset.imgs` be read from the file, which is made first unless it is there.

    Raises ValueError when the disk has no room or cannot be written to.
    """
    shapes, ends = layout(dataset, dataset.img_size)
    num_bytes = int(ends[-1])
    path = _location(dataset, f"version {FORMAT_VERSION}, {dataset.img_size} px, augment {dataset.augment}")
    _check_place(path)
    for _ in range(ATTEMPTS):  # again if another run, making its own, removed it meanwhile
        if (pixels := _mapped(path, num_bytes)) is not None:
            if _holds_images(dataset, views(pixels, shapes, ends)):
                break
            logger.warning("%s%s does not hold what the images give: it is damaged or was not copied in whole; it is "
                           "written again", prefix, printable(path))  # fmt: skip
            pixels = None  # what is not mapped any more is removed, and need not fit on the disk beside the new one
        _make(dataset, path, shapes, ends, prefix)
    else:
        raise ValueError(
            f"--cache-images disk: {printable(path)} was written but cannot be read as memory; the file system may not "
            "allow it: use --cache-images ram"
        )
    logger.info("%simages are read from %s (%.1f GB)", prefix, printable(path), num_bytes / 1e9)
    dataset.imgs = views(pixels, shapes, ends)


def layout(dataset, img_size):
    """(height, width) of each image at `img_size` pixels, and where the bytes of each end."""
    shapes = [resized_shape(height, width, img_size) for width, height in dataset.shapes.tolist()]
    return shapes, np.cumsum([3 * height * width for height, width in shapes])


def _location(dataset, kind):
    """Beside the label cache; other images, another size, order or way of resizing have a file of their own."""
    labels = cache_location(dataset.path, dataset.label_files)
    digest = hashlib.sha256(f"{kind}, rect {dataset.rect}".encode()).hexdigest()[:8]
    images = signature(dataset.img_files, ())[:16]
    return labels.with_name(f"{labels.stem}.{dataset.img_size}.{digest}.{images}.pixels.cache")


def _mapped(path, num_bytes):
    """The bytes of a complete cache file; None if there is none.

    The lock says that the file is in use. The mapping keeps it, as it has a descriptor of its own, until it goes.
    """
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # somebody is about to remove it
                return None
            except OSError:  # not every file system has locks; without them nothing is removed
                pass
            is_complete = os.fstat(file.fileno()).st_size == num_bytes
            return np.memmap(file, np.uint8, mode="r") if is_complete else None
    except OSError:
        return None


def _holds_images(dataset, cached):
    """Whether the cached pixels are those of the images, by a few of them, the last one too.

    Versions of OpenCV may differ by a few levels; machines of several that share the file would make it in turns.
    """
    chosen = sorted({*range(0, dataset.n, max(dataset.n // SAMPLES, 1)), dataset.n - 1})
    with ThreadPoolExecutor(FEWEST_THREADS) as pool:
        read = pool.map(lambda i: load_scanned(dataset, i, cached[i].shape[:2]), chosen)
        return all(_are_alike(image, cached[i]) for i, image in zip(chosen, read, strict=True))


def _are_alike(image, other):
    """Whether no row of two images [h x w x 3] of one shape differs by more than MOST_LEVELS in the mean."""
    return np.abs(image.astype(np.int16) - other).mean(axis=(1, 2)).max() <= MOST_LEVELS


def _remove_unused(folder, family):
    """Delete caches that no process has mapped and whose names begin with `family`: they need as much room as this one.

    They are of another --subset-seed or --subset-size, or of images that have changed since.
    """
    for path in [entry for entry in folder.iterdir() if entry.name.startswith(family) and ".pixels." in entry.name]:
        with suppress(OSError), path.open("r+b") as file:  # in use, or gone meanwhile
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            logger.info("%s is removed, it does not hold these images", printable(path))


def views(pixels, shapes, ends):
    """The image [height x width x 3] of each of `shapes` in `pixels` [bytes], as `layout` gives them."""
    starts = ends - [3 * height * width for height, width in shapes]
    return [pixels[a:b].reshape(*shape, 3) for a, b, shape in zip(starts, ends, shapes, strict=True)]


def _make(dataset, path, shapes, ends, prefix):
    """Write the file under another name, and give it its own when it is complete."""
    num_bytes = int(ends[-1])
    try:
        remove_leftovers(path.parent)
        _remove_unused(path.parent, path.name.removesuffix(".pixels.cache").rpartition(".")[0] + ".")
        _check_room(path.parent, num_bytes)
        with atomic_write(path, "w+b", fsync=True) as file:
            _reserve(file, num_bytes)
            pixels = np.memmap(file, np.uint8, mode="w+", shape=(num_bytes,))
            _fill(dataset, views(pixels, shapes, ends), f"{prefix}Caching images on disk")
            pixels.flush()
    except OSError as error:
        raise ValueError(
            f"--cache-images disk: {num_bytes / 1e9:.1f} GB cannot be written to {printable(path.parent)} "
            f"({error.strerror or error}); make room there, use a smaller --img-size, or --cache-images ram"
        ) from error


def _reserve(file, num_bytes):
    """Take the room on the disk now: one that gets full while it is mapped ends the process without a word."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # not every file system can
            raise


def _fill(dataset, places, title):
    def read(numbers):
        for i in numbers:
            places[i][:] = load_scanned(dataset, i, places[i].shape[:2])

    portions = [range(i, min(i + PORTION, dataset.n)) for i in range(0, dataset.n, PORTION)]
    read_in_threads(read, portions, title)


def read_in_threads(read, portions, title):
    """Call read(portion) for all `portions`, ranges of images, with a progress bar; whatever it raises ends all."""
    keep_freed_memory()
    bar = progress(desc=title, total=sum(map(len, portions)), unit="img")
    with ThreadPoolExecutor(max(FEWEST_THREADS, usable_cores())) as pool, bar:
        try:
            for portion, _ in zip(portions, pool.map(read, portions), strict=True):
                bar.update(len(portion))
        except BaseException:  # nobody needs the others any more
            pool.shutdown(cancel_futures=True)
            raise


def _check_place(path):
    if os.path.lexists(path) and not os.path.isfile(path):
        kind = "a link to nowhere" if link_to_nowhere(path) else "a folder" if path.is_dir() else "no ordinary file"
        raise ValueError(
            f"--cache-images disk: {printable(path)}, where the pixels belong, is {kind}; remove it, or use "
            "--cache-images ram"
        )


def _check_room(folder, num_bytes):
    free = shutil.disk_usage(folder).free
    if num_bytes + RESERVE > free:
        raise ValueError(
            f"--cache-images disk needs {num_bytes / 1e9:.1f} GB in {printable(folder)}, where {free / 1e9:.1f} GB are "
            "free; make room, use a smaller --img-size, or --cache-images ram"
        )
