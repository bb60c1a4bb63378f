"""A training run that starts sooner (--fast-step): what its first step would wait for is prepared before, or left out.

torch's compiler    is not imported only because an optimiser is made
cuDNN, cuBLAS       are loaded by a thread, while the model is built and the data are read
convolutions        are chosen and loaded while a thread runs the layers; backward passes are made by the thread of the
                    steps, where the choices hold
cuDNN's search      is left out in a run that is too short to win back the seconds that it takes
Triton's kernels    are compiled by processes, as threads would wait for Python's lock, then loaded by threads at once
threads of torch    are not used on the host: operations there are so small that threads would only wait for each other
threads of Python   let the main thread run again sooner
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing import get_context
from queue import Empty, SimpleQueue
from threading import Lock, Thread, local
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from utils.fast.compile import tensors_in
from utils.loss.batched import grid_shapes, load_kernels
from utils.system.children import enter_child
from utils.system.cores import one_thread, usable_cores
from utils.system.files import counted
from utils.system.signals import held_back, send_soon

logger = logging.getLogger(__name__)

THREADS = min(16, os.cpu_count() or 1)
USUAL_HEAD = 3, 3  # layers and anchors
MOST_COMPILED = 256  # kernels: a byte tells a process which one to compile
PATIENCE = 300  # seconds that processes may compile; one that hangs must not stop the run
# Seconds that a thread may keep the interpreter while another waits for it. With Python's 5 ms the thread that writes a
# checkpoint or loads a library delays the thread that feeds the device, by tens of milliseconds in a step.
SWITCH_INTERVAL = 1e-4
# In a run of at least so many steps cuDNN searches for the fastest algorithm of each convolution. That takes 3 to 8 s.
# Compared with the algorithm that it takes without a search, a step gains between nothing (yolov7-tiny; yolov7 at 320
# px) and 1.5 ms (yolov7x at 640 px).
SEARCH_STEPS = 3000


def prepare(is_ahead: bool, device: torch.device, with_loss: bool = False) -> Callable:
    """Change settings of the whole process, and return `compile_ahead`.

    `with_loss`: a thread also finds out whether kernels can compute the loss of a usual head, which compiles one.
    Without `is_ahead` the returned function does nothing, because nobody knows before the first step what it will run.
    """
    _leave_out_compiler()
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL))
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = not is_ahead  # until the number of steps is known
        torch.autograd.set_multithreading_enabled(not is_ahead)  # for this thread
        one_thread()
        loading = Thread(target=load_libraries, args=(device, with_loss), name="loading cuDNN")
        loading.start()
        # A process that is forked meanwhile would inherit the locks of that thread, and nobody would release them.
        os.register_at_fork(before=partial(_wait_for, loading))
    return compile_ahead if is_ahead else _nothing_ahead


def _wait_for(thread):
    with held_back(send_soon):
        thread.join()


def _nothing_ahead(steps, shape, num_steps):
    """The first step makes what it needs."""


def _leave_out_compiler():
    """Let methods of an optimiser run as they are.

    torch hides them from torch.compile by a wrapper, which imports the whole compiler when it is first called. That
    takes seconds, and no step is compiled here.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        inner = getattr(method, "__wrapped__", None)
        if inner is not None:
            inner.__dynamo_disable = inner  # here the wrapper looks for the function that it has made


