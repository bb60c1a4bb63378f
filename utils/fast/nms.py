"""`nms.non_max_suppression` for all images of a batch at once: the same boxes in the same order, in few kernels.

The candidates of every image, best first, are taken a block at a time. A block loses what the boxes kept so far
overlap, then what its own better boxes overlap; images that have all their boxes take no part in the next block.
"""

from typing import NamedTuple

import torch

from utils.ops.boxes import paired_iou, xywh2xyxy
from utils.ops.nms import CLASS_OFFSET, MAX_CANDIDATES, MAX_DETECTIONS

BLOCK = 512  # candidates
MAX_SCORES = 1 << 27  # class scores that are looked at together; more images are taken in turns


class Detections(NamedTuple):
    """`rows` [images x 300 x 6: x1, y1, x2, y2, confidence, class] float32, best first; `count` [images] are filled."""

    rows: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]  # a tuple has a method of this name, which nobody calls

    @property
    def valid(self):
        """[images x 300] which rows are filled."""
        return torch.arange(self.rows.shape[1], device=self.rows.device) < self.count[:, None]

    def per_image(self):
        """A list of [k x 6], as `non_max_suppression` returns it."""
        return [rows[:count] for rows, count in zip(self.rows, self.count.tolist(), strict=True)]


def stacked(detections):
    """Detections of a list of [k x 6], as the reference returns it; at least one."""
    rows = torch.zeros(len(detections), MAX_DETECTIONS, 6)
    for slots, found in zip(rows, detections, strict=True):
        slots[: len(found)] = found
    return Detections(rows, torch.tensor([len(found) for found in detections]))


class Candidates(NamedTuple):
    """Boxes above the threshold, image after image, best first; equal scores in the order of the predictions."""

    rows: torch.Tensor  # [n x 6] as in Detections
    first: torch.Tensor  # [images] where those of an image begin
    count: torch.Tensor  # type: ignore[assignment]  # [images]


def non_max_suppression(prediction, conf_thres, iou_thres):
    """Detections of `prediction` [images x n x 5 + nc], every class of a box counted (multi-label)."""
    step = max(1, MAX_SCORES // max(prediction[0].numel(), 1)) if len(prediction) else 1
    parts = [_suppress(find_candidates(part, conf_thres), iou_thres) for part in prediction.split(step)]
    return Detections(*map(torch.cat, zip(*parts, strict=True)))


def find_candidates(prediction, conf_thres):
    """The Candidates of `prediction` [images x n x 5 + nc]; waits for the device once."""
    objectness, classes = prediction[..., 4:5], prediction[..., 5:]
    # stock behaviour: with one class the objectness alone is the score; half predictions are multiplied in half
    scores = objectness if classes.shape[-1] == 1 else classes * objectness
    image, box, label = (scores > conf_thres).nonzero(as_tuple=True)
    score = scores[image, box, label].float()
    order = score.argsort(descending=True, stable=True)
    order = order[image[order].argsort(stable=True)]
    image, box = image[order], box[order]
    boxes_xyxy = xywh2xyxy(prediction[image, box, :4]).float()
    rows = torch.cat((boxes_xyxy, score[order, None], label[order, None].float()), 1)
    count = torch.zeros(len(prediction), dtype=torch.long, device=rows.device)
    count.index_add_(0, image, torch.ones_like(image))
    return Candidates(rows, count.cumsum(0) - count, count.clamp(max=MAX_CANDIDATES))


def _suppress(candidates, iou_thres):
    """Detections of `candidates`: those that no better kept one overlaps beyond `iou_thres`."""
    num_images, device = len(candidates.count), candidates.rows.device
    # one more slot: there goes what nobody keeps
    kept = torch.zeros(num_images, MAX_DETECTIONS + 1, 6, device=device)
    num_kept = torch.zeros(num_images, dtype=torch.long, device=device)
    for start in range(0, MAX_CANDIDATES, BLOCK):
        active = ((num_kept < MAX_DETECTIONS) & (candidates.count > start)).nonzero()[:, 0]
        if not len(active):
            break
        position = start + torch.arange(BLOCK, device=device)
        alive = position < candidates.count[active, None]  # [active x BLOCK]
        index = (candidates.first[active, None] + position).clamp(max=len(candidates.rows) - 1)
        block = candidates.rows[index]
        keep = _survivors(block, alive, kept[active, :-1], num_kept[active], iou_thres)
        slot = (num_kept[active, None] + keep.cumsum(1) - 1).clamp(max=MAX_DETECTIONS)
        slot = torch.where(keep, slot, MAX_DETECTIONS)
        kept[active[:, None], slot] = block
        num_kept[active] = (num_kept[active] + keep.sum(1)).clamp(max=MAX_DETECTIONS)
    detections = Detections(kept[:, :-1], num_kept)
    return detections._replace(rows=detections.rows * detections.valid[..., None])


def _survivors(block, alive, kept, num_kept, iou_thres):
    """Which rows of `block` [a x b x 6] stay, [a x b]: they are `alive`, and no row of `kept` [a x k x 6] or better
    row of the block that stays overlaps them."""
    shifted, kept_shifted = _apart(block), _apart(kept)
    is_kept = torch.arange(kept.shape[1], device=block.device) < num_kept[:, None]
    if is_kept.any():
        hit = paired_iou(kept_shifted[:, :, None], shifted[:, None]) > iou_thres
        alive = alive & ~(hit & is_kept[..., None]).any(1)
    overlaps = (paired_iou(shifted[:, :, None], shifted[:, None]) > iou_thres).triu(1)  # [a x better x worse]
    # What a row does depends on better rows only. So after i rounds the first i rows at least are settled, and when
    # nothing changes all are: chains of rows that suppress each other are short.
    keep = alive
    while True:
        settled = alive & ~(overlaps & keep[..., None]).any(1)
        if torch.equal(settled, keep):
            return keep
        keep = settled


def _apart(rows):
    """Boxes [... x 4] of `rows` [... x 6], those of each class on a plane of their own."""
    # stock behaviour: a fixed offset, so on inputs above 4096 pixels neighbouring classes can meet
    return rows[..., :4] + rows[..., 5:6] * CLASS_OFFSET
