"""Small loaders of the golden images for the tests of the opt-in loaders, and how their batches are compared."""

import inspect
from types import SimpleNamespace

import numpy as np

from tests import golden_data
from utils.datasets import LoadImagesAndLabels, create_dataloader

OPT = SimpleNamespace(single_cls=False)
HYP = golden_data.ALL_AUGMENTATIONS
BATCH = 5  # does not divide the 12 images


def make_loader(folder, workers=2, batch=BATCH, augment=True, **options):
    options = {"seed": 7} | options
    return create_dataloader(
        str(folder / "all.txt"), 64, batch, 32, OPT, hyp=HYP, augment=augment, workers=workers, **options
    )


def steps_on_pixels():
    """The names of the reference data set's methods that get an image or a mosaic."""
    methods = {name: method for name, method in vars(LoadImagesAndLabels).items() if inspect.isfunction(method)}
    return {name for name, method in methods.items() if {"img", "mosaic"} & set(inspect.signature(method).parameters)}


def copied(batch):
    images, targets, paths, shapes = batch
    return images.numpy().copy(), targets.numpy().copy(), paths, shapes


def read(folder, epochs=3, before_epoch=lambda epoch, dataset: None, **options):
    """All batches of some epochs, one list for each epoch."""
    loader, dataset = make_loader(folder, **options)
    passes = []
    for epoch in range(epochs):
        before_epoch(epoch, dataset)
        passes.append([copied(batch) for batch in loader])
        assert len(passes[-1]) == len(loader)
    return passes


def same(first, second):
    return len(first) == len(second) and all(
        np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1]) and a[2:] == b[2:]
        for a, b in zip(first, second, strict=True)
    )


def assert_same(first, second):
    assert len(first) == len(second)
    for epoch, (a, b) in enumerate(zip(first, second, strict=True)):
        assert same(a, b), f"epoch {epoch}"
