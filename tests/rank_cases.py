"""Several processes of one run, which start at once (see forked.py); gloo, on the CPU."""

import os
import socket

import torch
import torch.distributed as dist

from tests.forked import Forked
from utils.system import distributed


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_ranks(body, folder, count=2, timeout=120):
    """Call body(rank), which forked.py has to find, in `count` processes of one group; returns a forked.Ended for each.

    Those that do not end within `timeout` seconds, or soon after the first, are killed.
    """
    port = free_port()
    ranks = [Forked(folder / f"rank{rank}.txt", _in_group, body, rank, count, port) for rank in range(count)]
    return [process.end(3 if rank else timeout) for rank, process in enumerate(ranks)]


def _in_group(body, rank, count, port):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in where.items()})
    distributed.start_processes(distributed.read_ranks(), torch.device("cpu"))
    body(rank)
    if dist.is_initialized():
        dist.barrier()
    distributed.stop_processes()
