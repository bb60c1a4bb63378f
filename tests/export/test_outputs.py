"""What exported files compute, as PyTorch computes it: rows and columns, and test.py's NMS."""

import pytest
import torch
from torch import nn

from models.yolo import Model
from tests.heads_cases import small_heads
from tests.tiny_model import CFG, tiny_model
from utils.export.outputs import BoxesAndMaps, Decoded, OnnxDetections, RawMaps, as_list
from utils.ops.nms import non_max_suppression

IMAGES = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))


class Fixed(nn.Module):
    """A model that always sees the same boxes."""

    def __init__(self, boxes):
        super().__init__()
        self.boxes = boxes

    def forward(self, images):
        return self.boxes, None


def crowded(nc, num_images=3, num_boxes=300):
    """Random predictions [images x boxes x 5+nc], many of which overlap."""
    rng = torch.Generator().manual_seed(nc)
    centre = torch.rand(num_images, num_boxes, 2, generator=rng) * 300
    size = 20 + torch.rand(num_images, num_boxes, 2, generator=rng) * 60
    return torch.cat((centre, size, torch.rand(num_images, num_boxes, 1 + nc, generator=rng)), -1)


@pytest.mark.parametrize(("nc", "max_wh"), [(4, 4096), (4, 0), (1, 4096)])
def test_rows_are_those_of_our_own_nms(nc, max_wh):
    """Best class only; of one class the objectness alone counts; `max_wh` 0 is agnostic."""
    boxes = crowded(nc)
    rows = OnnxDetections(Fixed(boxes), (300, 0.5, 0.3), max_wh)(IMAGES)
    for image, expected in enumerate(non_max_suppression(boxes, 0.3, 0.5, agnostic=max_wh == 0)):
        mine = rows[rows[:, 0] == image]
        assert len(mine) == len(expected) > 20
        torch.testing.assert_close(mine[:, [1, 2, 3, 4, 6, 5]], expected)


def test_the_limit_is_that_of_an_image():
    rows = OnnxDetections(Fixed(crowded(4)), (7, 0.5, 0.3), 4096)(IMAGES)
    assert rows[:, 0].tolist() == [0.0] * 7 + [1.0] * 7 + [2.0] * 7
    assert OnnxDetections(Fixed(crowded(4)), (7, 0.5, 1.0), 4096)(IMAGES).shape == (0, 7)


def test_maps_and_boxes_are_those_of_the_model():
    model = tiny_model().eval()
    boxes, maps = model(IMAGES)
    assert all(map(torch.equal, RawMaps(model)(IMAGES), maps)) and torch.equal(Decoded(model)(IMAGES), boxes)
    assert RawMaps(model).names == ["output", "output_1", "output_2"]


def test_several_heads_have_the_class_ids_of_the_data_set():
    cfg = CFG | {"nc": 3, "head": [[[2, 3, 4], 1, "MultiHeadDetect", ["nc", "anchors"]]]}
    model = Model(cfg, head_config=small_heads()).eval()
    boxes, maps = BoxesAndMaps(model)(IMAGES)
    assert torch.equal(boxes, model(IMAGES)[0]) and boxes.shape[-1] == 8 and len(maps) == len(as_list(maps)) == 6
    assert torch.equal(Decoded(model)(IMAGES), boxes)
