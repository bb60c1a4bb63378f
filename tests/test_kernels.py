"""Every Triton kernel of the project compiles for the GPUs that it may meet, within their shared memory, without a GPU.

The project's own code launches the kernels on tensors of the host. A launch is noted instead of made, so it has the
types, constants, alignments and numbers of warps of a training step, and is compiled afterwards for each GPU. A kernel
that nothing here launches fails the test by its name.

YOLOV7FAST_ALL_GPUS=1 compiles all kinds of launches for all of GPUS. Otherwise each kernel is compiled once, the first
for the first GPU, the second for the second and so on, and has to be content with the shared memory of the smallest.
"""

import ast
import os
import shutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from models.yolo import Model
from tests.test_house import modules, tree

# Compute capability: bytes of shared memory that a block can have ("maximum amount of shared memory per thread block"
# in the CUDA programming guide: 163, 99 and 227 KB)
GPUS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
EVERYTHING = os.environ.get("YOLOV7FAST_ALL_GPUS") == "1"

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def jitted():
    """{module: its functions with @triton.jit} of the project, as syntax trees."""
    found = {}
    for name in modules():
        functions = [node for node in tree(name).body if isinstance(node, ast.FunctionDef)]
        functions = [f for f in functions if any(ast.unparse(d).startswith("triton.jit") for d in f.decorator_list)]
        if functions:
            found[name] = functions
    return found


def kernels():
    """Names "module:function" of those that the host launches, no other function of Triton calls."""
    called = {
        node.func.id
        for functions in jitted().values() for function in functions for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }  # fmt: skip
    return {f"{name}:{f.name}" for name, functions in jitted().items() for f in functions if f.name not in called}


def train_a_fused_model(cfg):
    from models.fused.network import fused_model

    torch.manual_seed(0)
    fused = fused_model(Model(f"cfg/training/{cfg}.yaml", nc=3).train())
    images = torch.rand(2, 3, 64, 64).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.float16):
        sum(p.float().sum() for p in fused(images)).backward()


def pool_and_upsample():
    from models.fused import pools

    x = torch.zeros(2, 64, 8, 8, dtype=torch.float16).to(memory_format=torch.channels_last)
    for window, stride in ((5, 1), (3, 1), (2, 2)):
        y, choice = pools.max_pool(x, window, stride)
        pools.max_pool(x, window, stride, copy=torch.empty_like(y))
        for plus in ((), (x,), (x, x)):
            pools.max_pool_gradient([y] * (3 - len(plus)), choice, window, stride, plus=plus)
    pools.upsample(x, copy=pools.upsample(x))
    pools.upsample_gradient([x, x], plus=[x[:, :, :4, :4].contiguous(memory_format=torch.channels_last)])


def first_convolution():
    from torch import nn

    from models.fused import kernels, stem

    images, norm = torch.zeros(2, 3, 64, 64, dtype=torch.uint8), nn.BatchNorm2d(32)
    for stride, block in ((1, 1), (2, 1), (1, 2)):
        conv = nn.Conv2d(3 * block**2, 32, 3, stride, 1)
        place = torch.zeros(2, 32, *stem.output_size(images, conv, block), dtype=torch.float16)
        place = place.to(memory_format=torch.channels_last)
        for source in (images, images.float()):
            kept = stem.forward(source, conv, norm, kernels.SILU, 0.0, block, torch.float16, [place])
            stem.gradient([place], kept, conv, kernels.SILU, 0.0, *torch.zeros(2, 32))


def add_maps():
    from models.fused import sums
    from models.fused.kernels import SILU

    x = torch.zeros(2, 64, 8, 8, dtype=torch.float16).to(memory_format=torch.channels_last)
    sums.add_activation([x, x], SILU, 0.0, [x, x])
    sums.add_activation_gradient([x], [x, x], SILU, 0.0)


def conversion_tables(has_formula=False):
    from utils.data.fast.device_augment import ConversionTables

    return ConversionTables(torch.zeros(512, dtype=torch.int32), torch.zeros(9, dtype=torch.int32), has_formula)


def augment_a_batch():
    from utils.data.fast import deferred, device_augment_triton

    steps = torch.zeros(2, deferred.STEPS + 4096, dtype=torch.uint8)
    tables = conversion_tables()
    numbers = torch.zeros(2048, dtype=torch.int32)
    device_augment_triton._count_other_colours[(1,)](numbers, numbers, 2048, enable_fp_fusion=False)
    pixels = torch.zeros(2, 64, 32, 3, dtype=torch.uint8)
    for mode in (deferred.FLOATING, None):
        device_augment_triton.augment(pixels, steps, tables, mode, torch.zeros(2, 32, 32, 3, dtype=torch.uint8))


def compose_a_batch():
    from utils.data.fast import deferred
    from utils.data.gpu import compose_triton
    from utils.data.gpu.recipes import RECIPE

    tables = conversion_tables(has_formula=True)
    store, recipes = torch.zeros(99, dtype=torch.uint8), torch.zeros(2, RECIPE, dtype=torch.uint8)
    for mode in (deferred.FLOATING, deferred.FIXED):
        images = torch.zeros(2, 64, 64, 3, dtype=torch.uint8)
        compose_triton.compose(store, recipes, torch.zeros(16, dtype=torch.uint8), tables, mode, images)


