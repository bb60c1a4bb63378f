"""Head configurations: the shipped ones, reading, and what is said about wrong ones."""

import re
from argparse import Namespace

import pytest
import yaml

from tests.heads_cases import FACTS, GROUPINGS, ROOT, STANDARD, small_heads
from utils.config.data_yaml import load_data_yaml
from utils.head_config import HeadConfig, id_ranges, of_model_yaml, of_options

GOOD = {
    "nc": 4,
    "heads": 2,
    "head_assignments": {"head_0": {"classes": [3, 0]}, "head_1": {"classes": [1, 2], "weight": 2, "name": "头"}},
}


def write(folder, content):
    path = folder / "heads.yaml"
    path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    return path


def with_head_1(**changes):
    heads = GOOD["head_assignments"]
    return GOOD | {"head_assignments": heads | {"head_1": heads["head_1"] | changes}}


@pytest.mark.parametrize("name", ["standard", "geometry", "anticonfusion"])
def test_shipped_groups(name):
    config = HeadConfig(GROUPINGS[name][0])
    assert config.head_nc_list == FACTS["sizes"][name] and config.weights == FACTS["weights"][name]
    assert config.nc == 80 and config.num_heads == 4 and config.grouping == name and config.full_head is False


def test_sizes_share_the_standard_groups():
    other = HeadConfig(ROOT / "data" / "coco_640_1b4h_standard.yaml")
    assert other.description() == HeadConfig(STANDARD).description()
    assert HeadConfig(ROOT / "data" / "coco_1b8h.yaml").num_heads == 8


@pytest.mark.parametrize("size", [320, 640])
def test_the_standard_files_are_data_yamls_too(size, monkeypatch):
    monkeypatch.chdir(ROOT)
    data = load_data_yaml(f"data/coco_{size}_1b4h_standard.yaml", needed=())
    plain = load_data_yaml(f"data/coco{size}.yaml", needed=())
    assert (data.train, data.val, data.names) == (plain.train, plain.val, plain.names)


def test_reading(tmp_path):
    config = HeadConfig(write(tmp_path, GOOD))
    assert config.head_classes == [[3, 0], [1, 2]] and config.head_names == ["Head 0", "头"]
    assert config.weights == [1.0, 2.0] and config.head_nc_list == [2, 2]
    assert config.head_map == {3: 0, 0: 0, 1: 1, 2: 1} and config.local_id_map == {3: 0, 0: 1, 1: 0, 2: 1}
    assert config.get_head_info(2) == (1, 1) and config.get_head_id(3) == 0 and config.get_local_id(0) == 1
    assert config.get_head_weight(1) == 2.0 and config.get_head_nc(0) == 2 and config.get_head_name(1) == "头"
    config.get_head_classes(0).append(9)
    assert config.head_classes[0] == [3, 0]
    assert "2 heads for 4 classes" in config.summary()
    assert "head 1 (头): 2 classes, weight 2, ids 1-2" in config.summary()
    assert HeadConfig(write(tmp_path, GOOD), full_head=True).full_head is True
    assert HeadConfig(write(tmp_path, GOOD | {"full_head": True}), full_head=False).full_head is False


def test_defaults_are_four_heads_of_coco(tmp_path):
    heads = {f"head_{h}": {"classes": list(range(20 * h, 20 * h + 20))} for h in range(4)}
    config = HeadConfig(write(tmp_path, {"head_assignments": heads}))
    assert (config.nc, config.num_heads, config.grouping, config.one_class_score) == (80, 4, "standard", "learned")


def test_notes_are_passed_over(tmp_path):
    content = with_head_1(nc=2, sample_count=7, sample_ratio=0.5, comment="c") | {"train": "a", "names": list("abcd")}
    assert HeadConfig(write(tmp_path, content)).num_heads == 2


def test_unknown_keys_that_only_inform_are_named_in_one_line(tmp_path):
    """As the user's fork writes them; what is nearly a known key is a slip (below)."""
    content = with_head_1(generated_by="a script", sample_mean=3) | {"generated_by": "a script", "date": "2026-01-01"}
    config = HeadConfig(write(tmp_path, content))
    named = [line for line in config.summary().splitlines() if "passed over" in line]
    assert named == ["  passed over, without a meaning here: date, generated_by, sample_mean"]
    assert config.description() == HeadConfig(write(tmp_path, GOOD)).description()
    assert "passed over" not in HeadConfig(write(tmp_path, GOOD)).summary()


