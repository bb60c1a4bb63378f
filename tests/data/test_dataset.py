"""utils/datasets.py: batches equal to stock's draw by draw, collation, loaders, and the repairs."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import golden_data, parity
from tests.golden_data import (
    ALL_AUGMENTATIONS,
    check_labels,
    check_pixels,
    check_streams,
    load_list,
    numbered,
    relative,
    seed_both,
    write_dataset,
)
from utils.data.training_size import load_image
from utils.datasets import InfiniteDataLoader, LoadImagesAndLabels, collate_fn, collate_fn4, create_dataloader
from utils.ops.boxes import segments2boxes

OPT = SimpleNamespace(single_cls=False)
ROOT = Path(__file__).resolve().parents[2]


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
        assert np.array_equal(cached, copy), "cached images must stay as they are"


@pytest.mark.parametrize("name", golden_data.names("e_workers2"))
def test_training_batches_of_two_workers_golden(name, folder, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
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


# properties and repairs


def test_rect_keeps_segments_with_their_images(folder):
    dataset = load_list(folder, "polys", img_size=64, rect=True)
    ratios = dataset.shapes[:, 1] / dataset.shapes[:, 0]
    assert (np.diff(ratios) >= 0).all()
    assert sum(map(len, dataset.segments)) > 0
    for labels, segments in zip(dataset.labels, dataset.segments, strict=True):
        assert len(segments) in (0, len(labels))
        if segments:
            np.testing.assert_allclose(segments2boxes(segments), labels[:, 1:], atol=1e-6)


def test_rect_with_paste_in_of_polygons(folder):
    hyp = ALL_AUGMENTATIONS | {"paste_in": 1.0}
    dataset = load_list(folder, "polys", img_size=64, batch_size=2, rect=True, augment=True, hyp=hyp)
    seed_both(11)
    for k in range(dataset.n):
        image, targets, _, _ = dataset[k]
        assert image.shape[1:] == tuple(dataset.batch_shapes[dataset.batch[k]])
        assert ((targets[:, 2:] >= 0) & (targets[:, 2:] <= 1)).all()


@pytest.mark.parametrize("options", [{}, {"rect": True}, {"cache_images": True}, {"augment": True}])
def test_extreme_aspect_ratio_keeps_a_pixel(options, tmp_path):
    box = "0 0.5 0.5 0.5 0.5\n"
    path = write_dataset(tmp_path, {"flat": (13, 1280, box), "tall": (1280, 13, box), "square": (64, 64, box)})
    dataset = LoadImagesAndLabels(path, 64, hyp=ALL_AUGMENTATIONS | {"mosaic": 1.0}, **options)
    assert load_image(dataset, 0)[2] in ((1, 64), (64, 1))
    seed_both(12)
    for k in range(3):
        image, targets, _, _ = dataset[k]
        assert min(image.shape) > 0
        assert targets.isfinite().all()


def test_images_without_labels_give_empty_targets(tmp_path):
    path = write_dataset(tmp_path, {"a": (64, 64, None), "b": (48, 64, "")})
    hyp = ALL_AUGMENTATIONS | {"copy_paste": 0.5, "paste_in": 1.0, "mixup": 1.0}
    dataset = LoadImagesAndLabels(path, 64, augment=True, hyp=hyp)
    seed_both(13)
    images, targets, _, _ = collate_fn([dataset[k % 2] for k in range(8)])
    assert images.shape == (8, 3, 64, 64)
    assert targets.shape == (0, 6)


def test_augmenting_without_hyperparameters_says_so(folder):
    with pytest.raises(ValueError, match="needs the hyper-parameters .*paste_in"):
        load_list(folder, "boxes", augment=True, hyp={"mosaic": 1.0})


def test_single_class(folder):
    dataset = load_list(folder, "all", single_cls=True)
    assert all((labels[:, 0] == 0).all() for labels in dataset.labels)


# the loader


def test_loader_sizes(folder, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    path = str(folder / "boxes.txt")
    loader, dataset = create_dataloader(path, 64, 100, 32, OPT, workers=0)
    assert (len(dataset), loader.batch_size, len(loader)) == (7, 7, 1)
    loader, _ = create_dataloader(path, 64, 1, 32, OPT, workers=8)
    assert (loader.num_workers, len(loader)) == (0, 7)
    loader, _ = create_dataloader(path, 64, 4, 32, OPT, world_size=3, workers=8)
    assert loader.num_workers == 2
    assert [len(images) for images, *_ in loader] == [4, 3]
    loader, dataset = create_dataloader(path, 64, 4, 32, OPT, rect=True, image_weights=True, workers=0)
    assert not isinstance(loader, InfiniteDataLoader)
    assert not dataset.rect


class EpochSampler(torch.utils.data.Sampler):
    """Six positions that tell the epoch in which they were drawn: 10 x epoch + position."""

    epoch = 0

    def __iter__(self):
        return iter([10 * self.epoch + position for position in range(6)])

    def __len__(self):
        return 6


@pytest.mark.parametrize(("workers", "expected"), [(0, [0, 1, 2, 3, 4]), (2, [0, 0, 0, 1, 2])])
def test_endless_loader_prefetches_the_order_of_earlier_epochs(workers, expected):
    """As in stock: with 2 workers and 3 batches an epoch, set_epoch comes two epochs late."""
    sampler = EpochSampler()
    loader = InfiniteDataLoader(range(100), batch_size=2, sampler=sampler, num_workers=workers)
    orders = []
    for epoch in range(5):
        sampler.epoch = epoch
        orders.append([int(first) for first, _ in loader])
    assert orders == [[10 * epoch, 10 * epoch + 2, 10 * epoch + 4] for epoch in expected]


def test_endless_loader_goes_on_where_a_pass_was_left():
    loader = InfiniteDataLoader(range(6), batch_size=2)
    assert next(iter(loader)).tolist() == [0, 1]
    assert [batch.tolist() for batch in loader] == [[2, 3], [4, 5], [0, 1]]


def test_ranks_share_the_images(folder, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        loader, dataset = create_dataloader(str(folder / "boxes.txt"), 64, 4, 32, OPT, rank=0, workers=0)
        loader.sampler.set_epoch(0)
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(7, generator=generator).tolist()
        paths = [path for _, _, batch_paths, _ in loader for path in batch_paths]
        assert paths == [dataset.img_files[i] for i in order]
    finally:
        torch.distributed.destroy_process_group()


PROGRAM = """
import sys
from types import SimpleNamespace
from tests.golden_data import ALL_AUGMENTATIONS
from utils.datasets import create_dataloader
opt = SimpleNamespace(single_cls=False)
loader, _ = create_dataloader(sys.argv[1], 64, 4, 32, opt, hyp=ALL_AUGMENTATIONS, augment=True, workers=0)
print(len(list(loader)), [name for name in sys.modules if name.startswith("utils.data.fast") or name == "triton"])
"""


def test_batches_without_flags_load_no_opt_in_module(folder):
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder / "boxes.txt")], cwd=ROOT, text=True,
                          capture_output=True, timeout=120)  # fmt: skip
    assert done.stdout.splitlines()[-1] == "2 []", done.stdout + done.stderr
