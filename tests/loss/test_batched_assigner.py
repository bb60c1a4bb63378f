import logging

import pytest
import torch

from tests import loss_cases
from tests.loss_cases import AUXILIARY, KINDS, NAMES, ORDINARY, Case, random_case, rows
from tests.parity import check
from utils.loss import assign_by_image, assigner, batched_assigner
from utils.loss.batched import BatchedLossOTA
from utils.loss.candidates import prepare

GROUP = "train: assignments, batched"
FINE, COARSE = {"reach": 0.5, "num_ious": 10}, {"reach": 1.0, "num_ious": 20}


def plan_of(case, padded, reach=0.5):
    predictions, targets, anchors, strides, size = case.matching_inputs()
    shapes = [prediction.shape for prediction in predictions]
    return prepare(targets.cpu(), shapes, anchors.cpu(), strides, size, reach=reach, padded=padded)


def rows_of(case, plan):
    """What the distinct cells of `plan` predict."""
    cells = plan.layout.cell_index.split(plan.sizes.cells)
    pairs = zip(case.predictions[: case.num_layers], cells, strict=True)
    return torch.cat([grid.detach().reshape(-1, grid.shape[-1])[index] for grid, index in pairs])


def owners_by_all_ways(case, plan, num_ious):
    layout = plan.layout
    cells = batched_assigner.decode(rows_of(case, plan).float(), layout)
    whole = [batched_assigner.Piece(0, plan.sizes.targets, 0, plan.sizes.pairs)]
    pieces = batched_assigner._pieces(plan, 700)
    yield batched_assigner._owners_flat(cells, layout, whole, num_ious)
    if pieces:
        yield batched_assigner._owners_flat(cells, layout, pieces, num_ious)
    if case.images.device.type == "cpu":
        yield assign_by_image.owners(cells, layout, plan.blocks(), num_ious)


def assert_all_ways_agree(case, options):
    inputs = case.matching_inputs()
    expected = rows(assigner.ota(*inputs, **options))
    assert rows(batched_assigner.ota(*inputs, **options)).tolist() == expected.tolist()
    plan = plan_of(case, padded=True, reach=options["reach"]).to(case.images.device)
    for owner in owners_by_all_ways(case, plan, options["num_ious"]):
        assert rows(batched_assigner.matches(plan, owner, inputs[2])).tolist() == expected.tolist()
    assert rows(batched_assigner.plain(*inputs)).tolist() == rows(assigner.plain(*inputs)).tolist()


# --- the golden assignments ------------------------------------------------------------------------------------------


def check_golden(name, device):
    case = loss_cases.load(name, device)
    if name in AUXILIARY:
        for kind, reach in (("lead", 0.5), ("coarse", 1.0)):
            found = batched_assigner.ota(*case.matching_inputs(), reach=reach, num_ious=20)
            check(GROUP, f"{name} {kind}", rows(found), case.arrays[f"aux_{kind}_stable_asg"])
    else:
        check(
            GROUP,
            name,
            rows(batched_assigner.ota(*case.matching_inputs())),
            loss_cases.stable_arrays(name, case.arrays)[0],
        )
    for options in (FINE, COARSE):
        assert_all_ways_agree(case, options)


@pytest.mark.parametrize("name", NAMES)
def test_golden(name):
    check_golden(name, "cpu")


def test_there_are_golden_cases():
    assert len(ORDINARY) >= 16 and len(AUXILIARY) >= 2


@pytest.mark.gpu
def test_golden_on_cuda():
    for name in NAMES:
        check_golden(name, "cuda")


