"""NMS of a whole batch against the reference: the same rows in the same order, to the last bit.

Run by test_validation.py in a process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

import pytest
import torch

from utils.fast import nms as nms_batched
from utils.fast import nms_triton
from utils.ops import nms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def predictions(num_classes, num_boxes=400, num_images=4, spread=100, seed=0):
    """Crowded random boxes; image 0 has no candidate, image 1 few."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(num_images, num_boxes, 5 + num_classes, generator=generator)
    rows[..., :2] *= spread
    rows[..., 2:4] = rows[..., 2:4] * 40 + 5
    rows[..., 4] **= 2
    rows[0, :, 4] = 0
    rows[1, 8:, 4] = 0
    return rows.to(DEVICE)


@pytest.mark.parametrize("half", [False, True], ids=["float", "half"])
@pytest.mark.parametrize("num_classes", [1, 3, 20])
def test_equals_the_reference(num_classes, half):
    prediction = predictions(num_classes, spread=60 if num_classes == 1 else 300)
    prediction = prediction.half() if half else prediction
    expected = nms.non_max_suppression(prediction, 0.05, 0.6, multi_label=True)
    found = nms_batched.non_max_suppression(prediction, 0.05, 0.6)
    assert found.rows.shape == (4, nms.MAX_DETECTIONS, 6) and found.rows.dtype == torch.float32
    assert [len(rows) for rows in expected][0] == 0 and 0 < len(expected[1]) < 300
    for rows, other in zip(found.per_image(), expected, strict=True):
        assert torch.equal(rows, other)
    assert not found.rows[~found.valid].any()
    again = nms_batched.stacked([rows.cpu() for rows in expected])
    assert torch.equal(again.rows, found.rows.cpu()) and torch.equal(again.count, found.count.cpu())


def test_blocks_do_not_matter(monkeypatch):
    prediction = predictions(3, spread=40)
    expected = nms_batched.non_max_suppression(prediction, 0.1, 0.4)
    monkeypatch.setattr(nms_triton, "BLOCK", 16)
    monkeypatch.setattr(nms_batched, "MAX_SCORES", 400 * 8 * 2)  # two images at a time
    found = nms_batched.non_max_suppression(prediction, 0.1, 0.4)
    assert torch.equal(found.rows, expected.rows) and torch.equal(found.count, expected.count)


def equal_to_the_reference(prediction):
    """What was found, after a comparison with the reference."""
    expected = nms.non_max_suppression(prediction, 0.05, 0.6, multi_label=True)
    found = nms_batched.non_max_suppression(prediction, 0.05, 0.6).per_image()
    assert all(torch.equal(rows, other) for rows, other in zip(found, expected, strict=True))
    return found


def test_limit_of_candidates(monkeypatch):
    for module in (nms, nms_batched):
        monkeypatch.setattr(module, "MAX_CANDIDATES", 50)
    assert max(map(len, equal_to_the_reference(predictions(3, spread=300)))) <= 50


def test_a_chain_by_hand():
    """Each box overlaps its neighbours by 2/3 IoU: every second one stays."""
    rows = torch.zeros(1, 5, 6, device=DEVICE)
    rows[0, :, 0] = torch.arange(5) * 2.0 + 50  # 10 pixels wide, shifted by 2: IoU 8 / 12
    rows[0, :, 1], rows[0, :, 2:4] = 50, 10
    rows[0, :, 4] = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5])
    rows[0, :, 5] = 1
    (found,) = nms_batched.non_max_suppression(rows, 0.1, 0.6).per_image()
    assert found[:, 4].tolist() == pytest.approx([0.9, 0.7, 0.5])
    assert found[0].tolist() == pytest.approx([45, 45, 55, 55, 0.9, 0])


def test_equal_scores_keep_their_order():
    rows = torch.zeros(1, 3, 6, device=DEVICE)
    rows[0, :, 0] = torch.tensor([300.0, 100, 200])
    rows[0, :, 2:6] = torch.tensor([10.0, 10, 0.5, 1])
    (found,) = nms_batched.non_max_suppression(rows, 0.1, 0.6).per_image()
    assert found[:, 0].tolist() == [295, 95, 195]


@pytest.mark.parametrize("shape", [(0, 10, 8), (2, 0, 8), (2, 10, 8)])
def test_nothing_to_find(shape):
    found = nms_batched.non_max_suppression(torch.zeros(shape, device=DEVICE), 0.1, 0.6)
    assert found.count.tolist() == [0] * shape[0] and not found.rows.any()


@pytest.mark.gpu
def test_equals_the_reference_for_many_boxes():
    equal_to_the_reference(predictions(20, num_boxes=2000, spread=300).half())
