"""Values and gradients in closed form, against autograd and by hand."""

import pytest
import torch

from utils.loss import criterion
from utils.loss.gradients import KnownGradients, binary_loss, binary_loss_change, complete_iou
from utils.ops import boxes

SETTINGS = [(1.0, 0.0), (0.7, 0.0), (1.0, 1.5), (1.3, 0.5)]


def by_autograd(logits, label, weight, gamma):
    logits = logits.clone().requires_grad_()
    labels = label if isinstance(label, torch.Tensor) else torch.full_like(logits, label)
    values = criterion.binary_loss(logits, labels, weight, gamma, reduction="none")
    return values.detach(), torch.autograd.grad(values.sum(), logits)[0]


@pytest.mark.parametrize("weight, gamma", SETTINGS)
@pytest.mark.parametrize("label", [0.0, 1.0, 0.05, "random"])
def test_binary_loss(weight, gamma, label):
    logits = torch.linspace(-9, 9, 101)
    label = torch.linspace(0, 1, 101).roll(37) if label == "random" else label
    for found, expected in zip(
        binary_loss(logits, label, weight, gamma), by_autograd(logits, label, weight, gamma), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weight, gamma", SETTINGS)
@pytest.mark.parametrize("before", [0.0, 0.05])
def test_binary_loss_change(weight, gamma, before):
    logits, label = torch.linspace(-9, 9, 101), torch.linspace(0, 1, 101)
    new, old = (binary_loss(logits, which, weight, gamma) for which in (label, before))
    for found, after, earlier in zip(binary_loss_change(logits, label, before, weight, gamma), new, old, strict=True):
        torch.testing.assert_close(found + earlier, after, rtol=1e-5, atol=2e-6)


def test_binary_loss_by_hand():
    value, gradient = binary_loss(torch.zeros(1), 1.0)
    assert value.item() == pytest.approx(0.6931472) and gradient.item() == -0.5
    value, gradient = binary_loss(torch.tensor([100.0, -100.0]), 0.0)
    assert value.tolist() == pytest.approx([100.0, 0.0]) and gradient.tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize("gamma", [0.1, 0.5, 0.99, 1.0, 1.5])
@pytest.mark.parametrize("label", [0.0, 1.0, 0.05, 0.95])
def test_focal_loss_of_extreme_logits_is_finite_and_equal(gamma, label):
    """A certain and right logit has 1 - p = 0, whose power below 1 has an infinite gradient, in stock YOLOv7 too."""
    sides = torch.tensor([0.0, 1.0, 10.0, 16.0, 16.7, 17.0, 20.0, 50.0, 88.0, 100.0, 200.0, 65504.0])
    logits = torch.cat((-sides, sides))
    found, expected = binary_loss(logits, label, 1.0, gamma), by_autograd(logits, label, 1.0, gamma)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.isfinite().all() and theirs.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_focal_loss_in_half_precision_is_finite(label):
    logits = torch.tensor([-65504.0, -100.0, -12.0, 0.0, 12.0, 100.0, 65504.0], dtype=torch.float16)
    values, gradients = by_autograd(logits, label, 1.0, 0.5)
    assert values.isfinite().all() and gradients.isfinite().all()


def iou_by_autograd(mine, true):
    mine = mine.clone().requires_grad_()
    overlap = boxes.complete_iou(mine, true)
    return overlap.detach(), torch.autograd.grad(overlap.sum(), mine)[0]


def iou_in_closed_form(mine, true):
    both = torch.stack((mine, true))
    overlap, by_doubled_centre, by_size = complete_iou(both[..., :2], both[..., 2:])
    return overlap, torch.cat((by_doubled_centre * 2, by_size), 1)


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])  # inside each other, overlapping, apart
def test_complete_iou(spread):
    generator = torch.manual_seed(0)
    draw = torch.rand(2, 1000, 4, generator=generator, dtype=torch.float64)
    mine, true = draw * torch.tensor([spread, spread, 2, 2]) + torch.tensor([0, 0, 0.01, 0.01])
    for found, expected in zip(iou_in_closed_form(mine, true), iou_by_autograd(mine, true), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_complete_iou_of_coinciding_edges():
    """Equal boxes, shared edges, a shared middle: where autograd halves a gradient."""
    true = torch.tensor([[2.0, 2.0, 2.0, 2.0]]).repeat(4, 1)
    mine = torch.tensor([[2.0, 2, 2, 2], [1.5, 2, 1, 2], [2, 2, 1, 2], [2.5, 2.5, 1, 1]])
    for found, expected in zip(iou_in_closed_form(mine, true), iou_by_autograd(mine, true), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_touching_boxes_do_not_overlap():
    true, mine = torch.tensor([[2.0, 2, 2, 2]]), torch.tensor([[4.0, 2, 2, 2], [4.5, 2, 2, 2]])
    overlap, gradients = iou_in_closed_form(mine, true.repeat(2, 1))
    assert overlap[0].item() == pytest.approx(-4 / 20)  # distance 2 squared over 4 x 2 enclosing
    assert gradients[0, 0].item() == pytest.approx(-2 * 2 / 20 + 2 * 4 * 4 / 400)  # of the distance alone
    assert gradients[0, 1] == 0


def test_known_gradients_are_written_where_they_belong():
    predictions = [torch.randn(1, 1, 2, 2, 7, requires_grad=True), torch.randn(1, 1, 1, 1, 7, requires_grad=True)]
    rows = torch.arange(21.0).view(3, 7)
    objectness = torch.tensor([1.0, 2, 3, 4, 5])
    value = torch.tensor([7.0])
    result = KnownGradients.apply(value, torch.tensor([3, 1, 4]), rows, objectness, *predictions)
    assert result.item() == 7
    first, second = torch.autograd.grad(result * 2, predictions)
    expected = torch.zeros(4, 7)
    expected[3], expected[1] = rows[0], rows[1]
    expected[:, 4] += objectness[:4]
    assert torch.equal(first.view(4, 7), 2 * expected)
    assert second.flatten().tolist() == [28, 30, 32, 34, 2 * (18 + 5), 38, 40]


def test_known_gradients_in_low_precision_are_scaled_before_they_are_rounded():
    prediction = torch.zeros(1, 1, 1, 1, 6, dtype=torch.float16, requires_grad=True)
    tiny = torch.full((1, 6), 1e-9)  # 0 in float16
    result = KnownGradients.apply(torch.zeros(1), torch.tensor([0]), tiny, torch.zeros(1), prediction)
    (gradient,) = torch.autograd.grad(result * 65536, prediction)
    assert gradient.dtype == torch.float16
    torch.testing.assert_close(gradient.float().flatten(), torch.full((6,), 6.5536e-5), rtol=1e-3, atol=0)
