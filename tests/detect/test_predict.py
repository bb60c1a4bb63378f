"""From inputs to detections: as NMS alone has them, and when half precision fails."""

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

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, images, augment=False):
        rows = torch.tensor([[[32.0, 32, 20, 20, 0.9, 0.8, 0.1]]]).expand(len(images), 1, 7)
        return rows * (torch.nan if images.dtype == torch.float16 else self.weight), None


def test_nan_in_half_precision_means_float32(caplog):
    predictor = Predictor(NanInHalf(), Thresholds())
    predictor.half = True
    predictor.model.half()
    pixels = [np.zeros((3, 64, 64), np.uint8)] * 2
    for _ in range(2):
        found = predictor(pixels)
        assert [len(rows) for rows in found] == [1, 1] and found[0][0, 4] == pytest.approx(0.72)
    assert caplog.text.count("half precision gives NaN on this GPU") == 1 and not predictor.half


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
