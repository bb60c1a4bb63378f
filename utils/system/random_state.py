"""Random generators: their states as plain values that a checkpoint may hold, and streams that derive from --seed."""

import random
from contextlib import contextmanager

import numpy as np
import torch

from utils.system.distributed import gather_everywhere

# What a stream is for; the first part of what it is derived from after the seed.
SAMPLE, GROUP, ORDER, EPOCH = range(4)


def seed_generators(*numbers):
    """Seed Python's and NumPy's global generators from non-negative integers; ValueError for others."""
    if min(numbers) < 0:
        raise ValueError(f"a seed is made of non-negative numbers, not of {min(numbers)}")
    random.seed(b"%d " * len(numbers) % numbers)  # their hash
    np.random.seed(random.getrandbits(32))  # one number: NumPy takes five times as long for several


@contextmanager
def generators_kept():
    """Whatever the body draws, the global generators go on afterwards as if it had not."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def seed_epoch(seed, epoch):
    """At the start of an epoch: what the main process draws itself (--image-weights, --multi-scale). None: nothing."""
    if seed is not None:
        seed_generators(seed, EPOCH, epoch)


def capture():
    """The states of this process: Python, NumPy, torch, and the GPU in use if there is one; tensors and numbers."""
    _, words, gauss = random.getstate()
    ours = np.random.get_state(legacy=False)
    state = {
        "python": {"words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "words": torch.from_numpy(ours["state"]["key"].astype(np.int64)),
            "position": int(ours["state"]["pos"]),
            "has_gauss": int(ours["has_gauss"]),
            "gauss": float(ours["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state):
    """Put the generators of this process where they were at `capture`. ValueError when `state` is none of its kind."""
    try:
        python, ours = state["python"], state["numpy"]
        random.setstate((3, tuple(python["words"].tolist()), python["gauss"]))
        inner = {"key": ours["words"].numpy().astype(np.uint32), "pos": ours["position"]}
        np.random.set_state({"bit_generator": "MT19937", "state": inner, "has_gauss": ours["has_gauss"],
                             "gauss": ours["gauss"]})  # fmt: skip
        torch.set_rng_state(state["torch"].cpu())
        if "cuda" in state and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(state["cuda"].cpu())
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the random states of the checkpoint cannot be used ({error})") from error


@contextmanager
def kept():
    """Whatever the body draws, the generators go on afterwards as if it had not."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


def of_all_ranks(ranks):
    """The states of all processes by rank; all of them have to call it. A single process only looks at itself."""
    return gather_everywhere(capture()) if ranks.is_distributed else [capture()]


def resume(progress, ranks):
    """Draw from here on what the interrupted run would have drawn, if its checkpoint holds a state for each rank.

    With other numbers of ranks, or without any state, each process starts a stream that derives from its rank and the
    epoch, so that nothing is drawn twice. A fresh run is left alone.
    """
    if progress.random_states is None:
        return
    if len(progress.random_states) == ranks.world_size:
        restore(progress.random_states[max(ranks.rank, 0)])
    else:
        numbers = 2 + ranks.rank, progress.start_epoch
        seed_generators(*numbers)
        torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))
