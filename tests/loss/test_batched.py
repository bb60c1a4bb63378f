import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import loss_cases, small_run
from tests.bench_loss import graph_replay
from tests.loss_cases import AUXILIARY, KINDS, ORDINARY, model_with_head, random_case
from tests.parity import check
from utils.loss.batched import CLASSES, BatchedLoss, BatchedLossAuxOTA, BatchedLossOTA
from utils.loss.criterion import (
    REFERENCE,
    ComputeLoss,
    ComputeLossAuxOTA,
    ComputeLossOTA,
    build_losses,
    losses_by_epoch,
)
from utils.plots import run

VALUES = "train: losses, batched"
GRADIENTS = "train: gradients, batched"
PAIRS = [(ComputeLoss, BatchedLoss), (ComputeLossOTA, BatchedLossOTA)]
AUXILIARY_PAIR = (ComputeLossAuxOTA, BatchedLossAuxOTA)


def with_gradients(loss_class, case, targets=None):
    loss, items = loss_class(case.model)(case.predictions, case.targets if targets is None else targets, case.images)
    used = case.predictions if loss_class in AUXILIARY_PAIR else case.predictions[: case.num_layers]
    return loss, items, *torch.autograd.grad(loss, used)


def prepared(compute_loss, case, at_least=None):
    shapes = [prediction.shape for prediction in case.predictions[: case.num_layers]]
    return compute_loss.prepare(case.targets.cpu(), shapes, case.size, at_least=at_least)


def assert_equal(actual, expected, rtol=1e-5):
    """Loss and items to `rtol`; a gradient to `rtol` of its largest value."""
    for found, wanted in zip(actual, expected, strict=True):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        scale = wanted.float().abs().max().item()
        torch.testing.assert_close(found.float(), wanted.float(), rtol=rtol, atol=rtol * scale)


# --- the golden values -----------------------------------------------------------------------------------------------


def check_golden(name, device):
    case = loss_cases.load(name, device)
    arrays = case.arrays
    if name in AUXILIARY:
        found = with_gradients(BatchedLossAuxOTA, case)
        check_values(f"{name} aux", found, arrays["aux_stable_loss"], arrays["aux_stable_items"])
        assert_equal(found, with_gradients(ComputeLossAuxOTA, case))
        return
    found = with_gradients(BatchedLoss, case)
    check_values(f"{name} plain", found, arrays["plain_loss"], arrays["plain_items"])
    for layer, gradient in enumerate(found[2:]):
        if f"plain_grad{layer}" in arrays:
            golden = arrays[f"plain_grad{layer}"]
            check(GRADIENTS, f"{name} plain {layer}", gradient, golden, rtol=1e-3, atol=1e-6)
    _, golden_loss, golden_items, _ = loss_cases.stable_arrays(name, arrays)
    found = with_gradients(BatchedLossOTA, case)
    check_values(f"{name} ota", found, golden_loss, golden_items)
    assert_equal(found, with_gradients(ComputeLossOTA, case))


