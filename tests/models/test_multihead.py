"""Several heads on one backbone: golden weights and outputs, places of scores, output forms, wrong configurations."""

import copy
import hashlib
import io
import pickle

import pytest
import torch

from models.attention import CBAM
from models.config import read_cfg
from models.experimental import attempt_load, rebuild
from models.yolo import Model
from tests.heads_cases import (
    ARRAYS,
    FACTS,
    GROUPINGS,
    ROOT,
    TINY,
    filled,
    fresh,
    outputs,
    small_cfg,
    small_heads,
    small_model,
)
from tests.parity import check
from tests.tiny_model import CFG
from utils.engine.checkpoint_reader import read_checkpoint
from utils.engine.ema import ModelEMA
from utils.engine.optimizer import parameter_groups


def lines_of(state):
    return [f"{key}:{'x'.join(map(str, value.shape))}" for key, value in state.items()]


@pytest.mark.parametrize("name", GROUPINGS)
def test_structure_and_initial_biases(name):
    model, facts = fresh(name), FACTS[name]
    head, lines = model.model[-1], lines_of(model.state_dict())
    assert hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest() == facts["sha"]
    known = facts["det_keys"]  # the first ones
    assert lines_of(head.state_dict())[: len(known)] == known
    assert [sum(p.numel() for p in model.parameters()), len(lines)] == [facts["params"], facts["entries"]]
    assert (head.head_nc, head.head_no) == (facts["head_nc"], facts["head_no"])
    assert head.stride.tolist() == facts["stride"] and model.stride is head.stride
    assert [len(group) for group in parameter_groups(model)] == facts["g"]
    for h in range(4):
        name_of_array = f"{name}:bias_h{h}_l1"
        check("model: several heads", name_of_array, head.heads[h][1].bias, ARRAYS[name_of_array], atol=1e-6)


@pytest.mark.parametrize("name", GROUPINGS)
def test_golden_outputs(name):
    boxes, maps = outputs(filled(name))
    assert list(boxes.shape) == FACTS[name]["dec_shape"]
    assert [[list(level.shape) for level in levels] for levels in maps] == FACTS[name]["raw_shapes"]
    rows, golden = boxes.reshape(-1, 85)[::9], ARRAYS[f"{name}:dec"]
    check("model: several heads", f"{name} xywh", rows[:, :4], golden[:, :4], atol=0.03)
    check("model: several heads", f"{name} scores", rows[:, 4:], golden[:, 4:], atol=1e-4)
    for h in range(4):
        array = f"{name}:raw_h{h}_l2"
        check("model: several heads", array, maps[h][2], ARRAYS[array], rtol=1e-4, atol=2e-4)


def test_scores_stand_at_their_class():
    model = small_model().eval()
    boxes, maps = model(torch.rand(2, 3, 64, 64))
    per_head = 2 * (64 + 16 + 4)
    assert boxes.shape == (2, 2 * per_head, 8)
    two, one = boxes[:, :per_head], boxes[:, per_head:]
    assert not two[..., 5 + 1].any() and not one[..., [5, 7]].any()
    first_level = maps[0][0].view(2, -1, 7).sigmoid()
    assert torch.equal(two[:, :128, 5 + 2], first_level[..., 5])  # local class 0 is class 2
    assert torch.equal(two[:, :128, 5 + 0], first_level[..., 6])
    assert torch.equal(one[:, :128, 5 + 1], maps[1][0].view(2, -1, 6).sigmoid()[..., 5])


def test_a_single_class_may_have_the_score_1():
    model = small_model().eval()
    images = torch.rand(1, 3, 64, 64)
    learned = model(images)[0]
    model.model[-1].fix_one_class_score(True)
    fixed = model(images)[0]
    per_head = learned.shape[1] // 2
    assert torch.equal(fixed[:, :per_head], learned[:, :per_head])
    assert (fixed[:, per_head:, 6] == 1).all() and (learned[:, per_head:, 6] < 1).all()
    assert torch.equal(fixed[:, per_head:, :6], learned[:, per_head:, :6])
    model.model[-1].fix_one_class_score(False)
    assert torch.equal(model(images)[0], learned)
    from_file = small_model(one_class_score=1).eval()
    assert torch.equal(from_file(images)[0], fixed)


