"""Overrides: what trials.json and a space may say, and the sentence about what they may not."""

import re

import pytest
import yaml

from tools.experiments import overrides
from tools.experiments.overrides import Budget, override_value, trial_options
from utils.config.options import train_parser

CFG = "cfg/training/yolov7-tiny.yaml"


@pytest.fixture
def base(tmp_path):
    (tmp_path / "hyp.yaml").write_text("lr0: 0.1\nbox: 0.05\n")
    return ["--cfg", CFG, "--hyp", str(tmp_path / "hyp.yaml"), "--epochs", "9", "--adam"]


def test_command_line_of_a_trial(base, tmp_path):
    line = overrides.trial_arguments(
        base, {"hyp.lr0": 0.5, "adam": False, "batch_size": 4}, Budget(5, None, 320), tmp_path
    )
    hyp = tmp_path / "trial_hyp.yaml"
    assert line == ["--cfg", CFG, "--hyp", str(hyp), "--epochs", "5", "--img-size", "320", "320", "--batch-size", "4"]
    assert yaml.safe_load(hyp.read_text()) == {"lr0": 0.5, "box": 0.05}


def test_a_budget_as_options():
    assert Budget(5, 100, 320).overrides() == {"epochs": 5, "subset_size": 100, "img_size": [320, 320]}
    assert Budget().overrides() == {}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("epochs", "2", 2), ("epochs", 2, 2), ("label_smoothing", "1e-3", 0.001), ("img_size", 96, [96]),
        ("img_size", ["96", 64], [96, 64]), ("freeze", "3-5", [3, 4, 5]), ("freeze", ["1", "3-5", 9], [1, 3, 4, 5, 9]),
        ("adam", False, False), ("device", 0, "0"), ("seed", None, None), ("cache_images", True, True),
        ("cache_images", "disk", "disk"), ("amp", None, None), ("weights", "", ""), ("hyp.lr0", "1e-3", 0.001),
        ("hyp.loss_ota", 1, 1),
    ],
)  # fmt: skip
def test_values(name, value, expected):
    found = override_value(name, value, "x")
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("epochs", "two", "has to be a number, not 'two'"),
        ("epochs", [1, 2], r"has to be a number, not \[1, 2\]"),
        ("epochs", 0, "0 is too small: it has to be at least 1"),
        ("label_smoothing", "inf", "inf is too large"),
        ("img_size", [], "has to be a list such as"),
        ("img_size", "96 96", "has to be a number, not '96 96'"),
        ("freeze", "5-3", "has to be a number, not '5-3'"),
        ("adam", "false", "has to be true or false, not 'false'"),
        ("device", True, "has to be text"),
        ("hyp.lr0", [0.1], "has to be a number"),
        ("hyp.loss_ota", 0.5, "0.5 is not usable"),
    ],
)
def test_values_of_another_kind_or_out_of_range(name, value, message):
    with pytest.raises(ValueError, match=f"^t.json, trial 3.*{message}"):
        override_value(name, value, f"t.json, trial 3: {name}")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"resize_schedule": "0:64,9:96"}, "9:96 is never reached in 9 epochs"),
        ({"resize_schedule": "0:64,4:96", "epochs": "4"}, "4:96 is never reached in 4 epochs"),
        ({"resize_schedule": "x"}, "is not understood"),
        ({"patience": 3, "notest": True}, "--patience needs validations"),
        ({"overfit": True, "quad": True}, "--overfit trains the same images"),
        ({"data": "none.yaml"}, "none.yaml does not exist"),
        ({"weights": "none.pt"}, "--weights none.pt does not exist"),
        ({"img_size": [1, 2, 3]}, "one or two positive numbers"),
        ({"cfg": ""}, "give --cfg .* or --weights"),
        ({"device": "gpu"}, "--device 'gpu' is unknown"),
    ],
)
def test_values_that_do_not_agree(params, message, base):
    with pytest.raises(ValueError, match=f"^trial 1: .*{message}"):
        trial_options(base, params, Budget(), "trial 1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "is no JSON"),
        ("{}", "has to be a list of overrides"),
        ("[]", "has to be a list of overrides"),
        ('[{"adam": true}, null]', "has to be a list of overrides"),
        ('[{"hyp.lr": 1}]', "trial 0: nothing called 'hyp.lr' can be set; did you mean hyp.lr"),
        ('[{}, {"name": "x"}]', "trial 1: nothing called 'name' can be set"),
        ('[{"evolve": 1}]', "trial 0: nothing called 'evolve' can be set"),
    ],
)
def test_trials_files_that_make_no_sense(tmp_path, text, message):
    path = tmp_path / "trials.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"trials.json.*{message}"):
        overrides.read_trials(path)


