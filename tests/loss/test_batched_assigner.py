import logging

import pytest
import torch

from tests import loss_cases
from tests.loss_cases import (
    AUXILIARY,
    KINDS,
    NAMES,
    Case,
    as_matches,
    batched_ota,
    candidates_of,
    random_case,
    rows,
)
from tests.parity import check
from utils.loss import assigner, batched_assigner
from utils.loss.batched import BatchedLossOTA

GROUP = "train: assignments, batched"
FINE, COARSE = {"reach": 0.5, "num_ious": 10}, {"reach": 1.0, "num_ious": 20}


def assigned_in_chunks(case, candidates, num_ious, most):
    """What `batched_assigner.assign` says of a batch with more pairs than fit at once."""
    tensors, predictions = candidates.tensors, [p.detach() for p in case.predictions[: case.num_layers]]
    rows_of_cells = batched_assigner.gather_rows(tensors.cell_index, candidates.sizes.cells, predictions)
    cells = batched_assigner.decode(rows_of_cells.float(), tensors)
    return batched_assigner._assign_chunks(cells, tensors, batched_assigner._chunks(candidates, most), num_ious)


def assert_equal_to_reference(case, options):
    inputs = case.matching_inputs()
    expected = rows(assigner.ota(*inputs, **options))
    assert rows(batched_ota(inputs, **options)).tolist() == expected.tolist()
    candidates = candidates_of(inputs, options["reach"])
    assigned = assigned_in_chunks(case, candidates, options["num_ious"], 700)
    assert rows(as_matches(candidates, assigned, inputs)).tolist() == expected.tolist()


# --- the golden assignments ------------------------------------------------------------------------------------------


def check_golden(name, device):
    case = loss_cases.load(name, device)
    if name in AUXILIARY:
        for kind, reach in (("lead", 0.5), ("coarse", 1.0)):
            found = batched_ota(case.matching_inputs(), reach=reach, num_ious=20)
            check(GROUP, f"{name} {kind}", rows(found), case.arrays[f"aux_{kind}_stable_asg"])
    else:
        golden = loss_cases.stable_arrays(name, case.arrays)[0]
        check(GROUP, name, rows(batched_ota(case.matching_inputs())), golden)
    for options in (FINE, COARSE):
        assert_equal_to_reference(case, options)


@pytest.mark.parametrize("name", NAMES)
def test_golden(name):
    check_golden(name, "cpu")


@pytest.mark.gpu
def test_golden_on_cuda():
    for name in NAMES:
        check_golden(name, "cuda")


# --- any batch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_random_batches(kind):
    for seed in range({"large": 4, "crowded": 8}.get(kind, 30)):
        assert_equal_to_reference(random_case(seed, kind), FINE if seed % 2 else COARSE)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_random_batches_on_cuda(kind):
    for seed in range(20):
        case = random_case(seed, kind, "cuda")
        options = FINE if seed % 2 else COARSE
        assert_equal_to_reference(case, options)
        with torch.autocast("cuda", torch.float16):
            assert_equal_to_reference(case, options)
        half = [prediction.detach().half() for prediction in case.predictions]
        inputs = half, *case.matching_inputs()[1:]
        assert rows(batched_ota(inputs)).tolist() == rows(assigner.ota(*inputs)).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_predictions(dtype):
    for seed in range(10):
        case = random_case(seed, "ordinary")
        case.predictions = [prediction.detach().to(dtype) for prediction in case.predictions]
        assert_equal_to_reference(case, FINE)


# --- padding, chunks, memory ------------------------------------------------------------------------------------------


def test_padding_is_assigned_to_nothing():
    case = random_case(3, "ordinary")
    candidates = candidates_of(case.matching_inputs())
    used = int((candidates.tensors.target_of_candidate >= 0).sum())
    assert candidates.sizes.candidates > used
    for most in (10**9, 700):
        assigned = assigned_in_chunks(case, candidates, 10, most)
        assert (assigned[:used] >= 0).any() and (assigned[used:] == -1).all()
        assert assigned.max() < len(case.targets)


def test_chunks_cover_all_pairs():
    case = random_case(3, "crowded")
    candidates = candidates_of(case.matching_inputs())
    for most in (1, 500, 10**9):
        chunks = batched_assigner._chunks(candidates, most)
        assert sum(chunk.num_pairs for chunk in chunks) == candidates.pairs_of_target.sum()
        assert [chunk.first_target for chunk in chunks[1:]] == [chunk.last_target for chunk in chunks[:-1]]
        assert chunks[0].first_target == 0 and chunks[-1].last_target == len(case.targets)
        assert all(chunk.num_pairs <= most or chunk.last_target - chunk.first_target == 1 for chunk in chunks)


def test_sortable_integers_have_the_order_of_the_numbers():
    numbers = torch.tensor([-torch.inf, -2.5, -1e-30, 0.0, 1e-30, 1.0, 3e38, torch.inf])
    ranks = batched_assigner.sortable(numbers)
    assert ranks.dtype == torch.int32 and (ranks.diff() > 0).all()
    assert ranks[3] == 0


def test_a_crowded_batch_is_one_warning(caplog, monkeypatch):
    monkeypatch.setattr(batched_assigner, "_warned", set())
    with caplog.at_level(logging.WARNING):
        batched_assigner._warn_once(20_000_000)
        batched_assigner._warn_once(30_000_000)
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
    found = batched_ota(case.matching_inputs())
    total, _ = BatchedLossOTA(case.model)(case.predictions, case.targets, case.images)
    total.backward()
    assert torch.cuda.max_memory_allocated() - before < 1e9
    assert rows(found).tolist() == expected.tolist()
