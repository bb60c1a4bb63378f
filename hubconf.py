"""Models for torch.hub, and for scripts that import them from here.

model = torch.hub.load("path/to/this/folder", "custom", path_or_model="best.pt", source="local")
"""

import copy
from pathlib import Path

import torch
from torch import nn

from models.experimental import attempt_load
from models.yolo import Model
from utils.detect.hub import AutoShape
from utils.engine.checkpoint_reader import read_checkpoint, transfer
from utils.system.files import PROJECT_ROOT, printable

dependencies = ["torch", "torchvision", "numpy", "cv2", "PIL", "yaml"]


def custom(path_or_model="path/to/model.pt", autoshape=True, path=None):
    """A model of your own: the path of a .pt file, a checkpoint dict, or a module; `path` is another word for it.

    With `autoshape` it takes images and gives results (see `AutoShape`), else it is the plain network, not fused, in
    evaluation mode. On the first GPU, or the CPU. Raises ValueError for anything that is no YOLOv7 checkpoint.
    """
    source = path_or_model if path is None else path
    if isinstance(source, (str, Path)):
        return _finish(attempt_load(source, fuse=autoshape), autoshape)
    if isinstance(source, dict):
        source = source.get("ema") or source.get("model")
    if not isinstance(source, nn.Module):
        raise ValueError("custom() needs the path of a .pt file, a checkpoint dict with a model, or a model")
    return _finish(copy.deepcopy(source).float().eval(), autoshape)


def create(name, pretrained=False, channels=3, classes=80, autoshape=True):
    """The model of cfg/training/<name>.yaml; `pretrained` takes what fits of <name>.pt here or in the project's folder.

    Nothing is downloaded: ValueError where that file is missing, and for an unknown name.
    """
    known = {path.stem: path for path in (PROJECT_ROOT / "cfg" / "training").glob("*.yaml")}
    if name not in known:
        raise ValueError(f"there is no model {printable(name)}; there are {', '.join(sorted(known))}")
    cfg = known[name]
    model = Model(cfg, ch=channels, nc=classes).eval()
    if pretrained:
        places = [Path(f"{name}.pt"), PROJECT_ROOT / f"{name}.pt"]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise ValueError(f"{name}.pt is not here, and nothing is downloaded; fetch it, or give pretrained=False")
        stored = read_checkpoint(path).for_inference()
        transfer(model, stored.state)
        names = stored.attributes.get("names", ())
        model.names = names if len(names) == classes else model.names
    return _finish(model, autoshape)


def _finish(model, autoshape):
    model = model.to("cuda:0" if torch.cuda.is_available() else "cpu")
    return AutoShape(model) if autoshape else model


def _named(name):
    def entry(pretrained=True, channels=3, classes=80, autoshape=True):
        return create(name, pretrained, channels, classes, autoshape)

    entry.__doc__ = f"The model {name}; see `create`."
    return entry


yolov7, yolov7_tiny, yolov7x = (_named(name) for name in ("yolov7", "yolov7-tiny", "yolov7x"))
yolov7_w6, yolov7_e6, yolov7_d6, yolov7_e6e = (_named(f"yolov7-{name}") for name in ("w6", "e6", "d6", "e6e"))
