"""Anchor recall by hand, stock's fitted anchors, and data sets that leave nothing to fit."""

import logging
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import scipy
import torch
from torch import nn

from tests import parity
from utils.engine.autoanchor import anchor_recall, box_sizes, check_anchors, kmean_anchors, set_anchors

GOLDEN = np.load(parity.GOLDEN / "model" / "autoanchor.npz")
TINY = GOLDEN["fit_anchor_grid_after"]  # this set must not trigger, so these are the anchors of yolov7-tiny


class Head(nn.Module):
    """What the anchor check needs of a detection layer; `strides` from fine to coarse."""

    def __init__(self, anchors=TINY, strides=(8.0, 16.0, 32.0)):
        super().__init__()
        self.stride = torch.tensor(strides)
        pixels = torch.tensor(anchors).float().view(len(strides), -1, 2)
        self.register_buffer("anchors", pixels / self.stride.view(-1, 1, 1))
        self.register_buffer("anchor_grid", pixels.clone().view(len(strides), 1, -1, 1, 1, 2))


def model_with(head):
    model = nn.Module()
    model.model = nn.Sequential(nn.Identity(), head)
    return model


def numbers(name, count):
    """The golden collection's own number source in -1..1: a hash of name and index."""
    with np.errstate(over="ignore"):
        h = np.arange(count, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(zlib.crc32(name.encode()))
        h = (h ^ (h >> np.uint32(15))) * np.uint32(2246822519)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(3266489917)
        h = h ^ (h >> np.uint32(16))
    return h / 2.0**31 - 1


def golden_dataset(kind):
    shapes = np.round(320 + 320 * (numbers("ds_shape", 120) + 1) / 2).reshape(60, 2)
    v = (numbers("ds_lab", 60 * 8 * 4).reshape(60, 8, 4) + 1) / 2
    if kind == "fit":
        w = 0.02 * 30 ** v[..., 2]
        h = w * np.exp(v[..., 3] - 0.5)
    else:
        shrink = 0.05 if kind == "small" else 1
        w, h = (shrink * 0.01 * 90 ** v[..., i] for i in (2, 3))
    labels = np.stack((np.zeros_like(w), v[..., 0], v[..., 1], w, h), 2).astype(np.float32)
    return SimpleNamespace(shapes=shapes, labels=list(labels))


@pytest.mark.parametrize("kind", ["fit", "wide", "small"])
def test_golden(kind):
    dataset, head = golden_dataset(kind), Head()
    wh = torch.from_numpy(box_sizes(dataset, 640)).float()
    recall = anchor_recall(torch.from_numpy(TINY), wh, 4.0)
    parity.check("autoanchor", f"{kind}_bpr_aat_noscale", recall, GOLDEN[f"{kind}_bpr_aat_noscale"], rtol=1e-7)
    np.random.seed(0)
    scale = np.random.uniform(0.9, 1.1, size=(60, 1))
    recall = anchor_recall(torch.from_numpy(TINY), torch.from_numpy(box_sizes(dataset, 640, scale)).float(), 4.0)
    parity.check("autoanchor", f"{kind}_bpr_aat_seed0", recall, GOLDEN[f"{kind}_bpr_aat_seed0"], rtol=1e-7)

    np.random.seed(0)
    replaced = check_anchors(dataset, model_with(head), thr=4.0, imgsz=640)
    assert replaced is (kind != "fit")
    if tuple(map(int, scipy.__version__.split(".")[:2])) < (1, 15):
        return  # its k-means ends elsewhere: 1.10 from the same start, with the same draws, in other centres
    grid = head.anchor_grid.view(-1, 2)
    parity.check("autoanchor", f"{kind}_anchor_grid_after", grid, GOLDEN[f"{kind}_anchor_grid_after"], rtol=1e-5)
    parity.check("autoanchor", f"{kind}_anchors_after", head.anchors, GOLDEN[f"{kind}_anchors_after"], rtol=1e-5)


def test_recall_by_hand():
    """A 10 x 10 anchor reaches sides strictly between 2.5 and 40 at ratio 4, a 100 x 100 one 25 to 400."""
    anchors = torch.tensor([[10.0, 10.0], [100.0, 100.0]])
    wh = torch.tensor([[10.0, 10.0], [30.0, 30.0], [2.0, 10.0], [40.0, 10.0], [2.5, 10.0]])
    assert anchor_recall(anchors, wh, 4.0) == pytest.approx((2 / 5, 3 / 5))


def test_box_sizes_follow_the_longer_side_of_the_image():
    dataset = SimpleNamespace(
        shapes=np.array([[200, 100], [50, 100]]),
        labels=[np.array([[0, 0.5, 0.5, 0.1, 0.2]], np.float32), np.zeros((0, 5), np.float32)],
    )
    assert box_sizes(dataset, 640) == pytest.approx(np.array([[64, 64]]))


def test_fitted_anchors_are_better_and_sorted():
    dataset, head = golden_dataset("small"), Head()
    np.random.seed(1)
    anchors = kmean_anchors(dataset, n=9, gen=50)
    assert (np.diff(anchors.prod(1)) >= 0).all()
    wh = torch.from_numpy(box_sizes(dataset, 640)).float()
    assert (
        anchor_recall(torch.from_numpy(anchors).float(), wh, 4.0)[0] > anchor_recall(torch.from_numpy(TINY), wh, 4)[0]
    )
    set_anchors(head, anchors)
    assert torch.allclose(head.anchors * head.stride.view(-1, 1, 1), head.anchor_grid.view(3, 3, 2))


def test_both_buffers_follow_the_order_of_the_strides():
    """A head whose levels run from coarse to fine gets the large anchors first, in both buffers."""
    head = Head(TINY.reshape(3, 3, 2)[::-1].copy(), strides=(32.0, 16.0, 8.0))
    set_anchors(head, TINY)
    assert torch.equal(head.anchor_grid[0].view(-1, 2), torch.from_numpy(TINY[6:]))
    assert torch.equal(head.anchors[0] * 32, torch.from_numpy(TINY[6:]))
    assert torch.equal(head.anchors[2] * 8, torch.from_numpy(TINY[:3]))


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([np.zeros((0, 5), np.float32)] * 3, "no boxes"),
        ([np.array([[0, 0.5, 0.5, 0.9, 0.01]], np.float32)] * 3, "too few"),
        ([np.array([[0, 0.5, 0.5, 0.9, 0.01]] * 5, np.float32)] * 3, "same width or height"),
    ],
)
def test_too_few_boxes_keep_the_anchors_and_say_so(labels, said, caplog):
    dataset, head = SimpleNamespace(shapes=np.full((3, 2), 100), labels=labels), Head()
    np.random.seed(0)
    expected = np.random.RandomState(0)
    expected.uniform(size=(3, 1))
    with caplog.at_level(logging.WARNING):
        assert check_anchors(dataset, model_with(head), imgsz=640) is False
    assert said in caplog.text
    assert torch.equal(head.anchor_grid.view(-1, 2), torch.from_numpy(TINY))
    assert np.random.random() == expected.random()  # the scale of each image was drawn all the same, nothing else


