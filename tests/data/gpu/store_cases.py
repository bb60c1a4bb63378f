"""A stand-in for the card on the CPU, and data sets to put on it."""

from types import SimpleNamespace

import numpy as np
import torch

from tests import golden_data
from utils.data.fast.shm_batches import LateSteps
from utils.data.gpu import placing
from utils.data.gpu.host_memory import HostMemory
from utils.data.training_size import load_image
from utils.datasets import LoadImagesAndLabels

CPU = torch.device("cpu")
PLAIN = golden_data.ALL_AUGMENTATIONS | dict.fromkeys(("paste_in", "copy_paste", "perspective"), 0.0)
MANY = 10**12  # bytes


def open_set(folder, hyp=PLAIN, **options):
    options = {"img_size": 64, "batch_size": 4, "augment": True} | options
    return LoadImagesAndLabels(str(folder / "all.txt"), hyp=hyp, **options)


class Undrawn(LoadImagesAndLabels):
    """A data set whose samples are made by the workers after all."""

    def __init__(self, dataset):
        vars(self).update(vars(dataset))

    def begin(self, steps):
        pass


def composing(dataset, with_groups):
    """What stands for `open_composing` where no kernel runs."""
    return dataset.image_store and LateSteps(16, Undrawn, lambda pixels, steps: pixels)


def simulate(monkeypatch, on_card=MANY, on_host=MANY, refusal=None):
    """A card and a host with so many bytes free; `refusal` says why no page can be locked."""
    monkeypatch.setattr(placing, "open_composing", composing)
    asked = SimpleNamespace(locked=[])
    monkeypatch.setattr(placing, "room_on_card", lambda device, num_bytes, step: (on_card, f"the GPU has {on_card}"))
    monkeypatch.setattr(placing, "room_on_host", lambda: on_host)

    def lock(memory, device):
        asked.locked.append(memory.bytes.nbytes)
        return refusal

    monkeypatch.setattr(HostMemory, "lock", lock)
    monkeypatch.setattr(HostMemory, "on_device", lambda memory, device: torch.from_numpy(memory.bytes))
    return asked


def assert_holds(store, dataset, folder, **options):
    """`store` has the images of `dataset`, as they are without a cache."""
    plain, pixels = open_set(folder, **options), store.pixels.cpu().numpy()
    assert len(store.offsets) == len(plain) == len(dataset)
    for i, start in enumerate(store.offsets.tolist()):
        expected = load_image(plain, i)[0]
        assert store.shapes[i].tolist() == list(expected.shape[:2])
        assert np.array_equal(pixels[start : start + expected.size].reshape(expected.shape), expected)
        assert np.array_equal(store.read(i), expected)
        if dataset.imgs[i] is not None:
            assert np.array_equal(dataset.imgs[i], expected) and not dataset.imgs[i].flags.writeable
    assert store.offsets[-1] + 3 * store.shapes[-1].prod() == len(pixels)
