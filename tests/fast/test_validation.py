"""--fast-val against engine.evaluate: the same model and loader, equal scores; and a run that uses it."""

from copy import deepcopy
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch

from models.yolo import Model
from tests import small_run, triton_cases
from utils.datasets import create_dataloader
from utils.engine.evaluate import evaluate
from utils.fast import validation
from utils.fast.validation import FastValidation
from utils.loss.criterion import ComputeLoss
from utils.ops.boxes import scale_coords, xywh2xyxy


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A model that finds something, its loss, and a loader with images of two shapes and some without labels."""
    folder = tmp_path_factory.mktemp("val")
    small_run.make_data(folder, num_images=14, num_empty=3)
    for i in range(3):
        path = str(folder / f"images/val/{i:02d}.png")
        cv2.imwrite(path, cv2.resize(cv2.imread(path), (100, 50)))
    torch.manual_seed(1)
    model = Model(str(small_run.make_cfg(folder)), nc=2)
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
    for _, bias, *_ in model.model[-1].output_biases():
        bias.data += 2 * torch.randn_like(bias) + 2
    model.hyp, model.gr = small_run.HYP, 1.0
    compute_loss = ComputeLoss(model)
    loader, _ = create_dataloader(
        str(folder / "images/val"), 64, 4, 32, SimpleNamespace(single_cls=False), rect=True, pad=0.5, workers=0
    )
    return model.eval(), loader, compute_loss


@triton_cases.needs_triton
def test_suppression_of_a_whole_batch():
    triton_cases.run("tests/fast/nms_cases.py")


@pytest.mark.parametrize("options", [{}, {"single_cls": True}, {"v5_metric": True}, {"conf_thres": 0.9}], ids=str)
def test_equal_results(case, options):
    model, loader, compute_loss = case
    expected = evaluate(model, loader, 2, ["a", "b"], compute_loss=compute_loss, **options)
    quick = FastValidation()
    for _ in range(2):  # the second time from what is known
        found = quick(model, loader, 2, ["a", "b"], compute_loss=compute_loss, **options)
        assert found.results[:4] == expected.results[:4]
        assert found.results[4:] == pytest.approx(expected.results[4:], rel=1e-6)
        assert np.array_equal(found.maps, expected.maps)
        assert found.scores.num_predictions == expected.scores.num_predictions
        assert found.scores.num_images == 14 and found.scores.num_labels == 11
    assert options or (expected.scores.num_predictions > 1000 and expected.results[3] > 0)


def test_a_model_is_fused_once_and_may_read_bytes(case):
    model, loader, compute_loss = case
    fused, sizes = [], []

    class Fused(torch.nn.Module):
        takes_bytes = True

        def __init__(self, model):
            super().__init__()
            self.model = model
            fused.append(self)

        def forward(self, images):
            assert images.dtype == torch.uint8 and not self.training
            sizes.append(len(images))
            return self.model(images / 255)

    quick = FastValidation().fused_by(Fused)
    expected = FastValidation()(model, loader, 2, compute_loss=compute_loss)
    assert all(quick(model, loader, 2, compute_loss=compute_loss).results == expected.results for _ in range(2))
    assert len(fused) == 1 and len(sizes) == 2 * len(loader)


def test_on_a_cpu_the_average_itself_stays_as_it_is(case):
    """Its tensors may lie in flat ones (FlatAverage)."""
    model, loader, _ = case
    model = deepcopy(model).to(memory_format=torch.channels_last)
    before = [(tensor.data_ptr(), tensor.stride()) for tensor in model.state_dict().values()]
    FastValidation()(model, loader, 2)
    assert [(tensor.data_ptr(), tensor.stride()) for tensor in model.state_dict().values()] == before


def test_without_a_loss(case):
    model, loader, _ = case
    assert FastValidation()(model, loader, 2).results[4:] == (0, 0, 0)


def test_what_is_known_of_a_batch_is_made_once(case, monkeypatch):
    model, loader, compute_loss = case
    made, make_truth = [], validation.make_truth
    monkeypatch.setattr(validation, "make_truth", lambda *args: made.append(1) or make_truth(*args))
    quick = FastValidation()
    for _ in range(2):
        quick(model, loader, 2, compute_loss=compute_loss)
    assert len(made) == len(loader) == 4
    quick.truths[2].targets += 1  # another data set
    quick(model, loader, 2, compute_loss=compute_loss)
    assert len(made) == 5


def test_truth_by_the_reference_arithmetic():
    targets = torch.tensor([[1, 4, 0.5, 0.5, 0.2, 0.4], [0, 2, 0.9, 0.1, 0.4, 0.4], [1, 3, 0.3, 0.6, 0.1, 0.1]])
    shapes = [((100, 200), ((0.37, 0.41), (3.5, 7.25))), ((64, 48), ((1.1, 1.3), (0.0, 2.0)))]
    truth = validation.make_truth(targets, shapes, (96, 64), torch.device("cpu"))
    assert truth.num_labels.tolist() == [1, 2] and truth.labels.shape == (2, 2, 5)
    assert truth.labels[0, 1].tolist() == [0] * 5 and truth.labels[1, :, 0].tolist() == [4, 3]
    for i, rows in enumerate(([1], [0, 2])):
        in_pixels = xywh2xyxy(targets[rows, 2:6] * torch.tensor([64.0, 96, 64, 96]))
        expected = scale_coords((96, 64), in_pixels.clone(), *shapes[i])
        assert torch.equal(truth.labels[i, : len(rows), 1:], expected)
        assert torch.equal(truth.to_native(in_pixels.expand(2, -1, -1))[i], expected)


def test_no_images():
    found = FastValidation()(torch.nn.Linear(1, 1), [], 3)
    assert found.results == (0,) * 7 and found.maps.tolist() == [0, 0, 0] and found.scores.problem


def test_a_run_validates_with_it_until_the_pictures(tmp_path, monkeypatch, caplog):
    calls = []

    class Counted(FastValidation):
        def __call__(self, *args, **kwargs):
            calls.append(super().__call__(*args, **kwargs))
            return calls[-1]

    monkeypatch.setattr(validation, "FastValidation", Counted)
    with caplog.at_level("INFO"):
        folder = small_run.run(tmp_path, "--fast-val", pictures=True)
    assert len(calls) == 1 and "fast/validation.py" in caplog.text  # two epochs, the last one with pictures
    lines = (folder / "results.txt").read_text().splitlines()
    assert [float(word) for word in lines[0].split()[-7:]] == pytest.approx(calls[0].results, rel=1e-3)
    assert (folder / "confusion_matrix.png").exists()


@pytest.mark.gpu
def test_equal_results_on_a_gpu(case):
    """One precision and one memory order on both sides."""
    model, loader, compute_loss = case
    model = model.cuda().to(memory_format=torch.channels_last)
    expected = evaluate(model, loader, 2, ["a", "b"], compute_loss=compute_loss)
    found = FastValidation()(model, loader, 2, compute_loss=compute_loss)
    assert found.results == pytest.approx(expected.results, rel=1e-4)
    model.cpu()
