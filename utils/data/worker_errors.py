"""How a loader says what went wrong in one of its worker processes."""

import os
import sys
from multiprocessing.queues import Queue

from utils.system.files import printable


class LoaderError(ValueError):
    """The loader cannot go on; one sentence with the sample and the cause."""


def end_with_a_lost_batch(worker_id):
    """For the `worker_init_fn` of torch's DataLoader: a worker that cannot pass a batch on ends.

    Left alone it drops the batch, for which the main process then waits in vain. The usual cause is a full /dev/shm.
    """

    def end(error, batch):
        try:
            print(f"loader worker {worker_id} cannot pass on a batch: {describe(error)}", file=sys.stderr, flush=True)
        finally:  # also when nobody reads that any more
            os._exit(1)

    Queue._on_queue_feeder_error = staticmethod(end)


def about(file, text):
    """`text` with the name of the `file` in front, if it does not begin with that already."""
    return text if text.startswith(f"{printable(file)}:") else f"{printable(file)}: {text}"


def describe(error):
    """An exception as a part of a sentence."""
    if isinstance(error, MemoryError):
        return "out of memory; fewer --workers or a smaller batch need less"
    text = printable(error).strip() or "no message"
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
