"""Box, objectness and class losses: one computation, given different matches.

    ComputeLoss        all candidate cells are trained on their targets
    ComputeLossOTA     the cells that OTA selects are
    ComputeLossAuxOTA  the same for lead heads, and a coarser selection for auxiliary heads at a quarter of the weight

Each is called as `(predictions, targets, images)` and returns (loss [1], items [4: box, objectness, class, total]); the
loss is multiplied by the batch size, the items are not and carry no gradient.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from utils.loss import assigner
from utils.loss.multi_head import HeadsLoss, LossAndItems, LossOfModel, has_several_heads
from utils.ops.boxes import complete_iou

logger = logging.getLogger(__name__)

Assigner = Callable[..., assigner.Matches]  # with the arguments of `assigner.plain`

# Weight of each layer's objectness, finest layer first: it has the most cells and the smallest share of objects.
OBJECTNESS_BALANCE = {3: (4.0, 1.0, 0.4)}
OBJECTNESS_BALANCE_OTHERWISE = (4.0, 1.0, 0.25, 0.06, 0.02)
AUXILIARY_WEIGHT = 0.25
FOCAL_ALPHA = 0.25
MIN_MISS = 1e-30  # of 1 - p in the focal loss


def smooth_labels(eps):
    """Targets (positive, negative) of the class loss under label smoothing `eps` (arXiv 1902.04103)."""
    return 1 - eps / 2, eps / 2


def binary_loss(logits, labels, positive_weight=1.0, focal_gamma=0.0, reduction="mean"):
    """Mean binary cross-entropy of `logits` and `labels`; gamma above 0 makes it the focal loss (arXiv 1708.02002).

    With the reduction "none" one value for each logit. A repair of stock: where a logit is so certain that 1 - p is 0,
    the gradient of (1 - p)^gamma with gamma below 1 would be infinite, and that of the loss NaN as in stock YOLOv7; so
    1 - p is held at MIN_MISS. No value above it changes.
    """
    weight = torch.full((1,), positive_weight, dtype=torch.float32, device=logits.device)
    if focal_gamma <= 0:
        return F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight, reduction=reduction)
    element = F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight, reduction="none")
    score = logits.sigmoid()
    hit = labels * score + (1 - labels) * (1 - score)
    alpha = labels * FOCAL_ALPHA + (1 - labels) * (1 - FOCAL_ALPHA)
    miss = (1 - hit).to(torch.promote_types(hit.dtype, torch.float32))  # float16 has no MIN_MISS
    element = element * alpha * miss.clamp(min=MIN_MISS) ** focal_gamma
    return element.mean() if reduction == "mean" else element


def objectness_target(score, cells, like):
    """A tensor of the shape and type of `like` [batch x anchors x ny x nx]: `score` [n] at `cells`, 0 elsewhere.

    `cells` is the index (image, anchor, y, x), each [n]. Where a cell occurs more than once the last match in the list
    counts. To write them one after the other leaves that to chance on CUDA; so every match looks up the last match of
    its cell and writes that one's score.
    """
    _, num_anchors, ny, nx = like.shape
    image, anchor, cell_y, cell_x = cells
    flat = ((image * num_anchors + anchor) * ny + cell_y) * nx + cell_x
    position = torch.arange(len(flat), device=flat.device)
    last = torch.zeros(like.numel(), dtype=torch.long, device=flat.device).scatter_reduce(0, flat, position, "amax")
    target = torch.zeros_like(like, memory_format=torch.contiguous_format)
    target.view(-1)[flat] = score[last[flat]].to(like.dtype)
    return target


class ComputeLoss(LossOfModel):
    """The plain loss. Calls `assign` for the matches and sums three terms over all layers.

    `model` as LossOfModel reads it; its head carries nl, nc, anchors [nl x na x 2, grid units] and stride.
    `autobalance` lets the weights of the layers' objectness follow their losses.
    """

    def __init__(self, model, autobalance: bool = False, assign: Assigner = assigner.plain):
        super().__init__(model)
        self.assign = assign
        self.autobalance = autobalance
        num_layers = self.head.nl
        self.balance = list(OBJECTNESS_BALANCE.get(num_layers, OBJECTNESS_BALANCE_OTHERWISE)[:num_layers])

    def __call__(self, predictions: Sequence[Tensor], targets: Tensor, images: Tensor | None = None) -> LossAndItems:
        """Loss [1] and items [4]; of `images` [batch x 3 x height x width] only the size is read, and by OTA alone.

        predictions  per layer [batch x na x ny x nx x 5+nc], raw
        targets      [N x 6: image, class, xywh normalised]
        """
        lead = predictions[: self.head.nl]
        return self.total([(lead, self.matches(lead, targets, images), 1.0)], targets)

    def matches(self, predictions, targets, images, **options):
        """What the assigner says to these predictions; `options` are passed on to it."""
        head = self.head
        return self.assign(
            predictions,
            targets,
            head.anchors.to(targets.device),
            getattr(head, "stride", None),
            None if images is None else images[0].shape[-2:],
            anchor_threshold=self.hyp["anchor_t"],
            **options,
        )

    def total(self, branches, targets):
        """Loss and items over `branches`: (predictions, matches, weight) of the lead heads, then of any others."""
        box, objectness, classes = (torch.zeros(1, device=targets.device) for _ in range(3))
        for layer in range(self.head.nl):
            balance = self.balance[layer]
            for branch, (predictions, matches, weight) in enumerate(branches):
                box_term, object_term, class_term = self.layer_terms(predictions[layer], matches, layer, targets)
                box += weight * box_term
                objectness += weight * balance * object_term
                classes += weight * class_term
                if self.autobalance and branch == 0:  # .item() waits for the device
                    self.balance[layer] = 0.9999 * balance + 0.0001 / object_term.item()
        if self.autobalance:
            reference = self.balance[torch.as_tensor(self.head.stride).tolist().index(16)]
            self.balance = [weight / reference for weight in self.balance]

        box, objectness, classes = (
            self.hyp[gain] * term for gain, term in (("box", box), ("obj", objectness), ("cls", classes))
        )
        total = box + objectness + classes
        batch_size = len(branches[0][0][0])
        return total * batch_size, torch.cat((box, objectness, classes, total)).detach()

    def layer_terms(self, prediction, matches, layer, targets):
        """The mean box, objectness and class loss of one layer, before gains; 0 where there is nothing to average."""
        cells, target = matches.cells(layer), targets[matches.target[layer]]
        rows = prediction[cells]  # [n x 5+nc]
        corner = torch.stack((cells[3], cells[2]), 1)
        grid_size = target.new_tensor((prediction.shape[3], prediction.shape[2]))
        overlap = self.overlap(rows, corner, target[:, 2:6], matches.anchor_size[layer], grid_size)

        # detached: the box learns from the overlap itself, not through the objectness that it is the target of
        score = (1 - self.gr) + self.gr * overlap.detach().clamp(min=0)
        wanted = objectness_target(score, cells, prediction[..., 4])
        object_term = self.binary_loss(prediction[..., 4], wanted, "obj_pw")
        if len(rows) == 0:  # the mean of nothing would be nan; objectness is trained on all cells
            return 0.0, object_term, 0.0
        class_term = self.class_term(rows[:, 5:], target[:, 1].long()) if self.head.nc > 1 else 0.0
        return (1 - overlap).mean(), object_term, class_term

    def overlap(self, rows, corner, true_box, anchor_size, grid_size):
        """CIoU [n] of the boxes that `rows` [n x 5+nc] predict with `true_box` [n x 4, xywh normalised].

        Both are in cells, counted from `corner` [n x 2: x, y] of the matched cell; `grid_size` is (nx, ny).
        """
        centre = rows[:, :2].sigmoid() * 2 - 0.5
        size = (rows[:, 2:4].sigmoid() * 2) ** 2 * anchor_size
        true_centre = true_box[:, :2] * grid_size - corner
        return complete_iou(torch.cat((centre, size), 1), torch.cat((true_centre, true_box[:, 2:] * grid_size), 1))

    def class_term(self, logits, classes):
        """Mean loss of class `logits` [n x nc] where `classes` [n] are true."""
        positive, negative = smooth_labels(self.hyp.get("label_smoothing", 0.0))
        wanted = torch.full_like(logits, negative).scatter_(1, classes[:, None], positive)
        return self.binary_loss(logits, wanted, "cls_pw")

    def binary_loss(self, logits, labels, positive_weight):
        """`binary_loss` with the hyper-parameters of the training; `positive_weight` is the name of one."""
        return binary_loss(logits, labels, self.hyp[positive_weight], self.hyp["fl_gamma"])


class ComputeLossOTA(ComputeLoss):
    """The loss on the cells that OTA selects. Needs the images for their size, and the head's strides."""

    def __init__(self, model, autobalance: bool = False, assign: Assigner = assigner.ota):
        super().__init__(model, autobalance, assign)


