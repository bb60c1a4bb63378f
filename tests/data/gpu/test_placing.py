"""Where images go for given amounts of memory, that they are the right ones there, and what is said."""

import logging
import random

import numpy as np
import pytest
import torch

from tests import golden_data
from tests.data.gpu.store_cases import CPU, MANY, PLAIN, Undrawn, assert_holds, open_set, simulate
from utils.data.gpu import filling, placing
from utils.data.gpu.placing import BOTH, CARD, HOST, open_images, open_store, possible_places
from utils.data.training_size import load_image

PASTING = PLAIN | {"paste_in": 0.1}


@pytest.fixture
def folder(tmp_path):
    return golden_data.copy_dataset(tmp_path)


def opened(dataset):
    """Its ImageStore."""
    return open_store(dataset, CPU, None, "train: ")[0]


def composed(dataset, workers=2, with_groups=False):
    """Its LateSteps."""
    return open_images(dataset, workers, with_groups, device=CPU, step_cost=None, prefix="train: ")


@pytest.mark.parametrize(
    ("on_card", "on_host", "workers_read", "places"),
    [
        (9, 9, False, [CARD, HOST]),
        (9, 9, True, [BOTH, CARD, HOST]),
        (9, 4, True, [CARD]),
        (4, 9, True, [HOST]),
        (4, 4, False, []),
        (-1, 9, False, [HOST]),
    ],
)
def test_where_five_bytes_fit(on_card, on_host, workers_read, places):
    assert possible_places(5, on_card, on_host, workers_read) == places


@pytest.mark.parametrize(
    ("on_card", "on_host", "hyp", "where", "on_workers_side"),
    [
        (MANY, MANY, PLAIN, "on the GPU, beside the model: the GPU has", False),
        (
            MANY,
            MANY,
            PASTING,
            "on the GPU, beside the model, and in RAM for the workers, which cut out objects to paste: ",
            True,
        ),
        (MANY, 100, PASTING, "on the GPU, beside the model: ", False),
        (100, MANY, PLAIN, "in page-locked memory, which the GPU reads over PCIe: the GPU has 100", True),
    ],
)
@pytest.mark.parametrize("options", [{}, {"augment": False}, {"rect": True}, {"img_size": 96}], ids=str)
def test_images_are_those_of_the_files(
    on_card, on_host, hyp, where, on_workers_side, options, folder, monkeypatch, caplog
):
    simulate(monkeypatch, on_card, on_host)
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(filling, "PIECE_BYTES", 30_000)  # more pieces than one
    dataset = open_set(folder, hyp, **options)
    store = opened(dataset)
    if options.get("augment", True) or "RAM" not in where:
        assert f"train: images: 0.1 MB {where}" in caplog.text or f"train: images: 0.2 MB {where}" in caplog.text
        assert (store.host is not None) == on_workers_side == (dataset.imgs[0] is not None)
    assert_holds(store, dataset, folder, **options)


def test_training_samples_are_those_of_the_files(folder, monkeypatch):
    simulate(monkeypatch, on_card=0)
    samples = []
    for is_stored in (True, False):
        dataset = open_set(folder, golden_data.ALL_AUGMENTATIONS)
        assert not is_stored or opened(dataset) is not None
        golden_data.seed_both(5)
        samples.append([dataset[i][:2] for i in range(12)])
    assert all(a.equal(c) and b.equal(d) for (a, b), (c, d) in zip(*samples, strict=True))


# ---- too little of something -----------------------------------------------------------------------------------------


def test_refused_page_locking_means_ram(folder, monkeypatch, caplog):
    simulate(monkeypatch, on_card=100, refusal="refused (ulimit -l is 8.0 MB)")
    dataset = open_set(folder)
    assert composed(dataset) is None and dataset.image_store is None
    message = caplog.messages[-1]
    assert message == (
        "train: images: 0.1 MB in RAM, as with --cache-images ram: the GPU has 100; refused (ulimit -l is 8.0 MB)"
    )
    plain = open_set(folder)
    assert all(np.array_equal(dataset.imgs[i], load_image(plain, i)[0]) for i in range(12))


def test_too_little_of_everything_is_said(folder, monkeypatch):
    simulate(monkeypatch, on_card=100, on_host=200)
    monkeypatch.setattr("utils.system.memory.available_memory", lambda: 1000)
    with pytest.raises(ValueError, match="--cache-images needs 0.1 MB, and 0.0 MB of memory are free"):
        composed(open_set(folder))


def test_memory_of_a_container_counts(folder, monkeypatch, caplog):
    simulate(monkeypatch, on_card=100, on_host=200)
    assert composed(open_set(folder)) is None
    assert "the GPU has 100; 0.0 MB of memory can be page-locked" in caplog.text


@pytest.mark.parametrize(
    ("hyp", "workers", "with_groups", "reason"),
    [
        ({}, 0, False, "there are no workers of --worker-tensor"),
        ({}, 2, True, "--quad makes one image of four"),
        ({"perspective": 0.001}, 2, False, "perspective is not 0"),
    ],
)
def test_what_cannot_be_composed_is_in_ram_at_once(hyp, workers, with_groups, reason, folder, monkeypatch, caplog):
    monkeypatch.setattr(placing, "open_store", None)
    dataset = open_set(folder, PLAIN | hyp)
    assert composed(dataset, workers, with_groups) is None and dataset.imgs[0] is not None
    assert caplog.messages[-1] == f"train: images: 0.1 MB in RAM, as with --cache-images ram: {reason}"


