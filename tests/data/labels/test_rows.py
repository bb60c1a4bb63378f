import random

import numpy as np
import pytest

from tests.label_sets import BOX, TRIANGLE, make_dataset
from utils.data.labels.rows import ROW_DROPPED, parse_label_text
from utils.data.labels.scan import scan_dataset


def said(text):
    """(rows as lists, reasons of the notes) of a label text."""
    rows, _, notes = parse_label_text(text, "f.txt")
    return rows.astype(float).round(4).tolist(), [note.reason for note in notes]


@pytest.mark.parametrize(
    "text",
    [
        "0 0.5 0.25 0.5 0.25\n1 1 1 0 0.5",
        "0 0.5 0.25 0.5 0.25\r\n1 1 1 0 0.5\r\n",
        "\ufeff0 0.5 0.25 0.5 0.25\n\n  \n1 1 1 0 0.5   \n\n",
        "0\t0.5\t0.25\t0.5\t0.25\n1,1,1,0,0.5",
        "0, 0.5, 0.25, 0.5, 0.25\r1 1 , 1 , 0 , 0.5",
        "# class x y w h\n0.0 .5 2.5e-1 +0.5 0.25  # a comment\n1e0 1. 1 -0 0.5",
        "-0 0.5 0.25 0.5 0.25\n01 1.0 1.0 0.0 0.50",
    ],
)
def test_spellings_of_the_same_boxes(text):
    rows, segments, notes = parse_label_text(text, "f.txt")
    assert rows.dtype == np.float32
    assert rows.tolist() == [[0, 0.5, 0.25, 0.5, 0.25], [1, 1, 1, 0, 0.5]]
    assert segments == []
    assert [note.reason for note in notes] == ["box of zero width or height"]  # said of the second


@pytest.mark.parametrize("text", ["", "\n \n\t\n", "\ufeff", "# nothing here"])
def test_text_without_objects(text):
    rows, segments, notes = parse_label_text(text)
    assert rows.shape == (0, 5)
    assert rows.dtype == np.float32
    assert (segments, notes) == ([], [])


def test_each_row_is_what_its_own_length_says():
    rows, segments, notes = parse_label_text(f"{BOX}\n1 .1 .1 .3 .1 .3 .3 .1 .3\n{TRIANGLE} .1 .5")
    np.testing.assert_allclose(rows[:2], [[0, 0.5, 0.5, 0.4, 0.4], [1, 0.2, 0.2, 0.2, 0.2]], rtol=1e-6)
    np.testing.assert_allclose(rows[2], [1, 0.2, 0.3, 0.2, 0.4], rtol=1e-6)
    assert [points.shape for points in segments] == [(0, 2), (4, 2), (4, 2)]
    assert all(points.dtype == np.float32 for points in segments)
    np.testing.assert_array_equal(segments[1], np.float32([[0.1, 0.1], [0.3, 0.1], [0.3, 0.3], [0.1, 0.3]]))
    assert notes == []


def test_a_triangle_is_a_polygon():
    rows, segments, _ = parse_label_text(TRIANGLE)
    np.testing.assert_allclose(rows, [[1, 0.2, 0.2, 0.2, 0.2]], rtol=1e-6)
    assert segments[0].shape == (3, 2)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("red 0.5 0.5 0.4 0.4", "class is text"),
        ("1.7 0.5 0.5 0.4 0.4", "class id is not a whole number"),
        ("1e9 0.5 0.5 0.4 0.4", "class id is beyond 16777216"),
        ("nan 0.5 0.5 0.4 0.4", "NaN or infinite"),
        ("0 0.5 inf 0.4 0.4", "NaN or infinite"),
        ("0 0.5 x 0.4 0.4", "not a number"),
        ("0 0.5 0.5 0.4", "fewer than 5 numbers"),
        ("0", "fewer than 5 numbers"),
        ("0 .1 .1 .3 .1 .3 .3 .5", "odd count of coordinates"),
        ("0 0.5 0.5 1.02 0.4", "more than 1% outside 0..1"),
        ("0 -0.02 0.5 0.4 0.4", "more than 1% outside 0..1"),
        ("0 320 240 64 48", "pixels?"),
        ("0 .1 .1 .3 .1 .3 1.5", "more than 1% outside 0..1"),
        ("0 0,5 0,5 0,4 0,4", "decimal comma"),
        ("0;0.5;0.5;0.4;0.4", "class is text"),
        ("1_0 0.5 0.5 0.4 0.4", "class is text"),  # Python's float takes it for 10
        ("0 0.5 0.5 0.4 0.\u0664", "not a number"),  # and this for 0.4
    ],
)
def test_rows_that_cannot_be_used_are_dropped_alone(row, reason):
    rows, _, notes = parse_label_text(f"{BOX}\n{row}\n{BOX[:-1]}1", "a/f.txt")
    assert len(rows) == 2
    assert len(notes) == 1
    assert notes[0].effect == ROW_DROPPED
    assert reason in notes[0].reason
    assert notes[0].place.startswith("a/f.txt:2")


