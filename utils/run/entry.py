"""How the programs start: log format, and errors of the user as one line instead of a traceback."""

import argparse
import atexit
import errno
import gc
import logging
import os
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import partial, partialmethod

from tqdm import tqdm

from utils.system.children import end_with_starter
from utils.system.driver import give_back_gpus
from utils.system.files import folded, printable
from utils.system.memory import is_out_of_memory
from utils.system.signals import Terminated, interrupt_raised, sigterm_raised, status_of
from utils.system.streams import LastingStream, keep_streams, wants_traceback

# Modules whose warnings are about this process and its batches; what the others warn of is the same in every process.
OWN_NEWS = ("utils.data.fast.shm_batches", "utils.fast.graph_step", "utils.fast.loss_readback")
# Errors of torch that are no bugs, by their first words: what can be done about them.
MACHINE_FAULTS = {
    "DataLoader timed out": "; is /dev/shm too small (start the container with a larger --shm-size), or a disk gone?",
    "A process in the process pool": "; if memory ran out, other programs have to end first",
    "DataLoader worker": "; if memory or /dev/shm ran out, fewer --workers or a smaller --batch-size need less",
}
SHOW_KERNEL = "YOLOV7FAST_TRACEBACK=1 CUDA_LAUNCH_BLOCKING=1 shows which"
GPU_FAULTS = ("unspecified launch failure", "uncorrectable ECC", "unknown error", "GPU is lost")
RESUME = "train.py --resume goes on after the last complete epoch"  # only said to those who train
MAX_CHARACTERS = 3000  # of an error; paths can be long
FULL = f"; make room, then {RESUME}"
ADVICE = {errno.ENOSPC: FULL, errno.EDQUOT: FULL, errno.EFBIG: FULL, errno.EMFILE: "; raise the limit with ulimit -n"}
LESS_MEMORY = {
    "workers": "fewer --workers",
    "batch_size": "a smaller --batch-size",
    "cache_images": "no --cache-images",
}


class NothingToDo(Exception):
    """The run that was asked for is complete; the message says so."""


def set_logging(rank: int = -1, local_rank: int = -1) -> None:
    """Log lines go to the standard output.

    Of the processes of a run, rank 0 says everything. The first one of each further machine warns, as that may have
    files of its own; all others only warn of what no other process knows.
    """
    handler = _Handler(LastingStream(sys.stdout))  # also for a script that does not call `run`
    handler.setFormatter(_Formatter("%(message)s"))
    if rank > 0:
        handler.setFormatter(_Formatter(f"process {rank}: %(message)s"))
    if rank > 0 and local_rank != 0:
        handler.addFilter(lambda record: record.levelno > logging.WARNING or record.name in OWN_NEWS)
    logging.basicConfig(handlers=[handler], level=logging.INFO if rank <= 0 else logging.WARNING)
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # its first start has news that nobody can use


def run(main: Callable[[Namespace], None], opt: Namespace, go_on: str = RESUME) -> None:
    """Call main(opt) and leave the process: status 0, or 2 with one sentence for wrong input or a file that failed.

    Ctrl-C and SIGTERM end it with one line, which says how to `go_on`, and with the status that a shell would give; a
    second one ends the process at once. Log and progress bars go to the standard output and the standard error; the run
    goes on when nobody reads them any more, as after `train.py | head`.
    YOLOV7FAST_TRACEBACK=1 shows where an error came from.
    """
    end_with_starter()
    keep_streams()
    atexit.register(gc.freeze)  # or Python would look through a million objects for cycles, for a second, as it ends
    rank, local_rank = (_number_in(name) for name in ("RANK", "LOCAL_RANK"))
    set_logging(rank, local_rank)
    if rank > 0:  # the bars of rank 0 stand for all
        tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)
    threading.excepthook = partial(_report_thread, opt=opt)
    sys.unraisablehook = _report_unraisable
    status = 0
    kept: list[BaseException] = []
    try:
        interrupt_raised()
        _check_working_directory()
        with sigterm_raised():
            main(opt)
    except NothingToDo as message:
        logging.getLogger("run").info("%s", message)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        sentence = out_of_memory(error, opt) if is_out_of_memory(error) else _lost_process(error)
        sentence = sentence or (_failed_gpu(error, opt) if isinstance(error, RuntimeError) else None)
        is_bug = isinstance(error, RuntimeError) and not str(error).startswith(tuple(MACHINE_FAULTS))
        if wants_traceback() or (is_bug and not sentence):
            raise
        status = refuse(ValueError(sentence) if sentence else error, opt)
        kept.append(error)
    except KeyboardInterrupt as interruption:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        what = "ended by SIGTERM" if isinstance(interruption, Terminated) else "interrupted"
        print(_for_program(f"{what}; {go_on}", opt).rstrip("; "), file=sys.stderr, flush=True)
        status = status_of(interruption)
        kept.append(interruption)
    if gpu_failure():
        _leave(status)
    if status:
        sys.exit(status)


def gpu_failure() -> str | None:
    """What the GPU says of work of this process that failed there, after which it does no more; None if there is none.

    It waits for nothing.
    """
    cuda = _cuda_in_use()
    try:
        # To ask in the midst of a capture would break it.
        if cuda and not cuda.is_current_stream_capturing():
            cuda.current_stream().query()
    except RuntimeError as failure:
        return str(failure)
    return None


