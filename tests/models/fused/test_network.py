"""The fused model: its kernels in a process of their own (kernel_cases.py, pool_and_stem_cases.py), its
plans with torch for the kernels."""

from collections import Counter
from copy import deepcopy
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from models.config import read_cfg

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from models.fused.convolutions import Stem
from models.fused.network import fused_model
from models.yolo import IDetect
from tests import step_cases, triton_cases
from tests.models.fused import plain_kernels
from tests.models.fused.small_models import (
    DEVICE,
    compare,
    compare_evaluation,
    distance,
    random_model,
    small_cfg,
    trained,
)
from tests.tiny_model import CFG
from utils.fast.train_step import FastSteps

SMALL = small_cfg([-1, 1, "Conv", [8, 3, 2]])


@pytest.fixture
def plain(monkeypatch):
    if not torch.cuda.is_available():
        plain_kernels.use(monkeypatch)


def images(size=64, batch=2):
    return torch.rand(batch, 3, size, size, device=DEVICE)


def test_kernels_against_torch():
    triton_cases.run("tests/models/fused/kernel_cases.py", "tests/models/fused/pool_and_stem_cases.py")


@pytest.mark.parametrize("first", [["Conv", [8, 3, 2]], ["Conv", [8, 3, 1]], ["ReOrg", []], ["Conv", [8, 5, 2]]])
def test_a_network_of_every_layer(first, plain):
    compare(random_model(small_cfg([-1, 1, *first])), images(), torch.float32, 10)


@pytest.mark.parametrize("name", ["tiny", "", "x", "w6", "e6", "d6", "e6e", "tiny-1b4h", "1bnh"])
def test_the_family_is_fused(name, plain):
    cfg = read_cfg(f"cfg/training/yolov7{name if name in ('', 'x') else '-' + name}.yaml", 3, 8, None)
    cfg["width_multiple"] = 0.125
    model = random_model(cfg)
    fused = fused_model(model)
    assert fused.summary() == f"all {len(model.model)} layers fused"
    assert sum(isinstance(operation, Stem) for operation in fused.plan.operations) == 1
    size = 128 if name.endswith(("6", "e")) else 64
    compare(model, images(size), torch.float32, 30)  # norms over 2 numbers
    compare_evaluation(model, images(size))


def test_what_has_no_operation_is_run_by_autograd(plain):
    rows = [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "nn.AvgPool2d", [2]], [-1, 1, "nn.Conv2d", [8, 3, 1, 1]],
            [-1, 1, "nn.BatchNorm2d", []], [[-1, -2], 1, "Chuncat", [1]], [[-1, -3], 1, "Concat", [1]]]  # fmt: skip
    head = [[[4, 5], 1, "MultiHeadDetectAttention", ["nc", "anchors"]]]
    cfg = {**SMALL, "nc": 2, "heads": 2, "backbone": rows, "head": head}
    model = random_model(cfg)
    fused = fused_model(model)
    ordinary = {"AvgPool2d": 1, "Conv2d": 1, "BatchNorm2d": 1, "Chuncat": 1, "Concat": 1, "CBAM": 4}
    assert fused.plan.ordinary == Counter(ordinary) and fused.summary().startswith("7 layers fused but for")
    compare(model, images(), torch.float32, 10)
    compare_evaluation(model, images())


def test_frozen_layers_get_no_gradient(plain):
    model = random_model(SMALL)
    for parameter in model.model[:6].parameters():
        parameter.requires_grad = False
    model.model[9:11].requires_grad_(False)
    compare(model, images(), torch.float32, 10)


def test_bytes_are_images_of_0_to_1(plain):
    model = random_model(small_cfg([-1, 1, "ReOrg", []]))
    other, numbers = deepcopy(model), torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)
    found, wanted = trained(fused_model(model).train(), numbers), trained(fused_model(other).train(), numbers / 255)
    assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))


def test_maps_are_laid_out_as_aligned_pixels_and_so_may_gradients_be(plain):
    models, x = [random_model(CFG) for _ in range(2)], images()
    for model, contiguous in zip(models, (True, False), strict=True):
        maps = fused_model(model).train()(x)
        assert [y.shape[1:] for y in maps] == [(2, 8, 8, 7), (2, 4, 4, 7), (2, 2, 2, 7)]
        assert all(y.stride() == (y.shape[2] * y.shape[3] * 16, 7, y.shape[3] * 16, 16, 1) for y in maps)
        gradients = [y.new_empty_strided(y.shape, y.stride()).fill_(0.5) for y in maps]
        torch.autograd.backward(maps, [g.contiguous() for g in gradients] if contiguous else gradients)
    grads = [[p.grad for p in model.parameters()] for model in models]
    assert distance(*grads) < 1e-6


