"""How --overfit trains: settings with which a model can memorise a few images within a few hundred steps."""

from torch import nn

from utils.engine.optimizer import NOMINAL_BATCH

SHORT_WARMUP = {"warmup_min_iters": 30, "warmup_epochs": 0.0}
# BatchNorm's running statistics have to keep up with weights that change fast; the images are always the same.
MOMENTUM = 0.3


def short_warmup(hyp: dict) -> dict:
    """The hyper-parameters with a warm-up that is over soon, unless the file names its length itself."""
    return hyp | SHORT_WARMUP if "warmup_min_iters" not in hyp else hyp


def quicken_statistics(model: nn.Module) -> None:
    """Give BatchNorm of a model that memorises images a short memory."""
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.momentum = MOMENTUM


def batch_weight(num_images: int, total_batch: int) -> float:
    """How many batches one batch counts for, in an epoch of `num_images`.

    The epoch is too short to collect the gradients of a nominal batch, so each batch stands for one.
    """
    return NOMINAL_BATCH / min(total_batch, num_images)
