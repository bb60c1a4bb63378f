"""The rows of all flags: what they say is what the parser, the checks, opt.yaml and docs/flags.md have."""

import argparse

import pytest

from tools.make_docs import flags_page
from utils.config.flags import FORK_FLAGS, MACHINE, STAYS, TRAIN_FLAGS, Flag
from utils.config.limits import at_least
from utils.config.options import (
    check_train_options,
    detect_parser,
    export_parser,
    read_options,
    save_options,
    train_parser,
)
from utils.config.options import test_parser as score_parser
from utils.system.files import PROJECT_ROOT


def parsed(line):
    return train_parser().parse_args(["--cfg", "c.yaml", *line.split()])


def test_a_row_is_all_that_a_new_flag_needs(tmp_path, monkeypatch, capsys):
    """See tests/run/test_folder.py for --resume."""
    row = Flag("--new-flag --new_flag", "a help", 2, int, at_least(1), STAYS, group="what is written", metavar="N")
    monkeypatch.setitem(TRAIN_FLAGS, row.dest, row)
    assert parsed("").new_flag == 2 and parsed("--new-flag 3").new_flag == parsed("--new_fl 3").new_flag == 3
    with pytest.raises(SystemExit):
        parsed("--help")
    assert "--new-flag N, --new_flag N" in capsys.readouterr().out
    with pytest.raises(ValueError, match="^--new-flag 0 is too small: it has to be at least 1$"):
        check_train_options(parsed("--new-flag 0"))
    save_options(parsed("--new-flag 3"), tmp_path / "opt.yaml")
    assert read_options(tmp_path / "opt.yaml")[0].new_flag == 3
    (tmp_path / "opt.yaml").write_text("new_flag: many")
    with pytest.raises(ValueError, match="new_flag has to be a number, not 'many'"):
        read_options(tmp_path / "opt.yaml")[0]
    assert "| `--new-flag`, `--new_flag` `N` | `2` | a help | taken, and kept |" in flags_page().splitlines()


def test_what_only_changes_speed_can_be_turned_off():
    switches = [flag for flag in TRAIN_FLAGS.values() if flag.default is False and flag.resume == MACHINE]
    assert {flag.dest for flag in switches} == {
        "cache_images", "fast_dataloader", "persistent_workers", "worker_tensor", "fast_loss", "fast_step",
        "cuda_graph", "fast", "fast_val",
    }  # fmt: skip
    for flag in switches:
        off = flag.name.replace("--", "--no-", 1)
        assert getattr(parsed(flag.name), flag.dest) is True and getattr(parsed(off), flag.dest) is False
        assert getattr(parsed(f"{flag.name} {off}"), flag.dest) is False, "the last one counts"
    with pytest.raises(SystemExit):
        parsed("--no-adam")


def test_negative_forms_take_no_abbreviation_away():
    opt = parsed("--not --nos --noa --fast-l --fast-d")
    assert opt.notest and opt.nosave and opt.noautoanchor and opt.fast_loss and opt.fast_dataloader and not opt.fast


def test_the_words_of_tutorials_for_detect_py():
    """Stock's flags, and the abbreviations in use, mean what they mean there."""
    defaults = detect_parser().parse_args([])
    assert vars(defaults).items() >= {
        "weights": ["yolov7.pt"], "source": ["inference/images"], "img_size": 640, "conf_thres": 0.25,
        "iou_thres": 0.45, "device": "", "classes": None, "project": "runs/detect", "name": "exp", "half": None,
    }.items()  # fmt: skip
    line = ("--weights a.pt b.pt --source x --img 320 --conf 0.4 --iou 0.5 --device 0 --view --save-txt --save-conf "
            "--nosave --class 0 2 --agnostic --aug --update --project p --name n --exist --no-half")  # fmt: skip
    opt = detect_parser().parse_args(line.split())
    assert (opt.weights, opt.img_size, opt.conf_thres, opt.iou_thres) == (["a.pt", "b.pt"], 320, 0.4, 0.5)
    assert opt.classes == [0, 2] and opt.half is False and opt.view_img and opt.agnostic_nms and opt.exist_ok
    assert detect_parser().parse_args(["--half"]).half is True


def test_opt_in_paths_have_a_stage_of_the_approval():
    assert {flag.stage for flag in TRAIN_FLAGS.values()} == {None, 2, 3, 4, 6}
    assert all(flag.default in (False, 0, None) for flag in TRAIN_FLAGS.values() if flag.stage), "off by default"


@pytest.mark.parametrize("parser", [train_parser, detect_parser, score_parser, export_parser])
def test_help_says_default_and_unit_of_every_flag(parser, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert not [line for line in text.splitlines() if line.endswith("-")], "flags stay in one piece"
    for action in parser()._actions[1:]:
        if action.help == argparse.SUPPRESS:
            continue
        assert action.help, action.dest
        takes_value = action.nargs != 0
        assert not takes_value or action.metavar or action.choices, f"{action.dest} has no unit"
        entry = " ".join(text.split(f"  {action.option_strings[0]}", 1)[1].split("\n  --")[0].split())
        default = " ".join(map(str, action.default)) if isinstance(action.default, list) else str(action.default)
        if takes_value and action.default not in (None, "", False):
            assert f"[{default}]" in entry or "default:" in entry, action.dest


def test_flags_of_the_fork_say_what_to_do_instead(capsys):
    for flag in FORK_FLAGS:
        with pytest.raises(SystemExit) as caught:
            train_parser().parse_args(["--cfg", "c.yaml", flag, "x"])
        said = capsys.readouterr().err.strip().splitlines()
        assert caught.value.code == 2 and said[-1].startswith(f"train.py: error: {flag} is ") and len(said) == 2
    with pytest.raises(SystemExit):
        train_parser().parse_args(["--nonsense"])
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err
    page = (PROJECT_ROOT / "docs/differences-from-stock.md").read_text()
    assert [flag for flag in FORK_FLAGS if f"`{flag}`" not in page] == []
