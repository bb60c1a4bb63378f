"""The loss of several heads: golden values, the way of each box, reference and batched losses alike."""

import pytest
import torch

from tests.heads_cases import ARRAYS, GROUPINGS, filled, outputs, small_model
from tests.parity import check
from tests.tiny_model import tiny_model
from utils.loss import batched
from utils.loss.batched import BatchedHeadsLoss, BatchedLoss, BatchedLossOTA
from utils.loss.criterion import REFERENCE, ComputeLoss, ComputeLossOTA, losses_by_epoch
from utils.loss.multi_head import HeadsLoss, in_float32, level_shapes

TARGETS = torch.from_numpy(ARRAYS["targets"])
# image, class, x, y, w, h: classes 2 and 0 belong to the first head, 1 to the second
SMALL_TARGETS = torch.tensor(
    [
        [0, 2, 0.3, 0.3, 0.2, 0.2], [0, 1, 0.6, 0.4, 0.3, 0.2], [0, 0, 0.7, 0.8, 0.5, 0.4],
        [1, 1, 0.2, 0.8, 0.15, 0.2], [1, 1, 0.5, 0.5, 0.6, 0.7], [1, 0, 0.5, 0.5, 0.2, 0.3],
    ]
)  # fmt: skip
IMAGES = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", GROUPINGS)
@pytest.mark.parametrize(("heads_loss", "kind"), [(HeadsLoss, ComputeLoss), (BatchedHeadsLoss, BatchedLoss)])
def test_golden_losses(name, heads_loss, kind):
    model = filled(name)
    _, maps = outputs(model)
    compute_loss = heads_loss(model, kind)
    loss, items = compute_loss(maps, TARGETS)
    for array, value in (("loss", loss), ("loss_items", items), ("loss_empty", compute_loss(maps, TARGETS[:0])[0])):
        check("loss: several heads", f"{name}:{array}", value, ARRAYS[f"{name}:{array}"], rtol=1e-5)
    gains = torch.tensor([model.hyp[gain] for gain in ("box", "obj", "cls")])
    own = zip(compute_loss.losses, compute_loss.own_columns(maps), compute_loss.route(TARGETS), strict=True)
    per_head = torch.stack([one(levels, targets)[1][:3] / gains for one, levels, targets in own])
    golden = ARRAYS[f"{name}:loss_per_head_unweighted"]
    check("loss: several heads", f"{name}:per head", per_head.double(), golden, rtol=1e-5)


def gradient_of(model, compute):
    """Loss, items, and the gradient of every parameter of the heads."""
    model.zero_grad()
    loss, items = compute(model(IMAGES))
    loss.backward()
    return loss.detach(), items, [p.grad.clone() for p in model.model[-1].parameters()]


