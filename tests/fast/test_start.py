"""What is made ahead of the first step, and that the steps do not notice."""

import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from models.common import Conv
from tests import small_run
from tests.engine.test_trainer import new_trainer
from utils.fast import start
from utils.fast.train_step import FastSteps
from utils.system.files import PROJECT_ROOT

PROGRAM = """
import sys
from tests import small_run
assert small_run.program("train", sys.argv[1:]) == 0
print(*sys.modules)
"""


def test_a_dry_pass_changes_nothing():
    torch.manual_seed(0)
    network = torch.nn.Sequential(Conv(3, 4), Conv(4, 4)).eval()
    network[0].conv.weight.grad = torch.ones_like(network[0].conv.weight)
    passes, state = [], {name: value.clone() for name, value in network.state_dict().items()}
    for conv in network:
        conv.register_forward_hook(lambda module, _, output: passes.append((module.training, tuple(output.shape))))
    generator = torch.get_rng_state()
    start.dry_pass(network, torch.zeros(2, 3, 8, 8), nullcontext)
    assert passes == [(True, (2, 4, 8, 8))] * 2 and not network.training
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert network[0].conv.weight.grad.eq(1).all() and network[1].conv.weight.grad is None
    assert torch.equal(torch.get_rng_state(), generator)


def test_nothing_is_made_without_a_gpu(caplog):
    steps = FastSteps(new_trainer())
    caplog.set_level("INFO")
    caplog.clear()
    start.prepare(is_ahead=True)(steps, (2, 3, 8, 8))
    start.prepare(is_ahead=False)(SimpleNamespace(), (2, 3, 8, 8))
    assert not caplog.text


def test_kernels_are_ordered_and_not_run(monkeypatch):
    """All that is ordered is ready at the end, from threads; a kernel that fails says so where it is used."""
    jit = pytest.importorskip("triton.runtime.jit")
    mode = pytest.importorskip("triton.runtime._async_compile").active_mode
    done = []

    def run(kernel, *args, grid, warmup, **options):
        compile_kernel = (
            (lambda: done.append(kernel) or SimpleNamespace(run=None)) if kernel != "bad" else (lambda: 1 // 0)
        )
        return mode.get().submit(kernel, compile_kernel, lambda _: None), warmup

    monkeypatch.setattr(jit.JITFunction, "run", run)
    with start.compiled_in_threads(torch.device("cpu")) as kernels:
        for name in ("a", "b", "bad", "a"):
            ordered, is_only_compiled = jit.JITFunction.run(name, 1, grid=(1,), warmup=False)
            assert is_only_compiled
            if name == "bad":
                bad = ordered
    assert sorted(done) == ["a", "b"] and len(kernels) == 3 and jit.JITFunction.run is run and mode.get() is None
    with pytest.raises(ZeroDivisionError):
        bad.result()


def test_a_fast_run_does_not_load_the_compiler_of_torch(tmp_path):
    line = small_run.arguments(tmp_path, "--fast", "--epochs", "1")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", PROGRAM, *line], cwd=PROJECT_ROOT, capture_output=True, text=True,
                         timeout=300, env=environment)  # fmt: skip
    assert run.returncode == 0, run.stderr
    loaded = run.stdout.splitlines()[-1].split()
    assert "utils.fast.start" in loaded and not {"torch._dynamo", "torchvision"} & set(loaded)


@pytest.mark.gpu
def test_the_first_step_finds_its_kernels(caplog):
    """The losses are those of steps that were not prepared, within what two searches of cuDNN may differ by."""
    caplog.set_level("INFO")
    device = torch.device("cuda", 0)
    from models.fused.network import fused_model
    from models.yolo import Model

    model = Model(str(PROJECT_ROOT / "cfg/training/yolov7-tiny.yaml"), ch=3, nc=3).to(device)
    network = fused_model(model.to(memory_format=torch.channels_last))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with start.compiled_in_threads(device) as kernels:
        start.dry_pass(network, torch.zeros(2, 3, 64, 64, device=device), lambda: torch.autocast("cuda"))
    assert kernels and all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    images = torch.rand(2, 3, 64, 64, device=device).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cuda"):
        ours, plain = network(images), model.train()(images)
    for a, b in zip(ours, plain, strict=True):
        assert (a.float() - b.float()).norm() < 0.05 * b.float().norm()  # in half precision
