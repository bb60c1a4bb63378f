"""Reading configurations: stock-style text, safe arguments, and messages for everything that is wrong."""

import math

import pytest
import torch
import yaml
from torch import nn

from models.config import read_cfg, resolve_argument
from models.yolo import Model
from tests.tiny_model import CFG
from utils.system.files import PROJECT_ROOT as ROOT

STOCK_STYLE = """
nc: 3  # number of classes
depth_multiple: 1.0
width_multiple: 1.0

anchors:
  - [10,13, 16,30]
  - [30,61, 62,45]

backbone:
  # [from, number, module, args]
  [[-1, 1, Conv, [8, 3, 2, None, 1, nn.LeakyReLU(0.1)]],  # 0
   [-1, 1, MP, []],
   [-1, 1, torch.nn.Conv2d, [16, 3, 1, 1]],
   [-1, 1, Conv, [16, 3, 2, None, 1, nn.ReLU()]],
  ]

head:
  [[-1, 1, Conv, [16, 1, 1]],
   [-1, 1, nn.Upsample, [None, 2, 'nearest']],
   [[-1, 2], 1, Concat, [1]],
   [-1, 1, Conv, [16, 3, 2]],
   [-1, 1, Conv, [16, 3, 2]],
   [[7, 8], 1, IDetect, [nc, anchors]],
  ]
"""


def stock():
    return yaml.safe_load(STOCK_STYLE)


def write(folder, text):
    path = folder / "model.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def with_row(section, index, row):
    cfg = stock()
    cfg[section][index] = row
    return cfg


def test_stock_style_file_is_read_unchanged(tmp_path):
    model = Model(str(write(tmp_path, STOCK_STYLE)))
    assert model.yaml_file == "model.yaml" and model.yaml["head"] == stock()["head"]
    assert isinstance(model.model[0].act, nn.LeakyReLU) and model.model[0].act.negative_slope == 0.1
    assert type(model.model[2]) is nn.Conv2d and model.model[2].out_channels == 16
    assert model.model[5].scale_factor == 2 and model.model[5].size is None and model.model[5].mode == "nearest"
    assert model.model[5].type == "torch.nn.modules.upsampling.Upsample"
    assert model.save == [2, 7, 8] and model.stride.tolist() == [8, 16]


@pytest.mark.parametrize(
    ("text", "value"),
    [("None", None), ("True", True), ("False", False), ("nc", 7), ("anchors", 3), ("nearest", "nearest")]
    + [(5, 5), (0.5, 0.5), (True, True), ([1, "x"], [1, "x"]), ("1e-3", 1e-3), ("12", 12), ("-.5", -0.5)],
)
def test_arguments(text, value):
    assert resolve_argument(text, {"nc": 7, "anchors": 3}) == value


def test_activation_arguments():
    first, second = (resolve_argument("nn.LeakyReLU(negative_slope=0.2, inplace=True)", {}) for _ in range(2))
    assert first.negative_slope == 0.2 and first.inplace and first is not second
    assert type(resolve_argument("torch.nn.SiLU()", {})) is nn.SiLU


@pytest.mark.parametrize(
    "text",
    ["__import__('os').system('true')", "nn.Linear(3, 4)", "nn.LeakyReLU(open('x'))", "nn.LeakyReLU(0.1", "a.b"]
    + ["nn.SiLU(slope=1)", "nn.ReLU(*[1])", "[5, 9]", "1 + 1", ""],
)
def test_code_is_an_error(text):
    with pytest.raises(ValueError, match="understood|activation|neither"):
        resolve_argument(text, {})


