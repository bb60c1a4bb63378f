"""utils/data/fast/deferred.py: what a GPU makes of a part of a mosaic is what OpenCV makes of the whole."""

import numpy as np
import pytest
import torch

from tests.loader_cases import steps_on_pixels
from utils.data.affine import GREY, Affine
from utils.data.fast import deferred, device_augment
from utils.data.fast.deferred import (
    AFFINE,
    CAPACITY,
    FIXED,
    FLOATING,
    HEADER,
    STEPS,
    DeferredAffine,
    DeferredDataset,
    SyntheticMosaic,
    rounding_mode,
    steps_bytes,
    visible_part,
    warp_with_grid,
)
from utils.data.fast.device_augment import DeferredBatch
from utils.data.transforms import Colours
from utils.datasets import LoadImagesAndLabels

SIZE = 64
AT_ONCE = LoadImagesAndLabels.__new__(LoadImagesAndLabels)  # its steps need no data
KNOWN_MODE = pytest.mark.skipif(rounding_mode(SIZE) is None, reason="this OpenCV rounds in a way of its own")


def canvas(seed=0):
    """Noise [2 * SIZE square] in the role of a mosaic."""
    return SyntheticMosaic(np.random.default_rng(seed).integers(0, 256, (2 * SIZE, 2 * SIZE, 3)).astype(np.uint8))


def warp_of(gain, x, y, slant=0.0):
    """Scales by `gain` and moves the centre of the canvas to (x, y)."""
    matrix = np.array([[gain, slant, x - gain * SIZE], [0, gain, y - gain * SIZE], [0, 0, 1]])
    return Affine(matrix, gain, SIZE, SIZE, has_perspective=False)


def test_the_part_that_is_seen_by_hand():
    """Twice as large: column 0 lies at (0 + 96) / 2 = 48, column 63 at 79.5, so 48 to 80 are read; rows are 5 lower."""
    for mode, half in ((FIXED, 16), (FLOATING, 0.5)):
        (x1, y1, x2, y2), columns, rows = visible_part(warp_of(2, 32, 22), 2 * SIZE, 2 * SIZE, SIZE**2, mode)
        assert (x1, x2, y1, y2) == (48, 81, 53, 86)
        assert [part[:3].tolist() for part in columns] == [[48, 48, 49], [0, half, 0]]
        assert [part[-1] for part in rows] == [53 + 31, half]


def test_warps_that_cannot_wait():
    area = 2 * SIZE, 2 * SIZE, CAPACITY * SIZE**2, FIXED
    assert visible_part(warp_of(1.2, 30, 30), *area) is not None
    assert visible_part(warp_of(1.2, 30, 30, slant=0.1), *area) is None
    assert visible_part(warp_of(0.6, 30, 30), *area) is None, "more is seen than there is room for"
    assert visible_part(warp_of(1.2, 500, 30), *area) is None, "nothing is seen"
    assert visible_part(warp_of(-1.2, 30, 30), *area) is None
    tilted = Affine(np.array([[1.2, 0, 0], [0, 1.2, 0], [0.001, 0, 1]]), 1.2, SIZE, SIZE, has_perspective=True)
    assert visible_part(tilted, *area) is None


def test_half_way_between_two_pixels_and_beside_the_canvas():
    """Halves are rounded up in fixed point, to even numbers in floating point; left of the canvas all is grey."""
    place = np.zeros((CAPACITY * 2, 2, 3), np.uint8)
    place.reshape(-1)[: 2 * 2 * 3] = np.repeat([31, 32, 32, 33], 3)
    grid = np.array([2, 2, 0, -2, 0, 1, 16, 0, 0, 0], np.int32)  # 2 x 2 pixels; columns at 0.5 and -2, rows at 0 and 1
    assert warp_with_grid(place, grid, FIXED)[..., 0].tolist() == [[32, GREY], [33, GREY]]
    grid[6] = np.float32(0.5).view(np.int32)
    assert warp_with_grid(place, grid, FLOATING)[..., 0].tolist() == [[32, GREY], [32, GREY]]


