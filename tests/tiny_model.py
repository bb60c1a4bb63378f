"""The smallest network of the family: five stride-2 convolutions under a head of three levels."""

from models.yolo import Model

CFG = {
    "nc": 2,
    "depth_multiple": 1.0,
    "width_multiple": 1.0,
    "anchors": [[8, 8, 12, 10], [16, 16, 24, 20], [32, 32, 48, 40]],
    "backbone": [[-1, 1, "Conv", [channels, 3, 2]] for channels in (8, 16, 32, 32, 32)],
    "head": [[[2, 3, 4], 1, "IDetect", ["nc", "anchors"]]],
}


def tiny_model(nc=2):
    """A model in training mode with random weights."""
    return Model(CFG, nc=nc)
