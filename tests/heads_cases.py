"""The golden networks with several heads, and a small one."""

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch

from models.yolo import Model
from tests.golden_fill import fill, image
from tests.parity import GOLDEN
from tests.tiny_model import CFG
from utils.head_config import HeadConfig

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "cfg" / "training" / "yolov7-tiny-1b4h.yaml"
ATTENTION = TINY.with_stem("yolov7-tiny-1b4h-attn")
STANDARD = ROOT / "data" / "coco_320_1b4h_standard.yaml"
FACTS = json.loads((GOLDEN / "model" / "multihead.json").read_text())
ARRAYS = np.load(GOLDEN / "model" / "multihead.npz")
GAIN = 1.36
GROUPINGS = {
    "standard": (STANDARD, None),
    "geometry": (ROOT / "data" / "coco_320_1b4h_geometry.yaml", None),
    "anticonfusion": (ROOT / "data" / "coco_320_1b4h_anticonfusion.yaml", None),
    "standard_full": (STANDARD, True),
    "attn": (STANDARD, None),
}


def fresh(name):
    """The golden network `name` with the weights of seed 0."""
    path, full_head = GROUPINGS[name]
    torch.manual_seed(0)
    return Model(ATTENTION if name == "attn" else TINY, head_config=HeadConfig(path, full_head))


def filled(name):
    """The same with the golden weights, in evaluation mode, and what its loss needs."""
    model = fill(fresh(name), GAIN).eval()
    model.hyp, model.gr = FACTS["hyp_used"], 1.0
    return model


def outputs(model):
    """Boxes and maps of the golden image."""
    with torch.no_grad():
        return model(image((1, 3, 64, 64)))


# ---- a small network: 3 classes in 2 heads, the second with a single class ------------------------------------------


def small_heads(**changes):
    """A HeadConfig."""
    content = {
        "nc": 3,
        "heads": 2,
        "head_assignments": {
            "head_0": {"classes": [2, 0], "weight": 1.5, "name": "two"},
            "head_1": {"classes": [1], "name": "one"},
        },
    }
    return HeadConfig.from_description(content | changes, "small.yaml")


def small_cfg(heads=None):
    cfg = deepcopy(CFG)
    cfg["head"][-1][2] = "MultiHeadDetect"
    return cfg if heads is None else cfg | {"heads": heads}


def small_model(seed=0, **changes):
    """In training mode, with random weights and what its loss needs."""
    torch.manual_seed(seed)
    model = Model(small_cfg(), nc=3, head_config=small_heads(**changes))
    model.hyp, model.gr = FACTS["hyp_used"] | {"loss_ota": 1}, 1.0
    return model
