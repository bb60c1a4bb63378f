"""From inputs to detections: as NMS alone has them, and when half precision fails."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tests.detect_cases import picture, random_detector
from utils.detect.predict import Predictor, Thresholds, suppress
from utils.detect.sources import prepare
from utils.ops.nms import non_max_suppression


def test_suppress_is_nms(one_thread):
    model = random_detector().eval()
    images = torch.from_numpy(np.stack([prepare(picture(k), 64, 32) for k in range(3)])).float() / 255
    with torch.no_grad():
        predictions = model(images)[0]
    for classes, agnostic in ((None, False), ([0], True)):
        found = suppress(predictions, Thresholds(0.02, 0.3, classes, agnostic))
        expected = non_max_suppression(predictions, 0.02, 0.3, classes, agnostic)
        assert [rows.tolist() for rows in found] == [rows.tolist() for rows in expected]
        assert sum(map(len, found)) > 10


def test_prepare_is_rgb_and_a_multiple_of_the_stride():
    image = np.zeros((300, 1000, 3), np.uint8)
    image[..., 0] = 255  # blue
    pixels = prepare(image, 640, 32)
    assert pixels.shape == (3, 192, 640) and pixels[:, 96, 320].tolist() == [0, 0, 255]
    assert pixels.flags.c_contiguous


class NanInHalf(nn.Module):
    """Stands in for a network on a GTX 16xx."""

    def __init__(self, threshold=-1):
        super().__init__()
        self.weight, self.threshold = nn.Parameter(torch.tensor(1.0001)), threshold

    def forward(self, images, augment=False):
        assert self.weight.dtype == images.dtype
        rows = torch.tensor([[[32.0, 32, 20, 20, 0.9, 0.8, 0.1]]]).expand(len(images), 1, 7)
        nan = images.dtype == torch.float16 and float(images.max()) > self.threshold
        return rows * (torch.nan if nan else self.weight.float()), None


@pytest.mark.parametrize("threshold", [-1, 0.5])
def test_nan_in_half_precision_means_float32(threshold, caplog):
    """From the first image on, or from the first bright one; with weights that half precision cannot hold."""
    predictor = Predictor(NanInHalf(threshold), Thresholds())
    predictor.half, predictor.model = True, copy.deepcopy(predictor.full).half()  # as on a GPU
    weights = 1.0001
    for shade in (0, 255, 0):
        (rows,) = predictor([np.full((3, 64, 64), shade, np.uint8)])
        half = threshold > 0 and predictor.half
        assert len(rows) == 1 and float(rows[0, 4]) == pytest.approx(0.72 * (1.0 if half else weights**2), rel=1e-6)
    assert caplog.text.count("half precision gives NaN on this GPU") == 1 and not predictor.half
    assert "float32 is used (--no-half)" in caplog.text


def test_half_on_a_cpu_is_said(caplog):
    assert not Predictor(NanInHalf(), Thresholds(), half=True).half
    assert "--half has no effect on a CPU" in caplog.text


@pytest.mark.gpu
def test_half_is_the_default_on_a_gpu():
    model = random_detector().eval().cuda()
    pixels = [prepare(picture(k), 64, 32) for k in range(3)]
    half = Predictor(model, Thresholds(0.02, 0.3), None)
    found = half(pixels)
    assert half.half and {rows.device.type for rows in found} == {"cpu"}
    full = Predictor(model, Thresholds(0.02, 0.3), False)(pixels)
    assert abs(sum(map(len, found)) - sum(map(len, full))) <= 3


@pytest.mark.gpu
def test_a_network_that_half_precision_overflows(caplog):
    """The first convolution gives more than 65504: float32 is used from there on, as --no-half gives it."""
    model = random_detector().eval().cuda()
    with torch.no_grad():
        model.model[0].bn.weight.mul_(1e6)
        model.model[1].conv.weight.mul_(1e-6)
    pixels = [prepare(picture(k), 64, 32) for k in range(3)]
    predictor = Predictor(model, Thresholds(0.02, 0.3), None)
    found, again = predictor(pixels), predictor(pixels)
    assert caplog.text.count("half precision gives NaN") == 1 and not predictor.half
    expected = Predictor(model, Thresholds(0.02, 0.3), False)(pixels)
    for rows in (found, again):
        assert [len(part) for part in rows] == [len(part) for part in expected]
        for part, wanted in zip(rows, expected, strict=True):
            torch.testing.assert_close(part, wanted, rtol=1e-3, atol=1e-2)
