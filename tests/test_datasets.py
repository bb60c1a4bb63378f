"""utils/datasets.py and utils/mosaic.py: batches equal to stock's draw by draw, and the repairs."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import golden_data, parity
from tests.golden_data import check_labels, check_pixels, check_streams, numbered, seed_both
from utils import datasets
from utils.datasets import (
    LoadImagesAndLabels,
    collate_fn,
    collate_fn4,
    create_dataloader,
    load_image,
    load_mosaic,
    load_mosaic9,
    load_samples,
    pastein,
)

OPT = SimpleNamespace(single_cls=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return golden_data.copy_dataset(tmp_path_factory.mktemp("golden"))


def relative(paths, folder):
    return [str(path).replace(f"{folder}/", "") for path in paths]


def plain_shapes(shapes):
    """Nested tuples as JSON has them."""
    return json.loads(json.dumps(shapes, default=float))


def check_batches(name, batches, folder, exact_pixels=False):
    """Compare (images, targets, paths, shapes) with the golden batches img{k}, tgt{k}."""
    entry, arrays = golden_data.load(name)
    assert len(numbered(arrays, "img")) == len(entry["paths"])
    for k in range(len(entry["paths"])):
        images, targets, paths, shapes = next(batches)
        assert relative(paths, folder) == entry["paths"][k]
        assert plain_shapes(shapes) == entry["shapes"][k]
        if exact_pixels:
            parity.check("data batches", f"{name} img{k}", images, arrays[f"img{k}"])
        else:
            check_pixels("data batches", f"{name} img{k}", images, arrays[f"img{k}"])
        check_labels("data targets", f"{name} tgt{k}", targets, arrays[f"tgt{k}"])
    return entry


def endless(loader):
    while True:
        yield from loader


def load_list(folder, name, **options):
    return LoadImagesAndLabels(str(folder / f"{name}.txt"), **options)


# validation: nothing random


@pytest.mark.parametrize("name", golden_data.names("b_val_rect"))
def test_validation_batches_rect_golden(name, folder):
    entry = golden_data.index()[name]
    loader, dataset = create_dataloader(
        str(folder / "all.txt"), entry["img"], entry["batch"], entry["stride"], OPT, pad=entry["pad"], rect=True,
        workers=0
    )  # fmt: skip
    assert relative(dataset.img_files, folder) == entry["order"]
    assert dataset.batch_shapes.tolist() == entry["batch_shapes"]
    assert dataset.batch.tolist() == entry["batch_index"]
    check_batches(name, iter(loader), folder, exact_pixels=True)


def test_validation_batches_square_golden(folder):
    entry = golden_data.index()["b_val_square_img64_bs4"]
    loader, _ = create_dataloader(str(folder / "all.txt"), entry["img"], entry["batch"], 32, OPT, workers=0)
    check_batches("b_val_square_img64_bs4", iter(loader), folder, exact_pixels=True)


# functions of the training sample


@pytest.mark.parametrize("augment", [False, True])
def test_load_image_golden(augment, folder):
    name = f"c_load_image_augment{int(augment)}"
    entry, arrays = golden_data.load(name)
    dataset = load_list(folder, "all", img_size=entry["img"], augment=augment)
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
    dataset = load_list(folder, entry["list"], img_size=entry["img"], augment=True)
    seed_both(entry["seed"])
    samples = load_samples(dataset, entry["index"])
    check_streams(name, entry["after"])
    parity.check("data samples", f"{name} classes", [s.category for s in samples], arrays["sample_labels"])
    for k, sample in enumerate(samples):
        parity.check("data samples", f"{name} image{k}", sample.cut_out(), arrays[f"image{k}"])
        parity.check("data samples", f"{name} mask{k}", sample.cut_out(), arrays[f"mask{k}"])


@pytest.mark.parametrize("name", golden_data.names("c_pastein", "empty"))
def test_pastein_golden(name, folder):
    entry, arrays = golden_data.load(name)
    source = entry["samples_from"]
    dataset = load_list(folder, source["list"], img_size=source["img"], augment=True)
    seed_both(source["seed"])
    samples = dataset.samples_to_paste()
    parity.check("data paste-in", f"{name} classes", [s.category for s in samples], arrays["sample_labels"])
    for k, golden in enumerate(numbered(arrays, "image")):
        parity.check("data samples", f"{name} image{k}", samples[k].cut_out(), golden)
    seed_both(entry["seed"])
    img = arrays["input"].copy()
    labels = pastein(img, arrays["labels"], samples)
    check_pixels("data paste-in", f"{name} img", img, arrays["img"])
    check_labels("data paste-in", f"{name} labels", labels, arrays["out_labels"])
    check_streams(name, entry["after"])


# training batches

WHOLE_RUNS = golden_data.names("d_train", "d_train_all")


def seed_like_training(entry):
    random.seed(entry["seed"])
    np.random.seed(entry["seed"])
    torch.manual_seed(entry["seed"])


def draw_like_autoanchor(entry):
    if "numpy_predraws" in entry:
        np.random.uniform(0.9, 1.1, size=(entry["n"], 1))


def training_loader(entry, folder, workers=0, **options):
    return create_dataloader(
        str(folder / f"{entry['list']}.txt"), entry["img"], entry["batch"], 32, OPT, hyp=entry["hyp"], augment=True,
        workers=workers, **options,
    )  # fmt: skip


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("name", WHOLE_RUNS)
def test_training_batches_golden(name, cache, folder):
    entry = golden_data.index()[name]
    seed_like_training(entry)
    loader, dataset = training_loader(entry, folder, cache=cache)
    draw_like_autoanchor(entry)
    before = [img.copy() for img in dataset.imgs] if cache else []
    check_batches(name, endless(loader), folder)
    check_streams(name, entry["after"])
    for cached, copy in zip(dataset.imgs, before, strict=False):
        assert np.array_equal(cached, copy), "cached pictures must stay as they are"


@pytest.mark.parametrize("name", golden_data.names("e_workers2"))
def test_training_batches_of_two_workers_golden(name, folder, monkeypatch):
    monkeypatch.setattr(datasets.os, "cpu_count", lambda: 2)
    entry = golden_data.index()[name]
    torch.manual_seed(entry["torch_seed"])
    loader, _ = training_loader(entry, folder, workers=2)
    assert loader.num_workers == 2
    check_batches(name, endless(loader), folder)


def record_draws(monkeypatch):
    """Wrap the random functions; the list fills with [generator.function, args, (kwargs,) result] of each call."""
    calls = []

    def plain(value):
        if isinstance(value, range):
            return ["range", value.start, value.stop]
        return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value

    def watch(module, name, prefix):
        original = getattr(module, name)

        def recorded(*args, **kwargs):
            result = original(*args, **kwargs)
            keywords = [kwargs] if kwargs else []
            calls.append([f"{prefix}.{name}", [plain(a) for a in args], *keywords, plain(result)])
            return result

        monkeypatch.setattr(module, name, recorded)

    for name in ("random", "uniform", "randint", "choices", "sample"):
        watch(random, name, "py")
    for name in ("uniform", "beta"):
        watch(np.random, name, "np")
    return calls


TRACES = json.loads((golden_data.FOLDER / "f_draw_trace.json").read_text())


@pytest.mark.parametrize("name", list(TRACES))
def test_every_draw_is_stocks_draw(name, folder, monkeypatch):
    entry = golden_data.index()[name]
    _, dataset = training_loader(entry, folder)
    seed_like_training(entry)
    draw_like_autoanchor(entry)
    calls = record_draws(monkeypatch)
    for sample in TRACES[name]:
        calls.clear()
        dataset[sample["index"]]
        assert [call[0] for call in calls] == [call[0] for call in sample["calls"]]
        for number, (call, golden) in enumerate(zip(calls, sample["calls"], strict=True)):
            assert call[1:-1] == golden[1:-1], (number, call, golden)
            parity.check("data draws", f"{name} sample {sample['index']} call {number}", call[-1], golden[-1])


# collation


def quad_samples():
    entry, arrays = golden_data.load("c_collate_fn4_0")
    labels = [torch.from_numpy(rows.copy()) for rows in numbered(arrays, "lab")]
    return list(zip(torch.from_numpy(arrays["imgs"]), labels, entry["in_paths"], [None] * len(labels), strict=True))


def test_collate_fn_golden():
    _, arrays = golden_data.load("c_collate_fn")
    images, targets, _, _ = collate_fn(quad_samples())
    parity.check("data collate", "img", images, arrays["img"])
    parity.check("data collate", "tgt", targets, arrays["tgt"])


@pytest.mark.parametrize("name", golden_data.names("c_collate_fn4"))
def test_collate_fn4_golden(name):
    entry, arrays = golden_data.load(name)
    random.seed(entry["py_seed"])
    images, targets, paths, shapes = LoadImagesAndLabels.collate_fn4(quad_samples())
    parity.check("data collate", f"{name} img", images, arrays["img"])
    check_labels("data collate", f"{name} tgt", targets, arrays["tgt"])
    assert list(paths) == entry["paths"]
    assert len(shapes) == len(images)
    check_streams(name, entry["after"], generators=("py",))


@pytest.mark.parametrize(("num_samples", "num_groups"), [(1, 1), (3, 1), (7, 1), (8, 2)])
def test_quad_remainder_is_no_crash(num_samples, num_groups):
    images, targets, _, _ = collate_fn4(quad_samples()[:num_samples])
    assert images.shape == (num_groups, 3, 128, 128)
    assert targets[:, 0].max() < num_groups