def test_full_heads_have_all_columns_and_use_their_own():
    model = small_model(full_head=True).eval()
    boxes, maps = model(torch.rand(1, 3, 64, 64))
    assert [levels[0].shape[-1] for levels in maps] == [8, 8]
    per_head = boxes.shape[1] // 2
    assert not boxes[:, :per_head, 6].any() and not boxes[:, per_head:, [5, 7]].any()
    assert torch.equal(boxes[:, :128, [5, 7]], maps[0][0].view(1, -1, 8).sigmoid()[..., [5, 7]])
    bias = model.model[-1].heads[1][0].bias.detach().view(2, -1)
    assert bias[:, 6].mean() - bias[:, [5, 7]].mean() > 3  # only its own class starts at ln(0.6/0.01)


def test_output_forms():
    model = small_model().eval()
    head, images = model.model[-1], torch.rand(1, 3, 64, 64)
    boxes, _ = model(images)
    head.export = True
    maps = model(images)
    assert [len(levels) for levels in maps] == [3, 3] and maps[0][0].shape == (1, 2, 8, 8, 7)
    head.export, head.include_nms = False, True
    ((corners, scores),) = model(images)
    assert torch.equal(scores, boxes[..., 5:] * boxes[..., 4:5])
    assert torch.equal(corners[..., 2] - corners[..., 0] > 0, boxes[..., 2] > 0)
    head.include_nms, head.concat = False, True
    assert torch.equal(model(images), boxes)
    head.concat, head.end2end = False, True
    assert torch.equal(model(images), boxes)


def test_without_a_configuration_classes_are_divided_in_order():
    head = Model(small_cfg(), nc=8).model[-1]
    assert head.head_classes == [[0, 1], [2, 3], [4, 5], [6, 7]] and head.head_weights == [1.0] * 4
    assert Model(small_cfg(heads=2), nc=8).model[-1].head_classes == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="9 classes do not divide evenly among 4 heads"):
        Model(small_cfg(), nc=9)


def test_configurations_that_disagree():
    with pytest.raises(ValueError, match=r"this model has 4 heads .* but small.yaml describes 2; .*-1bnh.yaml"):
        Model(small_cfg(heads=4), nc=3, head_config=small_heads())
    with pytest.raises(ValueError, match="small.yaml groups 3 classes, but the model has 4"):
        Model(small_cfg(), nc=4, head_config=small_heads())
    with pytest.raises(ValueError, match="small.yaml describes 2 heads, but this model has one"):
        Model(CFG, nc=3, head_config=small_heads())
    with pytest.raises(ValueError, match="heads must be the number of detection heads, not 0"):
        Model(small_cfg(heads=0), nc=3, head_config=small_heads())


@pytest.mark.parametrize("base", ["yolov7-tiny", "yolov7"])
@pytest.mark.parametrize(("kind", "heads"), [("1b4h", 4), ("1b8h", 8), ("1bnh", None)])
def test_shipped_configurations_differ_in_the_last_row_only(base, kind, heads):
    one, several = (read_cfg(ROOT / "cfg" / "training" / f"{name}.yaml") for name in (base, f"{base}-{kind}"))
    assert several.pop("heads", None) == heads
    assert several["head"].pop()[2] == "MultiHeadDetect" and one["head"].pop()[2] == "IDetect"
    assert several == one


