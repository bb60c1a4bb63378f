"""Parts of a data set: reproducible, with every class, and nothing but a part."""

from types import SimpleNamespace

import numpy as np
import pytest

from utils.data import subset
from utils.data.labels.scan import ScannedDataset


def rows(*classes):
    return np.array([(c, 0.5, 0.5, 0.1, 0.1) for c in classes], np.float32).reshape(-1, 5)


def scanned(labels):
    n = len(labels)
    return ScannedDataset([f"{i}.jpg" for i in range(n)], [f"{i}.txt" for i in range(n)], labels, [[]] * n,
                          np.arange(2.0 * n).reshape(n, 2), {}, [])  # fmt: skip


def options(**values):
    return SimpleNamespace(
        **({"overfit": False, "subset_size": 0, "subset_seed": 0, "allow_background": False} | values)
    )


COMMON = [rows(0) for _ in range(200)]
LABELS = [*COMMON, rows(0, 1), rows(2), rows(), rows(3, 2)]  # classes 1 and 3 in one image each


def test_the_seed_decides():
    first, again, other = (subset.choose(LABELS, 20, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 20 and first == sorted(first)


@pytest.mark.parametrize("seed", range(5))
def test_rare_classes_are_covered(seed):
    chosen = subset.choose(LABELS, 5, seed)
    assert {200, 203} <= set(chosen), "the only images of classes 1 and 3; 203 brings class 2 as well"
    assert len(chosen) == 5


def test_more_classes_than_images(caplog):
    part = subset.random_part(scanned([rows(0), rows(1), rows(2)]), 2, seed=0)
    assert len(part.img_files) == 2
    assert "--subset-size 2 has no image of the classes" in caplog.text


def test_sizes_beyond_the_data_set():
    assert subset.choose(LABELS[:3], 9, 0) == [0, 1, 2]
    assert subset.choose([], 9, 0) == []


def test_backgrounds_take_part():
    chosen = subset.choose([rows() for _ in range(9)], 4, 0)
    assert len(chosen) == 4


def test_all_lists_are_cut_alike():
    part = subset.from_options(options(subset_size=5, subset_seed=3))(scanned(LABELS))
    chosen = [int(name.removesuffix(".jpg")) for name in part.img_files]
    assert chosen == subset.choose(LABELS, 5, 3)
    assert part.label_files == [f"{i}.txt" for i in chosen]
    assert all(np.array_equal(a, LABELS[i]) for a, i in zip(part.labels, chosen, strict=True))
    assert part.shapes.tolist() == [[2.0 * i, 2.0 * i + 1] for i in chosen] and len(part.segments) == 5


def test_overfit_takes_the_first():
    part = subset.from_options(options(overfit=True))(scanned(LABELS))
    assert part.img_files == [f"{i}.jpg" for i in range(10)] and part.shapes.shape == (10, 2)
    assert len(subset.from_options(options(overfit=True, subset_size=3))(scanned(LABELS)).labels) == 3
    assert len(subset.from_options(options(overfit=True))(scanned(LABELS[:4])).labels) == 4


@pytest.mark.parametrize("count", [0, 3])
def test_overfit_on_images_without_boxes(count):
    data, opt = scanned([rows()] * 12 + [rows(0), rows(1)]), options(overfit=True, subset_size=count)
    message = f"--overfit: the first {count or 10} images, .* no boxes, but 2 later .*12.jpg; .* --subset-size 13"
    with pytest.raises(ValueError, match=message):
        subset.from_options(opt)(data)
    assert len(subset.from_options(options(overfit=True, subset_size=13))(data).labels) == 13
    opt.allow_background = True
    assert len(subset.from_options(opt)(data).labels) == count or 10
    assert subset.from_options(options(overfit=True))(scanned([rows()] * 12))  # check_has_boxes has a word for it


def test_without_flags_nothing_is_picked():
    assert subset.from_options(options()) is None
