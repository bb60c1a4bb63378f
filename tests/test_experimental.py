"""Loading weights for inference: rebuilt, fused, alone or several together."""

import logging

import pytest
import torch

from models.experimental import attempt_load, rebuild
from models.yolo import Model
from tests.tiny_model import CFG, tiny_model
from utils.engine.checkpoint_reader import StoredModel, read_checkpoint

IMAGES = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))


def trained(seed=0, nc=3):
    """A model in evaluation mode whose norm layers and implicit tensors are not those of a new one."""
    torch.manual_seed(seed)
    model = tiny_model(nc)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point() and "anchor" not in name:
                value.add_(torch.rand_like(value) * 0.1)
    model.names, model.nc, model.hyp = [f"class {seed}.{i}" for i in range(nc)], nc, {"lr0": 0.01}
    return model.eval()


def saved(content, path):
    torch.save(content, path)
    return path


def test_fused_model_gives_the_outputs_of_the_unfused_one(tmp_path):
    model = trained()
    boxes, maps = model(IMAGES)
    loaded = attempt_load(saved({"model": model, "ema": None}, tmp_path / "a.pt"))
    assert not loaded.training and loaded.model[-1].implicit_folded
    assert not any(isinstance(layer, torch.nn.BatchNorm2d) for layer in loaded.modules())
    fused_boxes, fused_maps = loaded(IMAGES)
    assert torch.allclose(fused_boxes, boxes, rtol=1e-4, atol=1e-3)
    for fused, unfused in zip(fused_maps, maps, strict=True):
        assert torch.allclose(fused, unfused, rtol=1e-4, atol=1e-4)
    assert loaded.names == model.names and loaded.nc == 3 and loaded.hyp == {"lr0": 0.01}
    assert loaded.stride.tolist() == [8, 16, 32] and boxes.shape == (2, 2 * (8 * 12 + 4 * 6 + 2 * 3), 8)


def test_the_average_is_preferred(tmp_path):
    model, average = trained(0), trained(1)
    loaded = attempt_load(saved({"model": model, "ema": average}, tmp_path / "a.pt"))
    assert loaded.names == average.names
    assert torch.allclose(loaded(IMAGES)[0], average(IMAGES)[0], rtol=1e-4, atol=1e-3)


def test_half_precision_files_become_float(tmp_path):
    model = trained()
    loaded = attempt_load(saved(model.half(), tmp_path / "a.pt"), map_location=torch.device("cpu"))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded.model[-1].anchors, model.model[-1].anchors.float())


def test_an_ensemble_has_the_largest_stride(tmp_path):
    """Images of the smaller one's multiples do not fit the other."""
    deeper = CFG | {"backbone": [*CFG["backbone"], [-1, 1, "Conv", [32, 3, 2]]],
                    "head": [[[2, 3, 5], 1, "IDetect", ["nc", "anchors"]]]}  # fmt: skip
    models = [Model(deeper, nc=2).eval(), tiny_model().eval()]
    paths = [saved(model, tmp_path / f"{k}.pt") for k, model in enumerate(models)]
    assert attempt_load(paths).stride.tolist() == attempt_load(paths[::-1]).stride.tolist() == [8, 16, 64]


def test_ensemble_concatenates_and_takes_names_of_the_last(tmp_path):
    models = [trained(seed) for seed in (0, 1)]
    paths = [str(saved(model, tmp_path / f"{i}.pt")) for i, model in enumerate(models)]
    ensemble = attempt_load(paths)
    boxes, rest = ensemble.eval()(IMAGES)
    alone = [attempt_load(path)(IMAGES)[0] for path in paths]
    assert rest is None and torch.equal(boxes, torch.cat(alone, 1))
    assert ensemble.names == models[-1].names and torch.equal(ensemble.stride, models[-1].stride)
    assert ensemble(IMAGES, augment=True)[0].shape[1] > boxes.shape[1]
    assert attempt_load(paths[:1])(IMAGES)[0].shape == alone[0].shape, "a list of one path is a single model"
    with pytest.raises(ValueError, match=r"1.pt has 3 classes, .*two.pt has 2 classes; an ensemble needs equal ones"):
        attempt_load([paths[1], saved(tiny_model(), tmp_path / "two.pt")])


def test_rebuild_changes_neither_the_random_stream_nor_the_yaml(tmp_path):
    stored = read_checkpoint(saved(trained(), tmp_path / "a.pt")).model
    yaml_before = dict(stored.yaml)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    model = rebuild(stored)
    assert torch.equal(torch.rand(3), expected) and stored.yaml == yaml_before
    assert isinstance(model, Model) and model.yaml["nc"] == 3


def test_refused_states(tmp_path):
    model = trained()
    state = dict(model.state_dict())
    with pytest.raises(ValueError, match="a.pt holds only tensors and no model yaml"):
        attempt_load(saved(state, tmp_path / "a.pt"))

    del state["model.0.conv.weight"]
    with pytest.raises(ValueError, match=f"w.pt: only {len(state)} of the {len(state) + 1} tensors"):
        rebuild(StoredModel(state, model.yaml), "w.pt")
    with pytest.raises(ValueError, match="w.pt: only"):
        rebuild(StoredModel(tiny_model(nc=4).state_dict(), model.yaml), "w.pt")
    with pytest.raises(ValueError, match="w.pt: .*row 0.*Konv"):
        rebuild(StoredModel(state, CFG | {"backbone": [[-1, 1, "Konv", [8]]]}), "w.pt")
    with pytest.raises(ValueError, match="w.pt: .*lacks nc"):
        rebuild(StoredModel(state, {"backbone": []}), "w.pt")


def test_missing_file_is_named(tmp_path, caplog):
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match="none.pt"):
        attempt_load([saved(trained(), tmp_path / "a.pt"), tmp_path / "none.pt"])
