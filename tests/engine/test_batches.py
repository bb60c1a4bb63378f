"""From loader batches to what the model takes: plain copies, random sizes, single images."""

import random

import pytest
import torch
from torch.utils.data import DataLoader

from utils.data.epoch_loader import InfiniteDataLoader
from utils.engine.batches import Batch, FromStart, Trainable, multi_scaled, plain


def batches(*shapes):
    return [Batch(torch.rand(shape), torch.rand(3, 6), ("a.png",) * shape[0]) for shape in shapes]


def test_plain():
    images = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).view(2, 3, 4, 4)
    targets = torch.tensor([[0, 1, 0.5, 0.5, 0.1, 0.1]])
    loader = [(images, targets, ("a", "b"), ("shapes",)), (images + 100, targets, ("c", "d"), ())]
    first, second = plain(loader, torch.device("cpu"))
    assert first.images.dtype == torch.float32 and torch.equal(first.images, images.float() / 255)
    assert first.images.max() == 95 / 255 and second.images.max() == 195 / 255
    assert torch.equal(first.targets, targets) and first.paths == ("a", "b") and second.paths == ("c", "d")
    assert list(plain([], torch.device("cpu"))) == []


def test_plain_copies_no_batch_before_it_is_asked_for():
    asked = []

    def loader():
        for i in range(3):
            asked.append(i)
            yield torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.zeros(0, 6), (), ()

    batches = plain(loader(), torch.device("cpu"))
    assert asked == []
    next(batches)
    assert asked == [0]


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (64, 32, {32, 64, 96}),
        (96, 32, {32, 64, 96, 128, 160}),  # half and one and a half, rounded to multiples
        (128, 64, {64, 128, 192}),
        (32, 32, {32, 64}),
    ],
)
def test_random_sizes_are_multiples_between_half_and_one_and_a_half(size, stride, expected):
    random.seed(0)
    sides = set()
    for batch in multi_scaled(batches(*[(1, 3, size, size)] * 60), size, stride):
        height, width = batch.images.shape[2:]
        assert height == width
        sides.add(height)
    assert sides == expected


def test_one_draw_a_batch_decides_the_size():
    random.seed(7)
    given = batches(*[(2, 3, 64, 64)] * 5)
    scaled = list(multi_scaled(given, 64, 32))
    state = random.getstate()
    random.seed(7)
    drawn = [random.randrange(32, 128) // 32 * 32 for _ in given]
    assert random.getstate() == state and len(set(drawn)) > 1
    assert [batch.images.shape[2] for batch in scaled] == drawn
    for before, after, side in zip(given, scaled, drawn, strict=True):
        assert after.targets is before.targets and after.paths == before.paths
        assert (after.images is before.images) == (side == 64)


def test_rectangles_keep_their_ratio(monkeypatch):
    monkeypatch.setattr(random, "randrange", lambda low, high: 96)
    image = torch.zeros(1, 3, 32, 64)
    image[..., 32:] = 1
    (batch,) = multi_scaled([Batch(image, torch.zeros(0, 6), ())], 64, 32)
    assert batch.images.shape == (1, 3, 64, 96), "32 * 1.5 = 48 is rounded up to the stride"
    assert batch.images[..., :44].max() == 0 and batch.images[..., 52:].min() == 1


def test_smallest_draw_never_gives_an_empty_image(monkeypatch):
    monkeypatch.setattr(random, "randrange", lambda low, high: low)
    (batch,) = multi_scaled(batches((1, 3, 32, 32)), 32, 32)
    assert batch.images.shape == (1, 3, 32, 32)
    (batch,) = multi_scaled(batches((1, 3, 64, 64)), 64, 64)
    assert batch.images.shape == (1, 3, 64, 64)


def test_single_image_of_one_cell_is_dropped_with_one_warning(caplog):
    trainable = Trainable(32)
    given = batches((2, 3, 32, 32), (1, 3, 64, 32), (1, 3, 32, 32), (4, 3, 64, 64))
    for _ in range(2):
        kept = list(trainable(given))
        assert [id(batch) for batch in kept] == [id(given[i]) for i in (0, 1, 3)]
    assert len(caplog.records) == 1 and "one image of 32 px is skipped" in caplog.text
    with pytest.raises(ValueError, match="no batch can be trained"):
        list(trainable(batches((1, 3, 32, 32))))


def test_one_of_several_processes_makes_a_step_of_each_batch(caplog):
    """What it left out would be missing in the exchange of gradients, and the others would wait for ever."""
    given = batches((2, 3, 32, 32), (1, 3, 32, 32))
    first, second = Trainable(32, is_shared=True)(given)
    assert first is given[0] and "one image of 32 px is taken twice" in caplog.text
    assert second.images.shape == (2, 3, 32, 32) and torch.equal(second.images[0], second.images[1])
    targets = given[1].targets
    assert second.targets[:3].equal(targets) and second.targets[3:, 1:].equal(targets[:, 1:])
    assert (second.targets[3:, 0] == 1).all() and second.paths == ("a.png", "a.png")


@pytest.mark.parametrize("goes_on", [True, False], ids=["endless", "anew"])
@pytest.mark.parametrize("num_taken", [0, 1, 3, 4])
def test_a_pass_begins_with_the_first_batch_after_one_that_was_left(goes_on, num_taken):
    loader = InfiniteDataLoader(range(4), batch_size=1) if goes_on else DataLoader(range(4), batch_size=1)
    passes = FromStart(loader)
    for _ in range(2):
        assert [batch.item() for batch, _ in zip(passes, range(num_taken), strict=False)] == [*range(num_taken)]
        assert [batch.item() for batch in passes] == [0, 1, 2, 3] and len(passes) == 4
    assert [batch.item() for batch in passes] == [0, 1, 2, 3]
