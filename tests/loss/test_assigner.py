import math

import numpy as np
import pytest
import torch

from tests import loss_cases
from tests.loss_cases import AUXILIARY, ORDINARY, rows
from tests.parity import check
from utils.loss import assigner

GROUP = "train: assignments"


# --- the golden assignments ------------------------------------------------------------------------------------------


def check_plain(name, device):
    case = loss_cases.load(name, device)
    found = assigner.plain(*case.matching_inputs())
    for layer, target in enumerate(found.target):
        classes = case.targets[target, 1].long()
        actual = torch.stack((*found.cells(layer), classes), 1)
        check(GROUP, f"{name} plain {layer}", actual, case.arrays[f"plain_asg{layer}"])

        ny, nx = case.predictions[layer].shape[2:4]
        boxes = case.targets[target, 2:6] * case.targets.new_tensor((nx, ny, nx, ny))
        boxes[:, :2] -= torch.stack((found.cell_x[layer], found.cell_y[layer]), 1)
        check(GROUP, f"{name} plain boxes {layer}", boxes, case.arrays[f"plain_tbox{layer}"], rtol=1e-6, atol=1e-6)


def check_ota(name, device, monkeypatch):
    case = loss_cases.load(name, device)
    counts = record(assigner, "dynamic_k", monkeypatch)
    found = assigner.ota(*case.matching_inputs())
    golden_rows, _, _, golden_counts = loss_cases.stable_arrays(name, case.arrays)
    check(GROUP, f"{name} ota", rows(found), golden_rows)
    check(GROUP, f"{name} k", np.concatenate([[], *counts]), golden_counts)


def check_auxiliary(name, device, monkeypatch):
    case = loss_cases.load(name, device)
    for kind, reach in (("lead", 0.5), ("coarse", 1.0)):
        counts = record(assigner, "dynamic_k", monkeypatch)
        found = assigner.ota(*case.matching_inputs(), reach=reach, num_ious=20)
        check(GROUP, f"{name} {kind}", rows(found), case.arrays[f"aux_{kind}_stable_asg"])
        check(GROUP, f"{name} {kind} k", np.concatenate(counts), case.arrays[f"aux_{kind}_dynamic_k"])


def record(module, name, monkeypatch):
    """Let `module.name` also append its results, as NumPy, to the list that is returned."""
    results, function = [], getattr(module, name)

    def recording(*arguments):
        result = function(*arguments)
        results.append(result.cpu().numpy())
        return result

    monkeypatch.setattr(module, name, recording)
    return results


@pytest.mark.parametrize("name", ORDINARY)
def test_plain_golden(name):
    check_plain(name, "cpu")


@pytest.mark.parametrize("name", ORDINARY)
def test_ota_golden(name, monkeypatch):
    check_ota(name, "cpu", monkeypatch)


@pytest.mark.parametrize("name", AUXILIARY)
def test_auxiliary_golden(name, monkeypatch):
    check_auxiliary(name, "cpu", monkeypatch)


@pytest.mark.gpu
def test_golden_on_cuda(monkeypatch):
    for name in ORDINARY:
        check_plain(name, "cuda")
        check_ota(name, "cuda", monkeypatch)
    for name in AUXILIARY:
        check_auxiliary(name, "cuda", monkeypatch)


# --- candidates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "centre, cells",
    [
        ((2.5, 2.5), [(2, 2)]),  # half a cell from every border: near none
        ((2.25, 2.25), [(2, 2), (1, 2), (2, 1)]),
        ((2.75, 2.75), [(2, 2), (3, 2), (2, 3)]),
        ((3.0, 2.5), [(3, 2), (2, 2), (3, 2)]),  # on a grid line: its own cell twice
        ((0.25, 2.5), [(0, 2)]),  # no cell to the left
        ((1.0, 2.5), [(1, 2), (1, 2)]),  # the step to the left needs x > 1
        ((7.75, 2.5), [(7, 2)]),  # no cell to the right of 8
        ((8.0, 2.5), [(7, 2), (7, 2)]),  # on the last border: clamped into the grid
    ],
)
def test_cells_around_a_centre(centre, cells):
    pair, found = assigner._cells_around(torch.tensor([centre]), (8, 6), reach=0.5)
    assert [tuple(cell) for cell in found.tolist()] == cells
    assert pair.tolist() == [0] * len(cells)


def test_reach_of_a_whole_cell_takes_all_neighbours():
    _, found = assigner._cells_around(torch.tensor([[2.5, 2.25]]), (8, 6), reach=1.0)
    assert found.tolist() == [[2, 2], [1, 2], [2, 1], [3, 2], [2, 3]]


def test_similar_shapes_excludes_the_threshold_itself():
    anchors = torch.tensor([[2.0, 2.0], [20.0, 20.0]])
    sizes = torch.tensor([[8.0, 2.0], [7.9, 2.0], [0.5, 2.0], [0.0, 2.0], [30.0, 30.0]])
    anchor, target = assigner._similar_shapes(sizes, anchors, threshold=4.0)
    assert list(zip(anchor.tolist(), target.tolist(), strict=True)) == [(0, 1), (1, 4)]