def test_fast_steps_train_it_like_the_model(plain):
    """The first step lays the weights out anew, in one tensor; accumulation is over."""
    runs = []
    for form in (lambda model: model, fused_model):
        trainer = step_cases.new_trainer(DEVICE, precision="off", total_batch=64, num_warmup=0, batched=True)
        trainer.network = form(trainer.model)
        runs.append(step_cases.run(FastSteps(trainer), step_cases.batches(5)))
    assert torch.allclose(runs[1].items, runs[0].items, rtol=1e-3)  # rounding grows from step to step
    weights = [list(run.trainer.model.parameters()) for run in runs]
    assert distance(*weights) < 1e-4
    before = list(step_cases.new_trainer(DEVICE).model.parameters())
    assert distance(weights[1], before) > 1e-2  # they have moved


def test_a_run_is_told_how_its_layers_are_computed(plain, caplog):
    caplog.set_level("INFO")
    fused_model(random_model(CFG))
    assert "forward: all 6 layers fused" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton works on a GPU")
def test_where_triton_does_not_work_the_model_is_left_alone(caplog):
    model = random_model(SMALL)
    assert fused_model(model) is model and "forward: not fused, Triton does not work here (" in caplog.text


def test_another_detection_layer_is_left_alone(caplog):
    class OtherDetect(IDetect):
        pass

    model = random_model(CFG)
    model.model[-1].__class__ = OtherDetect
    assert fused_model(model) is model and "no operations for OtherDetect" in caplog.text


def test_the_backward_pass_is_run_once(plain):
    maps = fused_model(random_model(CFG)).train()(images())
    total = sum(y.sum() for y in maps)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="it can be run once"):
        total.backward()


def test_it_shares_every_tensor_and_evaluates_like_the_model(plain, monkeypatch):
    model = random_model(CFG)
    fused = compare_evaluation(model, torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8, device=DEVICE))
    assert all(a is b for a, b in zip(fused.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(fused.buffers(), model.buffers(), strict=True))
    compare_evaluation(model, images())  # by the running statistics that are there now
    monkeypatch.setattr(model.model[-1], "export", True)
    assert isinstance(fused(images()), list)  # the maps alone


def test_sizes_that_fit_no_stride_are_refused(plain):
    model = random_model("cfg/training/yolov7-tiny.yaml", nc=2)
    with pytest.raises(ValueError, match="multiples of the largest stride"):
        fused_model(model).train()(images(72))


def test_windows_of_a_pyramid_go_on_from_one_another(plain):
    fused = fused_model(random_model("cfg/training/yolov7-tiny.yaml", nc=2))
    pools = [operation for operation in fused.plan.operations if type(operation).__name__ == "Pool"]
    assert [pool.window for pool in pools] == [2, 2, 2, 5, 5, 5]
    assert isinstance(fused.model.model[32].m, nn.MaxPool2d) and fused.model.model[32].m.kernel_size == 9


def test_gradients_of_maps_are_read_as_they_lie(plain):
    model = random_model(SMALL)
    other, x = deepcopy(model), images()
    plan, other_plan = fused_model(model).train().plan, fused_model(other).train().plan
    (maps, tape), (_, other_tape) = plan.forward(x, torch.float32), other_plan.forward(x, torch.float32)
    gradients, among_others = [torch.randn(y.shape, device=DEVICE) for y in maps], []
    for y, gradient in zip(maps, gradients, strict=True):
        assert not y.is_contiguous() and y.stride(3) > y.shape[1] * y.shape[4]  # there is a gap after each pixel
        room = torch.full((y.untyped_storage().nbytes() // 4,), float("nan"), device=DEVICE)
        among_others.append(room.as_strided(y.shape, y.stride()).copy_(gradient))
    found, wanted = plan.backward(tape, among_others), other_plan.backward(other_tape, gradients)
    found, wanted = ([part for part in parts if part is not None] for parts in (found, wanted))
    assert len(found) == len(wanted) > 0 and distance(found, wanted) < 1e-3  # a GPU may convolve in TF32