def test_one_percent_is_clipped():
    text = "0 1.005 0.5 1.01 -0.01\n1 -0.004 0 0.5 0 0.5 1.002"
    rows, segments, notes = parse_label_text(text)
    np.testing.assert_allclose(rows, [[0, 1, 0.5, 1, 0], [1, 0.25, 0.5, 0.5, 1]])
    np.testing.assert_allclose(segments[1], [[0, 0], [0.5, 0], [0.5, 1]])
    assert [note.reason for note in notes].count("coordinates less than 1% outside 0..1 were clipped") == 2
    assert said("0 1.00000001 0.5 1 1") == ([[0, 1, 0.5, 1, 1]], [])  # float32 cannot tell this from 1


def test_boxes_may_leave_the_image_with_their_corners():
    assert said("0 0.9 0.1 0.8 0.8") == ([[0, 0.9, 0.1, 0.8, 0.8]], [])


def test_a_confidence_column_is_ignored():
    assert said(f"{BOX} 0.87") == ([[0, 0.5, 0.5, 0.4, 0.4]], ["sixth column (a confidence) ignored"])
    for more in ("17", "-1.57"):
        assert said(f"{BOX} {more}")[1] == ["sixth column (a track id or an angle?) ignored"]


def test_repeated_rows_count_once():
    repeats = "repeats an earlier row of the file"
    assert said(f"{BOX}\n{BOX}") == ([[0, 0.5, 0.5, 0.4, 0.4]], [repeats])
    assert said(f"{BOX}\n1{BOX[1:]}\n0.0 0.50 .5 .4 .4")[1] == [repeats]  # another class is another object
    assert said(f"{TRIANGLE}\n{TRIANGLE}")[1] == [repeats]


def test_class_ids_are_not_judged_here():
    assert said("-1 0.5 0.5 0.4 0.4\n99 0.5 0.5 0.4 0.4")[0] == [[-1, 0.5, 0.5, 0.4, 0.4], [99, 0.5, 0.5, 0.4, 0.4]]


# --- rows that only their data set explains ---------------------------------------------------------------------------


