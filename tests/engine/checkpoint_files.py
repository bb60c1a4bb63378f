"""Checkpoints for the tests of what writes them and of what reads them."""

import pickletools
import zipfile
from pathlib import Path

import torch

from tests.tiny_model import tiny_model
from utils.engine.checkpoint import training_checkpoint
from utils.engine.ema import ModelEMA
from utils.engine.optimizer import build_optimizer

STOCK_KEYS = {"epoch", "best_fitness", "training_results", "model", "ema", "updates", "optimizer", "wandb_id"}
LAYERS = {
    "models.yolo Model", "models.yolo IDetect", "models.common Conv", "models.common ImplicitA",
    "models.common ImplicitM", "torch.nn.modules.conv Conv2d", "torch.nn.modules.batchnorm BatchNorm2d",
    "torch.nn.modules.activation SiLU", "torch.nn.modules.container Sequential",
    "torch.nn.modules.container ModuleList",
}  # fmt: skip
PLAIN = {
    "collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter",
    "torch HalfStorage", "torch FloatStorage", "torch DoubleStorage", "torch LongStorage", "__builtin__ set",
}  # fmt: skip


def trained(updates=3, nc=2):
    """A model, its average and its optimiser after some steps, with what training attaches to the model."""
    torch.manual_seed(0)
    model = tiny_model(nc)
    ema, optimizer = ModelEMA(model), build_optimizer(model, 0.01, 0.9, 0.0005)
    for _ in range(updates):
        sum(maps.square().mean() for maps in model(torch.rand(2, 3, 64, 64))).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
    model.nc, model.names, model.gr = nc, ["cat", "dog", "cow"][:nc], 1.0
    model.hyp, model.class_weights = {"lr0": 0.01, "loss_ota": 1}, torch.ones(nc, dtype=torch.float64)
    ema.update_attr(model, include=("yaml", "nc", "hyp", "gr", "names", "stride", "class_weights"))
    return model, ema, optimizer


def content_of_epoch(epoch=7, best_fitness=0.25, updates=3):
    model, ema, optimizer = trained(updates)
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    return training_checkpoint(epoch, best_fitness, "0/9 line\n", model, ema, optimizer, scaler)


def written(content, folder, **options):
    path = Path(folder) / "file.pt"
    torch.save(content, path, **options)
    return path


def same(state, other):
    assert list(state) == list(other)
    return all(torch.equal(state[key], other[key]) and state[key].dtype == other[key].dtype for key in state)


def globals_of(path):
    """All names that the pickle inside a .pt file mentions."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return {argument for code, argument, _ in pickletools.genops(archive.read(name)) if code.name == "GLOBAL"}