# --- any batch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_random_batches(kind):
    for seed in range({"large": 4, "crowded": 8}.get(kind, 30)):
        assert_all_ways_agree(random_case(seed, kind), FINE if seed % 2 else COARSE)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_random_batches_on_cuda(kind):
    for seed in range(20):
        case = random_case(seed, kind, "cuda")
        options = FINE if seed % 2 else COARSE
        assert_all_ways_agree(case, options)
        with torch.autocast("cuda", torch.float16):
            assert_all_ways_agree(case, options)
        half = [prediction.detach().half() for prediction in case.predictions]
        inputs = half, *case.matching_inputs()[1:]
        assert rows(batched_assigner.ota(*inputs)).tolist() == rows(assigner.ota(*inputs)).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_predictions(dtype):
    for seed in range(10):
        case = random_case(seed, "ordinary")
        case.predictions = [prediction.detach().to(dtype) for prediction in case.predictions]
        assert_all_ways_agree(case, FINE)


# --- padding, order, memory ------------------------------------------------------------------------------------------


def test_padding_owns_nothing():
    case = random_case(3, "ordinary")
    exact, padded = plan_of(case, padded=False), plan_of(case, padded=True)
    used = exact.sizes.candidates
    assert padded.sizes.candidates > used
    for owner in owners_by_all_ways(case, padded, 10):
        for expected in owners_by_all_ways(case, exact, 10):
            assert owner[:used].tolist() == expected.tolist()
        assert (owner[used:] == -1).all()


def test_pieces_cover_all_pairs():
    plan = plan_of(random_case(3, "crowded"), padded=True)
    num_targets, num_candidates = plan.per_image
    for most in (1, 500, 10**9):
        pieces = batched_assigner._pieces(plan, most)
        assert sum(piece.num_pairs for piece in pieces) == num_targets @ num_candidates
        assert [piece.first_target for piece in pieces[1:]] == [piece.last_target for piece in pieces[:-1]]
        assert pieces[0].first_target == 0 and pieces[-1].last_target == num_targets.sum()
        assert all(piece.num_pairs <= most or piece.last_target - piece.first_target == 1 for piece in pieces)


def test_sortable_integers_have_the_order_of_the_numbers():
    numbers = torch.tensor([-torch.inf, -2.5, -1e-30, 0.0, 1e-30, 1.0, 3e38, torch.inf])
    ranks = batched_assigner.sortable(numbers)
    assert ranks.dtype == torch.int32 and (ranks.diff() > 0).all()
    assert ranks[3] == 0


def test_a_crowded_batch_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr(batched_assigner, "_told", set())
    with caplog.at_level(logging.WARNING):
        batched_assigner._tell_once(20_000_000)
        batched_assigner._tell_once(30_000_000)
    (record,) = caplog.records
    assert "20000000 pairs" in record.getMessage()


def crowded_batch(device):
    """An image with 2,000 small boxes of 80 classes at 640 px, and one with 10."""
    generator = torch.manual_seed(0)
    shapes = [(2, 3, n, n, 85) for n in (80, 40, 20)]
    predictions = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    image = (torch.arange(2010) >= 2000).float()[:, None]
    boxes = torch.rand(2010, 4, generator=generator) * torch.tensor([1, 1, 0.1, 0.1]) + torch.tensor([0, 0, 0.01, 0.01])
    targets = torch.cat((image, torch.randint(80, (2010, 1), generator=generator), boxes.clamp(max=1)), 1)
    anchors = torch.tensor([[[2.0, 2.0], [3.0, 4.0], [4.0, 3.0]]] * 3).to(device)
    model = loss_cases.model_with_head(anchors, torch.tensor([8.0, 16, 32]), 80)
    return Case({}, model, predictions, targets.to(device), torch.zeros(2, 3, 640, 640, device=device))


@pytest.mark.gpu
def test_a_crowded_image_needs_less_than_a_gigabyte():
    case = crowded_batch("cuda")
    expected = rows(assigner.ota(*case.matching_inputs()))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = batched_assigner.ota(*case.matching_inputs())
    total, _ = BatchedLossOTA(case.model)(case.predictions, case.targets, case.images)
    total.backward()
    assert torch.cuda.max_memory_allocated() - before < 1e9
    assert rows(found).tolist() == expected.tolist()
