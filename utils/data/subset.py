"""Training on a part of the data set: a random but reproducible one (--subset-size), or its beginning (--overfit)."""

import logging
from dataclasses import replace
from functools import partial

import numpy as np

from utils.system.files import printable

logger = logging.getLogger(__name__)

OVERFIT_SAMPLES = 10


def from_options(opt):
    """The function ScannedDataset -> ScannedDataset that leaves what these options train on; None for all of it."""
    if opt.overfit:
        return partial(first, count=opt.subset_size or OVERFIT_SAMPLES, allow_background=opt.allow_background)
    if opt.subset_size:
        return partial(random_part, count=opt.subset_size, seed=opt.subset_seed)
    return None


def first(scanned, count, allow_background=True):
    """The first `count` images; ValueError when only later ones have a box, unless background is allowed."""
    with_boxes = [i for i, rows in enumerate(scanned.labels) if len(rows)]
    if with_boxes and with_boxes[0] >= count and not allow_background:
        raise ValueError(
            f"--overfit: the first {count} images, sorted by name, have no boxes, but {len(with_boxes)} later ones "
            f"have, the first of them {printable(scanned.img_files[with_boxes[0]])}; name such images in a list file, "
            f"or give --subset-size {with_boxes[0] + 1} to reach it"
        )
    return _chosen(scanned, range(min(count, len(scanned.img_files))))


def random_part(scanned, count, seed):
    """`count` images drawn with `seed`, in the order of the data set; see `choose`."""
    chosen = choose(scanned.labels, count, seed)
    missing = _classes(scanned.labels) - _classes([scanned.labels[i] for i in chosen])
    if missing:
        logger.warning("--subset-size %d has no image of the classes %s", count, ", ".join(map(str, sorted(missing))))
    logger.info("Training on %d of %d images (--subset-seed %d)", len(chosen), len(scanned.labels), seed)
    return _chosen(scanned, chosen)


def choose(labels, count, seed):
    """Sorted indices of `count` images (or all, if there are no more), drawn with `seed`; every class, if possible.

    `labels` is the list of [n x 5: class, x, y, w, h] of all images. The images are shuffled; first each class, the
    rarest first, takes the next image that has it, unless one that is taken already does; the next ones fill up.
    """
    order = np.random.default_rng(seed).permutation(len(labels)).tolist()
    images_of = {}  # by class, in the drawn order
    for i in order:
        for class_id in _classes([labels[i]]):
            images_of.setdefault(class_id, []).append(i)
    chosen = {}  # the keys are a set that keeps its order
    for class_id in sorted(images_of, key=lambda c: (len(images_of[c]), c)):
        if len(chosen) < count and not any(class_id in labels[i][:, 0] for i in chosen):
            chosen[images_of[class_id][0]] = None
    for i in order:
        if len(chosen) >= count:
            break
        chosen[i] = None
    return sorted(chosen)


def _classes(labels):
    return {int(class_id) for rows in labels for class_id in rows[:, 0]}


def _chosen(scanned, indices):
    lists = ("img_files", "label_files", "labels", "segments")
    chosen = {name: [getattr(scanned, name)[i] for i in indices] for name in lists}
    return replace(scanned, shapes=scanned.shapes[list(indices)], **chosen)