class ComputeLossAuxOTA(ComputeLossOTA):
    """The loss of a head with auxiliary outputs: predictions are those of the lead heads, then of the auxiliary heads.

    Both assignments look at the lead heads. The auxiliary heads learn from the coarser one, where all neighbours of a
    target's cell are candidates.
    """

    NUM_IOUS = 20

    def __call__(self, predictions: Sequence[Tensor], targets: Tensor, images: Tensor | None = None) -> LossAndItems:
        lead, auxiliary = predictions[: self.head.nl], predictions[self.head.nl :]
        fine = self.matches(lead, targets, images, num_ious=self.NUM_IOUS)
        coarse = self.matches(lead, targets, images, num_ious=self.NUM_IOUS, reach=1.0)
        return self.total([(lead, fine, 1.0), (auxiliary, coarse, AUXILIARY_WEIGHT)], targets)


Loss = ComputeLoss | HeadsLoss


class LossClasses(NamedTuple):
    """One implementation of the losses: three that are made from a model, and one from a model with several heads."""

    plain: Callable
    ota: Callable
    auxiliary: Callable
    heads: Callable  # (model, one of the above)


REFERENCE = LossClasses(ComputeLoss, ComputeLossOTA, ComputeLossAuxOTA, HeadsLoss)


def build_losses(model, classes: LossClasses = REFERENCE, use_ota: bool | None = None) -> tuple[Loss, Loss]:
    """(training loss, validation loss) for `model`; the validation loss is always the reference.

    A head with auxiliary outputs trains with OTA whatever is asked; for another one `use_ota` decides, and if that is
    None the hyper-parameter loss_ota (1 if missing). A model with several heads trains with the plain loss unless
    `use_ota` is true. stock behaviour: validation reports the plain loss, also in OTA training.
    """
    if has_several_heads(model):
        return classes.heads(model, classes.ota if use_ota else classes.plain), HeadsLoss(model, ComputeLoss)
    validation = ComputeLoss(model)
    if hasattr(validation.head, "m2"):
        return classes.auxiliary(model), validation
    if use_ota is None:
        use_ota = validation.hyp.get("loss_ota", 1) == 1
    return (classes.ota if use_ota else classes.plain)(model), validation


def losses_by_epoch(
    model, epochs: int, classes: LossClasses = REFERENCE, ota_last: int | None = None
) -> tuple[Callable[[int], Loss], Loss]:
    """(function of the epoch that names its training loss, validation loss) for a run of `epochs`.

    With `ota_last` the last so many epochs train with OTA and those before with the plain loss, whatever loss_ota says.
    """
    if ota_last is None:
        training, validation = build_losses(model, classes)
        return (lambda epoch: training), validation
    before, validation = build_losses(model, classes, use_ota=False)
    last, _ = build_losses(model, classes, use_ota=True)
    if hasattr(validation.head, "m2"):
        logger.warning("--ota-last has no effect: a head with auxiliary outputs trains with OTA in all epochs")
    return (lambda epoch: last if epoch >= epochs - ota_last else before), validation
