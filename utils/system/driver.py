"""The driver of the GPU, started while Python still imports torch, and told when a program is done.

It is started when torch's libraries are loaded and Python imports the modules: libraries and driver both map memory
hundreds of times, and at the same time they would only wait for each other.
"""

import ctypes
import os
import sys
import time
from collections.abc import Mapping, Sequence
from threading import Thread, main_thread

FLAGS = ("--fast", "--cuda-graph")  # of runs that want to begin soon
OTHERS = ("--device", "--resume", "--help")  # the GPU, or whether there is work, is not known before these are read
LIBRARIES = "torch._C"  # module that loads them
LAUNCHED = "RANK"  # environment variable of one of several processes, each with a GPU of its own


def wants_speed(words: Sequence[str]) -> bool:
    """Whether the command line `words` asks for a fast run."""
    return any(word.startswith(FLAGS) for word in words)


def start_ahead(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> Thread | None:
    """Let a thread open the first GPU, if the command line `words` asks for a fast run there; returns the thread.

    torch later uses the very same context. Where anything fails nothing is said: torch will find out, and say it.
    """
    typed = [word.partition("=")[0] for word in words]
    # argparse takes --dev for --device; a driver that has started no longer reads which GPUs it is to see
    names_others = any(other.startswith(word) for other in OTHERS for word in typed if len(word) > len("--"))
    if not wants_speed(words) or LAUNCHED in environment or names_others:
        return None
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch sets it, which the driver reads once
    # No daemon: Python ends such threads wherever they are, which inside a library of C++ aborts the process.
    thread = Thread(target=_open_in_time, name="starting the driver")
    thread.start()
    return thread


def _open_in_time():
    """Open the first GPU as soon as torch has its libraries; never, if the program ends before."""
    while LIBRARIES not in sys.modules:
        if not main_thread().is_alive():
            return
        time.sleep(0.005)
    open_first_gpu()


def open_first_gpu(load=ctypes.CDLL) -> bool:
    """Make the context that all libraries of this process share on GPU 0, and keep it; whether that worked."""
    try:
        driver = load("libcuda.so.1")
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
        and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    )


def give_back_gpus(load=ctypes.CDLL) -> None:
    """Let the driver take back, as a whole, what this process has on its GPUs; nothing may use them afterwards.

    A process that ends without it has everything taken back piece by piece.
    """
    try:
        driver = load("libcuda.so.1")
    except OSError:
        return
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    for number in range(count.value):
        device = ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(device), number) == 0:
            driver.cuDevicePrimaryCtxReset_v2(device)
