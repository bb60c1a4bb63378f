"""Several processes of one run, forked from this one, so that they start at once; gloo, on the CPU."""

import multiprocessing
import os
import socket
import sys
import traceback
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from utils.system import distributed


class Ended(NamedTuple):
    """How a process ended: its status (negative: the signal), what it wrote; None while it had to be killed."""

    status: int | None
    text: str


def run_ranks(body, folder, count=2, timeout=120):
    """Call body(rank) in `count` processes of one group; returns an Ended for each.

    Those that do not end within `timeout` seconds, or soon after the first, are killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_child, args=(body, folder, rank, count, port)) for rank in range(count)]
    for process in processes:
        process.start()
    ended = []
    for rank, process in enumerate(processes):
        process.join(timeout if rank == 0 else 3)
        is_stuck = process.exitcode is None
        if is_stuck:
            process.kill()
            process.join()
        text = (folder / f"rank{rank}.txt").read_text(errors="replace")
        ended.append(Ended(None if is_stuck else process.exitcode, text))
    return ended


def _child(body, folder, rank, count, port):
    torch.set_num_threads(1)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in where.items()})
    file = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
    status = 0
    try:
        distributed.start_processes(distributed.read_ranks(), torch.device("cpu"))
        body(rank)
        if dist.is_initialized():
            dist.barrier()
        distributed.stop_processes()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
