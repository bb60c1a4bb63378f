"""The kernels of the losses against the reference, on a GPU or interpreted on a CPU.

Run by test_on_gpu.py in a process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton.language import core

from tests import loss_cases
from tests.loss_cases import KINDS, NAMES, random_case, rows
from utils.loss import assign_kernels, assigner, candidates, loss_kernels, on_gpu
from utils.loss.batched import BatchedLoss, BatchedLossAuxOTA, BatchedLossOTA
from utils.loss.criterion import ComputeLoss, ComputeLossAuxOTA, ComputeLossOTA

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAIRS = [(ComputeLoss, BatchedLoss), (ComputeLossOTA, BatchedLossOTA), (ComputeLossAuxOTA, BatchedLossAuxOTA)]
FINE, COARSE = {"reach": 0.5, "num_ious": 10}, {"reach": 1.0, "num_ious": 20}

# Every operation of a program takes the interpreter about 20 microseconds.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, where infinity and nan are meant
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="takes too long without a GPU")


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch):
    """On a CPU: maths by torch instead of CUDA's library, kernels on tensors of the host, little padding."""
    if DEVICE == "cpu":
        functions = {name: as_libdevice(getattr(torch, name)) for name in ("exp", "log", "log1p", "expm1", "atan")}
        for module in (assign_kernels, loss_kernels):
            monkeypatch.setattr(module, "libdevice", SimpleNamespace(**functions))
        monkeypatch.setattr(BatchedLoss, "has_kernels", lambda self: True)
        monkeypatch.setattr(candidates, "SMALLEST", 4)


def one_case(seed, kind, auxiliary=False):
    """A random batch, on a CPU of few targets."""
    case = random_case(seed, kind, DEVICE, auxiliary)
    if DEVICE == "cpu":
        case.targets = case.targets[:2].repeat(2, 1) if kind == "duplicates" else case.targets[-4:]
    return case


def as_libdevice(function):
    """`function` of torch for tensors of the interpreter, float32."""

    def call(x, _semantic=None):
        values = function(torch.from_numpy(np.array(x.handle.data, dtype=np.float32)))
        return core.tensor(type(x.handle)(values.numpy(), x.handle.dtype), x.type)

    return call


# --- assignment ------------------------------------------------------------------------------------------------------


def target_set(inputs, reach=0.5, **options):
    predictions, targets, anchors, strides, size = inputs
    shapes = [prediction.shape for prediction in predictions]
    balance = [1.0] * len(shapes)
    batch = on_gpu.target_set(
        targets.cpu(), shapes, anchors.cpu(), strides, size, balance=balance, reach=reach, **options
    )
    return batch.to(targets.device)


def as_rows(batch, slots, targets):
    """Candidates or matches as `rows` has them, image by image."""
    order = np.argsort(targets[:, 0].cpu().numpy(), kind="stable")
    first, layers = batch.tensors.first.tolist(), batch.tensors.integers.cpu().numpy()
    found = []
    for image, count in enumerate(slots.counts.tolist()):
        here = slice(first[image] * slots.room, first[image] * slots.room + count)
        cell, target = (tensor[here].cpu().numpy() for tensor in (slots.cells, slots.targets))
        layer = (cell[:, None] >= layers[None, 1:, 2]).sum(1)
        ny, nx, before, _ = layers[layer].T
        cell = cell - before
        fields = layer, np.full(count, image), cell // (nx * ny), cell // nx % ny, cell % nx, order[target]
        found += np.column_stack(fields).tolist()
    return found


def by_image(matches):
    """`rows` of Matches, image by image, their order kept."""
    table = rows(matches)
    return table[np.argsort(table[:, 1], kind="stable")].tolist()


def check_assignment(inputs, reach, num_ious):
    predictions, targets, anchors, *_ = inputs
    batch = target_set(inputs, reach)
    found = on_gpu.find_candidates(batch)
    plain = assigner.plain(predictions, targets, anchors, reach=reach)
    assert as_rows(batch, found, targets) == by_image(plain)
    assert found.per_layer.tolist() == [len(target) for target in plain.target]
    matches = on_gpu.assign(batch, found, on_gpu.Maps.of([p.detach() for p in predictions]), num_ious)
    expected = assigner.ota(*inputs, reach=reach, num_ious=num_ious)
    assert as_rows(batch, matches, targets) == by_image(expected)
    assert matches.per_layer.tolist() == [len(target) for target in expected.target]


