"""What is made ahead of the first step, and that the steps do not notice."""

import errno
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from multiprocessing import popen_fork
from types import ModuleType, SimpleNamespace

import pytest
import torch

from models.common import Conv
from tests import small_run
from tests.engine.test_trainer import new_trainer
from tests.fast.test_start_convolutions import watch_convolutions
from utils.config.hyp import load_hyp
from utils.fast import start
from utils.fast.train_step import FastSteps
from utils.system.files import PROJECT_ROOT

PROGRAM = """
import sys
from tests import small_run
assert small_run.program("train", sys.argv[1:]) == 0
print(*sys.modules)
"""


@pytest.fixture(autouse=True)
def no_search(monkeypatch):
    """With cuDNN's search, which a training of an earlier test may have left on, no thread runs convolutions."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


def test_a_dry_pass_changes_nothing():
    torch.manual_seed(0)
    network = torch.nn.Sequential(Conv(3, 4), Conv(4, 4)).eval()
    network[0].conv.weight.grad = torch.ones_like(network[0].conv.weight)
    passes, state = [], {name: value.clone() for name, value in network.state_dict().items()}
    for conv in network:
        conv.register_forward_hook(lambda module, _, output: passes.append((module.training, tuple(output.shape))))
    generator = torch.get_rng_state()
    start.dry_pass(network, torch.zeros(2, 3, 8, 8), nullcontext, torch.Tensor.mean)
    assert passes == [(True, (2, 4, 8, 8))] * 2 and not network.training
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert network[0].conv.weight.grad.eq(1).all() and network[1].conv.weight.grad is None
    assert torch.equal(torch.get_rng_state(), generator)


def test_nothing_is_made_without_a_gpu(caplog):
    steps = FastSteps(new_trainer())
    caplog.set_level("INFO")
    caplog.clear()
    device = torch.device("cpu")
    start.prepare(True, device)(steps, (2, 3, 8, 8), 10)
    start.prepare(False, device)(SimpleNamespace(), (2, 3, 8, 8), 10)
    assert not caplog.text


@pytest.mark.parametrize(("before", "after"), [(5e-3, 1e-4), (2e-5, 2e-5)])
def test_other_threads_give_way_soon(before, after):
    usual = sys.getswitchinterval()
    try:
        sys.setswitchinterval(before)
        start.prepare(False, torch.device("cpu"))
        assert sys.getswitchinterval() == pytest.approx(after)
    finally:
        sys.setswitchinterval(usual)


def test_libraries_are_loaded_before_a_process_is_forked(monkeypatch, caplog):
    """Half precision is computed on a CPU as well; a device that fails says so at the first step, not here."""
    hooks, started = [], []
    monkeypatch.setattr(start.os, "register_at_fork", lambda before: hooks.append(before))
    monkeypatch.setattr(start, "load_libraries", lambda *given: (time.sleep(0.2), started.append(given)))
    monkeypatch.setattr(start, "one_thread", lambda: started.append(1))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    start.prepare(True, torch.device("cuda", 0), with_loss=True)
    hooks[0]()
    assert started == [1, (torch.device("cuda", 0), True)]


@pytest.mark.parametrize(("num_steps", "searches"), [(start.SEARCH_STEPS - 1, False), (start.SEARCH_STEPS, True)])
def test_a_short_run_is_without_cudnns_search(monkeypatch, num_steps, searches):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(start, "load_libraries", lambda *_: None)
    monkeypatch.setattr(start.os, "register_at_fork", lambda before: None)
    monkeypatch.setattr(start, "one_thread", lambda: None)
    start.prepare(False, torch.device("cuda", 0))
    assert torch.backends.cudnn.benchmark, "shapes may change: as without flags"
    seen = []

    def dry_loss(*_):
        seen.append(torch.backends.cudnn.benchmark)
        raise InterruptedError

    monkeypatch.setattr(start, "dry_loss", dry_loss)
    weight = SimpleNamespace(device=torch.device("cuda", 0))
    model = SimpleNamespace(parameters=lambda: iter([weight]))
    steps = SimpleNamespace(trainer=SimpleNamespace(model=model, compute_loss=None))
    ahead = start.prepare(True, torch.device("cuda", 0))
    assert not torch.backends.cudnn.benchmark
    with pytest.raises(InterruptedError):
        ahead(steps, (2, 3, 8, 8), num_steps)
    assert seen == [searches]


def test_a_tiny_network_loads_what_layers_need(monkeypatch, caplog):
    caplog.set_level("DEBUG")
    calls = Counter()
    for name in ("conv2d",):
        monkeypatch.setattr(start.functional, name, counting(calls, name, getattr(start.functional, name)))
    start.load_libraries(torch.device("cpu"))
    assert calls["conv2d"] == 2 and not caplog.text
    asked = []
    monkeypatch.setattr(start, "load_kernels", lambda: SimpleNamespace(can_run=lambda *head: asked.append(head)))
    start.load_libraries(torch.device("cpu"), with_loss=True)
    assert asked == [(torch.device("cpu"), 3, 3)]
    start.load_libraries(torch.device("meta"))  # has shapes and no numbers, but works
    monkeypatch.setattr(start.functional, "conv2d", lambda *_, **__: torch.zeros(2).view(3))
    start.load_libraries(torch.device("cpu"))
    assert "not loaded ahead" in caplog.text


def counting(calls, name, function):
    def counted(*args, **kwargs):
        calls[name] += 1
        return function(*args, **kwargs)

    return counted


@pytest.mark.parametrize("kind", ["BatchedLossOTA", "BatchedLoss"])
def test_all_kernels_of_a_step_are_ordered(monkeypatch, kind):
    """Types, alignments and constants of every launch of steps on other targets are among those of the dry pass."""
    jit = pytest.importorskip("triton.runtime.jit")
    from models.fused.network import fused_model
    from tests.test_kernels import kind_of
    from utils.loss import batched

    model, launches = train_tiny(), set()
    if not isinstance(importlib.import_module("models.fused.kernels")._apply_kernel, jit.JITFunction):
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")

    def run(kernel, *args, grid, warmup, **constants):
        launches.add((kernel.fn.__name__, *kind_of(kernel, args, constants)))

    monkeypatch.setattr(jit.JITFunction, "run", run)
    network, loss = fused_model(model), getattr(batched, kind)(model)
    loss.use_kernels = True
    autocast, device = lambda: torch.autocast("cpu", torch.float16), torch.device("cpu")
    images = torch.zeros(3, 3, 64, 64, dtype=torch.uint8).to(memory_format=torch.channels_last)
    start.dry_pass(network, images, autocast, start.dry_loss(loss, images.shape, device))
    ordered = set(launches)
    names = {name for name, *_ in ordered}
    assert {"candidates_kernel", "items_kernel", "dense_kernel", "rows_kernel", "_gradient_kernel"} <= names
    assert ("assign_kernel" in names) == (kind == "BatchedLossOTA")
    for number, batch, side in ((0, 3, 64), (1, 3, 64), (100, 3, 64), (9, 2, 96)):
        launches.clear()
        targets, images = torch.rand(number, 6), torch.zeros(batch, 3, side, side, dtype=torch.uint8)
        images = images.to(memory_format=torch.channels_last)
        targets[:, 0], targets[:, 1] = torch.arange(number) % batch, 0
        with autocast():
            value, _ = loss(network(images), targets, images)
        (value * 2.0).backward()
        late = {name for name, *_ in launches - ordered}
        # For other batches and image sizes as well, but for a gradient that is written faster if its size is regular.
        assert launches and late <= ({"dense_kernel"} if batch != 3 else set())


def train_tiny():
    from models.yolo import Model

    torch.manual_seed(0)
    model = Model(str(PROJECT_ROOT / "cfg/training/yolov7-tiny.yaml"), nc=3).train()
    model.hyp, model.gr = load_hyp(PROJECT_ROOT / "data/hyp.scratch.tiny.yaml"), 1.0
    return model.to(memory_format=torch.channels_last)


def test_kernels_are_ordered_and_not_run(monkeypatch):
    """All kernels that were asked for are ready at the end, from threads; one that fails raises where it is used."""
    jit = pytest.importorskip("triton.runtime.jit")
    mode = pytest.importorskip("triton.runtime._async_compile").active_mode
    done = []

    def run(kernel, *args, grid, warmup, **options):
        compile_kernel = (
            (lambda: done.append(kernel) or SimpleNamespace(run=None)) if kernel != "bad" else (lambda: 1 // 0)
        )
        return mode.get().submit(kernel, compile_kernel, lambda _: None), warmup

    monkeypatch.setattr(jit.JITFunction, "run", run)
    with start.compiled_ahead(torch.device("cpu")) as kernels:
        for name in ("a", "b", "bad", "a"):
            ordered, is_only_compiled = jit.JITFunction.run(name, 1, grid=(1,), warmup=False)
            assert is_only_compiled
            if name == "bad":
                bad = ordered
    assert sorted(done) == ["a", "b"] and len(kernels) == 3 and jit.JITFunction.run is run and mode.get() is None
    with pytest.raises(ZeroDivisionError):
        bad.result()


def test_what_is_not_kept_is_compiled_by_processes(monkeypatch, tmp_path):
    """Once each, and loaded here; what fails there is compiled again, by a thread."""
    jit = pytest.importorskip("triton.runtime.jit")
    mode = pytest.importorskip("triton.runtime._async_compile").active_mode
    compiler = importlib.import_module("triton.compiler")
    monkeypatch.setattr(compiler.ASTSource, "make_ir", lambda name: (tmp_path / name).write_text(str(os.getpid())))
    monkeypatch.setattr(start, "usable_cores", lambda: 2)
    (tmp_path / "kept").write_text("before")

    def compile_kernel(name):
        if not (tmp_path / name).exists():
            if name == "bad" and multiprocessing.parent_process():
                os._exit(1)
            compiler.ASTSource.make_ir(name)
        return SimpleNamespace(run=name)

    def run(name, *args, grid, warmup, **options):
        return mode.get().submit(name, lambda: compile_kernel(name), lambda _: None)

    monkeypatch.setattr(jit.JITFunction, "run", run)
    names = ["kept", "bad", *"abcde"]
    with start.compiled_ahead(torch.device("cpu")) as kernels:
        for name in names:
            jit.JITFunction.run(name, grid=(1,), warmup=False)
    assert [kernel.result().run for kernel in kernels] == names
    by = {name: (tmp_path / name).read_text() for name in names}
    own = str(os.getpid())
    assert by.pop("kept") == "before" and by.pop("bad") == own and own not in by.values()
    compiler.ASTSource.make_ir("later")
    assert (tmp_path / "later").read_text() == own, "Triton compiles again by itself"


@pytest.fixture
def order_one(monkeypatch):
    """A function that asks for a kernel that is not in the cache, to be compiled by the function that it is given."""
    jit = pytest.importorskip("triton.runtime.jit")
    mode = pytest.importorskip("triton.runtime._async_compile").active_mode
    compiler = importlib.import_module("triton.compiler")
    monkeypatch.setattr(compiler.ASTSource, "make_ir", lambda work: work())
    monkeypatch.setattr(start, "usable_cores", lambda: 1)
    before = set(multiprocessing.active_children())  # others may draw for earlier tests

    def run(work, *args, grid, warmup, **options):
        def compile_kernel():
            return SimpleNamespace(run=compiler.ASTSource.make_ir(work))

        return mode.get().submit("kernel", compile_kernel, lambda _: None)

    monkeypatch.setattr(jit.JITFunction, "run", run)
    yield lambda work: jit.JITFunction.run(work, grid=(1,), warmup=False)
    assert jit.JITFunction.run is run and mode.get() is None
    assert set(multiprocessing.active_children()) <= before


def test_a_second_ctrl_c_ends_the_wait_for_processes(order_one):
    def work():  # in the process, which hangs
        assert multiprocessing.parent_process(), "or the signal would end the tests"
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(100)

    with pytest.raises(KeyboardInterrupt), start.compiled_ahead(torch.device("cpu")) as kernels:
        order_one(work)
    assert kernels[0].exception(timeout=0)


@pytest.mark.parametrize("fault", ["hangs", "no process", "no pipe"])
def test_threads_compile_where_processes_fail(order_one, monkeypatch, fault):
    def refuse(*_):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    if fault == "hangs":
        monkeypatch.setattr(start, "PATIENCE", 0.2)
    elif fault == "no process":
        monkeypatch.setattr(popen_fork.Popen, "_launch", refuse)
    else:
        monkeypatch.setattr(start.os, "pipe", refuse)
    with start.compiled_ahead(torch.device("cpu")) as kernels:
        order_one(lambda: time.sleep(100) if multiprocessing.parent_process() else "by a thread")
    assert kernels[0].result().run == "by a thread"


def test_each_kernel_keeps_its_own_launcher(monkeypatch):
    """Python writes a file that it has loaded before into the module of that name, whosever it is by now."""
    pytest.importorskip("triton.runtime._async_compile")
    from triton.runtime import build

    shared = ModuleType("__triton_launcher")

    def load(name, path):
        shared.launch = path
        return shared

    monkeypatch.setattr(build, "_load_module_from_path", load)
    with start.compiled_ahead(torch.device("cpu")):
        launchers = [build._load_module_from_path("__triton_launcher", path) for path in ("one", "other")]
    assert [launcher.launch for launcher in launchers] == ["one", "other"]
    assert build._load_module_from_path is load


def test_a_fast_run_does_not_load_the_compiler_of_torch(tmp_path):
    line = small_run.arguments(tmp_path, "--fast", "--epochs", "1")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", PROGRAM, *line], cwd=PROJECT_ROOT, capture_output=True, text=True,
                         timeout=300, env=environment)  # fmt: skip
    assert run.returncode == 0, run.stderr
    loaded = run.stdout.splitlines()[-1].split()
    assert "utils.fast.start" in loaded and not {"torch._dynamo", "torchvision"} & set(loaded)


@pytest.mark.gpu
def test_the_first_step_finds_its_kernels(monkeypatch):
    """Nothing is compiled any more, and maps and loss are those of a step that was not prepared."""
    device = torch.device("cuda", 0)
    from triton.runtime.jit import JITFunction

    from models.fused.convolutions import Block
    from models.fused.network import fused_model
    from utils.loss.batched import BatchedLossOTA
    from utils.loss.criterion import ComputeLossOTA

    model = train_tiny().to(device)
    network, loss = fused_model(model), BatchedLossOTA(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    total = start.dry_loss(loss, (4, 3, 64, 64), device)
    made = watch_convolutions(monkeypatch)
    with start.compiled_ahead(device) as kernels:
        images = torch.zeros(4, 3, 64, 64, device=device)
        start.with_convolutions_here(
            device, lambda: start.dry_pass(network, images, lambda: torch.autocast("cuda"), total)
        )
    counts = Counter("backward" in str(operation) for operation, *_ in made)
    assert counts[True] == counts[False] == sum(isinstance(operation, Block) for operation in network.plan.operations)
    assert kernels and all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    late = []
    monkeypatch.setattr(JITFunction, "_do_compile", lambda kernel, *_, **__: late.append(kernel.fn.__name__))
    images = torch.rand(4, 3, 64, 64, device=device).contiguous(memory_format=torch.channels_last)
    targets = torch.rand(20, 6)
    targets[:, 0], targets[:, 1] = torch.arange(20) // 5, 0
    with torch.autocast("cuda"):
        ours, plain = network(images), model.train()(images)
        value, _ = loss(ours, targets, images)
    value.backward()
    assert not late and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    for a, b in zip(ours, plain, strict=True):
        assert (a.float() - b.float()).norm() < 0.05 * b.float().norm()  # in half precision
    with torch.autocast("cuda"):
        reference, _ = ComputeLossOTA(model)(ours, targets.to(device), images)
    assert torch.allclose(value, reference, rtol=0.01)