def test_unknown_module_names_the_row_and_the_known_ones():
    with pytest.raises(ValueError, match=r"row 1 .*unknown module 'Foo'; known are .*Conv,.*IAuxDetect"):
        Model(with_row("backbone", 1, [-1, 1, "Foo", []]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([-1, 1, "Conv"], r"a row is \[from, number, module, args\]"),
        ("Conv", "a row is"),
        ([-1, 1, 7, []], "must be a name"),
        ([-1, 1, "MP", 2], "args a list"),
        (["up", 1, "MP", []], "from must be"),
        ([[], 1, "Concat", [1]], "from must be"),
        ([[0, 0.5], 1, "Concat", [1]], "from must be"),
        ([1, 1, "MP", []], "not an earlier layer"),
        ([-2, 1, "MP", []], "not an earlier layer"),
        ([-1, 0, "MP", []], "positive integer"),
        ([-1, "2", "MP", []], "positive integer"),
        ([-1, 1, "Conv", []], "number of output channels"),
        ([-1, 1, "Conv", ["wide"]], "number of output channels"),
        ([-1, 1, "Conv", [0]], "number of output channels"),
        ([-1, 1, "Conv", [8, 3, 1, 1, 1, True, 7, 8]], "positional arguments"),
        ([-1, 1, "Conv", [8, "big"]], "row 1"),
        ([-1, 1, "Conv", [8, 3, 1, None, 3]], "groups"),
        ([-1, 1, "Conv", [8, 3, 1, None, 1, "nn.Foo()"]], "unknown activation"),
        ([-1, 1, "RepConv", [8, 5]], "kernel 3"),
        ([[-1], 1, "Conv", [8]], "one index"),
        ([-1, 1, "Concat", [1]], "a list"),
        ([[-1], 1, "Shortcut", [1]], "two inputs"),
        ([-1, 2, "Conv", [16]], "repetitions"),
        ([[-1, 0], 1, "IDetect", ["nc", "anchors"]], "the last row"),
    ],
)
def test_wrong_rows(row, message):
    with pytest.raises(ValueError, match=message) as error:
        Model(with_row("backbone", 1, row))
    assert "row 1" in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([-1, 1, "MP", []], "the last row"),
        ([[7, 8], 1, "IDetect", ["nc"]], "arguments"),
        ([[6, 7, 8], 1, "IDetect", ["nc", "anchors"]], "3 levels need 3"),
        ([[6, 7, 8], 1, "IAuxDetect", ["nc", "anchors"]], "as many auxiliary"),
        ([[7, 8], 1, "IDetect", ["nc", [[1, 2, 3], [1, 2, 3]]]], "equally long"),
        ([[7, 8], 1, "IDetect", ["nc", [[1, "b"], [1, 2]]]], "numbers of pixels"),
        ([[7, 8], 1, "IDetect", ["nc", [[0, 0], [1, 2]]]], "numbers of pixels above 0"),
        ([[7, 8], 1, "IDetect", ["nc", [[1, math.inf], [1, 2]]]], "numbers of pixels above 0 and below 1e"),
        ([[7, 8], 1, "IDetect", ["nc", 0]], "anchors must be"),
        ([[7, 8], 1, "IDetect", ["many", "anchors"]], "number of classes"),
    ],
)
def test_wrong_detection_rows(row, message):
    with pytest.raises(ValueError, match=message) as error:
        Model(with_row("head", -1, row))
    assert "row 9" in str(error.value)


def test_sizes_that_do_not_fit_name_the_row():
    with pytest.raises(ValueError, match=r"row 6 \(models.common.Concat\) cannot process"):
        Model(with_row("head", 2, [[-1, 0], 1, "Concat", [1]]))


def test_wrong_files_name_the_file(tmp_path):
    with pytest.raises(ValueError, match="missing.yaml does not exist"):
        read_cfg(tmp_path / "missing.yaml")
    with pytest.raises(ValueError, match="model.yaml, row 0"):
        Model(write(tmp_path, STOCK_STYLE.replace("-1, 1, Conv, [8,", "-1, 1, Cnv, [8,")))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"- 1", "found list"), (b"a: [1", "not valid yaml"), (b"", "the file is empty"),
     (b"\xef\xbb\xbfnc: 2", "lacks depth"), (b"nc: &a [*a]", "entries once"),
     (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer")],
)  # fmt: skip
def test_files_are_read_as_other_yaml_files(tmp_path, content, message):
    (tmp_path / "model.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=f"model.yaml.* {message}"):
        read_cfg(tmp_path / "model.yaml")


def test_a_dict_that_holds_itself():
    cfg = stock()
    cfg["anchors"].append(cfg["anchors"])
    with pytest.raises(ValueError, match="too many entries"):
        Model(cfg)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("nc", 10**6, "nc must be the number of classes, not 1000000"), ("anchors", 10**30, "anchors must be"),
     ("backbone", [[-1, 1, "Conv", [10**6, 3, 2]]], "row 0 .* more than 100000 output channels"),
     ("backbone", [[-1, 10**6, "Conv", [8, 3, 2]]], "row 0 .* more than 1000 repetitions"),
     ("depth_multiple", float("inf"), "depth_multiple must be|infinity|repetitions")],
)  # fmt: skip
def test_numbers_that_would_fill_the_memory(key, value, message):
    cfg = {**stock(), key: value}
    if key == "depth_multiple":
        cfg["backbone"] = [[-1, 2, "Conv", [8, 3, 2]]]
    with pytest.raises(ValueError, match=message):
        Model(cfg)


def test_long_values_are_cut_in_messages():
    with pytest.raises(ValueError) as caught:
        Model({**stock(), "nc": "x" * 10_000})
    assert len(str(caught.value)) < 500


def test_a_head_for_another_number_of_classes():
    cfg = stock()
    cfg["head"][-1][3] = [7, "anchors"]
    with pytest.raises(ValueError, match=r"row \d+ .* is made for 7 classes and the model for \d+: write nc there"):
        Model(cfg)


@pytest.mark.parametrize("key", ["nc", "depth_multiple", "width_multiple", "anchors", "backbone", "head"])
def test_missing_key_is_named(key):
    cfg = stock()
    del cfg[key]
    with pytest.raises(ValueError, match=f"lacks {key}"):
        Model(cfg)


