import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import loss_cases
from tests.loss_cases import AUXILIARY, NAMES, ORDINARY, matches_of, model_with_head
from tests.parity import check
from utils.loss import assigner as assign
from utils.loss.criterion import (
    ComputeLoss,
    ComputeLossAuxOTA,
    ComputeLossOTA,
    binary_loss,
    build_losses,
    objectness_target,
    smooth_labels,
)

VALUES = "train: losses"
GRADIENTS = "train: gradients"


# --- the golden values -----------------------------------------------------------------------------------------------


def check_values(name, loss_and_items, golden_loss, golden_items):
    loss, items = loss_and_items
    check(VALUES, f"{name} loss", loss, golden_loss, rtol=2e-5)
    check(VALUES, f"{name} items", items, golden_items, rtol=2e-5, atol=1e-8)


def check_gradients(name, loss, predictions, arrays, prefix):
    gradients = torch.autograd.grad(loss, predictions)
    for layer, gradient in enumerate(gradients):
        if f"{prefix}_grad{layer}" in arrays:  # the largest case has them only in the complete collection
            golden = arrays[f"{prefix}_grad{layer}"]
            check(GRADIENTS, f"{name} {prefix} {layer}", gradient, golden, rtol=1e-3, atol=1e-6)


def handed_in(case, **golden_rows):
    """An assigner that answers with golden assignments: `coarse` for a reach of 1, otherwise `fine`."""
    anchors = case.model.model[-1].anchors
    return lambda *_, reach=0.5, **__: matches_of(golden_rows["coarse" if reach == 1.0 else "fine"], anchors)


def check_case(name, device):
    case = loss_cases.load(name, device)
    arrays = case.arrays
    loss, items = ComputeLoss(case.model)(case.predictions, case.targets)
    check_values(f"{name} plain", (loss, items), arrays["plain_loss"], arrays["plain_items"])
    check_gradients(name, loss, case.predictions, arrays, "plain")

    _, golden_loss, golden_items, _ = loss_cases.stable_arrays(name, arrays)
    ota = ComputeLossOTA(case.model)(case.predictions, case.targets, case.images)
    check_values(f"{name} ota", ota, golden_loss, golden_items)

    stock_matches = ComputeLossOTA(case.model, assign=handed_in(case, fine=arrays["ota_asg"]))
    loss, items = stock_matches(case.predictions, case.targets, case.images)
    check_values(f"{name} ota with stock's matches", (loss, items), arrays["ota_loss"], arrays["ota_items"])
    check_gradients(name, loss, case.predictions, arrays, "ota")


def check_auxiliary_case(name, device):
    case = loss_cases.load(name, device)
    arrays = case.arrays
    stable = ComputeLossAuxOTA(case.model)(case.predictions, case.targets, case.images)
    check_values(name, stable, arrays["aux_stable_loss"], arrays["aux_stable_items"])

    stock_matches = handed_in(case, fine=arrays["aux_lead_asg"], coarse=arrays["aux_coarse_asg"])
    compute_loss = ComputeLossAuxOTA(case.model, assign=stock_matches)
    loss, items = compute_loss(case.predictions, case.targets, case.images)
    check_values(f"{name} with stock's matches", (loss, items), arrays["aux_loss"], arrays["aux_items"])
    check_gradients(name, loss, case.predictions, arrays, "aux")


@pytest.mark.parametrize("name", ORDINARY)
def test_golden(name):
    check_case(name, "cpu")


@pytest.mark.parametrize("name", AUXILIARY)
def test_auxiliary_golden(name):
    check_auxiliary_case(name, "cpu")


@pytest.mark.parametrize("name", loss_cases.RULED)
def test_golden_gradients_where_stock_is_repaired(name):
    case = loss_cases.load(name)
    loss, _ = ComputeLossOTA(case.model)(case.predictions, case.targets, case.images)
    with np.load(loss_cases.FOLDER / f"{loss_cases.RULED[name]}.npz") as arrays:
        assert "ota_grad0" in arrays
        check_gradients(f"{name} repaired", loss, case.predictions, arrays, "ota")