@KNOWN_MODE
def test_parts_become_the_images_of_opencv():
    rng, num_waiting = np.random.default_rng(1), 0
    for k in range(60):
        affine = DeferredAffine(canvas(k), warp_of(rng.uniform(0.5, 2.2), *rng.uniform(-10, SIZE + 10, 2)))
        place, grid = np.full((CAPACITY * SIZE, SIZE, 3), 7, np.uint8), np.empty(HEADER + 4 * SIZE, np.int32)
        if affine.write(place, grid):
            num_waiting += 1
            assert np.array_equal(warp_with_grid(place, grid, rounding_mode(SIZE)), affine.image()), k
    assert num_waiting > 30


def test_another_rounding_mode_is_noticed(monkeypatch):
    monkeypatch.setattr(deferred, "warp_with_grid", lambda place, *rest: place[: len(place) // CAPACITY])
    rounding_mode.cache_clear()
    assert rounding_mode(SIZE) is None
    rounding_mode.cache_clear()


def test_whole_images_pass():
    img = np.zeros((2, 3, 3), np.uint8)
    assert np.asarray(img) is img
    affine = DeferredAffine(canvas(), warp_of(1.3, 30, 30))
    assert affine.shape == (SIZE, SIZE, 3) == np.asarray(affine).shape


# gain, centre, flips, whether something is pasted in
CASES = [(1.02, 32, 32, (), False), (1.5, 30, 20, (0,), False), (1.9, -10, 40, (1,), False),
         (0.8, 33, 31, (0, 1), False), (0.5, 32, 32, (1,), False), (1.4, 31, 31, (0,), True),
         (1.2, 500, 30, (), False)]  # fmt: skip


def sample(finish, case, seed):
    gain, x, y, axes, is_pasting = case
    img = finish.warped(canvas(seed), warp_of(gain, x, y))
    img = finish.recolour(img, Colours(1.01, 0.7, 1.2), now=is_pasting)
    for axis in axes:
        img = finish.flip(img, axis)
    return finish.pixels(img)


def both_ways(with_affine=True):
    """Images [7 x 3 x h x w] finished at once, and the same as a DeferredBatch."""
    wanted = np.stack([sample(AT_ONCE, case, k) for k, case in enumerate(CASES)])
    later, pixels = DeferredDataset(AT_ONCE), []
    steps = np.full((len(CASES), steps_bytes(SIZE, with_affine)), 77, np.uint8)
    for k, case in enumerate(CASES):
        later.begin(steps[k])
        pixels.append(sample(later, case, k))
    return torch.from_numpy(wanted), DeferredBatch(torch.from_numpy(np.stack(pixels)), torch.from_numpy(steps))


@KNOWN_MODE
def test_a_batch_warped_later_on_the_host():
    wanted, batch = both_ways()
    assert batch.steps[:, AFFINE].tolist() == [1, 1, 1, 1, 0, 0, 0]
    assert batch.pixels.shape == (7, CAPACITY * SIZE, SIZE, 3) and batch.image_shape == (7, SIZE, SIZE, 3)
    assert batch.augmented().equal(wanted)


def test_without_room_for_a_grid_the_worker_warps():
    wanted, batch = both_ways(with_affine=False)
    assert batch.steps.shape[1] == STEPS and not batch.steps[:, AFFINE].any()
    assert batch.pixels.shape == batch.image_shape == (7, SIZE, SIZE, 3)
    assert batch.augmented().equal(wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [FIXED, FLOATING])
def test_a_batch_warped_on_the_gpu(mode, monkeypatch):
    """As the host does it, in both ways, whichever of them the OpenCV here has."""
    for module in (deferred, device_augment):
        monkeypatch.setattr(module, "rounding_mode", lambda width: mode)
    _, batch = both_ways()
    assert batch.steps[:, AFFINE].tolist() == [1, 1, 1, 1, 0, 0, 0]
    found = DeferredBatch(*(part.cuda() for part in batch)).augmented()
    assert found.is_contiguous(memory_format=torch.channels_last) and found.cpu().equal(batch.augmented())


def test_every_step_on_pixels_has_its_deferred_form():
    """A step that is added to the reference alone would see pixels before their affine and colours."""
    steps = steps_on_pixels()
    assert steps >= {"warped", "recolour", "flip", "pixels"}
    assert steps - set(vars(DeferredDataset)) == {
        "_flipped",  # which draws, and calls flip
        "moved", "blended", "paste",  # which get the image itself, or make it
    }  # fmt: skip