def check_values(name, found, golden_loss, golden_items):
    check(VALUES, f"{name} loss", found[0], golden_loss, rtol=2e-5)
    check(VALUES, f"{name} items", found[1], golden_items, rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("name", ORDINARY + AUXILIARY)
def test_golden(name):
    check_golden(name, "cpu")


@pytest.fixture(params=["kernels", "torch"])
def form(request, monkeypatch):
    """The form of the batched losses on a GPU."""
    if request.param == "torch":
        monkeypatch.setattr(BatchedLoss, "has_kernels", lambda self: False)


@pytest.mark.gpu
@pytest.mark.usefixtures("form")
def test_golden_on_cuda():
    for name in ORDINARY + AUXILIARY:
        check_golden(name, "cuda")


# --- any batch -------------------------------------------------------------------------------------------------------


def check_random(seed, kind, device, precision=None):
    case = random_case(seed, kind, device, auxiliary=seed % 3 == 0)
    for reference, batched in [*PAIRS, AUXILIARY_PAIR] if seed % 3 == 0 else PAIRS:
        with torch.autocast(device, precision, enabled=precision is not None):
            expected = with_gradients(reference, case)
            if kind == "saturated":
                expected = with_exact_gradients_of_centres(reference, case, expected)
            assert_equal(with_gradients(batched, case), expected)


@pytest.mark.parametrize("gamma", [0.3, 0.9])
def test_focal_loss_of_certain_logits(gamma):
    """Where 1 - p is 0 its power below 1 has no gradient; both losses hold it above."""
    for seed in range(6):
        case = random_case(seed, "ordinary", auxiliary=True)
        case.model.hyp["fl_gamma"] = gamma
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for prediction in case.predictions:
                logits = prediction[..., 4:]
                signs = torch.randint(-1, 2, logits.shape, generator=generator)
                logits[signs != 0] = 100.0 * signs[signs != 0]
        for reference, batched in [*PAIRS, AUXILIARY_PAIR]:
            expected = with_gradients(reference, case)
            assert all(values.isfinite().all() for values in expected)
            assert_equal(with_gradients(batched, case), expected)


def with_exact_gradients_of_centres(reference, case, values):
    """`values` with the gradients of x and y from a computation in float64.

    The gradient of the width of a box of no size is huge. The reference subtracts it from itself where the centre moves
    both edges, and in float32 what remains is noise.
    """
    exact = [prediction.detach().double().requires_grad_() for prediction in case.predictions]
    for mine, theirs in zip(values[2:], with_gradients(reference, replace(case, predictions=exact))[2:], strict=True):
        mine[..., :2] = theirs[..., :2].float()
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_random_batches(kind):
    for seed in range({"large": 3, "crowded": 6}.get(kind, 15)):
        check_random(seed, kind, "cpu")


@pytest.mark.gpu
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("precision", [None, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_random_batches_on_cuda(kind, precision):
    for seed in range(9):
        check_random(seed, kind, "cuda", precision)


def check_low_precision(seed, device, dtype):
    case = random_case(seed, "ordinary", device)
    case.predictions = [prediction.detach().to(dtype).requires_grad_() for prediction in case.predictions]
    for reference, batched in PAIRS:
        with torch.autocast(device, dtype):
            expected = with_gradients(reference, case)
            found = with_gradients(batched, case)
            # in bfloat16 the reference rounds parts of the loss, on a CPU the cross-entropy of the classes too
            assert_equal(found[:2], expected[:2], rtol=1e-4 if dtype is torch.float16 else 4e-3)
            assert_equal(found[2:], expected[2:], rtol=0.02)  # sums of rounded shares, rounded again


def test_low_precision_predictions_under_autocast():
    for seed in range(4):
        check_low_precision(seed, "cpu", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_predictions_under_autocast_on_cuda(dtype):
    for seed in range(4):
        check_low_precision(seed, "cuda", dtype)


# --- fixed shapes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [BatchedLoss, BatchedLossOTA])
def test_a_layer_without_matches_gives_finite_zero_gradients(batched):
    case = random_case(1, "no targets")
    _, items, *gradients = with_gradients(batched, case)
    assert items[0] == items[2] == 0 and items[1] > 0
    for gradient in gradients:
        assert gradient[..., 4].abs().sum() > 0
        assert gradient[..., :4].abs().sum() == 0 and gradient[..., 5:].abs().sum() == 0


def test_candidates_of_similar_batches_have_equal_sizes_and_replace_each_other():
    first, second = random_case(0, "ordinary"), random_case(0, "ordinary")
    second.targets = second.targets.flip(0)[1:]
    compute_loss = BatchedLossOTA(first.model)
    (static,), (other,) = prepared(compute_loss, first), prepared(compute_loss, second)
    (grown,) = prepared(compute_loss, second, [static.sizes])
    assert static.sizes == grown.sizes.or_more(other.sizes)
    expected = compute_loss.compute(second.predictions, [other])[1]
    assert compute_loss.compute(second.predictions, [static])[1].tolist() != expected.tolist()
    torch.testing.assert_close(compute_loss.compute(second.predictions, [static.copy_(grown)])[1], expected)


def check_compiled(device, backend):
    case = random_case(0, "ordinary", device)
    compute_loss = BatchedLossOTA(case.model)
    compute_loss.use_kernels = False
    candidate_sets = [candidates.to(case.images.device) for candidates in prepared(compute_loss, case)]
    compiled = torch.compile(compute_loss.compute, backend=backend, fullgraph=True)
    loss, items = compiled(case.predictions, candidate_sets)
    gradients = torch.autograd.grad(loss, case.predictions)
    assert_equal((loss, items, *gradients), with_gradients(ComputeLossOTA, case))


@pytest.mark.skipif(torch.__version__.startswith("2.4."), reason="Dynamo of torch 2.4 cannot trace the loss")
def test_compiles_without_a_break():
    check_compiled("cpu", "aot_eager")


@pytest.mark.gpu
def test_compiles_without_a_break_on_cuda():
    check_compiled("cuda", "inductor")


def test_candidates_of_other_sizes_are_refused():
    case = random_case(0, "ordinary")
    compute_loss = BatchedLoss(case.model)
    (candidates,) = prepared(compute_loss, case)
    (larger,) = prepared(compute_loss, case, [candidates.sizes.with_spare()])
    with pytest.raises(ValueError, match="cannot hold"):
        candidates.copy_(larger)


def test_ota_without_images_is_refused():
    case = random_case(0, "ordinary")
    with pytest.raises(ValueError, match="hand it the images"):
        BatchedLossOTA(case.model)(case.predictions, case.targets)


def test_anchors_may_change_in_place():
    case = random_case(0, "ordinary")
    compute_loss = BatchedLoss(case.model)
    before = compute_loss(case.predictions, case.targets)[1]
    case.model.model[-1].anchors *= 1.5
    after = compute_loss(case.predictions, case.targets)[1]
    assert before.tolist() != after.tolist()
    torch.testing.assert_close(after, ComputeLoss(case.model)(case.predictions, case.targets)[1])


@pytest.mark.gpu
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("batched", [BatchedLoss, BatchedLossOTA, BatchedLossAuxOTA])
def test_forward_and_backward_never_wait(batched):
    case = random_case(3, "ordinary", "cuda", auxiliary=True)
    compute_loss = batched(case.model)
    targets = case.targets.cpu()
    compute_loss(case.predictions, targets, case.images)[0].backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", torch.float16):
            loss, _ = compute_loss(case.predictions, targets, case.images)  # the whole call: candidates, copy, loss
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("reference, batched", [*PAIRS, AUXILIARY_PAIR])
def test_cuda_graph(reference, batched):
    case, other = (random_case(3, kind, "cuda", auxiliary=True) for kind in ("ordinary", "empty images"))
    compute_loss = batched(case.model)
    both = zip(prepared(compute_loss, case), prepared(compute_loss, other), strict=True)
    sizes = [mine.sizes.or_more(theirs.sizes) for mine, theirs in both]
    static = [candidates.to(case.images.device) for candidates in prepared(compute_loss, case, sizes)]
    predictions = [prediction.detach().clone().requires_grad_() for prediction in case.predictions]
    used = predictions if batched is BatchedLossAuxOTA else predictions[: case.num_layers]

    def step():
        loss, items = compute_loss.compute(predictions, static)
        return loss, items, *torch.autograd.grad(loss, used)

    replay = graph_replay(step)
    for now in (case, other, case):
        for prediction, values in zip(predictions, now.predictions, strict=True):
            prediction.data.copy_(values.detach())
        for candidates, new in zip(static, prepared(compute_loss, now, sizes), strict=True):
            candidates.copy_(new)
        assert_equal(replay(), with_gradients(reference, now))


# --- choice ----------------------------------------------------------------------------------------------------------


def small_model(auxiliary=False, **hyp):
    model = model_with_head(torch.ones(3, 1, 2), torch.tensor([8.0, 16.0, 32.0]), 2, **hyp)
    if auxiliary:
        model.model[-1].m2 = []
    return model


@pytest.mark.parametrize(
    "hyp, auxiliary, training",
    [({}, False, BatchedLossOTA), ({"loss_ota": 0}, False, BatchedLoss), ({"loss_ota": 0}, True, BatchedLossAuxOTA)],
)
def test_the_batched_losses_are_chosen_by_the_same_rule(hyp, auxiliary, training):
    train_loss, validation_loss = build_losses(small_model(auxiliary, **hyp), classes=CLASSES)
    assert type(train_loss) is training
    assert type(validation_loss) is ComputeLoss


@pytest.mark.parametrize(
    "classes, plain, ota", [(REFERENCE, ComputeLoss, ComputeLossOTA), (CLASSES, BatchedLoss, BatchedLossOTA)]
)
def test_ota_in_the_last_epochs(classes, plain, ota):
    loss_of_epoch, _ = losses_by_epoch(small_model(loss_ota=0), 5, classes, ota_last=2)
    assert [type(loss_of_epoch(epoch)) for epoch in range(5)] == [plain] * 3 + [ota] * 2
    assert loss_of_epoch(3) is loss_of_epoch(4)
    loss_of_epoch, _ = losses_by_epoch(small_model(), 2, classes, ota_last=5)
    assert type(loss_of_epoch(0)) is ota


def test_ota_last_means_nothing_to_an_auxiliary_head(caplog):
    with caplog.at_level(logging.WARNING):
        loss_of_epoch, _ = losses_by_epoch(small_model(auxiliary=True), 5, CLASSES, ota_last=2)
    assert type(loss_of_epoch(0)) is BatchedLossAuxOTA
    assert "--ota-last has no effect" in caplog.text


def results_of(folder):
    return np.array([line.split()[2:6] for line in (folder / "results.txt").read_text().splitlines()], dtype=float)


@pytest.mark.parametrize("options", [{}, {"auxiliary": True}, {"hyp": {"loss_ota": 0}}], ids=["ota", "aux", "plain"])
def test_a_run_trains_alike(options, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "in_background", lambda *_, **__: None)
    means = []
    for name, flags in (("reference", ()), ("fast", ("--fast-loss",))):
        folder = tmp_path / name
        folder.mkdir()
        means.append(results_of(small_run.run(folder, "--notest", *flags, **options)))
    np.testing.assert_allclose(means[1], means[0], rtol=1e-3, atol=1e-5)
