"""Do the anchors fit the boxes of a data set? If not, fit new ones: k-means, then a genetic search."""

import logging

import numpy as np
import torch

from utils.system.cores import usual_threads
from utils.system.distributed import unwrap
from utils.system.files import counted
from utils.system.progress import progress

logger = logging.getLogger(__name__)

ENOUGH_RECALL = 0.98  # best possible recall below which new anchors are fitted
SMALL_PIXELS = 3.0  # boxes with a side below are worth a warning
SMALLEST_IN_STRIDES = 1.5  # side of the smallest anchor of a level when none can be fitted; the largest is 3 times that
TINY_PIXELS = 2.0  # boxes with both sides below are not fitted, and no mutation goes below


def check_anchors(dataset, model, thr=4.0, imgsz=640, refit=True):
    """Refit the anchors of the head `model.model[-1]` when too few boxes of `dataset` are within reach of any.

    Placeholders, which a cfg with a mere number of anchors has, are replaced by sizes that follow the strides when
    nothing can be fitted, or nothing shall be (without `refit`).

    `dataset` has shapes [images x 2: width, height] and labels (per image [m x 5: class, x, y, w, h normalised]); `thr`
    is the largest side ratio between a box and its anchor. Returns whether the anchors were replaced.

    Draws from NumPy's global generator: one scale per image, and what `kmean_anchors` draws.
    """
    head = unwrap(model).model[-1]
    if not refit:
        return _keep(head)
    # stock behaviour: this draw happens whether or not its result is used
    scale = np.random.uniform(0.9, 1.1, size=(len(dataset.shapes), 1))
    wh = torch.from_numpy(box_sizes(dataset, imgsz, scale)).float()
    if not len(wh):
        logger.warning("the data set has no boxes to fit anchors to: keeping the anchors of the model")
        return _keep(head)

    old = head.anchor_grid.detach().reshape(-1, 2).float().cpu()
    recall, per_box = anchor_recall(old, wh, thr)
    logger.info("Anchors: %.2f in reach of a box, best possible recall %.4f", per_box, recall)
    if recall >= ENOUGH_RECALL:
        return False

    try:
        new = kmean_anchors(dataset, n=len(old), imgsz=imgsz, thr=thr)
    except ValueError as reason:
        logger.warning("keeping the anchors of the model: %s", reason)
        return _keep(head)
    new_recall, _ = anchor_recall(torch.from_numpy(new).float(), wh, thr)
    if new_recall <= recall:
        logger.info("The fitted anchors are no better (best possible recall %.4f): keeping the old ones", new_recall)
        return _keep(head)
    set_anchors(head, new)
    logger.info("New anchors, best possible recall %.4f: %s", new_recall, _describe(new))
    return True


def _keep(head):
    """Leave the anchors as they are, except placeholders, known by a side of zero. Returns whether they changed."""
    if head.anchor_grid.all():
        return False
    anchors_per_level = head.anchor_grid.numel() // (2 * len(head.stride))
    sides = torch.outer(head.stride.float().cpu(), torch.logspace(0, 1, anchors_per_level, 3.0) * SMALLEST_IN_STRIDES)
    set_anchors(head, sides.reshape(-1, 1).expand(-1, 2))
    logger.warning("only the number of anchors is known: squares of %s pixels are used; list better ones in the cfg",
                   ", ".join(f"{side:.0f}" for side in sides.flatten().tolist()))  # fmt: skip
    return True


def box_sizes(dataset, imgsz, scale=1.0):
    """Width and height [boxes x 2, float64] in pixels once the longer side of each image is `imgsz` times `scale`."""
    shapes = np.asarray(dataset.shapes, dtype=np.float64).reshape(-1, 2)
    sizes = imgsz * shapes / shapes.max(1, keepdims=True) * scale
    boxes = [labels[:, 3:5] * size for size, labels in zip(sizes, dataset.labels, strict=True) if len(labels)]
    return np.concatenate(boxes) if boxes else np.zeros((0, 2))


