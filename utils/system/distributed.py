"""Devices, processes and seeds."""

import hashlib
import json
import logging
import os
import random
import re
import shutil
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from utils.system import rendezvous

logger = logging.getLogger(__name__)

RESUME_ADVICE = "; train.py --resume goes on after the last complete epoch"
# What errors of gloo and NCCL say when another process has gone, or when they cannot reach it.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "NCCL error",
        "NCCL communicator was aborted", "failed to recv", "Socket Timeout")  # fmt: skip


@dataclass(frozen=True)
class Ranks:
    """Place of this process among its siblings. A run without a launcher has rank -1 and world size 1."""

    rank: int = -1
    local_rank: int = -1
    world_size: int = 1

    @property
    def is_main(self):
        """True for the one process that validates, reports and saves."""
        return self.rank in (-1, 0)

    @property
    def is_distributed(self):
        return self.rank != -1


def read_ranks(local_rank=-1):
    """Ranks from the launcher's environment; `local_rank` is the flag that older launchers pass instead of a variable.

    Raises ValueError when the launcher set only a part of RANK, WORLD_SIZE and the local rank.
    """
    rank = int(os.environ.get("RANK", -1))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", local_rank))
    if local_rank != -1 and rank == -1:
        raise ValueError("--local_rank is set by a launcher; start with: torchrun --nproc_per_node N train.py ...")
    if rank != -1 and (local_rank == -1 or not rank < world_size):
        raise ValueError(
            f"RANK is {rank}, WORLD_SIZE {world_size} and LOCAL_RANK {local_rank}, which do not go together; "
            "start with: torchrun --nproc_per_node N train.py ..., or unset RANK"
        )
    return Ranks(rank, local_rank, world_size)


def start_processes(ranks, device):
    """Join the process group of this run: NCCL between GPUs, gloo on the CPU. Nothing to do for a single process."""
    if ranks.is_distributed and not dist.is_initialized():
        if device.type == "cuda" and not dist.is_nccl_available():
            raise ValueError("several GPUs need NCCL, which this torch was built without: use one GPU or another torch")
        # NCCL would guess its GPU, and say so
        backend, which = ("nccl", {"device_id": device}) if device.type == "cuda" else ("gloo", {})
        try:
            store = rendezvous.fresh_store(ranks.rank, ranks.world_size)
            dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size,
                                    timeout=rendezvous.WAIT, **which)  # fmt: skip
        except RuntimeError as error:
            raise cannot_exchange(error, device) from error


def stop_processes():
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def lost_process(error: BaseException) -> str | None:
    """One sentence about an error of a collective operation whose other side has gone; None for any other error."""
    text = str(error)
    is_ours = isinstance(error, dist.DistError) if dist.is_available() else False
    if not is_ours and not any(sign in text for sign in LOST):
        return None
    reason = text.strip().splitlines()[0]
    return f"another process of this run has ended, or cannot be reached{RESUME_ADVICE} ({reason})"


def cannot_exchange(error: BaseException, device: torch.device) -> ValueError:
    """What to raise when processes on such devices could not exchange anything from the start, because of `error`."""
    reason = str(error).strip().splitlines()[0]
    return ValueError(f"the processes cannot exchange data: {exchange_advice(device)} ({reason})")


def exchange_advice(device: torch.device) -> str:
    """What to look at when processes on such devices cannot exchange data."""
    if device.type != "cuda":
        return "GLOO_SOCKET_IFNAME=NAME names the network interface that gloo shall use"
    advice = "NCCL_P2P_DISABLE=1 helps GPUs without peer access, NCCL_SHM_DISABLE=1 where /dev/shm is too small"
    with suppress(OSError):
        advice += f" (it has {shutil.disk_usage('/dev/shm').total / 2**20:,.0f} MB)"
    return advice + ", NCCL_SOCKET_IFNAME=NAME names the network interface, NCCL_DEBUG=INFO tells more"


@contextmanager
def first_on_each_machine(rank):
    """The first process of each machine runs the body first (it writes caches), the others after it (they read them).

    Machines may have disks of their own. `rank` is -1 for a process that does this alone; a launcher that does not tell
    the local rank in the environment has started one machine.
    """
    is_together = rank >= 0 and dist.is_initialized()
    is_first = int(os.environ.get("LOCAL_RANK", rank)) == 0
    if is_together and not is_first:
        dist.barrier()
    try:
        yield
    finally:  # after an error as well, or the others would wait for ever
        if is_together and is_first:
            dist.barrier()


@torch.no_grad()
def broadcast_tensors(tensors):
    """Give every process the values that rank 0 has in `tensors`, such as model.buffers(); in place."""
    tensors = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # one message for all of a type
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in alike])
        dist.broadcast(flat, 0)
        for tensor, values in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            tensor.copy_(values.view_as(tensor))


def gather_lists(items):
    """The lists of all processes as one, in the order of the ranks, at rank 0; an empty list elsewhere.

    Tensors in the entries (themselves, or in a tuple) arrive in host memory.
    """
    lists = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object([_on_host(item) for item in items], lists)
    return [item for part in lists or () for item in part]


def _on_host(item):
    if isinstance(item, tuple):
        return tuple(map(_on_host, item))
    return item.cpu() if isinstance(item, torch.Tensor) else item