def test_the_golden_cases_are_there():
    assert {name[:3] for name in NAMES} >= {f"g{i:02}" for i in range(1, 17)} | {"x01", "x02"}
    without = [name[:3] for name in ORDINARY if "plain_grad0" not in loss_cases.load(name).arrays]
    assert set(without) <= {"g07"}
    assert all("aux_grad0" in loss_cases.load(name).arrays for name in AUXILIARY)


@pytest.mark.gpu
def test_golden_on_cuda():
    for name in ORDINARY:
        check_case(name, "cuda")
    for name in AUXILIARY:
        check_auxiliary_case(name, "cuda")


# --- the terms by hand -----------------------------------------------------------------------------------------------

LOG2 = math.log(2)
ANCHORS = torch.tensor([[[2.0, 2.0]], [[2.0, 2.0]], [[2.0, 2.0]]])
BOX_IN_MID_CELL = [[0, 1, 20 / 64, 28 / 64, 16 / 64, 16 / 64]]  # exactly anchor 0 in cell (2, 3) of layer 0


def tiny(num_classes=2, batch=1, **hyp):
    """A model of three layers and its undecided predictions: every logit is 0, every box mid-cell, as its anchor."""
    model = model_with_head(ANCHORS.clone(), torch.tensor([8.0, 16.0, 32.0]), num_classes, **hyp)
    predictions = [torch.zeros(batch, 1, n, n, 5 + num_classes, requires_grad=True) for n in (8, 4, 2)]
    return model, predictions