def closeness(anchors, wh):
    """How alike each box [n x 2] and anchor [k x 2] are: the smaller over the larger of the sides that differ most.

    1 is equal, 1/4 means that one side is four times too long or too short; [n x k].
    """
    ratio = wh[:, None] / anchors[None]
    return torch.min(ratio, 1 / ratio).amin(2)


def anchor_recall(anchors, wh, thr):
    """Share of boxes that have an anchor within the ratio `thr`, and the mean number of such anchors."""
    alike = closeness(anchors, wh)
    recall = (alike.amax(1) > 1 / thr).float().mean()
    per_box = (alike > 1 / thr).float().sum(1).mean()
    return recall.item(), per_box.item()


def set_anchors(head, anchors):
    """Write pixel anchors [nl * na x 2] into both buffers of a head, smallest anchors to the finest level."""
    levels = torch.as_tensor(anchors).to(head.anchor_grid).view(head.anchor_grid.shape)
    area = levels.prod(-1).flatten(1).mean(1)
    if (area[-1] - area[0]) * (head.stride[-1] - head.stride[0]).to(area) < 0:
        levels = levels.flip(0)
    head.anchor_grid.copy_(levels)
    head.anchors.copy_(levels.view_as(head.anchors) / head.stride.to(head.anchors).view(-1, 1, 1))


def kmean_anchors(dataset, n=9, imgsz=640, thr=4.0, gen=1000):
    """Fit `n` anchors [n x 2, pixels, by area] to the boxes of `dataset`, then improve them over `gen` generations.

    Raises ValueError if there are too few different boxes. Draws from NumPy's global generator.
    """
    all_wh = box_sizes(dataset, imgsz)
    num_small = (all_wh < SMALL_PIXELS).any(1).sum()
    if num_small:
        logger.warning(
            "boxes with a side below %g pixels at image size %d: %d of %d", SMALL_PIXELS, imgsz, num_small, len(all_wh)
        )
    wh = all_wh[(all_wh >= TINY_PIXELS).any(1)]
    if len(wh) < n:
        raise ValueError(
            f"{counted(len(wh), 'box', 'boxes')} of at least {TINY_PIXELS:g} pixels: too few to fit {n} anchors"
        )

    spread = wh.std(0)
    if not spread.all():
        raise ValueError(f"all {len(wh)} boxes have the same width or height, so {n} anchors cannot be told apart")
    from scipy.cluster.vq import kmeans  # slow to import, and most runs keep their anchors

    centroids, _ = kmeans(wh / spread, n, iter=30)
    if len(centroids) != n:
        raise ValueError(f"k-means found only {counted(len(centroids), 'box size')} for {n} anchors")
    anchors = _by_area(centroids * spread)
    with usual_threads():
        return _by_area(_evolve(anchors, torch.from_numpy(wh).float(), thr, gen))


def _evolve(anchors, wh, thr, generations):
    """Mutate `anchors` [n x 2] at random and keep what fits the boxes `wh` [m x 2, float32] better."""
    best = _fitness(anchors, wh, thr)
    bar = progress(range(generations), desc="Evolving anchors", unit="generation")
    for _ in bar:
        mutant = (anchors * _mutation(anchors.shape)).clip(min=TINY_PIXELS)
        fitness = _fitness(mutant, wh, thr)
        if fitness > best:
            anchors, best = mutant, fitness
            bar.set_postfix_str(f"fitness {best:.4f}", refresh=False)
    return anchors


def _fitness(anchors, wh, thr):
    """Mean closeness of each box to its best anchor, 0 where that is out of reach."""
    best = closeness(torch.from_numpy(anchors).float(), wh).amax(1)
    return (best * (best > 1 / thr).float()).mean().item()


def _mutation(shape):
    """Random factors between 0.3 and 3, about one in ten exactly 1, but never all of them."""
    while True:
        chosen = np.random.random(shape) < 0.9
        strength = np.random.random()
        factors = (chosen * strength * np.random.randn(*shape) * 0.1 + 1).clip(0.3, 3.0)
        if (factors != 1).any():
            return factors


def _by_area(anchors):
    return anchors[np.argsort(anchors.prod(1))]


def _describe(anchors):
    return ", ".join(f"{width:.0f}x{height:.0f}" for width, height in anchors)
