"""Re-parameterisation: deploy twins give the same output, and the folding formulas by hand."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from models.reparam import fold_batchnorm, fold_implicit, identity_kernel, reparameterize
from models.yolo import Detect, Model
from tests.golden_fill import fill, image
from tests.parity import GOLDEN, check

CFG = Path(__file__).resolve().parents[2] / "cfg"


def filled(name, gain, nc=None):
    return fill(Model(CFG / "training" / f"{name}.yaml", nc=nc), gain).eval()


@torch.no_grad()
@pytest.mark.parametrize(("name", "gain", "side"), [("yolov7-tiny", 1.36, 64), ("yolov7-w6", 1.58, 128)])
def test_deploy_twin_equals_training_model(name, gain, side):
    golden = json.loads((GOLDEN / "model" / "reparam.json").read_text())[name]
    training = filled(name, gain)
    training.names = [f"class {i}" for i in range(80)]
    training.model[-1].anchors *= 1.5  # as after auto-anchor: must travel along, also where the layer index changes
    training.model[-1].anchor_grid *= 1.5
    deploy, x = reparameterize(training, CFG / "deploy" / f"{name}.yaml"), image((1, 3, side, side))
    assert type(deploy.model[-1]) is Detect and deploy.names == training.names and not deploy.training
    assert torch.equal(deploy.model[-1].anchors, training.model[-1].anchors)
    (boxes, maps), (deploy_boxes, deploy_maps) = training(x), deploy(x)
    assert len(deploy_maps) == golden["n"] == len(maps)
    difference = (deploy_boxes - boxes).abs()
    assert difference[..., 4:].max() < 1e-4
    check("model: deploy twin", f"{name} boxes", [difference.max()], [golden["dec"]], atol=0.03)
    for i, (level, deploy_level) in enumerate(zip(maps, deploy_maps, strict=True)):
        largest = (deploy_level - level).abs().max()
        check("model: deploy twin", f"{name} raw{i}", [largest], [golden["raw"][i]], atol=2e-4)


@torch.no_grad()
def test_repconv_stays_unmerged_and_a_half_model_gives_a_float_twin():
    training = filled("yolov7", 1.51, nc=3).half()
    deploy = reparameterize(training, CFG / "deploy" / "yolov7.yaml")
    assert deploy.model[104].rbr_dense is not None and deploy.model[-1].nc == 3
    assert all(p.dtype == torch.float32 for p in deploy.parameters())
    x = image((1, 3, 64, 64))
    assert (deploy(x)[0] - training.float()(x)[0]).abs()[..., 4:].max() < 1e-4


def test_other_network_is_refused():
    with pytest.raises(ValueError, match="yolov7-tiny-silu|yolov7.yaml"):
        reparameterize(filled("yolov7-tiny", 1.36), CFG / "deploy" / "yolov7.yaml")


def test_fused_model_is_refused():
    with pytest.raises(ValueError, match="no counterpart"):
        reparameterize(filled("yolov7-tiny", 1.36).fuse(), CFG / "deploy" / "yolov7-tiny.yaml")


def test_batchnorm_folding_by_hand():
    norm = nn.BatchNorm2d(1, eps=0.0)
    norm.weight.data.fill_(3.0)
    norm.bias.data.fill_(5.0)
    norm.running_mean.fill_(2.0)
    norm.running_var.fill_(4.0)
    weight, bias = fold_batchnorm(torch.full((1, 1, 1, 1), 10.0), None, norm)
    assert weight.item() == 15 and bias.item() == 2  # 10 * 3/2; 5 - 2 * 3/2
    assert fold_batchnorm(torch.ones(1, 1, 1, 1), torch.tensor([4.0]), norm)[1].item() == 8


def test_implicit_folding_by_hand():
    weight, bias = torch.tensor([[[[2.0]], [[3.0]]]]), torch.tensor([1.0])
    added, factor = torch.tensor([10.0, 100.0]).view(1, 2, 1, 1), torch.full((1, 1, 1, 1), 0.5)
    folded_weight, folded_bias = fold_implicit(weight, bias, added, factor)
    assert folded_weight.flatten().tolist() == [1, 1.5] and folded_bias.tolist() == [160.5]


def test_identity_kernel_passes_channels_through():
    x = torch.rand(1, 4, 5, 5)
    kernel = identity_kernel(4, 2, like=x)
    assert kernel.shape == (4, 2, 3, 3)
    assert torch.equal(nn.functional.conv2d(x, kernel, padding=1, groups=2), x)
