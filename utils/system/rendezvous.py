"""The processes of a launcher meet, before there is a process group, and again after each restart.

torchrun keeps its key-value store when it starts its processes again, and torch (2.14 does) then finds the addresses
of those before. So the processes agree on a prefix that was never used: rank 0 draws it, and hands it to each of the
others in answer to a word that this one has just drawn. What is left of an earlier start answers nobody.
"""

import secrets
import time
from datetime import timedelta
from functools import cache
from itertools import count

import torch.distributed as dist

# How long a process waits for the others. While rank 0 reads images into memory, validates, draws and saves, the others
# stand in their next collective operation, where NCCL gives up after 10 minutes by default. A process that ends, for
# whatever reason, ends the group at once; only for one that hangs does this limit count.
WAIT = timedelta(hours=3)
PAUSE = 0.02  # seconds between two looks
_number = count()


@cache
def fresh_store(rank: int, world_size: int) -> dist.Store:
    """The key-value store of the processes that were started together. All of them have to call it."""
    store = next(dist.rendezvous("env://", timeout=WAIT))[0]
    word = secrets.token_hex(8)
    if rank:
        prefix = _ask(store, rank, word)
    else:
        prefix = word
        for other in range(1, world_size):
            _answer(store, other, prefix)
    return dist.PrefixStore(prefix, store)


def text_of_rank_zero(text: str, rank: int, world_size: int) -> str:
    """The `text` of rank 0 on every rank; all of them have to call it equally often."""
    if world_size == 1:
        return text
    store, name = fresh_store(rank, world_size), f"text {next(_number)}"
    if rank == 0:
        store.set(name, text)
    return store.get(name).decode()


def texts_of_all(text: str, rank: int, world_size: int) -> list[str]:
    """The `text` of every rank on every rank; all of them have to call it equally often. Needs no process group."""
    store, name = fresh_store(rank, world_size), f"texts {next(_number)}"
    store.set(f"{name} {rank}", text)
    return [store.get(f"{name} {other}").decode() for other in range(world_size)]


def _ask(store, rank, word):
    store.set(f"question {rank}", word)
    while True:
        asked, _, prefix = store.get(f"answer {rank}").decode().partition(" ")
        if asked == word:
            store.set(f"thanks {rank}", prefix)
            return prefix
        time.sleep(PAUSE)


def _answer(store, other, prefix):
    """Answer until the process of now, not one before, has read it."""
    while not store.check([f"thanks {other}"]) or store.get(f"thanks {other}").decode() != prefix:
        store.set(f"answer {other}", f"{store.get(f'question {other}').decode()} {prefix}")
        time.sleep(PAUSE)
