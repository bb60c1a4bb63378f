from pathlib import Path

import pytest
import yaml

from utils.config.data_yaml import DataConfig, check_same_names, load_data_yaml, read_yaml
from utils.system import files

COCO_YAMLS = ("coco", "coco320", "coco480", "coco640")
NAMES = "names: [red, green]\n"
SPLITS = "train: ds/images/train\nval: ds/images/val\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory: `here` beside `elsewhere`, both empty."""
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def write(path, text, *folders):
    """A yaml file, and folders relative to its own folder that are to exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    for folder in folders:
        (path.parent / folder).mkdir(parents=True, exist_ok=True)
    return path


# --- where the images are ---------------------------------------------------------------------------------------------


def test_paths_from_the_working_directory_stay_as_written(here):
    write(here / "data.yaml", "train: ./ds/a\nval: [ds/b, ds/a]\ntest: ds/none\n" + NAMES, "ds/a", "ds/b")
    data = load_data_yaml("data.yaml")
    assert (data.train, data.val, data.test) == ("./ds/a", ["ds/b", "ds/a"], "ds/none")


def test_paths_from_the_yamls_own_folder(here):
    file = write(here.parent / "elsewhere/data.yaml", SPLITS + NAMES, "ds/images/train", "ds/images/val")
    assert load_data_yaml(file).train == str(here.parent / "elsewhere/ds/images/train")
    assert load_data_yaml("../elsewhere/data.yaml").val == "../elsewhere/ds/images/val"


def test_the_working_directory_comes_before_the_yamls_folder(here):
    file = write(here.parent / "elsewhere/data.yaml", "train: a\nval: a\n" + NAMES, "a", "../here/a")
    assert load_data_yaml(file).train == "a"


@pytest.mark.parametrize("base", ["ds", "./ds/", "{folder}/ds"])
def test_the_path_key(here, base):
    text = f"path: {base.format(folder=here)}\ntrain: images/train\nval: images/val\n" + NAMES
    write(here / "data.yaml", text, "ds/images/train", "ds/images/val", "images/train")
    data = load_data_yaml("data.yaml")
    assert Path(data.train).resolve() == here / "ds/images/train"
    assert Path(data.val).resolve() == here / "ds/images/val"


def test_the_path_key_counts_from_the_yaml_then_from_here_then_not_at_all(here, caplog):
    text = "path: ds\ntrain: a\nval: b\ntest: c\n" + NAMES
    file = write(here.parent / "elsewhere/data.yaml", text, "ds/a", "../here/ds/a", "../here/ds/b", "../here/c")
    data = load_data_yaml(file)
    assert (data.train, data.val, data.test) == (str(file.parent / "ds/a"), "ds/b", "c")
    assert [record.getMessage() for record in caplog.records] == [f"{file}: test: not found below path ds, c is used"]


def test_the_path_key_is_one_folder(here):
    write(here / "data.yaml", "path: [ds]\n" + SPLITS + NAMES, "ds/images/train", "ds/images/val")
    with pytest.raises(ValueError, match="path must be one folder, found"):
        load_data_yaml("data.yaml")


def test_roboflow_paths(here):
    text = "train: ../train/images\nval: ../valid/images\n" + NAMES
    file = write(here.parent / "elsewhere/data.yaml", text, "train/images", "valid/images")
    assert load_data_yaml(file).train == str(file.parent / "train/images")


def test_windows_paths_and_the_home_folder(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    write(here / "data.yaml", "train: ds\\images\nval: ~/ds/images\n" + NAMES, "ds/images")
    data = load_data_yaml("data.yaml")
    assert (data.train, data.val) == ("ds/images", str(here / "ds/images"))
    write(here / "data.yaml", "path: .\\ds\\\ntrain: a\\b\nval: a/b\n" + NAMES, "ds/a/b")
    data = load_data_yaml("data.yaml")
    assert Path(data.train).resolve() == Path(data.val).resolve() == here / "ds/a/b"


def test_a_missing_place_is_an_error_that_lists_where_it_was_sought(here):
    text = "path: base\ntrain: ../a\nval: b\ndownload: |\n  touch ran\n  ls\n" + NAMES
    file = write(here.parent / "elsewhere/data.yaml", text)
    with pytest.raises(ValueError, match=r"data.yaml: train: ../a does not exist. Tried: ") as error:
        load_data_yaml(file)
    for place in ("elsewhere/a", "here/a", "a"):
        assert f"{here.parent / place}" in str(error.value)
    assert "never run here; fetch the data yourself: touch ran\\nls" in str(error.value)
    assert str(error.value).count(f"{here.parent / 'here/a'}, ") == 1
    assert not list(here.parent.rglob("ran"))


def test_only_what_is_needed_must_exist(here):
    write(here / "data.yaml", "val: b\ntrain: gone\n" + NAMES, "b")
    assert load_data_yaml("data.yaml", needed=("val",)).train == "gone"
    with pytest.raises(ValueError, match="gone does not exist"):
        load_data_yaml("data.yaml")
    with pytest.raises(ValueError, match="the key `test` is missing"):
        load_data_yaml("data.yaml", needed=("val", "test"))


def test_entries_that_are_no_paths(here):
    write(here / "data.yaml", "train: {a: b}\n" + NAMES)
    with pytest.raises(ValueError, match="train must be a path or a list of paths"):
        load_data_yaml("data.yaml")
    write(here / "data.yaml", "val: [[1]]\n" + NAMES)
    with pytest.raises(ValueError, match=r"val must be a path or a list of paths, found \['1'\]"):
        load_data_yaml("data.yaml", needed=("val",))


def test_coco_is_known_by_its_name(here):
    text = SPLITS + NAMES + "annotations: ds/instances.json\n"
    for name, is_coco in (("coco.yaml", True), ("my_coco.yaml", True), ("coco320.yaml", False)):
        write(here / name, text, "ds/images/train", "ds/images/val")
        assert load_data_yaml(name).is_coco == is_coco
    (here / "ds/instances.json").touch()
    assert load_data_yaml("coco.yaml").annotations == "ds/instances.json"


# --- what the classes are called --------------------------------------------------------------------------------------


def classes(here, text, single_cls=False):
    write(here / "data.yaml", SPLITS + text, "ds/images/train", "ds/images/val")
    data = load_data_yaml("data.yaml", single_cls)
    return data.nc, data.names


@pytest.mark.parametrize(
    "text",
    [
        "nc: 2\nnames: [red, green]",
        "names: ['red', \"green\"]",
        "nc: '2'\nnames: {0: red, 1: green}",
        "nc: 2.0\nnames:\n  1: green\n  0: red",
        "names: {'0': red, '1': green}",
    ],
)
def test_spellings_of_the_same_classes(here, text):
    assert classes(here, text) == (2, ["red", "green"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nc: 3\nnames: [red, green]", "nc is 3 but names has 2 entries"),
        ("nc: 1\nnames: {0: red, 1: green}", "nc is 1 but names has 2 entries"),
        ("names: {0: red, 2: green}", r"without gaps; missing: 1"),
        ("names: {1: red, 2: green}", r"run from 0 without gaps; missing: 0"),
        ("names: {red: 0}", "the keys of names must be numbers, found 'red'; write 0: NAME, 1: NAME"),
        ("names: {0.5: red}", r"the keys of names must be numbers, found 0\.5"),
        ("nc: 2", "names must be a list of class names, found None"),
        ("names: red", "names must be a list of class names, found 'red'"),
        ("names: []", "names must be a list"),
        ("nc: two\nnames: [red]", "nc must be a whole number"),
        ("nc: true\nnames: [red]", "nc must be a whole number"),
        ("nc: .nan\nnames: [red]", "nc must be a whole number"),
        ("nc: 0\nnames: [red]", "nc must be a whole number"),
        ("nc: -1\nnames: [red]", "nc must be a whole number"),
        ("nc: '\u00b2'\nnames: [red, green]", "nc must be a whole number"),  # a digit, but no number
        (f"nc: {10**400}\nnames: [red]", r"nc is 1000+\.\.\. but names has 1 entry"),  # more than a float can hold
        ("nc: 0x" + "f" * 5000 + "\nnames: [red]", "nc is a number of more than 4300 digits but"),
        ("names: {0: red, '0': blue, 1: green}", "two keys of names are the same number"),
    ],
)
def test_classes_that_do_not_fit(here, text, message):
    with pytest.raises(ValueError, match="data.yaml: .*" + message):
        classes(here, text)


def test_single_class(here):
    assert classes(here, NAMES, single_cls=True) == (1, ["item"])
    assert classes(here, "nc: 1\nnames: [cell]", single_cls=True) == (1, ["cell"])


ODD_NAMES = [
    "010", "1.10", "12:30", "no", "null", "1e3", ".5", "0x10", "~", "2024-01-05", "=", "<<", "1_0", "+1", ".nan", "0o7",
    "grün", "on", "7",
]  # fmt: skip


def test_names_stay_the_text_of_the_file(here, caplog):
    lists = "".join(f"- {name}\n" for name in ODD_NAMES if name not in ("=", "<<"))
    dicts = "".join(f"    {number}: {name}\n" for number, name in enumerate(ODD_NAMES))
    plain = [name for name in ODD_NAMES if f"- {name}\n" in lists]
    assert classes(here, f"names: [{', '.join(ODD_NAMES)}, 2024-13-45]")[1] == [*ODD_NAMES, "2024-13-45"]
    assert classes(here, f"names: {ODD_NAMES}")[1] == ODD_NAMES  # quoted
    assert classes(here, f"names:\n{dicts}")[1] == ODD_NAMES
    assert classes(here, f"names:\n{lists}")[1] == plain
    assert classes(here, f"old: &n\n{lists}names: *n")[1] == plain
    assert classes(here, f"common: &c\n  names:\n{dicts}<<: *c")[1] == ODD_NAMES
    assert classes(here, "old: &n {0: 010, 1: yes}\nnames: {<<: *n, 2: off}")[1] == ["010", "yes", "off"]
    assert not caplog.messages


def test_names_that_are_no_text_are_said(here, caplog):
    assert classes(here, "names: [a, {b: c}, '']")[1] == ["a", "{'b': 'c'}", ""]
    assert "names[1] is read as {'b': 'c'}; put the name in quotes" in caplog.text
    assert "names[2] is empty; give it a name" in caplog.text


def test_ids_are_decimal_whatever_zeros_they_begin_with(here):
    names = [f"c{n}" for n in range(11)]
    assert classes(here, "names:\n" + "".join(f"  {n:03}: c{n}\n" for n in range(11)))[1] == names
    assert classes(here, "names: {0x0: a, 0b1: b}")[1] == ["a", "b"]


def test_equal_names_are_said(here, caplog):
    classes(here, "names: [car, bus, car, bus]")
    assert "data.yaml: 'car' is the name of the classes 0 and 2 (and 1 more such names)" in caplog.text


@pytest.mark.parametrize("folder", ["0123", "1.10", "2024-01-05", "12:30", "yes", "1e3", "0x10", "null/x", "~x"])
def test_folders_stay_the_text_of_the_file(here, folder):
    for place in ("train", "val"):
        (here / folder / place).mkdir(parents=True)
    write(here / "data.yaml", f"path: {folder}\ntrain: train\nval: [val]\n{NAMES}")
    assert load_data_yaml("data.yaml").train == f"./{folder}/train"
    write(here / "data.yaml", f"train: {folder}\nval: [{folder}, {folder}/val]\ntest: ~\n{NAMES}")
    data = load_data_yaml("data.yaml")
    assert (data.train, data.val, data.test) == (folder, [folder, f"{folder}/val"], None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('train: "C:\\new\\train"', r"C:\\new\\train does not exist.*a backslash inside double quotes.*single quotes"),
        ('train: "C:\\data\\train"', r"data.yaml:1: .*unknown escape character 'd' \(a backslash inside double quotes"),
        ('train: "C:\\Users\\x"', r"data.yaml:1: .*escape sequence of 8.* \(a backslash inside double quotes"),
        ('path: "D:\\torch"\ntrain: x', "odd characters come of a backslash"),
        ("train: |\n  a\n  b", "of several lines: .* a list for several paths"),
    ],
)
def test_backslashes_in_double_quotes(here, text, message):
    write(here / "data.yaml", f"{text}\nval: .\n{NAMES}")
    with pytest.raises(ValueError, match=message):
        load_data_yaml("data.yaml")


def test_keypoints(here):
    def keypoints(line):
        write(here / "data.yaml", f"{line}\n{SPLITS}{NAMES}", "ds/images/train", "ds/images/val")
        return load_data_yaml("data.yaml").keypoints

    assert [keypoints(line) for line in ("", "kpt_shape:", "kpt_shape: []")] == [None] * 3
    assert keypoints("kpt_shape: [17, 3]") == (17, 3)
    assert keypoints("kpt_shape: ['4', 2.0]") == (4, 2)
    for wrong in ("17", "[17]", "[17, 4]", "[0, 2]", "[x, 2]", "{a: 1}", "[1, 2, 3]", "[999999999, 2]"):
        with pytest.raises(ValueError, match=r"data.yaml: kpt_shape must be \[number of keypoints"):
            keypoints(f"kpt_shape: {wrong}")


NAMED = DataConfig(None, None, None, 3, ["car", "bus", "van"], False, None, {})


@pytest.mark.parametrize(
    ("names", "same_data", "said"),
    [
        (["car", "bus", "van"], True, ""),
        (["0", "1", "2"], True, ""),  # a model that was built without names
        (["a", "b"], True, ""),  # another number: the head is a new one
        (None, True, ""),
        (["bus", "car", "van"], False, "w.pt: class 0 is called 'bus' by the model but 'car' by the data yaml, which "
                                       "calls class 1 so (2 of 3 names differ)"),
        (3, True, ""),
        (["car", "van", "cart"], False, "class 1 is called 'van'"),
        (["Car", "bus", "van"], False, ""),  # a model trained further on classes of other names
        (["Car", "bus", "van"], True, "class 0 is called 'Car' by the model but 'car' by the data yaml (1 of 3"),
    ],
)  # fmt: skip
def test_names_of_the_model_and_of_the_data(names, same_data, said, caplog):
    check_same_names(NAMED, names, "w.pt", strict=False, same_data=same_data)
    assert said in caplog.text and bool(said) == bool(caplog.messages)
    if said:
        with pytest.raises(ValueError, match="--strict-data: w.pt: class"):
            check_same_names(NAMED, names, "w.pt", strict=True, same_data=same_data)


def test_a_key_that_stands_twice_is_said(here, caplog):
    text = "nc: 3\nnames:\n  0: red\n  1: blue\n  1: green\nnc: 2\nextra: {<<: {a: 1}, <<: {b: 2}}\n"
    assert classes(here, text) == (2, ["red", "green"])
    lines = ["data.yaml:8: 'nc' stands here once more; the last one counts",
             "data.yaml:7: '1' stands here once more; the last one counts"]  # fmt: skip
    assert caplog.messages == lines


# --- broken files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"train: a\nnames: [red\nval: b\n", r"data.yaml:3: not valid yaml"),
        (b"train: a\n\tval: b\n", r"data.yaml:2: not valid yaml"),
        (b"a: 1\nnames: [caf\xe9]\n", r"data.yaml:2: not valid yaml: .*; save the file as UTF-8 text"),
        (b"a: !!python/object/apply:os.system ['touch ran']\n", r"data.yaml:1: not valid yaml"),
        (b"nc: !!float x\n", "data.yaml:1: not valid yaml: could not convert string to float: 'x'"),
        (b"nc: 2024-99-99\n", "data.yaml:1: not valid yaml: month must be in 1..12"),
        (b"names: " + b"[" * 201, "data.yaml:1: not valid yaml: brackets nested too deeply"),
        (b"names: &a [*a]\n", "data.yaml: more than 200000 entries once its .aliases are written out"),
        (b"", "expected `key: value` lines, found nothing, the file is empty"),
        (b"- a\n- b\n", "found list"),
    ],
)
def test_broken_files(here, content, message):
    (here / "data.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_data_yaml("data.yaml")
    assert not (here / "ran").exists()


def test_without_libyaml_the_same_is_read(monkeypatch):
    path = files.PROJECT_ROOT / "cfg/training/yolov7-tiny.yaml"
    fast = read_yaml(path)
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    assert read_yaml(path) == fast


def test_files_that_are_not_there(here):
    with pytest.raises(ValueError, match="none.yaml: cannot be read"):
        load_data_yaml("none.yaml")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_byte_order_marks(here, encoding):
    write(here / "data.yaml", "", "ds/images/train", "ds/images/val")
    (here / "data.yaml").write_bytes((SPLITS + "names: [grün]\r\n").encode(encoding))
    assert load_data_yaml("data.yaml").names == ["grün"]


# --- what is shipped --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COCO_YAMLS)
def test_shipped_coco_yamls(name):
    path = files.PROJECT_ROOT / f"data/{name}.yaml"
    data, content = load_data_yaml(path, needed=()), yaml.safe_load(path.read_text())
    assert data.nc == len(set(data.names)) == 80
    assert (data.names[0], data.names[79]) == ("person", "toothbrush")
    assert data.is_coco == (name == "coco")
    if name != "coco":
        assert content["train"] == f"./{name}/images/train2017"
        assert content["val"] == f"./{name}/images/val2017"


SCHEDULE_AND_LOSS = {
    "lr0": 0.01, "momentum": 0.937, "weight_decay": 0.0005, "warmup_epochs": 3.0, "warmup_momentum": 0.8,
    "warmup_bias_lr": 0.1, "box": 0.05, "cls_pw": 1.0, "obj_pw": 1.0, "iou_t": 0.2, "anchor_t": 4.0, "fl_gamma": 0.0,
}  # fmt: skip
FIXED_AUGMENTATION = {
    "hsv_h": 0.015, "hsv_s": 0.7, "hsv_v": 0.4, "degrees": 0.0, "shear": 0.0, "perspective": 0.0, "flipud": 0.0,
    "fliplr": 0.5, "mosaic": 1.0, "copy_paste": 0.0,
}  # fmt: skip
VARYING = ("lrf", "cls", "obj", "translate", "scale", "mixup", "paste_in", "loss_ota")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("p5", (0.1, 0.3, 0.7, 0.2, 0.9, 0.15, 0.15, 1)),
        ("p6", (0.2, 0.3, 0.7, 0.2, 0.9, 0.15, 0.15, 1)),
        ("tiny", (0.01, 0.5, 1.0, 0.1, 0.5, 0.05, 0.05, 1)),
        ("tiny.noota", (0.01, 0.5, 1.0, 0.1, 0.5, 0.05, 0.05, 0)),
        ("custom", (0.1, 0.3, 0.7, 0.2, 0.5, 0.0, 0.0, 1)),
    ],
)
def test_shipped_hyper_parameters(name, values):
    text = (files.PROJECT_ROOT / f"data/hyp.scratch.{name}.yaml").read_text(encoding="utf-8")
    hyp = yaml.safe_load(text)
    assert hyp == SCHEDULE_AND_LOSS | FIXED_AUGMENTATION | dict(zip(VARYING, values, strict=True))
    assert list(hyp)[:2] == ["lr0", "lrf"]
    assert list(hyp)[-2:] == ["paste_in", "loss_ota"]
