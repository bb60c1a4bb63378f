"""--fast-val of several processes: each scores a share of the images, and rank 0 joins what they found.

The shares are whole batches in their order (`share` of create_dataloader), so that every batch is one that a single
process makes of the data set, and those of all ranks, one after the other, are its list: equal outputs, equal scores.
"""

import itertools
from collections.abc import Callable
from functools import partial

from utils.system import distributed


def shared(evaluate: Callable, with_room: Callable) -> Callable:
    """What all processes call together instead of `evaluate`, the reference or the fast one.

    Each gives the loader of its own share; all get the Evaluation of the whole data set. One that is out of memory
    tries again by its `with_room`, and does not make the others do so: what they have sent is asked for once.
    """
    return partial(_evaluate, evaluate, with_room)


def _evaluate(evaluate, with_room, model, loader, *args, **options):
    # The average of another rank began with weights of its own, and has batch statistics of its own.
    distributed.broadcast_tensors(model.state_dict().values())
    answers = []  # to the questions that an attempt asks all processes, in its order
    evaluation = with_room(lambda: evaluate(model, loader, *args, gather=asked_once(answers), **options))()
    return distributed.from_rank_zero(evaluation)  # one rank scores, as processors sort equal confidences differently


def asked_once(answers: list) -> Callable:
    """`gather_lists` that takes the first answers from `answers`, and adds new ones there."""
    numbers = itertools.count()

    def gather(items):
        number = next(numbers)
        if number == len(answers):
            answers.append(distributed.gather_lists(items))
        return answers[number]

    return gather
