"""Label rows of COCO's annotations, by hand."""

from pathlib import Path

import numpy as np
import pytest

from tools.coco.download import Task
from tools.coco.labels import Placement, joined, label_text, rings_of, scaled_annotations, signed_area
from utils.data.labels.rows import parse_label_text

SQUARE = [10, 10, 30, 10, 30, 30, 10, 30]
FAR = [70, 80, 70, 90, 60, 90, 60, 80]  # the other way round
NEAR = [40, 10, 50, 10, 50, 20]
WHOLE = Placement.of((100, 100), 100, "longer")


def annotation(**fields):
    return {"id": 1, "bbox": [10, 10, 20, 20], "segmentation": [SQUARE], "iscrowd": 0} | fields


def rows_of(*annotations, size=(100, 100), placement=WHOLE, class_id=0):
    text, left_out = label_text([(class_id, entry) for entry in annotations], size, placement)
    return text.splitlines(), dict(left_out)


@pytest.mark.parametrize(
    ("size", "fit", "expected"),
    [
        ((640, 480), "longer", ((320, 240), (0, 0), (320, 240))),
        ((77, 154), "longer", ((160, 320), (0, 0), (160, 320))),  # truncated, the longer side would be 319
        ((640, 480), "stretch", ((320, 320), (0, 0), (320, 320))),
        ((640, 427), "pad", ((320, 214), (0, 53), (320, 320))),
        ((2000, 1), "longer", ((320, 1), (0, 0), (320, 1))),
    ],
)
def test_placement(size, fit, expected):
    assert Placement.of(size, 320, fit) == expected


def test_parts_are_joined_to_one_ring_with_the_sum_of_their_areas():
    rings = [np.array(part, float).reshape(-1, 2) for part in (SQUARE, FAR, NEAR)]
    ring = joined(rings)
    assert abs(signed_area(ring)) == pytest.approx(400 + 100 + 50)
    assert {tuple(point) for point in ring} == {tuple(point) for part in rings for point in part}
    lines = np.linalg.norm(np.diff(ring, axis=0), axis=1)
    assert (lines == 10).sum() >= 2, "the near part hangs on the square: from (30, 10) to (40, 10) and back"
    assert joined(rings[:1]).tolist() == rings[0].tolist()


def test_rows_of_polygons_boxes_and_triangles():
    rows, left_out = rows_of(
        annotation(),
        annotation(segmentation={"counts": [1, 2], "size": [100, 100]}, bbox=[20, 20, 40, 20]),
        annotation(segmentation=[NEAR], bbox=[40, 10, 10, 10]),
        annotation(segmentation=[[-5, 50, 120, 50, 120, 60, -5, 60]], bbox=[0, 50, 100, 10]),
        class_id=7,
    )
    assert rows[0] == "7 0.100000 0.100000 0.300000 0.100000 0.300000 0.300000 0.100000 0.300000"
    assert rows[1] == "7 0.400000 0.300000 0.400000 0.200000"
    assert rows[2].split()[1:] == [*rows[2].split()[1:7], "0.400000", "0.100000"], "stock reads no triangles: closed"
    assert rows[3].split()[1::2] == ["0.000000", "1.000000", "1.000000", "0.000000"], "clipped to the image"
    assert not left_out
    labels, _, notes = parse_label_text("\n".join(rows))
    assert len(labels) == 4 and not notes


def test_what_is_left_out_is_counted():
    rows, left_out = rows_of(
        annotation(), annotation(iscrowd=1), annotation(), annotation(segmentation=[], bbox=[5, 5, 0, 9])
    )
    assert len(rows) == 1 and left_out == {"crowd": 1, "repeated": 1, "without area": 1}


def test_only_padding_changes_labels():
    size = (100, 50)
    longer, stretch, pad = (
        rows_of(annotation(), size=size, placement=Placement.of(size, 64, fit))[0]
        for fit in ("longer", "stretch", "pad")
    )
    assert longer == stretch == ["0 0.100000 0.200000 0.300000 0.200000 0.300000 0.600000 0.100000 0.600000"]
    assert pad == ["0 0.100000 0.350000 0.300000 0.350000 0.300000 0.550000 0.100000 0.550000"]


@pytest.mark.parametrize("segmentation", [[[1, 2, "x", 4, 5, 6]], [[1, 2, 3]], [7], [[1, 2, float("nan"), 4, 5, 6]]])
def test_a_segmentation_that_is_none(segmentation):
    with pytest.raises(ValueError, match="segmentation of annotation 1 is no list of polygons"):
        rings_of(annotation(segmentation=segmentation))


def test_annotations_in_the_pixels_of_the_new_image():
    content = {"info": {"year": 2017}, "images": [{"id": 4, "file_name": "a.jpg", "width": 100, "height": 50}],
               "annotations": [], "categories": []}  # fmt: skip
    task = Task(Path("a.jpg"), Path("b.jpg"), Path("b.txt"), (100, 50), [(0, annotation(area=300))], "a.jpg")
    found = scaled_annotations(content, [task], 50, "pad")
    assert found["images"] == [{"id": 4, "file_name": "a.jpg", "width": 50, "height": 50}]
    assert found["annotations"] == [{"id": 1, "bbox": [5, 17.0, 10, 10], "iscrowd": 0, "area": 75}]
    assert found["info"] == {"year": 2017}