PLACEHOLDERS = [[0, 1], [2, 3], [4, 5]] * 3  # what models.config.level_anchors makes of a mere number


@pytest.mark.parametrize("refit", [True, False])
def test_placeholders_never_stay(refit, caplog):
    """1.5 to 4.5 strides, smallest level first, in both buffers."""
    dataset, head = SimpleNamespace(shapes=np.full((3, 2), 100), labels=[np.zeros((0, 5))] * 3), Head(PLACEHOLDERS)
    assert check_anchors(dataset, model_with(head), imgsz=640, refit=refit) is True
    sides = head.anchor_grid.view(3, 3, 2)
    assert sides[..., 0].equal(sides[..., 1])
    assert sides[0, :, 0].tolist() == pytest.approx([12, 12 * 3**0.5, 36])
    assert sides[:, 0, 0].tolist() == pytest.approx([12, 24, 48])
    assert torch.allclose(head.anchors.view(3, 3, 2) * head.stride.view(3, 1, 1), sides)
    assert "only the number of anchors is known" in caplog.text


def test_without_refit_nothing_is_drawn_or_changed():
    head = Head()
    np.random.seed(0)
    assert check_anchors(golden_dataset("fit"), model_with(head), refit=False) is False
    assert np.random.random() == np.random.RandomState(0).random()
    assert torch.equal(head.anchor_grid.view(-1, 2), torch.from_numpy(TINY))


def test_a_wrapped_model_is_unwrapped():
    head = Head()
    np.random.seed(0)
    assert check_anchors(golden_dataset("fit"), nn.DataParallel(model_with(head))) is False
