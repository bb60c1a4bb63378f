"""Counting layers, parameters and operations."""

import pytest

from models.summary import count_macs, model_summary
from models.yolo import Model

CFG = {"nc": 1, "depth_multiple": 1.0, "width_multiple": 1.0, "anchors": [[10, 13]]}
CFG["backbone"] = [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "nn.Upsample", ["None", 2, "nearest"]]]
CFG["head"] = [[[1], 1, "Detect", ["nc", "anchors"]]]


def test_operations_by_hand():
    macs = count_macs(Model(CFG), 32)
    convolution, norm, upsampling, output = 8 * 16 * 16 * 27, 4 * 8 * 16 * 16, 8 * 32 * 32, 6 * 32 * 32 * 8
    assert macs == convolution + norm + upsampling + output


def test_summary_by_hand():
    model = Model(CFG)
    model.model[0].conv.weight.requires_grad_(False)
    summary = model_summary(model, 320)
    assert (summary.parameters, summary.gradients) == (216 + 16 + 54, 16 + 54)
    assert summary.layers == 10  # Model, Sequential, Conv with 3 inside, Upsample, Detect, ModuleList, output
    assert summary.gflops == pytest.approx(2 * count_macs(model, 32) * 100 / 1e9)
    assert model_summary(model, [320, 640]).gflops == pytest.approx(2 * summary.gflops)


def test_a_fused_model_has_no_gradients_to_speak_of(caplog):
    assert "gradients" in str(model_summary(Model(CFG)))
    caplog.set_level("INFO", logger="models.yolo")
    Model(CFG).fuse()
    assert "fused for inference" in caplog.messages[-1] and "gradients" not in caplog.messages[-1]


def test_summary_leaves_the_model_as_it_was():
    model = Model(CFG).train()
    model.model[0].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model_summary(model)
    assert model.training and not model.model[0].training and model.model[-1].training
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_info_logs_one_line_and_every_parameter_on_request(caplog):
    model = Model(CFG)
    caplog.clear()
    with caplog.at_level("INFO", logger="models.yolo"):
        model.info()
        assert len(caplog.records) == 1 and "286 parameters" in caplog.text
        model.info(verbose=True)
    assert "model.0.conv.weight" in caplog.text
