"""Memory of the host for all images: one copy for the processes of a machine, page-locked so that GPUs can read it.

It has no name and is no file: nothing of it can be left behind, and the size of /dev/shm does not limit it.
"""

import logging
import mmap
import os
import resource
import weakref
from contextlib import suppress

import numpy as np
import torch

from utils.system import distributed
from utils.system.memory import give_back, shared_array

logger = logging.getLogger(__name__)

READABLE_ANYWHERE = 1 | 2  # cudaHostRegisterPortable: by all GPUs; cudaHostRegisterMapped: by kernels
LOCK_ADVICE = "ulimit -l is {}; start the container with --ulimit memlock=-1"


class HostMemory:
    """`bytes` uint8 [num_bytes] zeros; forked workers share them. Raises OSError or MemoryError where there are none.

    With `is_shared` all processes of the run call this at the same time, and those of a machine get the same memory.
    """

    def __init__(self, num_bytes: int, is_shared: bool = False) -> None:
        self.bytes = _of_this_machine(num_bytes) if is_shared else shared_array((num_bytes,), np.uint8)
        self._unlock: weakref.finalize | None = None

    def lock(self, device: torch.device) -> str | None:
        """Page-lock all of it, so that kernels on `device` can read it; None, or why that was refused."""
        status: int | str
        try:
            with torch.cuda.device(device):
                address, size = self.bytes.ctypes.data, self.bytes.nbytes
                status = int(torch.cuda.cudart().cudaHostRegister(address, size, READABLE_ANYWHERE))
        except RuntimeError as error:
            status = str(error).splitlines()[0]
        if status == 0:
            self._unlock = weakref.finalize(self, _unlock, self.bytes, device, os.getpid())
            return None
        with suppress(RuntimeError):  # CUDA keeps a refusal, and would report it after the next kernel
            torch.zeros(1, device=device)
        return f"the system refused to page-lock so much (CUDA: {status}); {LOCK_ADVICE.format(_lock_limit())}"

    def on_device(self, device: torch.device) -> torch.Tensor:
        """The locked bytes as a tensor of `device`: what reads it there goes over PCIe."""
        view = torch.as_tensor(_CudaView(self), device=device)
        assert view.data_ptr() == self.bytes.ctypes.data, "a view, not a copy"
        return view

    def free(self) -> None:
        """Unlock the memory and take its pages away, also from workers that map them; they see zeros then."""
        if self._unlock is not None:
            self._unlock()
        give_back(self.bytes)


class _CudaView:
    """Page-locked HostMemory in the form in which torch takes memory that a GPU can reach."""

    def __init__(self, memory):
        self.memory = memory  # the tensor keeps this object, and so the memory
        self.__cuda_array_interface__ = {
            "shape": memory.bytes.shape, "typestr": "|u1", "data": (memory.bytes.ctypes.data, False), "version": 2,
        }  # fmt: skip


def _unlock(array, device, owner):
    """Undo `HostMemory.lock`; being an argument, `array` lives until then."""
    if os.getpid() == owner:  # not in a forked worker
        with suppress(RuntimeError), torch.cuda.device(device):  # a lost GPU unlocks nothing
            torch.cuda.cudart().cudaHostUnregister(array.ctypes.data)


def _lock_limit():
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 1e6:.1f} MB"


def machine_mates() -> list[int]:
    """The ranks of the processes on this machine, this one among them; [0] for a single process."""
    ranks = distributed.read_ranks()
    firsts = distributed.gather_everywhere(ranks.rank - ranks.local_rank)  # a launcher numbers machine by machine
    return [rank for rank, first in enumerate(firsts) if first == firsts[max(ranks.rank, 0)]]


def _of_this_machine(num_bytes):
    """The same `num_bytes` in all processes of a machine: a file in memory that the first one opens for the others."""
    first = machine_mates()[0]
    descriptor, array, problem = None, None, None
    try:
        if max(distributed.read_ranks().rank, 0) == first:
            descriptor = os.memfd_create("images")
            os.truncate(descriptor, num_bytes)
    except OSError as error:
        problem = error
    path = distributed.gather_everywhere(f"/proc/{os.getpid()}/fd/{descriptor}")[first]
    try:
        descriptor = os.open(path, os.O_RDWR) if descriptor is None and problem is None else descriptor
        array = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8) if problem is None else None
    except OSError as error:
        problem = error
    problems = [found for found in distributed.gather_everywhere(problem) if found]  # after it nobody needs the path
    if descriptor is not None:
        os.close(descriptor)
    if problems:
        raise problems[0]
    return array