def test_copies_averages_and_half_precision():
    model = small_model()
    ema = ModelEMA(model)
    with torch.no_grad():
        model.model[-1].heads[0][0].bias += 1
    ema.update(model)
    assert not any("columns" in key for key in model.state_dict())
    images = torch.rand(1, 3, 64, 64)
    copied = copy.deepcopy(model).eval()
    assert torch.equal(copied(images)[0], model.eval()(images)[0])
    half = copied.half()
    assert half.model[-1].columns.dtype == torch.int64
    assert half(images.half())[0].dtype == torch.float16
    assert torch.equal(pickle.loads(pickle.dumps(model))(images)[0], model(images)[0])


def test_augmented_and_fused(tmp_path):
    model = small_model().eval()
    images = torch.rand(1, 3, 64, 64)
    assert model(images, augment=True)[0].shape[-1] == 8
    torch.save({"model": model}, tmp_path / "a.pt")
    fused = attempt_load(tmp_path / "a.pt")
    assert torch.allclose(fused(images)[0], model(images)[0], rtol=1e-4, atol=1e-3)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_says_all_about_its_heads(tmp_path):
    model = small_model(grouping="cells", one_class_score=1).eval()
    torch.save({"model": model}, tmp_path / "a.pt")
    again = rebuild(read_checkpoint(tmp_path / "a.pt").model)
    assert again.model[-1].head_config.description() == model.model[-1].head_config.description()
    images = torch.rand(1, 3, 64, 64)
    assert torch.equal(again(images)[0], model(images)[0])


def test_files_that_name_the_heads_in_the_layer_only(tmp_path):
    """As another program writes them: nothing in the yaml, lists as dicts, a path object."""
    model = small_model(full_head=True).eval()
    del model.yaml["head_config"]
    config = model.model[-1].head_config
    expected = config.description()
    config.path, config.full_head = tmp_path / "heads.yaml", False  # the layer's own full_head counts
    config.head_classes, config.weights = dict(enumerate(config.head_classes)), dict(enumerate(config.weights))
    del config.one_class_score
    torch.save({"model": model}, tmp_path / "a.pt")
    stored = read_checkpoint(tmp_path / "a.pt").model
    assert stored.yaml["head_config"] == expected
    images = torch.rand(1, 3, 64, 64)
    assert torch.equal(rebuild(stored)(images)[0], model(images)[0])


def test_a_stored_configuration_that_makes_no_sense(tmp_path):
    model = small_model()
    model.model[-1].head_config.head_classes[1] = [2]
    torch.save({"model": model}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"b.pt.*every class must belong to exactly one head"):
        rebuild(read_checkpoint(tmp_path / "a.pt").model, "b.pt")
    del model.model[-1].head_config.num_heads
    torch.save({"model": model}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="a.pt is no checkpoint that can be used"):
        read_checkpoint(tmp_path / "a.pt")


def test_attention_by_hand():
    cbam = CBAM(16)
    assert [tuple(p.shape) for p in cbam.parameters()] == [(1, 16, 1, 1), (16, 1, 1, 1), (1, 2, 7, 7)]
    for parameter in cbam.parameters():
        torch.nn.init.zeros_(parameter)
    x = torch.rand(2, 16, 5, 4)
    assert torch.allclose(cbam(x), x / 4)  # both weights are sigmoid(0)


def test_attention_is_saved_and_read(tmp_path):
    cfg = read_cfg(TINY) | {"nc": 3, "heads": 2}
    cfg["backbone"], cfg["head"] = CFG["backbone"], copy.deepcopy(CFG["head"])
    cfg["anchors"] = CFG["anchors"]
    cfg["head"][-1][2] = "MultiHeadDetectAttention"
    model = Model(cfg, head_config=small_heads()).eval()
    file = io.BytesIO()
    torch.save({"model": model}, file)
    (tmp_path / "a.pt").write_bytes(file.getvalue())
    images = torch.rand(1, 3, 64, 64)
    assert torch.equal(rebuild(read_checkpoint(tmp_path / "a.pt").model)(images)[0], model(images)[0])
