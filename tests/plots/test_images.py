"""Single images with their boxes; grids are tested by the runs that draw them."""

import numpy as np
import pytest
import torch

from utils.plots.images import BoxStyle, draw_detections, plot_images

BLUE, ORANGE = (178, 114, 0), (0, 159, 230)  # of classes 0 and 1, as BGR
BOXES = torch.tensor([[30.0, 40.0, 80.0, 90.0, 0.9, 0.0], [30.0, 40.0, 80.0, 90.0, 0.5, 1.0]])


def colours(image, row):
    """The different colours of a row of pixels, apart from black."""
    return {tuple(pixel) for pixel in image[row].tolist()} - {(0, 0, 0)}


def test_colours_of_the_classes_the_best_on_top():
    image = np.zeros((120, 100, 3), np.uint8)
    plain = BoxStyle(with_names=False)
    assert colours(draw_detections(image, BOXES[1:], ["a", "b"], plain), 65) == {ORANGE}
    drawn = draw_detections(image, BOXES, ["a", "b"], plain)
    assert colours(drawn, 65) == {BLUE} and not image.any(), "a copy is drawn on"
    assert drawn.shape == image.shape and drawn.dtype == np.uint8


@pytest.mark.parametrize(
    ("shape", "thickness", "expected"), [((120, 100), 0, 2), ((1200, 1600), 0, 7), ((120, 100), 5, 5)]
)
def test_line_width(shape, thickness, expected):
    drawn = draw_detections(np.zeros((*shape, 3), np.uint8), BOXES[:1], None, BoxStyle(thickness, with_names=False))
    assert (drawn[65, :55] == BLUE).all(1).sum() == expected


def test_names_confidences_and_a_caption():
    image = np.zeros((120, 100, 3), np.uint8)
    styles = [BoxStyle(with_names=False), BoxStyle(with_confidence=False), BoxStyle()]
    filled = [(draw_detections(image, BOXES[:1], ["a", "b"], style)[20:40] == BLUE).all(2).sum() for style in styles]
    assert filled[0] == 0 < filled[1] < filled[2]
    assert draw_detections(image, BOXES[:0], ["a"], caption="1 a")[:10, :20].any()
    assert not draw_detections(image, BOXES[:0], ["a"]).any()


def test_a_suffix_of_no_image_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"grid\.txt has the suffix of no image format"):
        plot_images(np.zeros((1, 3, 8, 8), np.uint8), np.zeros((0, 6)), fname=tmp_path / "grid.txt")