def compute_losses():
    from tests.loss_cases import random_case
    from utils.loss.batched import BatchedLoss, BatchedLossOTA

    for kind in (BatchedLossOTA, BatchedLoss):
        case = random_case(10, "ordinary")
        compute_loss = kind(case.model)
        compute_loss.use_kernels = True
        maps = [prediction.detach().half().requires_grad_() for prediction in case.predictions]
        compute_loss(maps, case.targets, case.images)[0].backward()


def decode_boxes():
    from models.fused import boxes

    head = SimpleNamespace(anchor_grid=torch.zeros(1, 1, 3, 1, 1, 2, dtype=torch.float16), stride=torch.tensor([8.0]))
    boxes.decode_all(
        head, [torch.zeros(2, 4, 4, 256, dtype=torch.float16)[..., :255].unflatten(3, (3, 85)).movedim(3, 1)]
    )


def suppress_boxes():
    from utils.fast import nms_triton

    counts = torch.full((2,), 5)
    nms_triton.suppress(torch.rand(10, 6), counts - 5, counts, 0.6, 300, 4096)


LAUNCHES = {
    "yolov7-tiny": lambda: train_a_fused_model("yolov7-tiny"),
    **({"yolov7": lambda: train_a_fused_model("yolov7")} if EVERYTHING else {}),
    "sums": add_maps,
    "pools": pool_and_upsample,
    "stem": first_convolution,
    "boxes": decode_boxes,
    "augmentation": augment_a_batch,
    "composing": compose_a_batch,
    "losses": compute_losses,
    "nms": suppress_boxes,
}


class OfflineDriver:
    """What Triton asks about the GPU before it compiles."""

    def __init__(self, capability):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self):
        return f"sm_{self.target.arch}"  # Triton keeps what it compiled by device

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self.target


@pytest.fixture(scope="module")
def launches():
    """{kernel: [function that compiles one of its launches]}, launches of the same kind left out."""
    import triton
    from triton.runtime.jit import JITFunction

    if not isinstance(import_module("models.fused.kernels")._apply_kernel, JITFunction):
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    if not any(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*")) and not shutil.which("ptxas"):
        pytest.skip("there is no ptxas, neither with Triton nor on the path")
    noted = {}

    def note(kernel, grid):
        def launch(*arguments, **constants):
            kind = kind_of(kernel, arguments, constants)
            of_kernel = noted.setdefault(f"{kernel.fn.__module__}:{kernel.fn.__name__}", {})
            of_kernel[kind] = lambda: kernel.run(*arguments, grid=grid, warmup=True, **constants)

        return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "__getitem__", note)
        for launch in LAUNCHES.values():
            launch()
    return {name: list(of_kernel.values()) for name, of_kernel in noted.items()}


def kind_of(kernel, arguments, constants):
    """What Triton compiles anew for: types and constants, alignment; of numbers it is told 1 and multiples of 16."""
    known = zip(arguments, kernel.params, strict=False)  # some constants are among the arguments
    return (*(_kind_of(argument, parameter) for argument, parameter in known), *sorted(constants.items()))


def _kind_of(argument, parameter):
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if parameter.is_constexpr:
        return argument
    if parameter.do_not_specialize or not isinstance(argument, int):
        return type(argument)
    return argument == 1, argument % 16 == 0


def test_every_kernel_is_launched_here(launches):
    assert {"models.fused.kernels:_gradient_kernel", "models.fused.pools:_gather_kernel"} <= kernels()
    missing = sorted(kernels() - launches.keys())
    assert not missing, f"no entry of LAUNCHES launches {', '.join(missing)}: add one"


@pytest.mark.slow
@pytest.mark.parametrize("capability", GPUS)
def test_every_kernel_compiles(launches, capability, monkeypatch):
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", OfflineDriver(capability))
    limit = GPUS[capability] if EVERYTHING else min(GPUS.values())
    for name, compiles in shared_out(launches, capability).items():
        for compiled in (compile() for compile in compiles):
            assert f".target sm_{capability}" in compiled.asm["ptx"] and compiled.asm["cubin"], name
            shared = compiled.metadata.shared
            assert shared <= limit, f"{name} takes {shared} bytes of shared memory"


def shared_out(launches, capability):
    """Those of `launches` that are compiled for `capability`."""
    if EVERYTHING:
        return launches
    mine = sorted(launches)[list(GPUS).index(capability) :: len(GPUS)]
    return {name: launches[name][:1] for name in mine}


def test_each_kernel_is_compiled_for_some_gpu(launches):
    found = [name for capability in GPUS for name in shared_out(launches, capability)]
    assert sorted(found) == sorted(launches) if not EVERYTHING else len(found) == len(GPUS) * len(launches)