@pytest.mark.parametrize("kind", ["duplicates", "zeros", "saturated"])
def test_assignment(kind):
    check_assignment(one_case(10, kind).matching_inputs(), **FINE)


def test_coarse_assignment_of_empty_images():
    check_assignment(one_case(6, "empty images").matching_inputs(), **COARSE)


@pytest.mark.parametrize("most", [1, 2], ids=["1 target", "2 targets"])
@pytest.mark.parametrize("num_empty", [0, 1])
def test_assignment_in_chunks_of_images(most, num_empty, monkeypatch):
    """As with more scores than memory may hold; the targets of every image, or of some of them, are a chunk."""
    case, chunks, assign = one_case(2, "ordinary"), [], on_gpu._assign_targets
    images = torch.arange(len(case.targets), device=DEVICE) % (len(case.images) - num_empty)
    case.targets[:, 0] = images + num_empty
    monkeypatch.setattr(on_gpu, "_assign_targets", lambda *args: chunks.append(args[:2]) or assign(*args))
    monkeypatch.setattr(on_gpu, "MOST_SCORES", most * target_set(case.matching_inputs()).sizes.scores)
    check_assignment(case.matching_inputs(), **FINE)
    assert chunks[0][0] == 0 and chunks[-1][1] == len(case.targets)
    assert all(mine[1] == following[0] for mine, following in pairwise(chunks))
    assert len(chunks) == len(images.unique()) > 1 if most == 1 else len(chunks) > 1
    assert target_set(case.matching_inputs()).sizes.is_too_large, "so no graph holds it"


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_golden_assignment_on_cuda(name):
    inputs = loss_cases.load(name, "cuda").matching_inputs()
    for options in (FINE, COARSE):
        check_assignment(inputs, **options)


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_random_assignment_on_cuda(kind):
    for seed in range(20):
        inputs = random_case(seed, kind, "cuda").matching_inputs()
        half = [prediction.detach().half() for prediction in inputs[0]]
        for predictions in (inputs[0], half):
            check_assignment((predictions, *inputs[1:]), **(FINE if seed % 2 else COARSE))


# --- losses and gradients --------------------------------------------------------------------------------------------


def channels_last(prediction, gap=0):
    """The same map as a view of a convolution's output in channels-last order, with a `gap` after each pixel."""
    rows = prediction.detach().permute(0, 2, 3, 1, 4).flatten(3)
    whole = torch.nn.functional.pad(rows, (0, gap), value=float("nan"))[..., : rows.shape[3]]
    return whole.unflatten(3, (prediction.shape[1], prediction.shape[4])).permute(0, 3, 1, 2, 4).requires_grad_()


def check_loss(pair, case, rtol=1e-5, gradient_rtol=1e-5):
    """Loss, items and gradients against the reference; a gradient has the type and layout of its map."""
    used = case.predictions if pair[1] is BatchedLossAuxOTA else case.predictions[: case.num_layers]
    results = []
    for loss_class in pair:
        loss, items = loss_class(case.model)(case.predictions, case.targets, case.images)
        results.append((loss, items, *torch.autograd.grad(loss * 8, used)))
    for number, (wanted, found) in enumerate(zip(*results, strict=True)):
        tolerance = gradient_rtol if number > 1 else rtol
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        scale = wanted.float().abs().max().item()
        torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance * scale)
    assert [gradient.stride() for gradient in results[1][2:]] == [prediction.stride() for prediction in used]


@pytest.mark.parametrize("pair", PAIRS[::2], ids=["plain", "aux"])
def test_loss(pair):
    check_loss(pair, one_case(10, "ordinary", auxiliary=pair is PAIRS[2]))


@pytest.mark.parametrize("gap", [0, 5])
def test_loss_of_channels_last_maps(gap):
    case = one_case(6, "duplicates")
    case.predictions = [channels_last(prediction, gap) for prediction in case.predictions]
    check_loss(PAIRS[1], case)


