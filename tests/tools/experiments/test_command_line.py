"""Command lines: words of train.py that are checked and replaced; how a tool reads its own and ends."""

import argparse
import signal

import pytest

from tools.experiments import command_line
from utils.config.options import train_parser
from utils.system import signals


@pytest.mark.parametrize(
    ("base", "overrides", "expected"),
    [
        ("--epochs 3 --adam", {"epochs": 5}, "--epochs 5 --adam"),
        ("--epochs 3 --adam", {"adam": False, "img_size": [64, 96]}, "--epochs 3 --img-size 64 96"),
        ("--img 64", {"batch-size": 2, "rect": True, "seed": None}, "--img-size 64 --batch-size 2 --rect"),
        ("--seed 1", {"seed": None}, ""),
    ],
)
def test_override(base, overrides, expected):
    assert command_line.override(base.split(), overrides) == expected.split()


def test_override_keeps_every_option(tmp_path):
    line = ["--weights", "", "--freeze", "3", "--cache-images", "--hyp", "a b.yaml", "--fast-dataloader"]
    again = command_line.override(line, {})
    assert vars(train_parser().parse_args(again)) == vars(train_parser().parse_args(line))


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="no option 'bach_size'; did you mean batch_size?"):
        command_line.override([], {"bach_size": 3})
    with pytest.raises(ValueError, match="--base-args: train.py does not understand this: .*--nonsense"):
        command_line.check_arguments(["--nonsense", "3"], "--base-args")
    with pytest.raises(ValueError, match="invalid int value"):
        command_line.check_arguments(["--epochs", "x"], "--base-args")


def test_words_come_from_text_and_a_fault_names_its_option():
    assert command_line.train_words("--hyp 'a b.yaml' --adam", "--args") == ["--hyp", "a b.yaml", "--adam"]
    for text, fault in (('"x', "No closing quotation"), ("--nonsense", "does not understand this: .*--nonsense")):
        with pytest.raises(ValueError, match=f"--args.*{fault}"):
            command_line.train_words(text, "--args")


def test_a_value_that_looks_like_a_flag_is_a_value():
    parser = argparse.ArgumentParser()
    parser.add_argument("--args")
    parser.add_argument("--out")
    options = command_line.parse(parser, ["--args", "--adam", "--out", "x"], ("--args",))
    assert (options.args, options.out) == ("--adam", "x")
    assert command_line.parse(parser, ["--args=--adam"], ("--args",)).args == "--adam"


@pytest.mark.parametrize(
    ("outcome", "code", "says"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (None, None, ""),
        (ValueError("x is wrong"), 2, "error: x is wrong\n"),
        (IsADirectoryError(21, "Is a directory", "a.json"), 2, "error: a.json: Is a directory\n"),
        (KeyboardInterrupt(), 130, "interrupted; go on\n"),
        (signals.Terminated(), 143, "ended by SIGTERM; go on\n"),
    ],
)
def test_how_a_tool_ends(outcome, code, says, capsys):
    def main(options):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            command_line.run_tool(main, None, go_on="go on")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert end.value.code == code and capsys.readouterr().err == says