def test_binary_loss_by_hand():
    logits, labels = torch.zeros(4), torch.tensor([1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(binary_loss(logits, labels), torch.tensor(LOG2))
    torch.testing.assert_close(binary_loss(logits, labels, positive_weight=5.0), torch.tensor(2 * LOG2))
    focal = (0.25 + 3 * 0.75) / 4 * 0.5**2 * LOG2  # alpha of each label, (1 - 1/2) ** gamma
    torch.testing.assert_close(binary_loss(logits, labels, focal_gamma=2.0), torch.tensor(focal))


def test_smooth_labels():
    assert smooth_labels(0.0) == (1.0, 0.0)
    assert smooth_labels(0.1) == (0.95, 0.05)


def test_the_last_match_of_a_cell_decides_its_objectness():
    index = [torch.tensor(column) for column in ([0, 0, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1], [2, 0, 2, 2])]
    target = objectness_target(torch.tensor([0.9, 0.5, 0.1, 0.7]), index, torch.ones(2, 1, 2, 3))
    expected = torch.zeros(2, 1, 2, 3)
    expected[0, 0, 1, 2], expected[0, 0, 0, 0], expected[1, 0, 1, 2] = 0.1, 0.5, 0.7
    torch.testing.assert_close(target, expected)


@pytest.mark.gpu
def test_the_last_match_decides_on_cuda_too():
    score = torch.rand(100_000, generator=torch.manual_seed(0)).cuda()
    cell = [torch.randint(0, n, (len(score),)).cuda() for n in (2, 1, 3, 3)]
    like = torch.zeros(2, 1, 3, 3, device="cuda")
    on_cpu = objectness_target(score.cpu(), [index.cpu() for index in cell], like.cpu())
    torch.testing.assert_close(objectness_target(score, cell, like).cpu(), on_cpu, rtol=0, atol=0)


@pytest.mark.parametrize("loss_class", [ComputeLoss, ComputeLossOTA])
def test_without_targets_only_objectness_learns(loss_class):
    model, predictions = tiny(batch=3)
    loss, items = loss_class(model)(predictions, torch.zeros(0, 6), torch.zeros(3, 3, 64, 64))
    objectness = LOG2 * (4.0 + 1.0 + 0.4)
    torch.testing.assert_close(items, torch.tensor([0.0, objectness, 0.0, objectness]))
    torch.testing.assert_close(loss, torch.tensor([3 * objectness]))
    assert not items.requires_grad

    loss.backward()
    coarsest = predictions[2].grad  # balance 0.4, mean over 3 x 1 x 2 x 2 cells, times the batch of 3
    torch.testing.assert_close(coarsest[..., 4], torch.full((3, 1, 2, 2), 0.4 * 0.5 / 12 * 3))
    assert coarsest[..., :4].abs().sum() == 0 and coarsest[..., 5:].abs().sum() == 0


def test_a_perfect_box_costs_nothing_but_its_class():
    model, predictions = tiny(anchor_t=1.5)  # layer 0 only: the box is half as large as the next layer's anchor
    _, items = ComputeLoss(model)(predictions, torch.tensor(BOX_IN_MID_CELL), None)
    box, objectness, classes, total = items.tolist()
    assert box == pytest.approx(0, abs=1e-6)
    assert objectness == pytest.approx(LOG2 * 5.4)  # cross-entropy at logit 0, whatever the target
    assert classes == pytest.approx(LOG2)
    assert total == pytest.approx(box + objectness + classes)


def test_box_loss_of_a_box_of_half_the_width():
    model, predictions = tiny(anchor_t=2.5)
    targets = torch.tensor([[0, 1, 20 / 64, 28 / 64, 8 / 64, 16 / 64]])  # 1 x 2 cells in layer 0 against 2 x 2
    _, items = ComputeLoss(model)(predictions, targets)
    aspect = 4 / math.pi**2 * (math.atan(0.5) - math.atan(1.0)) ** 2
    assert items[0].item() == pytest.approx(1 - (0.5 - aspect**2 / (aspect + 0.5)), abs=1e-5)


def objectness_gradient(gr):
    model, predictions = tiny(anchor_t=2.5)
    model.gr = gr
    targets = torch.tensor([[0, 1, 20 / 64, 28 / 64, 8 / 64, 16 / 64]])
    loss, _ = ComputeLoss(model)(predictions, targets)
    loss.backward()
    return predictions[0].grad[0, 0, 3, 2, 4].item() / 4.0 * 64  # without balance and mean: sigmoid(0) - target


def test_gr_mixes_overlap_and_certainty_in_the_objectness_target():
    assert objectness_gradient(gr=0.0) == pytest.approx(0.5 - 1)
    overlap = 0.5 - objectness_gradient(gr=1.0)
    assert 0.4 < overlap < 0.5
    assert objectness_gradient(gr=0.5) == pytest.approx(0.5 - (0.5 + 0.5 * overlap))


def test_a_single_class_has_no_class_loss():
    model, predictions = tiny(num_classes=1)
    targets = torch.tensor(BOX_IN_MID_CELL)
    targets[:, 1] = 0
    for loss_class in (ComputeLoss, ComputeLossOTA):
        _, items = loss_class(model)(predictions, targets, torch.zeros(1, 3, 64, 64))
        assert items[2] == 0 and items[1] > 0


def test_gains_multiply_the_terms():
    targets = torch.tensor(BOX_IN_MID_CELL)
    model, predictions = tiny()
    _, ones = ComputeLoss(model)(predictions, targets)
    model, _ = tiny(box=0.5, obj=2.0, cls=3.0)
    _, items = ComputeLoss(model)(predictions, targets)
    torch.testing.assert_close(items[:3], ones[:3] * torch.tensor([0.5, 2.0, 3.0]))
    torch.testing.assert_close(items[3], items[:3].sum())


def test_autobalance_moves_the_balance_towards_equal_layers():
    model, predictions = tiny()
    compute_loss = ComputeLoss(model, autobalance=True)
    compute_loss(predictions, torch.zeros(0, 6))
    moved = [0.9999 * before + 0.0001 / LOG2 for before in (4.0, 1.0, 0.4)]
    balanced = pytest.approx([weight / moved[1] for weight in moved])
    assert compute_loss.balance == balanced

    compute_loss = ComputeLossAuxOTA(model, autobalance=True)  # auxiliary outputs have no say
    compute_loss([*predictions, *(p + 3 for p in predictions)], torch.zeros(0, 6), torch.zeros(1, 3, 64, 64))
    assert compute_loss.balance == balanced


# --- robustness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logit", [60.0, -60.0])
def test_saturated_predictions_have_finite_loss_and_gradient(logit):
    model, predictions = tiny()
    predictions = [torch.full_like(p, logit).requires_grad_() for p in predictions]
    loss, _ = ComputeLossOTA(model)(predictions, torch.tensor(BOX_IN_MID_CELL), torch.zeros(1, 3, 64, 64))
    loss.backward()
    assert torch.isfinite(loss).all()
    assert all(torch.isfinite(p.grad).all() for p in predictions)


def test_the_order_of_images_does_not_matter():
    name = "g01_nc3_64_b2"
    case = loss_cases.load(name)
    swapped = case.targets.clone()
    swapped[:, 0] = 1 - swapped[:, 0]
    for loss_class in (ComputeLoss, ComputeLossOTA):
        compute_loss = loss_class(case.model)
        _, items = compute_loss(case.predictions, case.targets, case.images)
        _, items_swapped = compute_loss([p.flip(0) for p in case.predictions], swapped, case.images)
        torch.testing.assert_close(items, items_swapped)


@pytest.mark.parametrize("loss_class", [ComputeLoss, ComputeLossOTA])
def test_low_precision_predictions_under_autocast(loss_class):
    case = loss_cases.load("g01_nc3_64_b2")
    low = [p.detach().bfloat16().requires_grad_() for p in case.predictions]
    compute_loss = loss_class(case.model)
    with torch.autocast("cpu", torch.bfloat16):
        loss, items = compute_loss(low, case.targets, case.images)
    assert loss.dtype == items.dtype == torch.float32
    _, exact = compute_loss([p.float() for p in low], case.targets, case.images)
    torch.testing.assert_close(items, exact, rtol=0.02, atol=1e-4)
    loss.backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.abs().sum() > 0 for p in low)


def test_anchors_may_change_after_construction():
    model, predictions = tiny()
    targets = torch.tensor(BOX_IN_MID_CELL)
    compute_loss = ComputeLoss(model)
    model.model[-1].anchors = ANCHORS / 2
    _, items = compute_loss(predictions, targets)
    _, fresh = ComputeLoss(model)(predictions, targets)
    assert items.tolist() == fresh.tolist()
    assert items[0] > 0.1  # the box was perfect for the old anchors


def test_a_wrapped_model_is_unwrapped():
    model, predictions = tiny()
    wrapper = SimpleNamespace(module=model, hyp=model.hyp, gr=model.gr)
    targets = torch.tensor(BOX_IN_MID_CELL)
    assert (
        ComputeLoss(wrapper)(predictions, targets)[1].tolist() == ComputeLoss(model)(predictions, targets)[1].tolist()
    )
    assert ComputeLoss(SimpleNamespace(module=model)).hyp is model.hyp


def test_validation_of_an_auxiliary_head_reads_the_lead_outputs_only():
    case = loss_cases.load(AUXILIARY[0])
    compute_loss = ComputeLoss(case.model)
    _, all_outputs = compute_loss(case.predictions, case.targets)
    _, lead_outputs = compute_loss(case.predictions[: case.num_layers], case.targets)
    assert all_outputs.tolist() == lead_outputs.tolist()


@pytest.mark.parametrize(
    "hyp, auxiliary, training",
    [
        ({}, False, ComputeLossOTA),
        ({"loss_ota": 1}, False, ComputeLossOTA),
        ({"loss_ota": 0}, False, ComputeLoss),
        ({"loss_ota": 0}, True, ComputeLossAuxOTA),
    ],
)
def test_build_losses_chooses_by_head_and_loss_ota(hyp, auxiliary, training):
    model, _ = tiny(**hyp)
    if auxiliary:
        model.model[-1].m2 = []
    train_loss, validation_loss = build_losses(model)
    assert type(train_loss) is training
    assert type(validation_loss) is ComputeLoss


def test_the_assigner_is_handed_in():
    model, predictions = tiny()
    asked = []

    def assigner(*arguments, **options):
        asked.append((arguments[4], options))
        return assign.ota(*arguments, **options)

    ComputeLossOTA(model, assign=assigner)(predictions, torch.tensor(BOX_IN_MID_CELL), torch.zeros(1, 3, 64, 64))
    assert asked == [((64, 64), {"anchor_threshold": 4.0})]
