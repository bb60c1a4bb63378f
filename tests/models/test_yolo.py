"""The complete networks: golden weights, outputs, augmentation and fusing; copying, saving, half precision."""

import copy
import io
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from models.yolo import Model, scale_images
from tests.golden_fill import fill, image, v
from tests.parity import GOLDEN, check

ROOT = Path(__file__).resolve().parents[2]
FAMILY = ["yolov7-tiny", "yolov7", "yolov7-w6"]
RAW = {"rtol": 1e-4, "atol": 2e-4}
SAMPLE = {"nc": 2, "depth_multiple": 1.0, "width_multiple": 1.0, "anchors": [[10, 13, 16, 30], [30, 61, 62, 45]]}
SAMPLE["backbone"] = [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "MP", []], [-1, 1, "Conv", [16, 3, 2]]]
SAMPLE["head"] = [[-1, 1, "Conv", [16, 3, 2]], [[2, 3], 1, "IDetect", ["nc", "anchors"]]]


class Case:
    """One golden network: its arrays, its description, the state after construction, and the filled model."""

    def __init__(self, name):
        self.group = f"model: {name}"
        self.golden = np.load(GOLDEN / "model" / f"{name}.npz")
        self.facts = json.loads((GOLDEN / "model" / f"{name}.json").read_text())
        torch.manual_seed(0)
        self.model = Model(ROOT / "cfg" / "training" / f"{name}.yaml")
        self.initial = {key: value.numpy().copy() for key, value in self.model.state_dict().items()}
        self.anchors = self.model.model[-1].anchors.clone()
        fill(self.model, self.facts["gain"]).eval()

    def input(self, call):
        return image(self.facts[call]["input"])

    def check(self, name, actual, step=1, **tolerance):
        """Compare every `step`-th row of `actual`, if the collection holds the array; returns whether it does."""
        if name not in self.golden:
            return False
        rows = actual.reshape(-1, actual.shape[-1])[::step] if actual.ndim > 2 else actual
        check(self.group, name, rows, self.golden[name], **tolerance)
        return True

    def check_boxes(self, name, actual, step=1):
        """Decoded boxes: 0.03 px for the corners, 1e-4 for the probabilities."""
        rows, expected = actual.reshape(-1, actual.shape[-1])[::step], self.golden[name]
        check(self.group, f"{name} xywh", rows[:, :4], expected[:, :4], atol=0.03)
        check(self.group, f"{name} scores", rows[:, 4:], expected[:, 4:], atol=1e-4)


@pytest.fixture(scope="module", params=FAMILY)
def case(request):
    return Case(request.param)


def test_number_source():
    facts = json.loads((GOLDEN / "model" / "selfcheck.json").read_text())
    assert zlib.crc32(b"input") == facts["crc32_input"]
    for name in ("input", "model.0.conv.weight"):
        check("model: number source", name, v(name, 5), facts[f"v_{name}"])
    check("model: number source", "large index", v("input", 1, start=10_000_000), facts["v_large_index"])


def test_initial_weights_of_seed_0(case):
    keys = list(case.initial)
    check(case.group, "init_keys", keys, case.golden["init_keys"])
    values = list(case.initial.values())
    check(case.group, "init_shape", ["x".join(map(str, value.shape)) for value in values], case.golden["init_shape"])
    for name in ("mean", "std"):
        moments = [getattr(value, name)(dtype=np.float64) for value in values]
        check(case.group, f"init_{name}", moments, case.golden[f"init_{name}"], atol=1e-6)
    first = np.full((len(values), 4), np.nan, np.float32)
    for row, value in zip(first, values, strict=True):
        row[: min(4, value.size)] = value.flatten()[:4]
    check(case.group, "init_first4", first, case.golden["init_first4"], rtol=1e-6, atol=1e-6)
    if torch.__version__.startswith("2.14"):  # the generator's stream is a promise within one version only
        check(case.group, "init_crc32", [zlib.crc32(value.tobytes()) for value in values], case.golden["init_crc32"])


def test_initial_biases_strides_and_anchors(case):
    head = case.model.model[-1]
    for branch in ("m", "m2"):
        levels = [key for key in case.initial if f".{branch}." in key and key.endswith(".bias")]
        for i, key in enumerate(levels):
            name = f"bias_m{i}" if branch == "m" else f"bias_m2_{i}"
            check(case.group, name, case.initial[key], case.golden[name], atol=1e-6)
    check(case.group, "stride", head.stride, case.golden["stride"])
    check(case.group, "anchors", case.anchors, case.golden["anchors"])
    check(case.group, "anchor_grid", head.anchor_grid, case.golden["anchor_grid"])
    assert case.model.stride is head.stride


