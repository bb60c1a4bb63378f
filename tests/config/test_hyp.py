"""Hyper-parameter files: defaults, warnings, and the scaling of the loss gains."""

import logging
from pathlib import Path

import pytest
import yaml

from utils.config.hyp import DEFAULTS, HYPER_PARAMETERS, load_hyp, save_hyp, scale_hyp

DATA = Path(__file__).resolve().parents[2] / "data"
AUGMENTATIONS = {"hsv_h", "hsv_s", "hsv_v", "degrees", "translate", "scale", "shear", "perspective", "flipud", "fliplr",
                 "mosaic", "mixup", "copy_paste", "paste_in"}  # fmt: skip


def write(folder, text):
    path = folder / "hyp.yaml"
    path.write_text(text)
    return path


def complete(**changes):
    return yaml.safe_dump(DEFAULTS | changes, sort_keys=False)


def test_complete_file_is_taken_as_it_is(tmp_path, caplog):
    path = write(tmp_path, complete(lr0=0.02, anchors=4, warmup_min_iters=50))
    hyp = load_hyp(path)
    assert hyp == DEFAULTS | {"lr0": 0.02, "anchors": 4, "warmup_min_iters": 50}
    assert list(hyp)[:3] == ["lr0", "lrf", "momentum"] and not caplog.records
    save_hyp(hyp, tmp_path / "again.yaml")
    assert load_hyp(tmp_path / "again.yaml") == hyp and list(load_hyp(tmp_path / "again.yaml")) == list(hyp)


def test_missing_keys_take_defaults_named_in_one_warning(tmp_path, caplog):
    text = "".join(f"{key}: {value}\n" for key, value in DEFAULTS.items() if key not in ("paste_in", "lrf", "loss_ota"))
    hyp = load_hyp(write(tmp_path, text))
    assert hyp == DEFAULTS
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    message = caplog.records[0].getMessage()
    assert "hyp.yaml lacks lrf, paste_in, loss_ota" in message and message.endswith(
        "used: lrf: 0.1, paste_in: 0, loss_ota: 1"
    )


def test_unknown_keys_are_kept_and_named(tmp_path, caplog):
    hyp = load_hyp(write(tmp_path, complete() + "kobj: 2\nnote: from yolov5\n"))
    assert hyp["kobj"] == 2 and hyp["note"] == "from yolov5"
    assert len(caplog.records) == 1 and "hyp.yaml has keys that nothing here reads: kobj, note" in caplog.text


def test_another_yaml_is_no_file_of_hyper_parameters(tmp_path):
    """A data yaml in its place would be trained with nothing but defaults."""
    with pytest.raises(ValueError, match=r"hyp.yaml has none of the hyper-parameters .* but train, nc"):
        load_hyp(write(tmp_path, "train: images/train\nnc: 2\n"))
    assert load_hyp(write(tmp_path, "{}")) == DEFAULTS


def test_defaults_are_those_of_the_p5_file_without_augmentation():
    p5 = yaml.safe_load((DATA / "hyp.scratch.p5.yaml").read_text())
    assert {key: value for key, value in DEFAULTS.items() if key not in AUGMENTATIONS} == {
        key: value for key, value in p5.items() if key not in AUGMENTATIONS
    }
    assert all(DEFAULTS[key] == 0 for key in AUGMENTATIONS) and set(p5) == set(DEFAULTS)
    assert {name for name, row in HYPER_PARAMETERS.items() if row.default is None} == {"anchors", "warmup_min_iters"}


def test_rows():
    assert {name for name, row in HYPER_PARAMETERS.items() if row.is_augmentation} == AUGMENTATIONS
    not_searched = {name for name, row in HYPER_PARAMETERS.items() if row.mutation is None}
    assert not_searched == {"loss_ota", "warmup_min_iters"} and all(row.meaning for row in HYPER_PARAMETERS.values())
    for name, row in HYPER_PARAMETERS.items():
        values = [row.default, *(row.mutation or ())[1:]]
        assert all(row.range.holds(value) for value in values if value is not None), name


@pytest.mark.parametrize("path", sorted(DATA.glob("hyp*.yaml")), ids=lambda path: path.name)
def test_shipped_files_are_complete(path, caplog):
    assert set(DEFAULTS) <= set(load_hyp(path)) and not caplog.records


@pytest.mark.parametrize(("text", "value"), [("1e-3", 0.001), ("'0.5'", 0.5), ("1E+1", 10.0), ("3", 3)])
def test_numbers_that_yaml_reads_as_text(text, value, tmp_path):
    hyp = load_hyp(write(tmp_path, complete().replace("lr0: 0.01", f"lr0: {text}")))
    assert hyp["lr0"] == value and isinstance(hyp["lr0"], (int, float))


@pytest.mark.parametrize("text", ["fast", "", "[0.1]", "true", "{a: 1}", ".nan", "inf", "1,5"])
def test_what_is_no_number_is_refused(text, tmp_path):
    with pytest.raises(ValueError, match="hyp.yaml: lr0 has to be a number, not"):
        load_hyp(write(tmp_path, complete().replace("lr0: 0.01", f"lr0: {text}")))


@pytest.mark.parametrize(
    ("line", "message"),
    [("lr0: 0", "lr0 0 is too small: it has to be above 0"), ("mosaic: 1.5", "mosaic 1.5 is too large: .* at most 1"),
     ("fliplr: -1e-3", "fliplr -0.001 is too small"), ("momentum: 1", "momentum 1 is too large: .* below 1"),
     ("anchors: 0", "anchors 0 is too small"), ("loss_ota: 2", "loss_ota 2 is too large"),
     ("lr0: 1" + "0" * 400, "lr0 has to be a number, not 10*[.]{3}$")],
)  # fmt: skip
def test_what_is_out_of_range_is_refused(line, message, tmp_path):
    with pytest.raises(ValueError, match=f"hyp.yaml: {message}"):
        load_hyp(write(tmp_path, f"{complete()}\n{line}\n"))


def test_what_is_no_mapping_is_refused(tmp_path):
    with pytest.raises(ValueError, match="hyp.yaml"):
        load_hyp(write(tmp_path, "- 1\n- 2\n"))


def test_scaling_by_hand():
    hyp = {"box": 0.05, "cls": 0.3, "obj": 0.7, "lr0": 0.01}
    assert scale_hyp(hyp, 3, 80, 640) == hyp | {"label_smoothing": 0.0}, "the reference point"
    scaled = scale_hyp(hyp, num_layers=4, num_classes=20, image_size=320, label_smoothing=0.1)
    assert scaled["box"] == pytest.approx(0.05 * 0.75)
    assert scaled["cls"] == pytest.approx(0.3 * 0.25 * 0.75)
    assert scaled["obj"] == pytest.approx(0.7 * 0.25 * 0.75)
    assert scaled["label_smoothing"] == 0.1 and scaled["lr0"] == 0.01
    assert hyp == {"box": 0.05, "cls": 0.3, "obj": 0.7, "lr0": 0.01}, "the given dict is not changed"