def test_description_makes_an_equal_one():
    config = small_heads(full_head=True, one_class_score=1, grouping="cells")
    again = HeadConfig.from_description(config.description(), "again")
    assert {**vars(again), "path": ""} == {**vars(config), "path": ""}
    assert of_model_yaml({"nc": 3}, "a.pt") is None and of_model_yaml(None, "a.pt") is None
    stored = of_model_yaml({"head_config": config.description()}, "a.pt")
    assert stored.path == "the head configuration in a.pt" and stored.head_names == ["two", "one"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (with_head_1(classes=[1, 2, 0]), "classes that occur twice: 0 in head_0 and head_1$"),
        (with_head_1(classes=[1, 2, 1]), "classes that occur twice: 1 in head_1 and head_1$"),
        (with_head_1(classes=[2]) | {"names": list("abcd")}, r"classes that no head has: 1 \(b\)$"),
        (with_head_1(classes=[2, 7]), "classes that no head has: 1; ids outside 0 to 3: 7$"),
        (with_head_1(classes=[1, 2, -1]), "ids outside 0 to 3: -1$"),
        (with_head_1(classes=[]), r"head_1: classes must be a list of at least one class id, not \[\]"),
        (with_head_1(classes=["a"]), "head_1: classes must be a list"),
        (with_head_1(wieght=1), r"head_1: unknown key wieght \(meant weight\?\); remove it"),
        (with_head_1(weight=0), "head_1: weight must be a positive number, not 0"),
        (with_head_1(weight="big"), "head_1: weight must be a positive number, not 'big'"),
        (with_head_1(nc=3), "head_1: nc is 3, but classes has 2 ids"),
        (GOOD | {"heads": 3}, "heads is 3, but head_assignments lacks head_2$"),
        (GOOD | {"heads": 1}, "heads is 1, but head_assignments also has head_1$"),
        (GOOD | {"heads": "two"}, "heads must be the number of heads, at least 1, not 'two'"),
        (GOOD | {"nc": 0}, "nc must be the number of classes, at least 1, not 0"),
        (GOOD | {"fullhead": True}, r"unknown key fullhead \(meant full_head\?\)"),
        (GOOD | {"full_head": 1}, "full_head must be true or false, not 1"),
        (GOOD | {"one_class_score": 0.5}, "one_class_score must be learned or 1, not 0.5"),
        (GOOD | {"one_class_score": True}, "one_class_score must be learned or 1, not True"),
        ({"nc": 4, "heads": 2}, "head_assignments must be a mapping with the keys head_0, head_1"),
        (GOOD | {"head_assignments": {"head_0": [1], "head_1": [2]}}, "head_0 must be a mapping"),
    ],
)
def test_what_is_wrong_is_said(content, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        HeadConfig(write(tmp_path, content))
    assert str(tmp_path / "heads.yaml") in str(caught.value)


def test_everything_wrong_with_the_groups_is_said_at_once(tmp_path):
    with pytest.raises(ValueError, match="twice: 3 in head_0 and head_1; .* no head has: 2; ids outside 0 to 3: 9$"):
        HeadConfig(write(tmp_path, with_head_1(classes=[1, 3, 9])))


def test_a_missing_file_and_no_yaml(tmp_path):
    with pytest.raises(ValueError, match="missing.yaml: this head configuration does not exist"):
        HeadConfig(tmp_path / "missing.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"bad.yaml:1: not valid yaml"):
        HeadConfig(tmp_path / "bad.yaml")


def test_options(tmp_path):
    path = str(write(tmp_path, GOOD))

    def options(heads=0, head_config=""):
        return Namespace(heads=heads, head_config=head_config, data="d.yaml")

    assert of_options(options(), 4) is None
    assert of_options(options(2, path), 4).num_heads == 2
    for half in (options(2), options(0, path)):
        with pytest.raises(ValueError, match="--heads N and --head-config FILE belong together"):
            of_options(half, 4)
    with pytest.raises(ValueError, match="--heads is 3, but .*heads.yaml describes 2"):
        of_options(options(3, path), 4)
    with pytest.raises(ValueError, match="groups 4 classes, but d.yaml has 5"):
        of_options(options(2, path), 5)


def test_id_ranges():
    assert id_ranges([0, 24, 25, 26, 31]) == "0, 24-26, 31"
    assert id_ranges([2, 1]) == "1-2" and id_ranges([5]) == "5" and id_ranges([]) == ""


@pytest.mark.parametrize("text", ["010", "1.10", "12:30", "yes", "null", "~", "2024-01-05", "1e3"])
def test_names_stay_the_text_of_the_file(text, tmp_path):
    (tmp_path / "heads.yaml").write_text(
        f"nc: 2\nheads: 2\ngrouping: {text}\nnames: [{text}, b]\nhead_assignments:\n"
        f"  head_0: {{classes: [0], name: {text}}}\n  head_1: {{classes: [0], name:}}\n"
    )
    with pytest.raises(
        ValueError, match=re.escape(f"0 ({text}) in head_0 and head_1; classes that no head has: 1 (b)")
    ):
        HeadConfig(tmp_path / "heads.yaml")
    (tmp_path / "heads.yaml").write_text((tmp_path / "heads.yaml").read_text().replace("[0], name:}", "[1], name:}"))
    config = HeadConfig(tmp_path / "heads.yaml")
    assert (config.grouping, config.head_names) == (text, [text, "Head 1"])
