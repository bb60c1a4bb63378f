"""Which epochs a run has: all of them, unless it stops improving (--patience)."""

import logging

from utils.system.distributed import from_rank_zero
from utils.system.files import counted

logger = logging.getLogger(__name__)


def is_due(best_epoch, tested_epoch, patience):
    """Whether the last validation came `patience` or more epochs after the best one; never with a patience of 0."""
    return bool(patience) and tested_epoch - best_epoch >= patience


def epochs_to_train(progress, patience):
    """Yield the numbers of the epochs that are left, until patience ends; all processes stop at the same one.

    `progress` is kept up to date by the main process. A run that was already due to stop gets no further epoch.
    """
    for epoch in range(progress.start_epoch, progress.epochs):
        stops = is_due(progress.best_epoch, progress.tested_epoch, patience)
        if patience and from_rank_zero(stops):
            logger.info(
                "Stopping before epoch %d: nothing was better than epoch %d for %s (--patience %d)",
                epoch, progress.best_epoch, counted(progress.tested_epoch - progress.best_epoch, "epoch"), patience,
            )  # fmt: skip
            return
        yield epoch


def is_tested(epoch, opt):
    """Whether `epoch` ends with a validation, though it is not the last: --notest, --eval-interval."""
    return not opt.notest and (epoch + 1) % (opt.eval_interval or 1) == 0
