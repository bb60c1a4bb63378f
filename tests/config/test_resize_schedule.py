"""Stages of progressive resizing."""

from types import SimpleNamespace

import pytest

from utils.config import resize_schedule


def test_size_of_every_epoch():
    sizes = resize_schedule.parse("0:320, 20:480,40:640")
    assert [sizes.at(epoch) for epoch in (0, 19, 20, 39, 40, 299)] == [320, 320, 480, 480, 640, 640]
    assert sizes.final == 640


def test_sizes_may_fall_and_are_rounded():
    sizes = resize_schedule.parse("0:100,2:60").rounded(lambda size: -(-size // 32) * 32)
    assert [sizes.at(epoch) for epoch in range(3)] == [128, 128, 64]


def test_without_a_schedule():
    sizes = resize_schedule.from_options(SimpleNamespace(resize_schedule="", img_size=[320, 640]))
    assert sizes.at(0) == sizes.at(99) == sizes.final == 320


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("320", "is not understood; write it like"),
        ("0:320:1", "is not understood"),
        ("0:a", "is not understood"),
        ("0:320,", "is not understood"),
        ("1:320", "have to begin with 0"),
        ("0:320,0:480", "to rise"),
        ("0:320,9:480,5:640", "to rise"),
        ("0:0", "size 0 is too small: it has to be at least 1"),
        ("0:99999,20:640", "size 99999 is too large: it has to be at least 1 and at most 16000"),
    ],
)
def test_wrong_schedules(text, message):
    with pytest.raises(ValueError, match=f"--resize-schedule .*{message}"):
        resize_schedule.parse(text)