def _cuda_in_use():
    """torch.cuda, if this process uses a GPU; None otherwise."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # none while torch is being imported
    return cuda if cuda and cuda.is_initialized() else None


def leave() -> None:
    """End a program that is done, sooner than Python would; without a GPU in use nothing happens.

    What is to be done at the exit is done, but no object goes by itself, nor memory of a GPU.
    """
    if _cuda_in_use():
        _leave(0, give_back_gpus)


def _leave(status, last=lambda: None):
    """End this process: threads and what is to be done at the exit first, as usual, then `last`, but no object goes.

    After a `gpu_failure` torch aborts when it cannot record an event for memory that goes; errors, which hold much,
    have to be kept.
    """
    gc.disable()
    try:
        with suppress(Exception, KeyboardInterrupt):  # Ctrl-C ends the wait for a thread
            threading._shutdown()
            atexit._run_exitfuncs()
            last()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status)


def _report_unraisable(unraisable):
    """What fails while an object goes is no news after a `gpu_failure`, which each of them meets."""
    if gpu_failure() is None:
        sys.__unraisablehook__(unraisable)


def _number_in(name):
    """The number in an environment variable of a launcher; -1 where there is none."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else -1


def _check_working_directory():
    """Raise ValueError when somebody has removed the folder that this process was started in."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ValueError("the folder that this was started in has been removed; go to another one") from error


def _lost_process(error):
    """`distributed.lost_process`, if that is imported: tools that need no torch begin and end without it."""
    distributed = sys.modules.get("utils.system.distributed")
    return distributed and distributed.lost_process(error)


def _failed_gpu(error, opt):
    """One sentence about an error after which the GPU does no more work for this process; None for any other error.

    Whatever asks the GPU next meets it, in words of torch, Triton or cuDNN; so the GPU is asked.
    """
    found = gpu_failure()
    reason = found or str(error)
    is_its_own = any(f"CUDA error: {fault}" in reason for fault in GPU_FAULTS)
    if not found and not is_its_own:
        return None
    what = "the GPU" if is_its_own else f"a kernel on the GPU ({SHOW_KERNEL})"
    return _for_program(f"{reason.strip().splitlines()[0].rstrip('.')}; {what} failed, {RESUME}", opt)


def out_of_memory(error, opt):
    """What to tell the user: what was asked for, and what needs less."""
    place = "the host" if "DefaultCPUAllocator" in str(error) else "the GPU"
    size = getattr(opt, "img_size", None)
    size = max(size) if isinstance(size, list) else size
    asked = f"batch size {getattr(opt, 'total_batch_size', getattr(opt, 'batch_size', '?'))} and image size {size}"
    if getattr(opt, "resume", False):  # its options are in its own opt.yaml
        asked = "the batch and image size of the resumed run"
    of_validation = " (--test-batch-size if it was a validation)" * hasattr(opt, "test_batch_size")
    advice = f"a smaller --batch-size{of_validation}, a smaller --img-size"
    if hasattr(opt, "amp"):
        advice += ", or --amp fp16"
    if getattr(opt, "cache_images", None) == "gpu":
        advice += ", or --cache-images ram"
    reason = str(error).strip().splitlines()[0].split(" If reserved but")[0]
    return f"{place} has too little memory for {asked}: give {advice} ({reason})"


def _for_program(sentence, opt):
    """`sentence`, of a program without --resume without the advice to use it."""
    return sentence if hasattr(opt, "resume") else sentence.removesuffix(RESUME).removesuffix("then ").rstrip(",; ")


def _report_thread(fault, opt=None):
    """A file that failed in a thread, such as TensorBoard's, is one line; whoever waits for the thread gets the error.

    Anything else is a bug, and a traceback.
    """
    if isinstance(fault.exc_value, OSError) and not wants_traceback():
        logging.getLogger("run").warning("a file is not complete: %s", printable(_describe(fault.exc_value, opt)))
    else:
        threading.__excepthook__(fault)


def refuse(error: BaseException, opt: Namespace | None = None) -> int:
    """Print the one sentence about an error that ends the program of these options; returns the exit status."""
    text = printable(_describe(error, opt))
    print(f"error: {text[:MAX_CHARACTERS]}{'...' * (len(text) > MAX_CHARACTERS)}", file=sys.stderr, flush=True)
    return 2


def _describe(error, opt):
    """One sentence for an error that ends the program."""
    if isinstance(error, MemoryError):
        advice = [text for name, text in LESS_MEMORY.items() if hasattr(opt, name)]
        return "the main memory is full" + f": {' or '.join(advice)} needs less" * bool(advice)
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return _for_program(f"{place}{error.strerror}{ADVICE.get(error.errno, '')}", opt)
    for start, advice in MACHINE_FAULTS.items():
        if str(error).startswith(start):
            return _for_program(str(error).strip().splitlines()[0].rstrip(".") + advice, opt)
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    # the loader sends the whole traceback of a worker as text; its last line is the sentence
    return lines[-1].removeprefix("ValueError: ") if "Original Traceback" in str(error) else " ".join(lines)


class Help(argparse.HelpFormatter):
    """For tools that are described by their docstring: paragraphs as wide as the terminal, commands as they are."""

    def _fill_text(self, text, width, indent):
        parts = text.strip("\n").split("\n\n")
        return "\n\n".join(part if "\n " in f"\n{part}" else folded(" ".join(part.split()), width, 0) for part in parts)


class _Handler(logging.StreamHandler):
    """Writes above the progress bars of its process."""

    def __init__(self, stream):
        super().__init__(stream)
        self.process = os.getpid()  # a loader worker has copies of the bars, and must not wait for their lock

    def emit(self, record):
        if os.getpid() != self.process or not getattr(tqdm, "_instances", None):
            super().emit(record)
            return
        with tqdm.external_write_mode(file=sys.stdout):
            super().emit(record)


class _Formatter(logging.Formatter):
    """Plain messages; warnings and errors say what they are."""

    def format(self, record):
        text = super().format(record)
        return text if record.levelno <= logging.INFO else f"{record.levelname}: {text}"