@torch.no_grad()
@pytest.mark.parametrize("call", ["eval0", "eval1"])
def test_eval_outputs(case, call):
    head, step = case.model.model[-1], case.facts[call]["row_step"]
    boxes, maps = case.model(case.input(call))
    assert list(boxes.shape) == case.facts[call]["dec_shape"]
    assert [list(level.shape) for level in maps] == case.facts[call]["raw_shapes"]
    case.check_boxes(f"{call}_dec", boxes, step)
    head.train()  # the layer honours its own flag: raw maps, the auxiliary ones included
    raw = case.model(case.input(call))
    head.eval()
    assert [list(level.shape) for level in raw] == case.facts[call]["headtrain_shapes"]
    assert all(torch.equal(level, lead) for level, lead in zip(raw, maps, strict=False))
    compared = [case.check(f"{call}_raw{i}", level, step, **RAW) for i, level in enumerate(raw)]
    assert all(compared) or f"{call}_raw0" not in case.golden


@torch.no_grad()
@pytest.mark.parametrize("call", ["train0", "train1"])
def test_training_outputs_and_statistics(case, call):
    """A batch of one normalises over 4 samples at the last level.

    That amplifies the rounding of float32, which differs from CPU to CPU, to a mean of 0.03; so train0 runs in float64,
    and what remains is the rounding in the golden values.
    """
    model, x, step = copy.deepcopy(case.model).train(), case.input(call), case.facts[call]["row_step"]
    raw = model.double()(x.double()) if call == "train0" else model(x)
    assert [list(level.shape) for level in raw] == case.facts[call]["shapes"]
    for i, level in enumerate(raw):
        if case.check(f"{call}_raw{i}", level, step, atol=0.3 if call == "train0" else 1e-2):
            rows = level.reshape(-1, level.shape[-1])[::step].numpy()
            assert np.abs(rows - case.golden[f"{call}_raw{i}"]).mean() < 0.02
    state = model.state_dict()
    keys = [str(key) for key in case.golden[f"{call}_bn_keys"]]
    tolerance = 3e-3 if call == "train0" else 1e-3
    for suffix, statistic in (("mean", "running_mean"), ("var", "running_var")):
        got = torch.stack([state[key.replace("running_mean", statistic)][:8] for key in keys])
        check(case.group, f"{call}_bn_{suffix}", got, case.golden[f"{call}_bn_{suffix}"], atol=tolerance)


@torch.no_grad()
def test_augmented_output(case):
    boxes, nothing = case.model(case.input("tta"), augment=True)
    assert list(boxes.shape) == case.facts["tta"]["dec_shape"] and nothing is None
    case.check_boxes("tta_dec", boxes, case.facts["tta"]["row_step"])


@torch.no_grad()
def test_fused_model(case):
    facts, x = case.facts["fuse"], case.input("eval0")
    before = case.model(x)
    fused = copy.deepcopy(case.model).fuse()
    boxes, maps = fused(x)
    case.check_boxes("fused0_dec", boxes, facts["row_step"])
    assert len(maps) == facts["unfused_raw_returned"]  # lead maps only, also for an auxiliary head
    assert (boxes - before[0]).abs().max() < 0.03
    state = fused.state_dict()
    check(case.group, "fused_keys", list(state), case.golden["fused_keys"])
    assert sum(p.numel() for p in fused.parameters()) == facts["params"]
    names = [key for key in case.golden.files if key.startswith("fw:")]
    assert names
    for name in names:
        weight = state[name[3:]]
        check(case.group, name, weight.flatten()[:256], case.golden[name], atol=1e-6)
        sums = [weight.double().sum(), weight.double().abs().sum()]
        check(case.group, f"fs:{name[3:]}", sums, case.golden[f"fs:{name[3:]}"], rtol=1e-5, atol=1e-3)
    again = fused.fuse()(x)[0]
    assert again.equal(boxes)


def sample_model():
    torch.manual_seed(1)
    return fill(Model(SAMPLE), 1.3).eval()