def gather_everywhere(value):
    """What all processes have for `value`, by rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_alike(given):
    """Raise ValueError when another process has another value for an entry of `given`; it names those. All call it.

    By way of the launcher's store: before it is known whether the processes can exchange anything else.
    """
    if not dist.is_initialized():
        return
    mine = {name: hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
            for name, value in given.items()}  # fmt: skip
    first, *others = map(json.loads, rendezvous.texts_of_all(json.dumps(mine), dist.get_rank(), dist.get_world_size()))
    for rank, theirs in enumerate(others, 1):
        if different := [name for name, value in theirs.items() if value != first[name]]:
            raise ValueError(f"rank {rank} does not have the {', '.join(different)} of rank 0: every machine needs the "
                             "same command line, and files that say the same")  # fmt: skip


def from_rank_zero(value):
    """What rank 0 has for `value`, on every rank; `value` itself in a single process."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, 0)
    return values[0]


def check_device(device):
    """Raise ValueError when `select_device` would find that this machine lacks what `device` names; takes nothing."""
    name = _device_name(device)
    if name in ("", "cpu") or "CUDA_VISIBLE_DEVICES" in os.environ:  # which hides GPUs that `device` may name
        return
    count = _count_gpus(device)
    if absent := [number for number in name.split(",") if int(number) >= count]:
        raise ValueError(f"--device {device} names GPU {absent[0]}, but {count} can be seen, the first is 0")


def _device_name(device):
    """What `device` names: '' (the best there is), 'cpu', or numbers of GPUs as '0,1'; ValueError for anything else."""
    name = str(device).strip().lower().replace("cuda:", "").replace("cuda", "")
    if name not in ("", "cpu") and not re.fullmatch(r"\s*[0-9]+\s*(,\s*[0-9]+\s*)*", name):
        raise ValueError(f"--device {device!r} is unknown: give cpu, 0, or a list like 0,1")
    return name


def _count_gpus(device):
    if not torch.cuda.is_available():
        raise ValueError(f"--device {device} asks for a GPU, but torch {torch.__version__} sees none; use --device cpu")
    return torch.cuda.device_count()


def select_device(device="", batch_size=None, ranks=None):
    """The torch device that `device` ('', 'cpu', '0', '0,1', 'cuda:0') names; logs what it is.

    '' is the first GPU, or the CPU where there is none. With a launcher every process takes the GPU of its local rank.
    Raises ValueError for an unknown device, a missing GPU, or a batch that does not divide among the GPUs.
    """
    ranks, name = ranks or Ranks(), _device_name(device)
    if name == "cpu" or (name == "" and not torch.cuda.is_available()):
        logger.info("Device: CPU, torch %s", torch.__version__)
        return torch.device("cpu")
    if name:
        # Must happen before the first CUDA call of this process; the numbers then count the visible cards.
        os.environ["CUDA_VISIBLE_DEVICES"] = name
    wanted, count = name.split(",") if name else ["0"], _count_gpus(device)
    if count < len(wanted):
        raise ValueError(f"--device {device} names {len(wanted)} GPUs, but {count} can be seen")
    if ranks.is_distributed:
        if ranks.local_rank >= count:
            raise ValueError(f"{ranks.world_size} processes were started, but only {count} GPUs can be seen")
        torch.cuda.set_device(ranks.local_rank)
        chosen = torch.device("cuda", ranks.local_rank)
    else:
        chosen = torch.device("cuda", 0)
    if batch_size is not None and len(wanted) > 1 and batch_size % len(wanted):
        raise ValueError(f"--batch-size {batch_size} does not divide among {len(wanted)} GPUs")
    properties = torch.cuda.get_device_properties(chosen)
    logger.info("Device: %s %s, %.0f MB, torch %s", chosen, properties.name, properties.total_memory / 2**20,
                torch.__version__)  # fmt: skip
    return chosen


def time_synchronized() -> float:
    """The time in seconds, after the GPU has done all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.time()


def init_seeds(seed=0):
    """Seed Python, NumPy and torch. Seed 0 makes cuDNN deterministic, any other lets it search for fast kernels."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = seed == 0
    torch.backends.cudnn.benchmark = seed != 0


def data_parallel(model, device, ranks, devices="", sync_bn=False):
    """The model as training calls it: wrapped for one of several processes, or for the list `devices` of GPUs.

    A launcher's only process needs no wrapper: it has nobody to share gradients with.
    """
    on_gpu = device.type == "cuda"
    if ranks.world_size > 1:
        model = without_wrapper(model, device, ranks, devices, sync_bn)
        # In channels-last order a weight of one cell has two orders that are the same; its gradient may have the other.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=[device] if on_gpu else None)
    if on_gpu and not ranks.is_distributed and "," in str(devices):
        logger.warning("several GPUs in one process are slow: start with torchrun --nproc_per_node N train.py ...")
        return torch.nn.DataParallel(model)
    return model


def without_wrapper(model, device, ranks, devices="", sync_bn=False):
    """As `data_parallel`, for steps that exchange gradients themselves: the bare model, its BatchNorm as asked for."""
    if sync_bn and device.type == "cuda" and ranks.world_size > 1:
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
    return model


def unwrap(model):
    """The model inside a (Distributed)DataParallel wrapper, or the model itself."""
    wrappers = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    return model.module if isinstance(model, wrappers) else model