@pytest.mark.parametrize("on_card", [MANY, 0])
def test_a_gpu_that_makes_other_pixels(on_card, folder, monkeypatch, caplog):
    """Which only shows when it has the images."""
    simulate(monkeypatch, on_card)
    monkeypatch.setattr(placing, "open_composing", lambda *_: None)
    dataset = open_set(folder)
    assert composed(dataset) is None and dataset.image_store is None
    assert caplog.messages[-1].endswith("ram: the GPU does not compose as the host does")
    assert all(img.any() for img in dataset.imgs)


@pytest.mark.parametrize("when", ["taken", "filled"])
def test_a_card_that_gets_full_means_page_locked_memory(when, folder, monkeypatch, caplog):
    asked = simulate(monkeypatch)
    caplog.set_level(logging.INFO)

    def full(*_, **options):
        if when == "taken" or options:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 27 GiB.\nmore")

    if when == "taken":
        monkeypatch.setattr(placing.torch, "empty", full)
    else:
        monkeypatch.setattr(filling.Filler, "_staging", lambda *_: full(when=when))
    dataset = open_set(folder)
    store = opened(dataset)
    assert len(asked.locked) == 1 and store.host is not None
    assert "in page-locked memory, which the GPU reads over PCIe" in caplog.text
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 27 GiB." in caplog.text
    assert_holds(store, dataset, folder)


@pytest.mark.parametrize("on_card", [MANY, 0])
def test_any_other_error_ends_it(on_card, folder, monkeypatch):
    simulate(monkeypatch, on_card)

    def lost(*_):
        raise RuntimeError("CUDA error: GPU is lost")

    monkeypatch.setattr(filling, "load_scanned", lost)
    with pytest.raises(RuntimeError, match="GPU is lost"):
        opened(open_set(folder))


# ---- what the figures are --------------------------------------------------------------------------------------------


def test_room_on_the_card_is_what_training_leaves(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 10**9, 80 * 10**9))
    measured = []

    def step():
        measured.append(None)
        return 30 * 10**9, 1

    room, why = placing.room_on_card(CPU, 63 * 10**9, step)
    assert not measured and room == 62 * 10**9 and why == "the GPU has 62.0 GB free"
    room, why = placing.room_on_card(CPU, 10**9, step)
    assert placing.room_on_card(CPU, 10**9, lambda: (np.inf, np.inf)) == (-1, "training alone fills the GPU")
    assert room == 32 * 10**9 and why == "the GPU has 32.0 GB free beside training, which takes 30.0 GB"


@pytest.mark.parametrize(("available", "room"), [(10**10, 8 * 10**9), (10**11, 9 * 10**10), (None, np.inf)])
def test_some_memory_of_the_host_stays_free(available, room, monkeypatch):
    monkeypatch.setattr(placing, "available_memory", lambda: available)
    assert placing.room_on_host() == room


def test_pieces_are_all_images_once():
    ends = np.cumsum([5, 5, 30, 5, 1, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "PIECE_BYTES", 12)
        pieces = filling.cut(ends)
    assert [(list(p.images), p.start, p.stop) for p in pieces] == [
        ([0, 1], 0, 10), ([2], 10, 40), ([3, 4, 5], 40, 47)
    ]  # fmt: skip


def test_a_closed_store_takes_the_memory_from_everybody(folder, monkeypatch):
    simulate(monkeypatch, on_card=0)
    dataset = open_set(folder)
    store = opened(dataset)
    assert dataset.imgs[0].any()
    store.close()
    assert not len(store.pixels) and not dataset.imgs[0].any()
    store.close()


# ---- what --fast does by itself --------------------------------------------------------------------------------------


def unasked(dataset, rate):
    """As `composed`, for a GPU that trains `rate` images a second."""
    return open_images(dataset, 2, False, device=CPU, step_cost=lambda: (0, 1 / rate), is_asked=False)


@pytest.fixture
def sample_time(monkeypatch):
    monkeypatch.setattr(placing, "usable_cores", lambda: 8)
    monkeypatch.setattr(placing, "seconds_of_sample", lambda dataset: 0.002)


def test_workers_that_are_fast_enough_are_left_alone(folder, monkeypatch, caplog, sample_time):
    simulate(monkeypatch)
    caplog.set_level(logging.INFO)
    dataset = open_set(folder)
    assert unasked(dataset, 600) is None and dataset.imgs == [None] * 12 and dataset.memory_cache is None
    assert caplog.messages[-1] == (
        "images: 0.1 MB read from their files: 2 workers make about 1000 images/s, the GPU trains about 600"
    )


def test_workers_that_are_too_slow_get_images_beside_the_model(folder, monkeypatch, sample_time):
    simulate(monkeypatch)
    dataset = open_set(folder)
    assert unasked(dataset, 700).dataset is Undrawn
    assert_holds(dataset.image_store, dataset, folder)


def test_nobody_asked_for_ram(folder, monkeypatch, caplog, sample_time):
    simulate(monkeypatch, on_card=0, on_host=0)
    caplog.set_level(logging.INFO)
    dataset = open_set(folder)
    assert unasked(dataset, 700) is None and dataset.imgs == [None] * 12
    assert "0.1 MB read from their files: the GPU has 0" in caplog.messages[-1]


def test_the_time_of_a_sample_is_measured_without_a_trace(folder):
    dataset = open_set(folder, golden_data.ALL_AUGMENTATIONS)
    golden_data.seed_both(3)
    before = random.random(), np.random.random()
    golden_data.seed_both(3)
    assert 1e-6 < placing.seconds_of_sample(dataset) < 5
    assert (random.random(), np.random.random()) == before