@torch.no_grad()
@pytest.mark.parametrize("is_fused", [False, True])
def test_copies_and_files_give_the_same_output(is_fused):
    model, x = sample_model(), image((1, 3, 64, 96))
    model = model.fuse() if is_fused else model
    expected = model(x)[0]
    assert copy.deepcopy(model)(x)[0].equal(expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded(x)[0].equal(expected)
    assert all(tensor.numel() == 1 for tensor in loaded.model[-1].grid)  # grids never travel
    assert loaded.stride is loaded.model[-1].stride


def test_attributes_that_stock_tools_read():
    model = sample_model()
    assert model.names == ["0", "1"] and model.yaml["ch"] == 3 and model.yaml_file is None and model.traced is False
    assert model.save == [2, 3]
    first, last = model.model[0], model.model[-1]
    assert (first.i, first.f, first.type, first.np) == (0, -1, "models.common.Conv", 232)
    assert (last.i, last.f, last.type) == (4, [2, 3], "models.yolo.IDetect")
    for name in ("nc", "no", "nl", "na", "grid", "stride"):
        assert name in vars(last)
    assert (last.nc, last.no, last.nl, last.na) == (2, 7, 2, 2)


def test_new_state_has_class_defaults():
    """An object from an older file lacks what newer code added to `__init__`."""
    model = sample_model()
    del model.__dict__["traced"]
    with torch.no_grad():
        assert model(image((1, 3, 64, 64)))[0].shape == (1, 160, 7)
    model.model[-1].fuse()
    assert not type(model.model[-1]).implicit_folded


@torch.no_grad()
def test_half_precision():
    model, x = sample_model(), image((1, 3, 64, 64))
    expected = model(x)[0]
    boxes, maps = model.half()(x.half())
    assert boxes.dtype == torch.float16 and maps[0].dtype == torch.float16
    assert model.stride.dtype == torch.float32 and model.model[-1].anchors.dtype == torch.float16
    assert (boxes.float() - expected)[..., :4].abs().max() < 0.5
    assert (boxes.float() - expected)[..., 4:].abs().max() < 5e-3


def test_sizes_may_change_from_call_to_call():
    model = sample_model()
    with torch.no_grad():
        rows = [model(image((1, 3, h, w)))[0].shape[1] for h, w in ((64, 64), (32, 96), (64, 64))]
    assert rows == [160, 120, 160]


@pytest.mark.gpu
@torch.no_grad()
def test_model_may_move_between_devices():
    model, x = sample_model(), image((1, 3, 64, 64))
    expected = model(x)[0]
    moved = model.cuda()(x.cuda())[0].cpu()
    assert (moved - expected).abs().max() < 0.05 and model.cpu()(x)[0].equal(expected)


def test_traced_model_stops_before_the_detection_layer():
    model = sample_model()
    model.traced = True
    features = model(image((1, 3, 64, 64)))
    assert [list(level.shape) for level in features] == [[1, 16, 8, 8], [1, 16, 4, 4]]


def test_gradients_reach_every_parameter():
    model = sample_model().train()
    sum(level.pow(2).sum() for level in model(image((2, 3, 64, 64)))).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_number_of_classes_and_anchors_override_the_file():
    model = Model(SAMPLE, ch=1, nc=1, anchors=3)
    assert model.yaml["nc"] == 1 and model.yaml["anchors"] == 3 and model.yaml["ch"] == 1
    head = model.model[-1]
    assert (head.na, head.no) == (3, 6) and model.names == ["0"]
    assert head.anchor_grid[0].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert SAMPLE["nc"] == 2 and "ch" not in SAMPLE  # the caller's dict is untouched


def test_channels_in_the_file_win():
    assert Model({**SAMPLE, "ch": 4}, ch=1).model[0].conv.in_channels == 4


def test_bias_starts_by_hand():
    model = Model(SAMPLE)
    fill(model).model[-1].m[0].bias.data.zero_()
    model._initialise_biases()
    bias = model.model[-1].m[0].bias.view(2, 7)
    expected = [0, 0, 0, 0, -6.684612, -0.520776, -0.520776]  # ln(8 / 80^2), ln(0.6 / 1.01), stride 8
    torch.testing.assert_close(bias, torch.tensor([expected, expected]), rtol=0, atol=1e-5)


def test_anchors_follow_the_order_of_the_strides():
    model = Model({**SAMPLE, "anchors": SAMPLE["anchors"][::-1]})
    head = model.model[-1]
    assert head.anchor_grid[0].flatten().tolist() == [10, 13, 16, 30]
    assert head.anchors[1].flatten().tolist() == [30 / 16, 61 / 16, 62 / 16, 45 / 16]


def test_start_of_norms_and_activations():
    """stock behaviour: the stride pass moves the running variance of every batch norm to 0.9."""
    model = Model({**SAMPLE, "head": [[-1, 1, "Conv", [16, 3, 2, None, 1, "nn.LeakyReLU(0.1)"]], SAMPLE["head"][1]]})
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 3
    for norm in norms:
        assert (norm.eps, norm.momentum, int(norm.num_batches_tracked)) == (1e-3, 0.03, 1)
        assert norm.running_mean.eq(0).all() and norm.running_var.eq(0.9).all()
    assert model.model[3].act.inplace and not model.model[0].act.inplace


def test_scaled_image_is_padded_right_and_below():
    scaled = scale_images(torch.zeros(1, 3, 64, 96), 0.67, 32)
    assert scaled.shape == (1, 3, 64, 96)
    assert scaled[..., :42, :64].eq(0).all() and torch.allclose(scaled[..., 42:, :], torch.tensor(0.447))
    x = torch.rand(1, 3, 8, 8)
    assert scale_images(x, 1, 32) is x


def test_empty_batch():
    boxes, maps = sample_model()(torch.zeros(0, 3, 64, 64))
    assert boxes.shape == (0, 160, 7) and maps[0].shape == (0, 2, 8, 8, 7)


def test_profile_logs_every_layer(caplog):
    model, x = sample_model(), image((1, 3, 64, 64))
    caplog.clear()
    with torch.no_grad(), caplog.at_level("INFO", logger="models.summary"):
        profiled = model(x, profile=True)[0]
        assert profiled.equal(model(x)[0])
    assert len(caplog.records) == 5 and "models.yolo.IDetect" in caplog.text
