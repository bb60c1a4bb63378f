"""Building blocks: golden outputs, state keys, merging, and hand-computed values."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from models.common import MP, SP, SPPCSPC, Chuncat, Concat, Conv, DownC, ImplicitA, ImplicitM, ReOrg, RepConv, Shortcut
from models.yolo import Detect, IAuxDetect, IDetect
from tests.golden_fill import fill, signal
from tests.parity import GOLDEN, check

GROUP = "model: modules"
TOLERANCE = {"atol": 1e-5}


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "model" / "modules.npz")


def filled(module, tag):
    """`module` in eval mode with the batch-norm epsilon of a finished model and deterministic numbers."""
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.eps = 1e-3
    return fill(module, prefix=f"{tag}.").eval()


INPUTS = {"x8": (1, 8, 6, 5), "x8e": (1, 8, 6, 4), "x4": (1, 4, 6, 5)}
BLOCKS = {
    "rep_id": (lambda: RepConv(8, 8, 3, 1), "x8"),
    "rep_noid": (lambda: RepConv(8, 12, 3, 1), "x8"),
    "rep_s2": (lambda: RepConv(8, 8, 3, 2), "x8"),
    "spp": (lambda: SPPCSPC(8, 6), "x8"),
    "down": (lambda: DownC(8, 10), "x8e"),
    "conv_leaky": (lambda: Conv(8, 6, 3, 2, None, 1, nn.LeakyReLU(0.1)), "x8"),
    "conv_g2_noact": (lambda: Conv(8, 6, 5, 1, None, 2, False), "x8"),
    "reorg": (ReOrg, "x8e"),
}


@torch.no_grad()
@pytest.mark.parametrize("tag", BLOCKS)
def test_block_equals_golden(golden, tag):
    build, source = BLOCKS[tag]
    module, x = filled(build(), tag), signal(source, INPUTS[source])
    check(GROUP, f"{tag}:y", module(x), golden[f"{tag}:y"], **TOLERANCE)
    if f"{tag}:keys" in golden:
        check(GROUP, f"{tag}:keys", list(module.state_dict()), golden[f"{tag}:keys"])


@torch.no_grad()
@pytest.mark.parametrize("tag", ["rep_id", "rep_noid", "rep_s2"])
def test_merged_repconv_equals_golden(golden, tag):
    build, source = BLOCKS[tag]
    module, x = filled(build(), tag), signal(source, INPUTS[source])
    module.fuse()
    module.fuse()  # harmless
    check(GROUP, f"{tag}:fkeys", list(module.state_dict()), golden[f"{tag}:fkeys"])
    check(GROUP, f"{tag}:fw", module.rbr_reparam.weight, golden[f"{tag}:fw"], **TOLERANCE)
    check(GROUP, f"{tag}:fb", module.rbr_reparam.bias, golden[f"{tag}:fb"], **TOLERANCE)
    check(GROUP, f"{tag}:yf", module(x), golden[f"{tag}:yf"], **TOLERANCE)
    assert module.deploy and module.rbr_dense is None and module.rbr_1x1 is None and module.rbr_identity is None


def test_chuncat_equals_golden(golden):
    inputs = [signal(name, INPUTS[name]) for name in ("x8", "x4")]
    check(GROUP, "chuncat:y", Chuncat()(inputs), golden["chuncat:y"])


DETECTION = {"det": (Detect, (8, 4)), "idet": (IDetect, (8, 4)), "iaux": (IAuxDetect, (8, 4, 6, 2))}


def detection(tag):
    kind, channels = DETECTION[tag]
    head = kind(3, [[10, 13, 16, 30], [30, 61, 62, 45]], channels)
    head.stride = torch.tensor([8.0, 16.0])
    head.anchors /= head.stride.view(-1, 1, 1)
    features = [signal(f"{tag}_x{i}", (2, c, *((2, 3) if i % 2 else (4, 6)))) for i, c in enumerate(channels)]
    return filled(head, tag), features


@torch.no_grad()
@pytest.mark.parametrize("tag", DETECTION)
def test_detection_layer_equals_golden(golden, tag):
    head, features = detection(tag)
    keys = [f"{key}:{'x'.join(map(str, value.shape))}" for key, value in head.state_dict().items()]
    check(GROUP, f"{tag}:keys", keys, golden[f"{tag}:keys"])
    boxes, maps = head(list(features))
    check(GROUP, f"{tag}:dec", boxes, golden[f"{tag}:dec"], atol=1e-4)
    assert len(maps) == 2
    for i, level in enumerate(maps):
        check(GROUP, f"{tag}:raw{i}", level, golden[f"{tag}:raw{i}"], **TOLERANCE)
    trained = head.train()(list(features))
    check(GROUP, f"{tag}:train_n", len(trained), golden[f"{tag}:train_n"])
    for i, level in enumerate(trained):
        check(GROUP, f"{tag}:train{i}", level, golden[f"{tag}:train{i}"], **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tag", DETECTION)
def test_other_outputs_of_detection_layer(golden, tag, fused):
    head, features = detection(tag)
    if fused and tag != "det":
        head.fuse()
        head.fuse()  # must not fold twice
        check(GROUP, f"{tag}:fm0w", head.m[0].weight, golden[f"{tag}:fm0w"], **TOLERANCE)
        check(GROUP, f"{tag}:fm0b", head.m[0].bias, golden[f"{tag}:fm0b"], **TOLERANCE)
        boxes, maps = head(features)
        check(GROUP, f"{tag}:fdec", boxes, golden[f"{tag}:fdec"], atol=1e-4)
        assert len(maps) == 2
    head.include_nms = True
    ((corners, scores),) = head(features)
    check(GROUP, f"{tag}:nms_box", corners, golden[f"{tag}:nms_box"], atol=1e-4)
    check(GROUP, f"{tag}:nms_score", scores, golden[f"{tag}:nms_score"], **TOLERANCE)
    head.end2end = True  # wins over include_nms
    assert head(features).shape == (2, 60, 8)
    head.end2end = head.include_nms = False
    head.concat = True
    assert head(features).shape == (2, 60, 8)
    head.export = True  # training output, without becoming a training layer
    assert isinstance(head(features), list) and not head.training
    assert len(features) == len(head.m) * (2 if tag == "iaux" else 1)


def test_reorg_order_by_hand():
    x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    assert ReOrg()(x).flatten().tolist() == [1, 3, 2, 4]


def test_pooling_by_hand():
    x = torch.arange(16.0).view(1, 1, 4, 4)
    assert MP()(x).flatten().tolist() == [5, 7, 13, 15]
    assert SP(3)(x).flatten().tolist() == [5, 6, 7, 7, 9, 10, 11, 11, 13, 14, 15, 15, 13, 14, 15, 15]


def test_concat_and_shortcut_by_hand():
    a, b = torch.ones(1, 1, 2, 2), torch.full((1, 1, 2, 2), 2.0)
    assert Concat()([b, a]).flatten().tolist() == [2] * 4 + [1] * 4
    assert Concat(2)([a, b]).shape == (1, 1, 4, 2)
    assert Shortcut()([a, b]).unique().tolist() == [3]


def test_implicit_knowledge_starts_around_its_mean():
    torch.manual_seed(0)
    added, factor = ImplicitA(1000), ImplicitM(1000)
    assert added.implicit.shape == (1, 1000, 1, 1)
    assert abs(added.implicit.mean()) < 0.003 and abs(factor.implicit.mean() - 1) < 0.003
    assert 0.018 < added.implicit.std() < 0.022 and 0.018 < factor.implicit.std() < 0.022
    x = torch.ones(2, 1000, 1, 1)
    assert torch.equal(added(x)[0], 1 + added.implicit[0]) and torch.equal(factor(x)[1], factor.implicit[0])


@pytest.mark.parametrize(("act", "kind"), [(True, nn.SiLU), (None, nn.Identity), (False, nn.Identity)])
def test_activation_rule(act, kind):
    assert type(Conv(1, 1, act=act).act) is kind
    leaky = nn.LeakyReLU(0.1)
    assert Conv(1, 1, act=leaky).act is leaky


def test_padding_rule():
    x = torch.zeros(1, 2, 9, 9)
    assert Conv(2, 3, 5)(x).shape == (1, 3, 9, 9)
    assert Conv(2, 3, (1, 3))(x).shape == (1, 3, 9, 9)
    assert Conv(2, 3, 3, 1, 0)(x).shape == (1, 3, 7, 7)  # 0 is a padding, not "none given"


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_merging_keeps_the_output_with_groups(groups):
    module, x = filled(RepConv(4, 4, g=groups), "g"), signal("x4", INPUTS["x4"])
    merged = copy.deepcopy(module)
    merged.fuse()
    check(GROUP + " (own)", f"groups {groups}", merged(x), module(x), **TOLERANCE)


def test_repconv_refuses_other_kernels():
    with pytest.raises(ValueError, match="kernel 3 and padding 1"):
        RepConv(4, 4, 5)


def test_deploy_repconv_has_one_convolution():
    assert list(RepConv(4, 6, deploy=True).state_dict()) == ["rbr_reparam.weight", "rbr_reparam.bias"]


def test_fused_convolution_does_not_need_gradients_off():
    module, x = filled(Conv(4, 6, 3), "c"), signal("x4", INPUTS["x4"])
    before = module(x)
    module.fuse()
    module.fuse()
    assert list(module.state_dict()) == ["conv.weight", "conv.bias"]
    torch.testing.assert_close(module(x), before, rtol=0, atol=1e-5)
