"""utils/data/gpu/recipes.py: samples that are only drawn are the reference's, and their recipes say what they are."""

import random
import re

import numpy as np
import pytest
import torch

from tests.data.gpu.configurations import CONFIGURATIONS, dataset_of, open_loader, store_of
from tests.loader_cases import steps_on_pixels
from utils.data.affine import Affine
from utils.data.fast.shm_batches import LateSteps
from utils.data.gpu.recipes import HEADER, LAYER, OBJECT, RECIPE, TILE, DrawnImage, RecipeDataset, write_recipes
from utils.data.mosaic import Mosaic, Tile
from utils.data.transforms import Colours
from utils.data.worker_errors import LoaderError
from utils.system.random_state import seed_generators


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_same_samples(name, folder):
    changes, options = CONFIGURATIONS[name]
    dataset = dataset_of(folder, changes, **options)
    drawn = RecipeDataset(dataset)
    wanted, together, recipes = [], [], np.zeros((len(dataset), RECIPE), np.uint8)
    for index in range(len(dataset)):
        seed_generators(5, index)
        image, rows, *rest = dataset[index]
        after = random.random(), np.random.random()
        seed_generators(5, index)
        _, sample, *more = drawn[index]
        targets = drawn.finish([sample], 0, recipes[:1])
        assert (random.random(), np.random.random()) == after
        assert pixels(sample).tobytes() == image.numpy().tobytes() and rest == more
        assert targets.tobytes() == rows.numpy().tobytes()
        rows[:, 0] = index
        wanted.append((image, rows))
        seed_generators(5, index)
        together.append(drawn[index][1])
    images, rows = zip(*wanted, strict=True)
    assert drawn.finish(together, 0, recipes).tobytes() == torch.cat(rows).numpy().tobytes(), "all at once"
    assert all(
        pixels(sample).tobytes() == image.numpy().tobytes() for sample, image in zip(together, images, strict=True)
    )


def pixels(sample):
    """The image [3 x h x w: RGB] of a sample, made on the host."""
    return np.ascontiguousarray(np.asarray(sample.image)[..., ::-1].transpose(2, 0, 1))


def test_without_a_seed_no_numbers_are_drawn_twice(folder):
    """Objects are pasted in after the next samples are drawn, from a state of before."""
    drawn = RecipeDataset(dataset_of(folder, {"paste_in": 1, "mosaic": 1, "degrees": 0, "shear": 0}))
    random.seed(1)
    samples = [drawn[k][1] for k in range(3)]
    states = [sample.generator for sample in samples]
    drawn.finish(samples, 0, np.zeros((3, RECIPE), np.uint8))
    numbers = []
    for state in [*states, random.getstate()]:
        random.setstate(state)
        numbers.append(random.random())
    assert len(set(numbers)) == 4


def test_an_error_while_objects_are_pasted_in_names_the_sample(folder, monkeypatch):
    changes = {"paste_in": 1, "mosaic": 1, "degrees": 0, "shear": 0}
    _, _, paths, _ = next(iter(open_loader(folder, changes)[0]))
    calls = []

    def fail(img, labels, *_):
        calls.append(img)
        if len(calls) == 2:
            raise ValueError("no such object")
        return labels

    def compose(dataset, *_):
        dataset.image_store = store_of(dataset)
        return LateSteps(RECIPE, RecipeDataset, lambda pixels, steps: pixels, at_once=True)

    monkeypatch.setattr("utils.data.gpu.recipes.pastein", fail)
    loader, _ = open_loader(folder, changes, worker_tensor=True, compose=compose)
    with pytest.raises(LoaderError, match=f"^{re.escape(paths[1])}: no such object$"):
        next(iter(loader))


def test_a_recipe_by_hand(folder):
    """Twice as large, shifted: a tile that hangs over the edge of a canvas seen through a window."""
    dataset = dataset_of(folder, {})
    canvas = Mosaic(dataset, [Tile(3, 5, -10, 40, 30), Tile(0, 500, 0, 10, 10)], window=(7, 2))
    image = DrawnImage(canvas, Affine(np.array([[2, 0, 6], [0, 2, -4], [0, 0, 1.0]]), 2, 64, 64, False))
    image.colours, image.ratio, image.flips = Colours(1, 0.5, 1.5), 0.25, [False, True]
    image.objects = [(np.full((2, 3, 3), 9, np.uint8), 4, 5), (np.full((1, 1, 3), 8, np.uint8), 1, 2)]
    other = DrawnImage(Mosaic(dataset, [Tile(3, 0, 0, 40, 30)]), Affine(np.eye(3), 1, 64, 64, False))
    recipes, place = np.full((2, RECIPE), 7, np.uint8), np.zeros((64, 64, 3), np.uint8)
    assert image.write_objects(place)
    write_recipes([other, image], recipes, np.array([0, 0, 0, 1000]))
    recipe = recipes[1]
    assert HEADER.unpack_from(recipe) == (1, 1, 0, 1, 2, 48 + 32, 0, 1, 0.5, 1.5, 0.25)
    assert LAYER.unpack_from(recipe, HEADER.size) == (0.5, 0, -3, 0, 0.5, 2, 1, 0)
    tile = TILE.unpack_from(recipe, HEADER.size + LAYER.size)
    assert tile == (1000 + 3 * (12 * 40 + 2), 40, 0, 0, 38, 18, 0), "12 rows and 2 columns are cut off"
    assert OBJECT.unpack_from(place) == (4, 5, 3, 2) and OBJECT.unpack_from(place.reshape(-1), 48) == (1, 2, 1, 1)
    assert place.reshape(-1)[16:34].tolist() == [9] * 18 and place.reshape(-1)[64:67].tolist() == [8] * 3


def test_objects_without_room_are_pasted_by_the_worker(folder):
    dataset = RecipeDataset(dataset_of(folder, {}))
    height, width = dataset.image_store.shapes[0].tolist()
    image = DrawnImage(Mosaic(dataset, [Tile(0, 0, 0, width, height)]), Affine(np.eye(3), 1, 64, 64, False))
    dataset.paste(image, np.full((64, 64, 3), 9, np.uint8), 0, 0)
    assert (dataset.pixels(image) == 9).all()
    recipe = np.full(RECIPE, 7, np.uint8)
    write_recipes([image], recipe, dataset.image_store.offsets)
    assert HEADER.unpack_from(recipe) == (0, 0, 0, 0, 0, 64 * 64 * 3, 0, 1, 1, 1, 1)


def test_every_step_on_pixels_has_its_drawn_form():
    """A step that is added to the reference alone would see an image that is not there."""
    steps = steps_on_pixels()
    assert steps >= {"warped", "moved", "blended", "recolour", "paste", "flip", "pixels"}
    assert steps - set(vars(RecipeDataset)) == {"_flipped"}, "which draws, and calls flip"