def rows_of(behind, count=12, files=4, seed=0):
    """Texts of label files with boxes and, behind each, the numbers that `behind(random)` gives."""
    draw = random.Random(seed)
    texts = {}
    for number in range(files):
        box = [[0, *(round(draw.uniform(0.3, 0.6), 4) for _ in range(4)), *behind(draw)] for _ in range(count // files)]
        texts[f"f{number}"] = "\n".join(" ".join(map(str, row)) for row in box)
    return texts


def pose(number, flags):
    """Keypoints x y, each with one of the `flags` if there are any."""
    return lambda draw: [
        value
        for _ in range(number)
        for value in (draw.random(), draw.random(), *([draw.choice(flags)] if flags else ()))
    ]


def judged(tmp_path, texts, keypoints=None, again=True):
    """(boxes are those of the texts, number of polygons, reasons, scan) of a data set."""
    folder = make_dataset(tmp_path, texts)
    scanned = scan_dataset(folder, keypoints=keypoints)
    if again:  # the cache knows it as well
        assert scan_dataset(folder, keypoints=keypoints).messages == scanned.messages
    expected = [[row.split()[:5] for row in text.splitlines()] for text in texts.values()]
    boxes = [np.array(rows, np.float32).reshape(-1, 5) for rows in expected]
    are_boxes = len(boxes) == len(scanned.labels) and all(map(np.array_equal, scanned.labels, boxes))
    return are_boxes, sum(map(len, scanned.segments)), [finding.reason for finding in scanned.findings], scanned


@pytest.mark.parametrize("each", [2, 3])
@pytest.mark.parametrize("number", [1, 2, 4, 5, 17])
def test_kpt_shape_of_the_data_yaml_decides(number, each, tmp_path):
    texts = rows_of(pose(number, [0, 1, 2] if each == 3 else []))
    are_boxes, polygons, reasons, scanned = judged(tmp_path, texts | {"plain": BOX}, (number, each))
    assert are_boxes and not polygons
    assert reasons == [f"keypoints ignored, the box counts (kpt_shape [{number}, {each}])"]
    assert (scanned.counts["repaired_rows"], scanned.counts["dropped_rows"]) == (12, 0)


def test_rows_that_do_not_fit_kpt_shape(tmp_path):
    texts = {"a": rows_of(pose(4, [2]))["f0"], "b": TRIANGLE, "c": f"{BOX}\n{BOX[:-1]}5 .5", "d": f"{BOX} .1 .1"}
    _, polygons, reasons, scanned = judged(tmp_path, texts, (4, 3))
    assert polygons == 0 and scanned.counts["dropped"] == 2
    assert (
        "kpt_shape [4, 3] of the data yaml asks for 5 numbers or 17; remove kpt_shape if these are polygons" in reasons
    )
    confident = rows_of(lambda draw: [*pose(4, [2])(draw), 0.9])
    assert judged(tmp_path / "c", confident, (4, 3))[0]


@pytest.mark.parametrize(("number", "flags"), [(1, [0, 1, 2]), (4, [0, 1, 2]), (17, [0, 1, 2]), (2, [2]), (3, [0, 1]),
                                               (4, [1, 1.0, 2.0]), (3, [-1, 0, 1])])  # fmt: skip
def test_visibility_tells_keypoints(number, flags, tmp_path):
    are_boxes, polygons, reasons, _ = judged(tmp_path, rows_of(pose(number, flags)))
    assert are_boxes and not polygons
    assert reasons == [f"keypoints with visibility ignored, the box counts (say so: kpt_shape: [{number}, 3])"]


@pytest.mark.parametrize(
    ("behind", "columns"),
    [
        (lambda draw: [round(draw.random(), 3), draw.randint(0, 40)], 2),  # confidence and track id
        (lambda draw: [draw.randint(0, 40), round(draw.random(), 3)], 2),
        (lambda draw: [draw.randint(0, 1), draw.randint(0, 1)], 2),  # difficult, truncated
        (lambda draw: [round(draw.random(), 3), draw.randint(0, 40), 7], 3),
        (lambda draw: [0.5, 0.25, draw.randint(0, 9), 0.1], 4),
        (lambda draw: [-1, round(draw.random(), 3)], 2),  # no track id
        (lambda draw: [round(draw.random(), 3), draw.choice([-1, 0, 1])], 2),
    ],
)
def test_whole_numbers_tell_further_columns(behind, columns, tmp_path):
    are_boxes, polygons, reasons, _ = judged(tmp_path, rows_of(behind))
    assert are_boxes and not polygons
    assert reasons == [f"{columns} columns behind the box ignored (track ids or flags, as they hold whole numbers)"]


def outline(points):
    return lambda draw: [round(draw.random(), 4) for _ in range(2 * points - 4)]


@pytest.mark.parametrize("points", [3, 4, 5, 8, 16])
def test_polygons_of_equal_length_stay_polygons(points, tmp_path):
    """Those of more than four points might be keypoints: that is asked, once."""
    are_boxes, polygons, reasons, _ = judged(tmp_path, rows_of(outline(points)))
    assert not are_boxes and polygons == 12
    if points <= 4:
        assert not reasons
    else:
        shapes = {5: "[3, 2] or [2, 3]", 8: "[6, 2] or [4, 3]", 16: "[14, 2]"}[points]
        assert reasons == [
            f"all rows but plain boxes have {1 + 2 * points} numbers, read as polygons of {points} points; if they are "
            f"boxes with keypoints, say kpt_shape: {shapes} in the data yaml"
        ]


def test_polygons_at_the_border_stay_polygons(tmp_path):
    texts = {"a": "0 0 0 1 0 1 1 0 1\n0 .5 0 1 0 1 1", "b": "0 .2 .3 .4 .5 .1 1\n0 .2 .3 .5 .5 .3 1",
             "c": "0 0 0 1 0 1 1 .5 1 0 1"}  # fmt: skip
    _, polygons, reasons, _ = judged(tmp_path, texts)
    assert polygons == 5 and reasons == []


BORDERS = {
    "the whole image": lambda x, y: f"0 0 0 1 0 1 1 0 1 {'' if x else '0 0'}",
    "roads that reach the bottom": lambda x, y: f"0 {0.5 - x} {0.5 + y} {0.5 + x} {0.5 + y} .9 1 .1 1",
    "keys at the bottom": lambda x, y: f"0 {7 * x:g} {y} {7 * x + 0.05:g} {y} {7 * x + 0.05:g} 1 {7 * x:g} 1",
    "walls at the left": lambda x, y: f"0 {x} {y} {x} {0.5 + y} 0 .9 0 .1",
}


@pytest.mark.parametrize("name", BORDERS)
@pytest.mark.parametrize("files", [12, 1])
def test_polygons_that_all_touch_a_border_stay_polygons(name, files, tmp_path):
    rows = [BORDERS[name](round(i * 0.01, 2), round(0.1 + i * 0.01, 2)) + "\n" for i in range(1, 13)]
    rows = [*dict.fromkeys(rows)] if files == 1 else rows
    texts = {str(i): "".join(rows[i::files]) for i in range(files)}
    _, polygons, reasons, _ = judged(tmp_path, texts)
    assert polygons == len(rows) and reasons == []


def test_closed_outlines_of_the_whole_image_are_no_keypoints(tmp_path):
    _, polygons, _, _ = judged(tmp_path, {str(i): "0 0 0 0 1 1 1 1 0 0 0" for i in range(9)})
    assert polygons == 9


def test_a_refused_row_does_not_change_what_the_others_are(tmp_path):
    """Neither before nor behind them: each file is judged for itself first."""
    texts = rows_of(lambda draw: [0.5, draw.randint(2, 40)], files=12)
    for name in ("0", "z"):
        folder = make_dataset(tmp_path / name, texts | {name: "0 5 5 5 5 .5 7"})
        scanned = scan_dataset(folder)
        assert len(scanned.labels) == 12 and not sum(map(len, scanned.segments))
        assert scanned.counts["repaired_rows"] == 12 and scanned.counts["dropped_rows"] == 1


def test_files_of_several_forms(tmp_path):
    """Files with a visibility of 2 are poses, whatever the others of the same length are."""
    poses = {f"p{name}": text for name, text in rows_of(pose(4, [0, 2])).items()}
    _, polygons, reasons, scanned = judged(tmp_path, rows_of(outline(8)) | poses | {"z": BOX})
    assert polygons == 12 and scanned.counts["repaired_rows"] == 12
    assert "keypoints with visibility ignored, the box counts (say so: kpt_shape: [4, 3])" in reasons
    mixed = {"a": f"{BOX}\n{TRIANGLE}\n{TRIANGLE} .1 .5", "b": f"{TRIANGLE} .1 .5 .2 .2\n{BOX} 0.5"}
    _, polygons, reasons, _ = judged(tmp_path / "mixed", mixed)
    assert reasons == ["sixth column (a confidence) ignored"]


@pytest.mark.parametrize("slip", [2, -1])
def test_a_slip_of_the_pen_makes_no_boxes_of_polygons(slip, tmp_path):
    texts = rows_of(outline(4)) | {"slip": f"0 .1 .1 .3 .1 .3 .3 {slip} .3\n" + TRIANGLE}
    _, polygons, reasons, _ = judged(tmp_path, texts)
    assert polygons == 13 and reasons == ["coordinate more than 1% outside 0..1"]


def test_keypoints_that_nothing_tells(tmp_path):
    """An even count of numbers is no polygon: the message names kpt_shape, and the image is left out."""
    texts = rows_of(lambda draw: [draw.random() for _ in range(51)]) | {"plain": BOX}
    _, _, reasons, scanned = judged(tmp_path, texts)
    assert (
        "polygon with an odd count of coordinates; boxes with keypoints? kpt_shape in the data yaml says so" in reasons
    )
    assert scanned.counts["dropped"] == 4


def test_another_kpt_shape_is_another_scan(tmp_path):
    folder = make_dataset(tmp_path, rows_of(pose(4, [])))
    for keypoints, polygons in ((None, 12), ((4, 2), 0), (None, 12)):
        assert sum(map(len, scan_dataset(folder, keypoints=keypoints).segments)) == polygons


@pytest.mark.parametrize("flags", [[0, 2], [0.5]])
def test_rows_are_read_as_those_of_the_training_set(flags, tmp_path):
    """Also when the label cache holds what they were taken for alone; what the cache says then stays."""
    training = scan_dataset(make_dataset(tmp_path / "train", rows_of(pose(2, flags))))
    folder = make_dataset(tmp_path / "val", rows_of(pose(2, [0, 1] if flags == [0.5] else [0.5]), files=3))
    own = sum(map(len, scan_dataset(folder).segments))
    for row_forms in (training.row_forms, None):
        assert sum(map(len, scan_dataset(folder, row_forms=row_forms).segments)) == (12 if flags == [0.5] else 0) != own