@pytest.mark.parametrize("changes", [{}, {"full_head": True}], ids=["own columns", "full"])
@pytest.mark.parametrize(
    ("plain", "fast"), [(ComputeLoss, BatchedLoss), (ComputeLossOTA, BatchedLossOTA)], ids=["plain", "ota"]
)
def test_batched_losses_give_the_same(plain, fast, changes):
    model = small_model(**changes)
    slow, quick = HeadsLoss(model, plain), BatchedHeadsLoss(model, fast)
    expected = gradient_of(model, lambda maps: slow(maps, SMALL_TARGETS, IMAGES))
    called = gradient_of(model, lambda maps: quick(maps, SMALL_TARGETS, IMAGES))

    def in_two_steps(maps):
        candidate_sets = quick.prepare(SMALL_TARGETS, level_shapes(maps), (64, 64))
        assert len(candidate_sets) == 2
        return quick.compute(maps, candidate_sets)

    prepared = gradient_of(model, in_two_steps)
    for loss, items, gradients in (called, prepared):
        torch.testing.assert_close(loss, expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(items, expected[1], rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(gradients, expected[2], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_candidates_can_be_made_as_large_as_others():
    compute_loss = BatchedHeadsLoss(small_model(), BatchedLoss)
    shapes = [(2, 2, size, size, 99) for size in (8, 4, 2)]
    many = compute_loss.prepare(SMALL_TARGETS.repeat(40, 1), shapes)
    few = compute_loss.prepare(SMALL_TARGETS, shapes, at_least=[candidates.sizes for candidates in many])
    assert [candidates.sizes for candidates in few] == [candidates.sizes for candidates in many]
    for old, new in zip(many, few, strict=True):
        old.copy_(new)


def test_every_box_goes_to_the_head_of_its_class():
    first, second = HeadsLoss(small_model(), ComputeLoss).route(SMALL_TARGETS)
    assert first[:, :2].tolist() == [[0, 0], [0, 1], [1, 1]]  # class 2 is the first of its head, class 0 the second
    assert second[:, :2].tolist() == [[0, 0], [1, 0], [1, 0]]
    assert torch.equal(first[:, 2:], SMALL_TARGETS[[0, 2, 5], 2:])
    assert SMALL_TARGETS[:, 1].tolist() == [2, 1, 0, 1, 1, 0]


def test_it_is_the_weighted_sum_of_ordinary_losses():
    model = small_model()
    maps = model(IMAGES)
    routed = HeadsLoss(model, ComputeLoss)
    losses = [
        one(levels, own) for one, levels, own in zip(routed.losses, maps, routed.route(SMALL_TARGETS), strict=True)
    ]
    loss, items = routed(maps, SMALL_TARGETS)
    assert torch.equal(loss, 1.5 * losses[0][0] + 1.0 * losses[1][0])
    assert torch.equal(items, 1.5 * losses[0][1] + 1.0 * losses[1][1])
    assert losses[1][1][2] == 0 and losses[0][1][2] > 0  # a single class has no class loss


def test_a_head_without_boxes_learns_that_there_is_nothing():
    model = small_model()
    loss, items, gradients = gradient_of(
        model, lambda maps: HeadsLoss(model, ComputeLoss)(maps, SMALL_TARGETS[SMALL_TARGETS[:, 1] == 1])
    )
    convs = dict(model.model[-1].named_parameters())
    by_name = dict(zip(convs, gradients, strict=True))
    objectness = by_name["heads.0.0.bias"].view(2, -1)[:, 4]
    others = by_name["heads.0.0.bias"].view(2, -1)[:, [0, 1, 2, 3, 5, 6]]
    assert (objectness > 0).all() and not others.any()
    assert by_name["heads.1.0.bias"].view(2, -1)[:, :4].any()
    assert items[0] > 0 and items[2] == 0


def test_maps_that_are_not_nested():
    maps = tiny_model()(IMAGES)
    assert level_shapes(maps) == [level.shape for level in maps]
    assert all(torch.equal(a, b) for a, b in zip(in_float32(maps), maps, strict=True))
    nested = in_float32([[level.half() for level in maps]])
    assert nested[0][1].dtype == torch.float32 and level_shapes(nested) == level_shapes(maps)


# ---- which loss a run gets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "plain", "ota"),
    [(REFERENCE, ComputeLoss, ComputeLossOTA), (batched.CLASSES, BatchedLoss, BatchedLossOTA)],
)
def test_plain_by_default_and_ota_on_request(classes, plain, ota):
    model = small_model()  # whose loss_ota is 1
    loss_of_epoch, validation = losses_by_epoch(model, 3, classes=classes)
    assert [type(loss_of_epoch(epoch).losses[0]) for epoch in range(3)] == [plain] * 3
    assert type(validation) is HeadsLoss and type(validation.losses[0]) is ComputeLoss
    loss_of_epoch, _ = losses_by_epoch(model, 3, classes=classes, ota_last=1)
    assert [type(loss_of_epoch(epoch).losses[1]) for epoch in range(3)] == [plain, plain, ota]


def test_a_wrapped_model_and_later_anchors():
    model = small_model()
    wrapped = torch.nn.DataParallel(model)
    compute_loss = HeadsLoss(wrapped, ComputeLoss)
    maps, before = model(IMAGES), compute_loss.losses[0].head.anchors.clone()
    model.model[-1].anchors.mul_(1.3)
    assert torch.equal(compute_loss.losses[0].head.anchors, before * 1.3)
    assert compute_loss(maps, SMALL_TARGETS)[0] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [BatchedLoss, BatchedLossOTA])
@pytest.mark.parametrize("changes", [{}, {"full_head": True}], ids=["own columns", "full"])
def test_in_a_cuda_graph(kind, changes):
    """Loss and gradient of a replay equal those of an ordinary call, also with the candidates of other boxes."""
    model = small_model(**changes).cuda()
    compute_loss = BatchedHeadsLoss(model, kind)
    maps = [[level.detach().requires_grad_() for level in levels] for levels in model(IMAGES.cuda())]
    shapes = level_shapes(maps)
    many = compute_loss.prepare(SMALL_TARGETS, shapes, (64, 64))
    few = compute_loss.prepare(SMALL_TARGETS[:2], shapes, (64, 64), at_least=[candidates.sizes for candidates in many])
    static = [candidates.to(torch.device("cuda")) for candidates in few]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute_loss.compute(maps, static)[0].backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for level in sum(maps, []):
            level.grad = None
        loss, items = compute_loss.compute(maps, static)
        loss.backward()
    again = compute_loss.prepare(SMALL_TARGETS, shapes, (64, 64), at_least=[old.sizes for old in static])
    for old, new in zip(static, again, strict=True):
        old.copy_(new)
    graph.replay()
    replayed = [level.grad.clone() for level in sum(maps, [])]
    copies = [[level.detach().requires_grad_() for level in levels] for levels in maps]
    expected, expected_items = compute_loss(copies, SMALL_TARGETS, IMAGES.cuda())
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(items, expected_items, rtol=1e-5, atol=1e-6)
    for mine, level in zip(replayed, sum(copies, []), strict=True):
        torch.testing.assert_close(mine, level.grad, rtol=1e-4, atol=1e-6)