def test_focal_loss():
    case = one_case(39, "ordinary")
    case.model.hyp |= {"fl_gamma": 1.5, "cls_pw": 0.7, "obj_pw": 1.3, "label_smoothing": 0.1}
    case.model.gr = 0.5
    check_loss(PAIRS[1], case)


def test_loss_without_targets():
    check_loss(PAIRS[1], one_case(13, "no targets"))


def test_gradients_are_scaled_before_they_are_rounded():
    case = one_case(13, "ordinary")
    case.predictions = [channels_last(prediction.half()) for prediction in case.predictions]
    compute_loss = BatchedLossOTA(case.model)
    loss, _ = compute_loss(case.predictions, case.targets, case.images)
    small, large = (torch.autograd.grad(loss * scale, case.predictions, retain_graph=True) for scale in (1e-5, 65536.0))
    assert all((gradient[..., 4] == 0).any() for gradient in small)
    assert all((gradient[..., 4] != 0).all() and gradient.isfinite().all() for gradient in large)


@needs_gpu
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "saturated"])  # see test_batched
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "with gaps"])
def test_loss_on_cuda(kind, layout):
    for seed in range(6):
        case = random_case(seed, kind, "cuda", auxiliary=True)
        if layout != "contiguous":
            gap = 3 if layout == "with gaps" else 0
            case.predictions = [channels_last(prediction, gap) for prediction in case.predictions]
        for pair in PAIRS:
            check_loss(pair, case)


@needs_gpu
@pytest.mark.parametrize("pair", PAIRS, ids=["plain", "ota", "aux"])
def test_half_precision_on_cuda(pair):
    for seed in range(4):
        case = random_case(seed, "ordinary", "cuda", auxiliary=True)
        case.predictions = [channels_last(prediction.half()) for prediction in case.predictions]
        with torch.autocast("cuda", torch.float16):
            check_loss(pair, case, rtol=1e-4, gradient_rtol=0.02)


@needs_gpu
def test_the_same_input_gives_the_same_output():
    case = random_case(0, "crowded", "cuda")
    compute_loss, results = BatchedLossOTA(case.model), []
    for _ in range(3):
        loss, items = compute_loss(case.predictions, case.targets, case.images)
        results.append((items, *torch.autograd.grad(loss, case.predictions[: case.num_layers])))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


# --- target sets -----------------------------------------------------------------------------------------------------


def test_target_sets_replace_each_other_and_are_padded():
    inputs = random_case(1, "ordinary").matching_inputs()
    (small,) = [target_set(inputs)]
    room = small.sizes.with_spare()
    static, other = (target_set(inputs, at_least=room) for _ in range(2))
    assert static.sizes == room and room.targets > len(inputs[1]) and room.work > small.sizes.work
    assert (static.tensors.targets[len(inputs[1]) :, 0] == -1).all()
    static.buffer.zero_()
    assert static.copy_(other) is static and torch.equal(static.tensors.targets, other.tensors.targets)
    with pytest.raises(ValueError, match="cannot hold"):
        static.copy_(small)


def test_targets_are_sorted_by_image():
    targets = torch.tensor([[1, 0, 0.5, 0.5, 0.1, 0.1], [0, 1, 0.5, 0.5, 0.1, 0.1], [1, 2, 0.5, 0.5, 0.1, 0.1]])
    batch = on_gpu.target_set(targets, [(3, 1, 4, 4, 8)], torch.ones(1, 1, 2), [8.0], (32, 32), balance=[1.0])
    assert batch.tensors.targets[:3, :2].tolist() == [[0, 1], [1, 0], [1, 2]]
    assert batch.tensors.first.tolist() == [0, 1, 3, 3]


def test_where_triton_does_not_work_the_loss_goes_without(monkeypatch, caplog):
    def broken(batch):
        raise RuntimeError("no C compiler\nwas found")

    monkeypatch.setattr(on_gpu, "find_candidates", broken)
    assert on_gpu.can_run(torch.device("cpu"), 3, 3) is False
    (record,) = caplog.records
    assert "Triton does not work here (no C compiler was found)" in record.getMessage()