def load_libraries(device: torch.device, with_loss: bool = False) -> None:
    """Let torch load the libraries of convolutions and matrix products: by a tiny network, and its gradients.

    `with_loss` as in `prepare`.
    """

    def ones(*shape):
        return torch.ones(shape, dtype=torch.float16, device=device, requires_grad=True)

    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread uses the first GPU
        maps = ones(2, 64, 8, 8).to(memory_format=torch.channels_last)
        for weight in (ones(64, 64, 3, 3), ones(8, 64, 1, 1)):
            maps = functional.conv2d(maps, weight.to(memory_format=torch.channels_last), padding=weight.shape[2] // 2)
        maps.permute(0, 2, 3, 1).reshape(-1, 8).matmul(ones(8, 8)).sum().backward()
        if with_loss:
            load_kernels().can_run(device, *USUAL_HEAD)
    except Exception as error:  # the first step meets it again, and reports it
        logger.debug("libraries not loaded ahead: %s", error)


def compile_ahead(steps: Any, shape: Sequence[int], num_steps: int) -> None:
    """Prepare the first of `num_steps` on images of `shape` [b x 3 x h x w] on a GPU: kernels, cuDNN's choices.

    The memory that this takes is kept by torch, for the stream of `steps` (FastSteps).
    """
    trainer, began = steps.trainer, time.monotonic()
    device = next(trainer.model.parameters()).device
    if device.type != "cuda":
        return
    torch.backends.cudnn.benchmark = num_steps >= SEARCH_STEPS
    logger.info("Preparing the kernels for images %s ...", " x ".join(map(str, shape)))
    with held_back():
        total = dry_loss(trainer.compute_loss, shape, device)  # first: it asks the device whether kernels work
        with getattr(steps, "on_stream", nullcontext)(), compiled_ahead(device) as kernels:
            images = steps.as_input(torch.zeros(shape, dtype=torch.uint8, device=device))
            with_convolutions_here(device, partial(dry_pass, trainer.network, images, trainer.autocast, total))
        torch.cuda.synchronize(device)
    logger.info("%s ready after %.1f s", counted(len(kernels), "kernel of Triton", "kernels of Triton"),
                time.monotonic() - began)  # fmt: skip


def dry_loss(compute_loss: Any, shape: Sequence[int], device: torch.device) -> Callable:
    """A function that makes one number of the maps for images of `shape`: the loss if kernels compute all of it.

    Otherwise it is a plain sum: operations of torch would read indices that kernels write, and here no kernel runs.
    """
    if not (hasattr(compute_loss, "has_kernels") and compute_loss.has_kernels()):
        return lambda maps: sum(map_.float().mean() for map_ in tensors_in(maps))
    targets = torch.full((shape[0], 6), 0.5)  # one for each image
    targets[:, 0], targets[:, 1] = torch.arange(shape[0]), 0
    sets = compute_loss.prepare(targets, grid_shapes(compute_loss.head, shape), tuple(shape[2:]))
    sets = [own.to(device) for own in sets]
    return lambda maps: compute_loss.compute(maps, sets)[0]


def dry_pass(network: torch.nn.Module, images: torch.Tensor, autocast: Callable, total: Callable) -> None:
    """One pass forward, under `autocast()`, and backward from `total(maps)`, a number.

    Gradients and running statistics stay as they were.
    """
    was_training, buffers, parameters = network.training, list(network.buffers()), list(network.parameters())
    kept, gradients = [buffer.clone() for buffer in buffers], [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    network.train()
    with autocast():
        loss = total(network(images))
    loss.sum().backward()  # torch imports much when it is given gradients
    network.train(was_training)
    for buffer, before in zip(buffers, kept, strict=True):
        buffer.copy_(before)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def with_convolutions_here(device: torch.device, work: Callable[[], object]) -> None:
    """Let a thread call `work()`; convolutions of channels-last maps in it are run here, by the calling thread.

    In `work` they return at once, results of undefined content. For each geometry cuDNN chooses a kernel and loads it,
    which takes milliseconds in which nothing else would happen. It keeps the choices of each thread apart: they are
    made by the thread that will make the steps. Memory comes from the current stream. Where cuDNN is to search, `work`
    is only called: measurements of time need the device for themselves.
    """
    if torch.backends.cudnn.benchmark:
        work()
        return
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    operations: SimpleQueue = SimpleQueue()

    def beside():
        try:
            _enter(device, stream)
            torch.set_grad_enabled(True)
            with _Handing(operations):
                work()
        except BaseException:  # nobody needs the rest, from which the other thread takes as well
            with suppress(Empty):
                while True:
                    operations.get_nowait()
            raise
        finally:
            operations.put(None)

    with ThreadPoolExecutor(1, "layers") as pool:
        done = pool.submit(beside)
        with torch.no_grad():
            while operation := operations.get():
                with suppress(Exception):  # it comes again in the first step, which reports it
                    operation()
        done.result()


class _Handing(TorchDispatchMode):
    """Puts convolutions, and their gradients, into the queue `operations`; also those that autograd calls."""

    @classmethod
    def _should_skip_dynamo(cls):
        """Without this method torch would import its compiler, for a second, only to tell it not to compile this."""
        return False

    def __init__(self, operations):
        super().__init__()
        self.operations = operations

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = _empty_results(operation, args)
        if results is None:
            return operation(*args, **(kwargs or {}))
        self.operations.put(partial(operation, *args))
        return results


def _empty_results(operation, args):
    """Uninitialised results of a convolution, or of its gradient, of maps in channels-last order; else None."""
    aten, order = torch.ops.aten, torch.channels_last
    if operation is aten.convolution.default:
        x, weight, _, stride, padding, dilation, is_transposed, *_ = args
    elif operation is aten.convolution_backward.default:
        _, x, weight, bias_size, *_, is_transposed, _, _, wanted = args
    else:
        return None
    if is_transposed or x.dim() != 4 or not x.is_contiguous(memory_format=order):
        return None
    if x.is_contiguous():  # of one channel, or one pixel: the order of the result depends on more
        return None
    if operation is aten.convolution_backward.default:
        results = torch.empty_like(x), torch.empty_like(weight, memory_format=order), weight.new_empty(bias_size or 0)
        return tuple(result if is_wanted else None for result, is_wanted in zip(results, wanted, strict=True))
    of_both = (numbers * (2 // len(numbers)) for numbers in (stride, padding, dilation))  # one number is for both axes
    geometry = zip(x.shape[2:], weight.shape[2:], *of_both, strict=True)
    size = [(length + 2 * pad - reach * (kernel - 1) - 1) // step + 1 for length, kernel, step, pad, reach in geometry]
    return torch.empty((len(x), len(weight), *size), dtype=x.dtype, device=x.device, memory_format=order)


@contextmanager
def compiled_ahead(device: torch.device) -> Iterator[list[Future]]:
    """Within, a call of a Triton kernel only hands its compilation to threads; at the end all are compiled and loaded.

    Nothing is launched, so results have the right shapes and undefined content. Yields the list of Futures. A kernel
    that fails raises its error where it is used. Where Triton is missing, or is older than 3.5, nothing is different.
    """
    try:
        from triton.compiler import ASTSource
        from triton.runtime import build
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
        from triton.runtime.jit import JITFunction

        run, load, translate = JITFunction.run, build._load_module_from_path, ASTSource.make_ir
    except (ImportError, AttributeError):
        yield []
        return

    def compile_only(kernel, *args, grid, warmup, **options):
        token = active_mode.set(mode)  # here, because autograd has threads of its own
        try:
            return run(kernel, *args, grid=grid, warmup=True, **options)
        finally:
            active_mode.reset(token)

    def translate_if_allowed(*args, **options):
        compilations.check()
        return translate(*args, **options)

    with ThreadPoolExecutor(THREADS, "loading", _enter, (device,)) as pool:
        compilations = _Compilations(pool)
        with AsyncCompileMode(compilations, ignore_errors=True) as mode:
            JITFunction.run, build._load_module_from_path, ASTSource.make_ir = (
                compile_only, _loaded_alone(load), translate_if_allowed,
            )  # fmt: skip
            try:
                yield mode.raw_futures
            finally:
                try:
                    compilations.finish()
                finally:
                    JITFunction.run, build._load_module_from_path, ASTSource.make_ir = run, load, translate


def _loaded_alone(load):
    """`load(name, path)` of a module of C for threads: one at a time, and each gets functions of its own.

    Triton up to 3.6 has a launcher for each kind of arguments, and all have one module name. Python would fill the
    module of that name anew with each launcher, and a thread could get one that was made for other arguments.
    """
    lock = Lock()

    def load_alone(name, path):
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    return load_alone


def _enter(device, stream=None):
    """Set what is not passed on to a new thread: no gradients, the GPU, its stream."""
    torch.set_grad_enabled(False)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(stream or torch.cuda.current_stream())


class _NotCached(Exception):
    """Raised instead of compiling a kernel that is not in Triton's cache."""


class _Compilations(Executor):
    """Loads kernels by threads: those in Triton's cache at once, the others when `finish` has let them be compiled."""

    def __init__(self, pool):
        self.pool, self.futures, self.first_tries, self.not_cached = pool, [], [], []
        self.thread = local()  # .only_cached: whether this thread is to compile nothing

    def submit(self, compile_kernel):
        """The Future of what `compile_kernel()` returns: it finds a kernel in Triton's cache, or compiles it."""
        future = Future()
        self.futures.append(future)
        self.first_tries.append(self.pool.submit(self._load, compile_kernel, future, only_cached=True))
        return future

    def finish(self):
        try:
            wait(self.first_tries)
            with suppress(OSError):  # too many processes or files: then the threads compile
                compile_in_processes([compile_kernel for compile_kernel, _ in self.not_cached])
            wait([self.pool.submit(self._load, *entry, only_cached=False) for entry in self.not_cached])
        except BaseException:  # Ctrl-C, twice: Triton would wait for ever for a Future that nobody completes
            self.pool.shutdown(wait=False, cancel_futures=True)
            for future in self.futures:
                with suppress(InvalidStateError):
                    future.set_exception(_NotCached())
            raise

    def check(self):
        """Called where Triton begins to compile a kernel, so it is not in the cache."""
        if getattr(self.thread, "only_cached", False):
            raise _NotCached

    def _load(self, compile_kernel, future, only_cached):
        self.thread.only_cached = only_cached
        try:
            kernel = compile_kernel()
            kernel.run  # noqa: B018, the attribute loads the kernel, and may compile a launcher
        except _NotCached:
            self.not_cached.append((compile_kernel, future))
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(kernel)


def compile_in_processes(compiles: Sequence[Callable]) -> None:
    """Call each of `compiles`, which return kernels, once, in forked processes, one for each core.

    Triton's cache keeps what they compile, launchers too. A kernel that fails is not in it: whoever needs the kernel
    compiles it again.
    """
    from triton.runtime.driver import driver

    compiles, parent, end = compiles[:MOST_COMPILED], os.getpid(), time.monotonic() + PATIENCE
    numbers, writer = os.pipe()  # which kernels are left to compile: each process takes the next number
    os.write(writer, bytes(range(len(compiles))))
    os.close(writer)

    def work():
        enter_child(parent)
        os.setpgid(0, 0)  # or Ctrl-C at a terminal would end ptxas, which compiles
        while number := os.read(numbers, 1):
            with suppress(Exception):
                kernel = compiles[number[0]]()
                driver.active.launcher_cls(kernel.src, kernel.metadata)

    processes = []
    try:
        for _ in range(min(len(compiles), usable_cores())):
            process = get_context("fork").Process(target=work, daemon=True)
            process.start()
            processes.append(process)
        for process in processes:
            process.join(max(end - time.monotonic(), 0))
    finally:
        os.close(numbers)
        for process in processes:
            process.kill()
            process.join()
