"""utils/data/pixel_ops.py: the bytes of the plain formula."""

import numpy as np
import pytest

from utils.data.pixel_ops import _scaled_truncated, blended
from utils.data.transforms import Colours


@pytest.mark.parametrize("gain", [0.0, 0.1, 0.3, 0.5, 0.7123456, 0.99999, 1.0, 1.00001, 1.37, 1.9999, 2.0, 300.0])
def test_colour_gains_cut_off_what_exceeds_whole_numbers(gain):
    plane = np.arange(256, dtype=np.uint8).reshape(16, 16)
    expected = [min(int(level * gain), 255) for level in range(256)]
    colours = Colours(1, gain, gain)
    assert colours.tables()[1].tolist() == colours.tables()[2].tolist() == expected
    if _scaled_truncated(plane, gain, colours.tables()[1]):
        assert plane.ravel().tolist() == expected
    else:
        assert plane.ravel().tolist() == list(range(256))


@pytest.mark.parametrize("ratio", [0.5, 0.37, 0.3, 0.1 + 0.2, 1 / 3, 0.70000001, 0.25, 0.99, 0.123456789])
def test_blending_cuts_off_like_the_exact_sum(ratio):
    """For every pair of levels, also where nothing quicker than a table gives them (3/10, 1/4: many whole numbers)."""
    first, second = (np.repeat(levels.ravel(), 3).reshape(256, 256, 3) for levels in np.indices((256, 256), np.uint8))
    expected = (first * ratio + second * (1 - ratio)).astype(np.uint8)
    assert np.array_equal(blended(first, second, ratio), expected)
