"""utils/data/mosaic.py: images and mosaics equal to stock's, painted only where somebody looks."""

import cv2
import numpy as np
import pytest

from tests import golden_data, parity
from tests.golden_data import (
    ALL_AUGMENTATIONS,
    check_cut_out,
    check_labels,
    check_pixels,
    check_streams,
    load_list,
    relative,
    seed_both,
    write_dataset,
)
from utils.data import mosaic, training_size
from utils.data.affine import Affine
from utils.data.mosaic import load_mosaic, load_mosaic9, load_samples
from utils.data.training_size import load_image
from utils.datasets import LoadImagesAndLabels


@pytest.mark.parametrize("augment", [False, True])
def test_load_image_golden(augment, folder):
    name = f"c_load_image_augment{int(augment)}"
    entry, arrays = golden_data.load(name)
    dataset = load_list(folder, "all", img_size=entry["img"], augment=augment, hyp=ALL_AUGMENTATIONS)
    for k, (path, shape0, shape) in enumerate(entry["items"]):
        img, *shapes = load_image(dataset, k)
        assert relative([dataset.img_files[k]], folder) == [path]
        assert shapes == [tuple(shape0), tuple(shape)]
        parity.check("data load_image", f"{name} im{k}", img, arrays[f"im{k}"])


# The mosaics of the mixed list `all` are left out: there stock pairs polygons with labels of other objects.
@pytest.mark.parametrize("name", golden_data.names("c_load_mosaic", "mosaic_all_", "mosaic9_all_"))
def test_load_mosaic_golden(name, folder):
    entry, arrays = golden_data.load(name)
    dataset = load_list(folder, entry["list"], img_size=entry["img"], augment=True, hyp=entry["hyp"])
    seed_both(entry["seed"])
    img, labels = (load_mosaic9 if "mosaic9" in name else load_mosaic)(dataset, entry["index"])
    check_pixels("data mosaics", name, img, arrays["img"])
    check_labels("data mosaics", f"{name} labels", labels, arrays["labels"])
    check_streams(name, entry["after"])


@pytest.mark.parametrize("name", golden_data.names("c_load_samples"))
def test_load_samples_golden(name, folder):
    entry, arrays = golden_data.load(name)
    dataset = load_list(folder, entry["list"], img_size=entry["img"], augment=True, hyp=ALL_AUGMENTATIONS)
    seed_both(entry["seed"])
    samples = load_samples(dataset, entry["index"])
    check_streams(name, entry["after"])
    parity.check("data samples", f"{name} classes", [s.category for s in samples], arrays["sample_labels"])
    for k, sample in enumerate(samples):
        check_cut_out(f"{name} image{k}", sample.cut_out(), arrays[f"image{k}"])
        check_cut_out(f"{name} mask{k}", sample.cut_out(), arrays[f"mask{k}"])


@pytest.mark.parametrize("load", [load_mosaic, load_mosaic9])
@pytest.mark.parametrize("perspective", [0.0, 0.001])
def test_images_left_out_of_a_mosaic_are_invisible(load, perspective, folder, monkeypatch):
    """Decoding only what the warp can see gives the very same images, with fewer decodes."""
    hyp = ALL_AUGMENTATIONS | {"perspective": perspective}
    dataset = load_list(folder, "all", img_size=64, augment=True, hyp=hyp)
    opened = []
    original = training_size.load_image
    monkeypatch.setattr(training_size, "load_image", lambda *args: opened.append(args) or original(*args))

    def all_results():
        opened.clear()
        seed_both(7)
        return [load(dataset, k % dataset.n) for k in range(40)], len(opened)

    quick, num_quick = all_results()
    everything = (-np.inf, -np.inf, np.inf, np.inf)
    monkeypatch.setattr(Affine, "source_area", lambda affine: everything)
    full, num_full = all_results()
    assert num_quick < num_full <= 40 * (4 if load is load_mosaic else 9)
    for (img, labels), (full_img, full_labels) in zip(quick, full, strict=True):
        assert np.array_equal(img, full_img)
        assert np.array_equal(labels, full_labels)


def test_mosaic_slices_are_parts_of_the_whole_canvas(folder):
    dataset = load_list(folder, "all", img_size=64, augment=True, hyp=ALL_AUGMENTATIONS)
    seed_both(8)
    for draw in (mosaic.draw_mosaic4, mosaic.draw_mosaic9):
        canvas = draw(dataset, 3)
        whole = canvas[:, :]
        assert whole.shape == canvas.shape == (128, 128, 3)
        assert np.array_equal(canvas[20:90, 37:101], whole[20:90, 37:101])


def test_polygons_stay_with_their_labels_in_a_mixed_set(folder):
    """Every object of every image is in the mosaic, with its class, and the polygon in a row fills the row's box."""
    dataset = load_list(folder, "all", img_size=64, augment=True, hyp=ALL_AUGMENTATIONS)
    seed_both(9)
    kinds = set()
    for k in range(30):
        canvas = (mosaic.draw_mosaic9 if k % 2 else mosaic.draw_mosaic4)(dataset, k % dataset.n)
        labels, segments = canvas.labels(), canvas.segments()
        classes = [dataset.labels[tile.image][:, 0] for tile in canvas.tiles]
        assert labels[:, 0].tolist() == np.concatenate(classes).tolist()
        assert len(segments) == len(labels)
        for row, points in zip(labels, segments, strict=True):
            kinds.add(len(points) > 0)
            if len(points):
                np.testing.assert_allclose([*points.min(0), *points.max(0)], row[1:], atol=1e-3)
    assert kinds == {False, True}


def test_row_kinds_mix_within_one_file(tmp_path):
    """A box row among polygon rows keeps its class and its place."""
    text = "0 0.1 0.1 0.4 0.1 0.4 0.4 0.1 0.4\n1 0.7 0.3 0.2 0.2\n2 0.5 0.6 0.9 0.6 0.9 0.9\n"
    dataset = LoadImagesAndLabels(
        write_dataset(tmp_path, {"a": (64, 64, text)}), 64, augment=True, hyp=ALL_AUGMENTATIONS
    )
    seed_both(10)
    canvas = mosaic.draw_mosaic4(dataset, 0)
    assert canvas.labels()[:, 0].tolist() == [0, 1, 2] * 4
    assert [len(points) for points in canvas.segments()] == [4, 0, 3] * 4
    seen = {int(category) for k in range(20) for category in dataset[0][1][:, 1]}
    assert seen == {0, 1, 2}
    assert {sample.category for _ in range(20) for sample in load_samples(dataset, 0)} <= {0, 2}


def test_image_that_changed_its_size_is_named(tmp_path):
    path = write_dataset(tmp_path, {"a": (64, 64, "0 0.5 0.5 0.5 0.5\n")})
    dataset = LoadImagesAndLabels(path, 64, augment=True, hyp=ALL_AUGMENTATIONS)
    cv2.imwrite(f"{path}/a.png", np.zeros((32, 64, 3), np.uint8))
    with pytest.raises(ValueError, match=r"a\.png: the image changed its size"):
        mosaic.draw_mosaic4(dataset, 0)[:, :]


def test_odd_training_size(folder):
    dataset = load_list(folder, "polys", img_size=65, augment=True, hyp=ALL_AUGMENTATIONS)
    assert load_mosaic(dataset, 0)[0].shape == (64, 64, 3)