def test_a_space(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("hyp.lr0: {low: 1e-4, high: 0.1, log: true}\nbatch_size: {choices: [16, 32]}\n"
                    "epochs: {low: 2, high: 8, step: 2}\nhyp.momentum: {low: 0.0, high: 1}\n")  # fmt: skip
    assert overrides.read_space(path) == {
        "hyp.lr0": {"low": 1e-4, "high": 0.1, "log": True, "step": None},
        "batch_size": {"choices": [16, 32]},
        "epochs": {"low": 2, "high": 8, "log": False, "step": 2},
        "hyp.momentum": {"low": 0.0, "high": 1, "log": False, "step": None},
    }


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("3", "needs either choices"),
        ("{low: 1}", "needs either"),
        ("{low: 2, high: 1}", "low has to be below high"),
        ("{low: 0, high: 1, log: true}", "above 0 with log"),
        ("{low: x, high: 1}", "needs either .*; low is no number"),
        ("{low: true, high: 1}", "needs either"),
        ("{low: 0.1, high: 1, steps: 2}", "needs either"),
        ("{choices: [0.1], low: 0}", "needs either"),
        ("{choices: []}", "choices needs a list of values"),
        ("{choices: 0.1}", "choices needs a list of values, not 0.1"),
        ("{choices: [0.1, big]}", "choices has to be a number, not 'big'"),
        ("{choices: [0.1, -1]}", "choices -1 is too small"),
        ("{low: -1, high: 1}", "low -1 is too small"),
        ("{low: 0.1, high: .inf}", "high inf is too large"),
        ("{low: .nan, high: 1}", "low nan is not usable"),
        ("{low: 0.1, high: 1, step: 0}", "step has to be a number above 0, not 0"),
        ("{low: 0.1, high: 1, step: .nan}", "step has to be a number above 0"),
        ("{low: 0.1, high: 1, log: 'yes'}", "log has to be true or false, not 'yes'"),
    ],
)
def test_spaces_that_make_no_sense(tmp_path, entry, message):
    path = tmp_path / "space.yaml"
    path.write_text(f"hyp.lr0: {entry}\n")
    with pytest.raises(ValueError, match=f"space.yaml: hyp.lr0.*{message}"):
        overrides.read_space(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("adam: {low: 0, high: 1}", "adam is no single number; give choices"),
        ("img_size: {low: 96, high: 128}", "img_size is no single number"),
        ("epochs: {low: 1.5, high: 3}", "low has to be a whole number, not 1.5"),
        ("epochs: {low: 0, high: 3}", "low 0 is too small"),
        ("amp: {choices: [fp16, fp8]}", "has to be one of"),
        ("project: {choices: [a]}", "nothing called 'project' can be set"),
        ("- epochs", "expected `key: value` lines"),
    ],
)
def test_dimensions_of_options(tmp_path, line, message):
    path = tmp_path / "space.yaml"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=f"space.yaml.*{message}"):
        overrides.read_space(path)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"data": "--adam"}, "--adam does not exist"),
        ({"device": "-x"}, "--device '-x' is unknown"),
        ({"weights": "-1.pt"}, "--weights -1.pt does not exist"),
        ({"data": "x" * 300}, "'"),
    ],
)
def test_text_that_looks_like_an_option_or_is_too_long_costs_one_trial(override, said):
    with pytest.raises(ValueError, match=f"^trial 3: {re.escape(said)}"):
        trial_options(["--cfg", CFG], override, Budget(), "trial 3")
    words, _ = trial_options(["--cfg", CFG], {"entity": "--adam"}, Budget())
    assert not train_parser().parse_args(words).adam and train_parser().parse_args(words).entity == "--adam"
