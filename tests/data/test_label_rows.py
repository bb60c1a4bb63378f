import numpy as np
import pytest

from utils.data.label_rows import ROW_DROPPED, parse_label_text

BOX = "0 0.5 0.5 0.4 0.4"
TRIANGLE = "1 0.1 0.1 0.3 0.1 0.3 0.3"


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


def test_repeated_rows_count_once():
    repeats = "repeats an earlier row of the file"
    assert said(f"{BOX}\n{BOX}") == ([[0, 0.5, 0.5, 0.4, 0.4]], [repeats])
    assert said(f"{BOX}\n1{BOX[1:]}\n0.0 0.50 .5 .4 .4")[1] == [repeats]  # another class is another object
    assert said(f"{TRIANGLE}\n{TRIANGLE}")[1] == [repeats]


def test_class_ids_are_not_judged_here():
    assert said("-1 0.5 0.5 0.4 0.4\n99 0.5 0.5 0.4 0.4")[0] == [[-1, 0.5, 0.5, 0.4, 0.4], [99, 0.5, 0.5, 0.4, 0.4]]
