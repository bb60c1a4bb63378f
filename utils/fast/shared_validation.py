"""--fast-val of several processes: each scores a share of the images, and rank 0 joins what they found.

The shares are whole batches in their order (`share` of create_dataloader), so that every batch is one that a single
process makes of the data set, and those of all ranks, one after the other, are its list: equal outputs, equal scores.
"""

from collections.abc import Callable
from functools import partial

from utils.system import distributed


def shared(evaluate: Callable) -> Callable:
    """What all processes call together instead of `evaluate`, the reference or the fast one.

    Each gives the loader of its own share; all get the Evaluation of the whole data set.
    """
    return partial(_evaluate, evaluate)


def _evaluate(evaluate, model, loader, *args, **options):
    # The average of another rank began with weights of its own, and has batch statistics of its own.
    distributed.broadcast_tensors(model.state_dict().values())
    evaluation = evaluate(model, loader, *args, gather=distributed.gather_lists, **options)
    return distributed.from_rank_zero(evaluation)  # one rank scores, as processors sort equal confidences differently
