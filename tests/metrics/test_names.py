"""Names that tell images and classes apart."""

import re

import pytest

from utils.metrics.names import class_names, image_names


@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        (["a", "b"], {}, ["a", "b"]),
        ([], {}, []),
        (["dog", "cat", "dog"], {}, ["dog (0)", "cat", "dog (2)"]),
        (["dog", "dog (0)", "dog"], {}, ["dog (0) (0)", "dog (0)", "dog (2)"]),
        (["epoch", "a"], {"taken": ["epoch"]}, ["epoch (0)", "a"]),
        (["x" * 21, "x" * 22, "y" * 30], {"longest": 20}, ["x" * 16 + " (0)", "x" * 16 + " (1)", "y" * 20]),
        (["a b", "a_b", "a"], {"form": lambda name: re.sub(r"\W", "_", name)}, ["a b (0)", "a_b (1)", "a"]),
        (["1", 1, None], {}, ["1 (0)", "1 (1)", "None"]),
        (["", ""], {}, [" (0)", " (1)"]),
    ],
)
def test_class_names(names, options, expected):
    found = class_names(names, **options)
    assert found == expected and len(set(found)) == len(names)


def test_stems_where_they_are_enough():
    assert image_names(["x/a.b.jpg", "y/c.jpg"]) == {"x/a.b.jpg": "a.b", "y/c.jpg": "c"}
    assert image_names([]) == {}


def test_what_counts_as_different():
    images = ["x/000123.jpg", "y/123.png", "y/a.jpg"]
    assert list(image_names(images).values()) == ["000123", "123", "a"]
    assert list(image_names(images, key=int_or_text).values()) == ["x/000123", "y/123", "y/a"]


def int_or_text(name):
    return int(name) if name.isdecimal() else name