# --- cost, number, selection -----------------------------------------------------------------------------------------


def test_dynamic_k_by_hand():
    iou = torch.tensor([[0.9, 0.9, 0.5, 0.0], [0.1, 0.0, 0.0, 0.2], [1.0, 1.0, 1.0, 1.0]])
    assert assigner.dynamic_k(assigner.best_ious(iou, num_ious=10)).tolist() == [2, 1, 4]
    assert assigner.dynamic_k(assigner.best_ious(iou, num_ious=2)).tolist() == [1, 1, 2]


def test_joint_class_logits_are_those_of_the_geometric_mean():
    classes, objectness = torch.randn(50, 4, generator=torch.manual_seed(0)) * 3, torch.linspace(-6, 6, 50)[:, None]
    score = (classes.double().sigmoid() * objectness.double().sigmoid()).sqrt()
    background, logits = assigner.joint_class_logits(classes, objectness)
    torch.testing.assert_close(logits.double(), (score / (1 - score)).log(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(background.double(), -(1 - score).log().sum(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("logit", [20.0, 300.0, 1e30, -20.0, -300.0, -1e30])
def test_saturated_logits_have_finite_costs(logit):
    background, logits = assigner.joint_class_logits(torch.full((1, 2), logit), torch.full((1, 1), logit))
    assert torch.isfinite(background).all() and torch.isfinite(logits).all()


def test_cost_of_an_undecided_perfect_box():
    background, logits = assigner.joint_class_logits(torch.zeros(2, 3), torch.zeros(2, 1))  # every score is 1/2
    boxes = assigner.with_area(torch.tensor([[0.0, 0.0, 4.0, 4.0], [0.0, 0.0, 2.0, 4.0]]))
    true = assigner.with_area(torch.tensor([[0.0, 0.0, 4.0, 4.0]]))
    assert boxes[:, 4].tolist() == [16, 8]
    iou, cost = assigner.matching_cost(true[:, None], boxes, background, logits.T[torch.tensor([1])])
    assert iou.tolist() == [[1.0, 0.5]]
    expected = torch.tensor([[3 * math.log(2), 3 * math.log(2) + 3 * math.log(2)]])  # classes, then 3 (-log IoU)
    torch.testing.assert_close(cost, expected)


def test_a_pair_in_a_list_costs_what_it_costs_in_a_matrix():
    """To the last bit: the batched assigner hands over lists, and ties have to be the same ties."""
    generator = torch.manual_seed(0)
    corners = torch.rand(50, 4, generator=generator)
    boxes = assigner.with_area(torch.cat((corners[:, :2], corners[:, :2] + corners[:, 2:]), 1))
    background, logit = torch.rand(50, generator=generator), torch.randn(20, 50, generator=generator)
    matrices = assigner.matching_cost(boxes[:20, None], boxes, background, logit)
    target, cell = torch.arange(20).repeat_interleave(50), torch.arange(50).repeat(20)
    lists = assigner.matching_cost(boxes[target], boxes[cell], background[cell], logit.flatten())
    for matrix, values in zip(matrices, lists, strict=True):
        assert torch.equal(matrix.flatten(), values)
    assert matrices[0].diagonal().tolist() == [1.0] * 20


def test_boxes_without_area_do_not_overlap():
    point = assigner.with_area(torch.tensor([[1.0, 1.0, 1.0, 1.0]]))
    iou, cost = assigner.matching_cost(point[:, None], point, torch.zeros(1), torch.zeros(1, 1))
    assert iou.tolist() == [[0.0]] and torch.isfinite(cost).all()


def test_a_long_row_of_ties_goes_to_the_lowest_candidates():
    selected = assigner.select_cheapest(torch.zeros(1, 5000), torch.tensor([7]))
    assert selected[0].nonzero()[:, 0].tolist() == list(range(7))


def assigned(cost, k):
    cost = torch.tensor(cost)
    selected = assigner.select_cheapest(cost, torch.tensor(k))
    return assigner.resolve_conflicts(selected.sum(0), selected.int().argmax(0), cost.argmin(0)).tolist()


def test_a_contested_candidate_goes_where_it_is_cheapest():
    assert assigned([[2.0, 3.0, 9.0], [1.0, 9.0, 9.0]], [2, 1]) == [1, 0, -1]  # the loser gets no replacement


def test_a_contested_candidate_may_go_to_a_target_that_had_not_selected_it():
    assert assigned([[1.0, 9.0], [2.0, 9.0], [0.5, 0.1]], [1, 1, 1]) == [2, 2]


def test_a_contest_between_equals_goes_to_the_first_target():
    assert assigned([[1.0, 1.0]] * 3, [1, 1, 1]) == [0, -1]


# --- whole assignments -----------------------------------------------------------------------------------------------

ANCHORS = torch.tensor([[[2.0, 2.0], [1.0, 3.0]], [[2.0, 2.0], [3.0, 1.0]]])
STRIDES = torch.tensor([8.0, 16.0])


def random_predictions(height, width, batch=2, num_classes=3):
    generator = torch.manual_seed(1)
    return [
        torch.randn(batch, 2, height // stride, width // stride, 5 + num_classes, generator=generator)
        for stride in (8, 16)
    ]


def test_the_cell_that_predicts_a_box_exactly_gets_it():
    predictions = [torch.zeros(1, 2, 8, 8, 6), torch.full((1, 2, 4, 4, 6), -4.0)]  # logit 0: mid-cell, anchor's size
    targets = torch.tensor([[0, 0, 20 / 64, 28 / 64, 16 / 64, 16 / 64]])  # cell (2, 3) of layer 0, anchor 0
    found = assigner.ota(predictions, targets, ANCHORS, STRIDES, (64, 64))
    assert rows(found)[0].tolist() == [0, 0, 0, 3, 2, 0]
    assert found.anchor_size[0][0].tolist() == [2.0, 2.0]


def test_ota_without_the_size_of_the_images_is_refused():
    with pytest.raises(ValueError, match="hand it the images"):
        assigner.ota(random_predictions(64, 64), torch.zeros(0, 6), ANCHORS, STRIDES, None)


@pytest.mark.parametrize("assign", [assigner.plain, assigner.ota])
@pytest.mark.parametrize("boxes", [[], [[0, 0, 0.5, 0.5, 0.001, 0.9]]], ids=["no targets", "no candidates"])
def test_nothing_to_match(assign, boxes):
    targets = torch.tensor(boxes).reshape(-1, 6)
    found = assign(random_predictions(64, 64), targets, ANCHORS, STRIDES, (64, 64))
    for layer in range(2):
        assert all(index.shape == (0,) and index.dtype == torch.long for index in found.cells(layer))
        assert found.target[layer].dtype == torch.long and found.anchor_size[layer].shape == (0, 2)


def test_images_and_layers_without_boxes_are_empty():
    targets = torch.tensor([[1, 0, 0.3, 0.3, 0.05, 0.05]])  # 3.2 px: too small for the second layer
    found = assigner.ota(random_predictions(64, 64), targets, ANCHORS / 4, STRIDES, (64, 64), anchor_threshold=2.0)
    assert set(found.image[0].tolist()) == {1}
    assert len(found.image[1]) == 0


def test_the_same_box_has_the_same_matches_in_a_square_and_a_wide_image():
    square = random_predictions(64, 64, batch=1)
    wide = [prediction[:, :, : prediction.shape[2] // 2] for prediction in square]
    box = [0, 1, 48 / 64, 12 / 64, 16 / 64, 16 / 64]  # x 40 to 56, y 4 to 20 pixels
    box_in_wide = [0, 1, 48 / 64, 12 / 32, 16 / 64, 16 / 32]
    for assign in (assigner.plain, assigner.ota):
        in_square = assign(square, torch.tensor([box]), ANCHORS, STRIDES, (64, 64))
        in_wide = assign(wide, torch.tensor([box_in_wide]), ANCHORS, STRIDES, (32, 64))
        assert len(rows(in_wide)) > 0
        assert rows(in_square).tolist() == rows(in_wide).tolist()


def random_targets(num=8):
    generator = torch.manual_seed(2)
    centre, size = torch.rand(num, 2, generator=generator), torch.rand(num, 2, generator=generator) * 0.3 + 0.1
    image_and_class = torch.stack((torch.arange(num) % 2, torch.arange(num) % 3), 1)
    return torch.cat((image_and_class, centre, size), 1)


def test_mirroring_x_and_y_mirrors_the_matches():
    predictions, targets = random_predictions(64, 96), random_targets()
    found = assigner.ota(predictions, targets, ANCHORS, STRIDES, (64, 96))
    mirrored = assigner.ota(
        [p.transpose(2, 3)[..., [1, 0, 3, 2, 4, 5, 6, 7]] for p in predictions],
        targets[:, [0, 1, 3, 2, 5, 4]],
        ANCHORS.flip(2),
        STRIDES,
        (96, 64),
    )
    assert sorted(rows(found).tolist()) == sorted(rows(mirrored)[:, [0, 1, 2, 4, 3, 5]].tolist())


def test_the_order_of_the_targets_does_not_matter():
    predictions, targets = random_predictions(64, 64), random_targets()
    order = torch.randperm(len(targets), generator=torch.manual_seed(3))
    found = rows(assigner.ota(predictions, targets, ANCHORS, STRIDES, (64, 64)))
    shuffled = rows(assigner.ota(predictions, targets[order], ANCHORS, STRIDES, (64, 64)))
    shuffled[:, 5] = order.numpy()[shuffled[:, 5]]
    assert sorted(found.tolist()) == sorted(shuffled.tolist())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_predictions_match_as_their_values_in_single_precision(dtype):
    low = [prediction.to(dtype) for prediction in random_predictions(64, 64)]
    single = [prediction.float() for prediction in low]
    inputs = random_targets(30), ANCHORS, STRIDES, (64, 64)
    assert rows(assigner.ota(low, *inputs)).tolist() == rows(assigner.ota(single, *inputs)).tolist()