@pytest.mark.parametrize(
    ("key", "value"),
    [("nc", 0), ("nc", "many"), ("nc", True), ("width_multiple", 0), ("depth_multiple", "x"), ("head", "x")]
    + [("anchors", "x"), ("ch", 0), ("backbone", {})],
)
def test_wrong_value_is_named(key, value):
    with pytest.raises(ValueError, match=key):
        Model({**stock(), key: value})


@pytest.mark.parametrize("anchors", [2.6, "x", [[1, 2]], -1])
def test_wrong_override_of_anchors(anchors):
    if anchors == 2.6:
        assert Model(stock(), anchors=anchors).model[-1].na == 3
    else:
        with pytest.raises(ValueError, match="anchors"):
            Model(stock(), anchors=anchors)


def test_width_and_depth_multiples():
    cfg = {**stock(), "width_multiple": 0.5, "depth_multiple": 0.33}
    cfg["backbone"][3] = [-1, 1, "Conv", [24, 3, 2]]
    cfg["head"][0] = [-1, 6, "Conv", [24, 1, 1]]
    model = Model(cfg)
    assert model.model[0].conv.out_channels == 8  # ceil(8 * 0.5 / 8) * 8
    assert model.model[3].conv.out_channels == 16  # ceil(24 * 0.5 / 8) * 8
    repeated = model.model[4]
    assert type(repeated) is nn.Sequential and len(repeated) == 2 and repeated.type == "models.common.Conv"
    assert "model.4.1.conv.weight" in model.state_dict()


def test_repeats_that_a_block_takes_itself():
    cfg = stock()
    cfg["head"][0] = [-1, 3, "SPPCSPC", [16]]
    assert type(Model(cfg).model[4]).__name__ == "SPPCSPC"


def test_channel_arithmetic():
    cfg = stock()
    cfg["backbone"][1] = [-1, 1, "ReOrg", []]
    cfg["backbone"][2] = [-1, 1, "nn.BatchNorm2d", [1]]
    cfg["head"][2] = [[-1, 2], 1, "Chuncat", [1]]
    model = Model(cfg)
    assert model.model[2].num_features == 32 and model.model[7].conv.in_channels == 48


def test_auxiliary_head_with_a_number_of_anchors():
    cfg = {**stock(), "anchors": 2}
    cfg["head"][-1] = [[7, 8, 7, 8], 1, "IAuxDetect", ["nc", "anchors"]]
    model = Model(cfg).train()
    head = model.model[-1]
    assert (head.nl, head.na, len(head.m), len(head.m2)) == (2, 2, 2, 2)
    maps = model(torch.zeros(2, 3, 64, 64))
    assert [list(level.shape) for level in maps] == [[2, 2, 8, 8, 8], [2, 2, 4, 4, 8]] * 2


# A file on top of another one -----------------------------------------------------------------------------------------


def on_top(folder, text, name="top.yaml"):
    (folder / "below.yaml").write_text(yaml.safe_dump(CFG))
    (folder / name).write_text(text)
    return folder / name


def test_a_file_says_only_what_differs(tmp_path):
    path = on_top(tmp_path, "base: below.yaml\nnc: 7\nlast_row: [[1, 2], 1, Detect, [nc, anchors]]\n")
    found, below = read_cfg(path), read_cfg(tmp_path / "below.yaml")
    assert found["nc"] == 7 and found["head"] == [*below["head"][:-1], [[1, 2], 1, "Detect", ["nc", "anchors"]]]
    assert {**found, "nc": 0, "head": 0} == {**below, "nc": 0, "head": 0}, "base and last_row are not in it"
    second = on_top(tmp_path, "base: top.yaml\nnc: 9\n", "second.yaml")
    assert read_cfg(second) == found | {"nc": 9}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base: missing.yaml", "top.yaml, base missing.yaml does not exist"),
        ("base: 3", "top.yaml: base must be the name of another model configuration, not 3"),
        ("base: top.yaml", "base must be the name of another model configuration, not 'top.yaml'"),
        ("base: below.yaml\nlast_row: 5", "row 5 5: a row is"),
    ],
)
def test_a_wrong_base_is_one_sentence(text, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        Model(on_top(tmp_path, text))


@pytest.mark.parametrize("name", ["yolov7-tiny", "yolov7", "yolov7x"])
def test_configurations_by_size_have_their_anchors_in_proportion(name):
    stock, *sized = (read_cfg(ROOT / f"cfg/training/{name}{end}.yaml") for end in ("", "-320", "-480", "-640"))
    for cfg, size in zip(sized, (320, 480, 640), strict=True):
        assert cfg | {"anchors": 0} == stock | {"anchors": 0}
        assert cfg["anchors"] == [[side * size / 640 for side in level] for level in stock["anchors"]]
