"""Command lines: every stock flag with type and default, prefixes, checks, and opt.yaml in and out."""

import datetime
import logging
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from utils.config.flags import TEST_FLAGS, TRAIN_FLAGS
from utils.config.options import (
    check_img_size,
    check_train_options,
    explicit_options,
    read_options,
    save_options,
    test_parser,
    train_parser,
    warn_about_idle_options,
)

test_parser.__test__ = False  # pytest would take the function for a test

# flag: (arguments for it, value after parsing them, default)
TRAIN = {
    "--weights": (["a.pt"], "a.pt", ""),  # stock names a file that does not exist
    "--cfg": (["c.yaml"], "c.yaml", ""),
    "--data": (["d.yaml"], "d.yaml", "data/coco.yaml"),
    "--hyp": (["h.yaml"], "h.yaml", "data/hyp.scratch.p5.yaml"),
    "--epochs": (["3"], 3, 300),
    "--batch-size": (["8"], 8, 16),
    "--test-batch-size": (["4"], 4, None),
    "--img-size": (["320", "640"], [320, 640], [640, 640]),
    "--rect": ([], True, False),
    "--resume": ([], True, False),
    "--nosave": ([], True, False),
    "--notest": ([], True, False),
    "--noautoanchor": ([], True, False),
    "--evolve": ([], 300, 0),
    "--bucket": (["b"], "b", ""),
    "--cache-images": ([], True, False),  # or ram, disk, gpu
    "--image-weights": ([], True, False),
    "--device": (["0,1"], "0,1", ""),
    "--multi-scale": ([], True, False),
    "--single-cls": ([], True, False),
    "--adam": ([], True, False),
    "--sync-bn": ([], True, False),
    "--local_rank": (["1"], 1, -1),
    "--workers": (["2"], 2, 8),
    "--project": (["p"], "p", "runs/train"),
    "--entity": (["e"], "e", None),
    "--name": (["n"], "n", "exp"),
    "--exist-ok": ([], True, False),
    "--quad": ([], True, False),
    "--linear-lr": ([], True, False),
    "--label-smoothing": (["0.1"], 0.1, 0.0),
    "--upload_dataset": ([], True, False),
    "--bbox_interval": (["2"], 2, -1),
    "--save_period": (["5"], 5, -1),
    "--artifact_alias": (["a"], "a", "latest"),
    "--freeze": (["0", "1", "3"], [0, 1, 3], [0]),
    "--v5-metric": ([], True, False),
}
TEST = {
    "--weights": (["a.pt", "b.pt"], ["a.pt", "b.pt"], ["yolov7.pt"]),
    "--data": (["d.yaml"], "d.yaml", "data/coco.yaml"),
    "--batch-size": (["8"], 8, 32),
    "--img-size": (["320"], 320, 640),
    "--conf-thres": (["0.1"], 0.1, 0.001),
    "--iou-thres": (["0.5"], 0.5, 0.65),
    "--task": (["study"], "study", "val"),
    "--device": (["cpu"], "cpu", ""),
    "--single-cls": ([], True, False),
    "--augment": ([], True, False),
    "--verbose": ([], True, False),
    "--save-txt": ([], True, False),
    "--save-hybrid": ([], True, False),
    "--save-conf": ([], True, False),
    "--save-json": ([], True, False),
    "--save-per-class-ap": (["f.json"], "f.json", None),
    "--project": (["p"], "p", "runs/test"),
    "--name": (["n"], "n", "exp"),
    "--exist-ok": ([], True, False),
    "--no-trace": ([], True, False),
    "--one-class-score": ([], True, False),
    "--v5-metric": ([], True, False),
}


def destination(flag):
    return flag.lstrip("-").replace("-", "_")


@pytest.mark.parametrize(("make_parser", "table"), [(train_parser, TRAIN), (test_parser, TEST)], ids=["train", "test"])
def test_stock_flags_keep_type_and_default(make_parser, table):
    defaults = vars(make_parser().parse_args([]))
    for flag, (arguments, expected, default) in table.items():
        assert defaults[destination(flag)] == default, flag
        value = getattr(make_parser().parse_args([flag, *arguments]), destination(flag))
        assert value == expected and type(value) is type(expected), flag


def test_our_flags_are_off_by_default():
    ours = {name: flag for name, flag in TRAIN_FLAGS.items() if name not in map(destination, TRAIN)}
    numbers = {name: flag.default for name, flag in ours.items() if flag.default}
    assert numbers == {"loader_timeout": 300, "sync_interval": 10} and len(ours) > 20
    assert TEST_FLAGS.keys() - set(map(destination, TEST)) == {"strict_data"}


def test_options_are_in_the_order_of_the_rows():
    assert list(vars(train_parser().parse_args([]))) == list(TRAIN_FLAGS)
    assert list(vars(test_parser().parse_args([]))) == list(TEST_FLAGS)


def test_prefixes_and_spellings():
    line = "--img 320 --batch 4 --cache --multi --label 0.1 --local-rank 2"
    opt = train_parser().parse_args(line.split())
    assert (opt.img_size, opt.batch_size, opt.cache_images, opt.multi_scale) == ([320], 4, True, True)
    assert (opt.label_smoothing, opt.local_rank) == (0.1, 2)
    assert train_parser().parse_args(["--local_rank=3"]).local_rank == 3
    assert train_parser().parse_args(["--save-period", "3"]).save_period == 3
    line = "--img 320 --batch 4 --conf 0.2 --iou 0.3 --save-per f"
    opt = test_parser().parse_args(line.split())
    assert (opt.img_size, opt.batch_size, opt.conf_thres, opt.iou_thres) == (320, 4, 0.2, 0.3)


def test_optional_values():
    assert train_parser().parse_args(["--resume", "a/last.pt"]).resume == "a/last.pt"
    assert train_parser().parse_args(["--evolve", "5"]).evolve == 5
    assert train_parser().parse_args(["--freeze", "11"]).freeze == [11]


def test_freeze_takes_ranges(capsys):
    assert train_parser().parse_args(["--freeze", "3-5", "9"]).freeze == [3, 4, 5, 9]
    for wrong in ("5-3", "3-3", "a", "3-"):
        with pytest.raises(SystemExit):
            train_parser().parse_args(["--freeze", wrong])
        assert f"'{wrong}' is neither a layer number nor a range such as 29-76" in capsys.readouterr().err


def test_transfer_needs_a_checkpoint():
    with pytest.raises(ValueError, match="--transfer-weights takes backbone and neck from --weights"):
        check_train_options(train_parser().parse_args(["--cfg", "c.yaml", "--transfer-weights"]))


@pytest.mark.parametrize("line", ["--epochs many", "--unknown-flag", "--img-size", "--local_rank x"])
def test_wrong_lines_end_with_status_2(line, capsys):
    with pytest.raises(SystemExit) as caught:
        train_parser().parse_args(line.split())
    assert caught.value.code == 2 and line.split()[0] in capsys.readouterr().err


def test_explicit_options(monkeypatch):
    line = ["--epochs", "300", "--resume", "--local-rank", "1"]
    typed = {"epochs": 300, "resume": True, "local_rank": 1}
    assert explicit_options(train_parser(), line) == typed, "a typed default counts as typed"
    assert explicit_options(train_parser(), []) == {}
    monkeypatch.setattr("sys.argv", ["train.py", "--device", "cpu", "--words", "of", "-q", "another program"])
    assert explicit_options(train_parser()) == {"device": "cpu"}


# ---- checks ---------------------------------------------------------------------------------------------------------


def parsed(line):
    return train_parser().parse_args(["--cfg", "c.yaml", *line.split()])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--cfg=", "give --cfg .* or --weights"),
        ("--epochs 0", "--epochs 0 is too small: it has to be at least 1"),
        ("--batch-size -2", "--batch-size -2 is too small"),
        ("--batch-size 0", "--batch-size 0 is too small: it has to be at least 1"),
        ("--batch-size -1 --device 0,1", "-1, what fits, is for one GPU a process"),
        ("--workers -2", "--workers -2 is too small: it has to be at least 0"),
        ("--test-batch-size 0", "--test-batch-size 0 is too small"),
        ("--img 0", "--img-size .* one or two positive"),
        ("--img 320 320 320", "--img-size .* one or two positive"),
        ("--label-smoothing 1", "--label-smoothing 1.0"),
        ("--patience 3 --notest", "--patience needs validations"),
        ("--overfit --multi-scale --quad", "--overfit trains the same images .* drop --multi-scale --quad"),
        ("--overfit --resize-schedule 0:64", "--overfit has one image size"),
        ("--cache-images gpu", "--cache-images gpu needs --worker-tensor and --fast-step; give both, or --fast"),
        ("--cache-images gpu --fast-dataloader", "--cache-images gpu needs"),
        ("--cache-images gpu --cuda-graph", "--cache-images gpu needs"),
        ("--resize-schedule 64", "--resize-schedule '64' is not understood; write it like"),
    ],
)
def test_values_that_no_run_could_use(line, message):
    with pytest.raises(ValueError, match=message):
        check_train_options(parsed(line))


@pytest.mark.parametrize(("line", "sizes"), [("", [640, 640]), ("--img 320", [320, 320]), ("--img 64 96", [64, 96])])
def test_image_sizes_become_two(line, sizes):
    opt = parsed(line)
    check_train_options(opt)
    assert opt.img_size == sizes


def test_a_seed_without_a_subset(caplog):
    check_train_options(parsed("--data a --cfg b --subset-size 5 --subset-seed 3"))
    assert not caplog.records
    check_train_options(parsed("--data a --cfg b --subset-seed 3"))
    assert caplog.messages == ["--subset-seed 3 has no effect without --subset-size"]


def test_resize_schedule_decides_the_size(caplog):
    for line, words in (("", ""), ("--img 96", ""), ("--img 64 128", "validation has its last size, 96")):
        caplog.clear()
        opt = parsed(f"--resize-schedule 0:64,2:96 {line}")
        check_train_options(opt)
        assert opt.img_size == [96, 96] and (words in caplog.text if words else not caplog.records)


@pytest.mark.parametrize("flags", ["--fast", "--worker-tensor --fast-step", "--fast-dataloader --cuda-graph"])
def test_images_beside_the_model_have_what_they_need(flags):
    check_train_options(parsed(f"--cache-images gpu {flags}"))


def test_weights_alone_are_enough():
    check_train_options(train_parser().parse_args(["--weights", "a.pt"]))


def test_check_img_size(caplog):
    assert check_img_size(640, 32) == 640 and not caplog.records
    assert check_img_size(641, 32) == 672 and check_img_size(1, 64) == 64
    assert "--img-size 641" in caplog.text and "672 is used" in caplog.text


def test_idle_flags_are_answered_with_one_warning(caplog):
    warn_about_idle_options(parsed(""))
    assert not caplog.records
    warn_about_idle_options(parsed("--bucket b --save_period 3 --upload_dataset"))
    assert len(caplog.records) == 1 and "'--bucket', '--upload_dataset'" in caplog.text
    assert "save_period" not in caplog.text, "here it keeps checkpoints"
    warn_about_idle_options(Namespace())


# ---- opt.yaml -------------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path, caplog):
    opt = parsed("--epochs 7 --img 320 --freeze 1 2 --evolve 4 --entity me --test-batch-size 3")
    opt.hyp = Path("some") / "hyp.yaml"
    opt.save_dir, opt.world_size, opt.global_rank = "runs/train/exp", 1, -1
    path = tmp_path / "opt.yaml"
    save_options(opt, path)
    loaded = read_options(path)[0]
    assert not caplog.records
    runtime = {"save_dir", "world_size", "global_rank"}
    assert vars(loaded) == {key: value for key, value in vars(opt).items() if key not in runtime} | {
        "hyp": "some/hyp.yaml"
    }


# As stock YOLOv7 writes it, on two processes.
STOCK = """
weights: ''
cfg: cfg/training/yolov7-tiny.yaml
data: data/coco.yaml
hyp: data/hyp.scratch.tiny.yaml
epochs: 100
batch_size: 32
img_size: [320, 320]
rect: false
resume: false
nosave: false
notest: false
noautoanchor: true
evolve: false
bucket: ''
cache_images: false
image_weights: false
device: '0,1'
multi_scale: false
single_cls: false
adam: false
sync_bn: true
local_rank: 0
workers: 8
project: runs/train
entity: null
name: exp
exist_ok: false
quad: false
linear_lr: false
label_smoothing: 0.0
upload_dataset: false
bbox_interval: -1
save_period: -1
artifact_alias: latest
freeze: [0]
v5_metric: false
world_size: 2
global_rank: 0
save_dir: runs/train/exp4
total_batch_size: 64
"""


def test_stock_file_is_read_without_a_word(tmp_path, caplog):
    (tmp_path / "opt.yaml").write_text(STOCK)
    opt = read_options(tmp_path / "opt.yaml")[0]
    assert not caplog.records
    assert (opt.batch_size, opt.epochs, opt.sync_bn, opt.evolve) == (64, 100, True, False)
    assert opt.cfg == "cfg/training/yolov7-tiny.yaml"
    assert opt.hyp == "data/hyp.scratch.tiny.yaml" and opt.fast_dataloader is False and opt.test_batch_size is None
    assert not hasattr(opt, "total_batch_size") and not hasattr(opt, "save_dir")


def test_stock_file_of_one_process_among_two(tmp_path, caplog):
    """Stock keeps world_size 2 when one process resumes the run of two, and takes that of a cluster for itself."""
    (tmp_path / "opt.yaml").write_text(STOCK.replace("batch_size: 32", "batch_size: 64"))
    assert read_options(tmp_path / "opt.yaml")[0].batch_size == 64 and not caplog.records


def test_unknown_keys_are_named_once_and_dropped(tmp_path, caplog):
    (tmp_path / "opt.yaml").write_text("epochs: 5\nrl_augment: true\nhead_params: a.yaml\n1: 2\n")
    opt = read_options(tmp_path / "opt.yaml")[0]
    assert opt.epochs == 5 and opt.batch_size == 16 and not hasattr(opt, "rl_augment")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "opt.yaml: options unknown here are ignored: rl_augment, head_params, 1" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: many", "epochs has to be a number, not 'many'"),
        ("epochs: null", "epochs has to be a number, not None"),
        ("img_size: [320, big]", "img_size has to be a number"),
        ("batch_size: {a: 1}", "batch_size has to be a number"),
        ("epochs: true", "epochs has to be a number, not True"),
        ("epochs: 2.5", "epochs has to be a whole number, not 2.5"),
        ("epochs: 0", "epochs 0 is too small: it has to be at least 1"),
        (f"epochs: {10**30}", "epochs 10+ is too large for 64 bits"),
        (
            "batch_size: 8\nworld_size: 2\ntotal_batch_size: 8\nworking_dir: /tmp",
            "batch_size 8 for each of 2 .* is not total_batch_size 8",
        ),
        (
            "batch_size: 4\nworld_size: 2\ntotal_batch_size: 16",
            "batch_size 4 for each of 2 .* is not total_batch_size 16",
        ),
        ("total_batch_size: null", "total_batch_size has to be a number, not None"),
        ("total_batch_size: [8]", r"total_batch_size has to be a number, not \[8\]"),
        ("label_smoothing: .nan", "label_smoothing nan is not usable"),
        ("label_smoothing: .inf", "label_smoothing inf is too large"),
        ("img_size: 96", r"img_size has to be a list such as \[640, 640\], not 96"),
        ("img_size: []", "img_size has to be a list"),
        ("img_size: [[96], 96]", r"img_size has to be a number, not \[96\]"),
        ("img_size: [96, null]", "img_size has to be a number, not None"),
        ("freeze: {0: 1}", "freeze has to be a list"),
        ("image_weights: 'false'", "image_weights has to be true or false, not 'false'"),
        ("adam: 1", "adam has to be true or false, not 1"),
        ("rect: null", "rect has to be true or false, not None"),
        ("amp: off", r"amp has to be one of 'fp16', 'bf16', 'off' \(in quotes\), not False"),
        ("cache_images: disc", "cache_images has to be one of 'ram', 'disk'"),
        ("cache_images: [ram]", "cache_images has to be one of"),
        ("device: 0", "device has to be text, in quotes, not 0"),
        ("name: 2024-01-05", "name has to be text, in quotes, not datetime.date"),
        ("data: null", "data has to be text, in quotes, not None"),
        ("save_dir: 3", "save_dir has to be a folder, in quotes, not 3"),
        ("working_dir: [a]", "working_dir has to be a folder, in quotes"),
        ("working_dir: .", "working_dir '.' has to be an absolute path"),
        ("working_dir: ''", "working_dir '' has to be an absolute path"),
        ("- epochs", "expected"),
        ("epochs: [", "not valid yaml"),
    ],
)
def test_files_that_cannot_be_used(text, message, tmp_path):
    (tmp_path / "opt.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"opt.yaml.*{message}"):
        read_options(tmp_path / "opt.yaml")[0]


ODD = [None, True, False, 0, 1, -1, 2.5, 10**400, float("nan"), float("-inf"), "", "yes", "3", [], [1], [[1]], [None],
       {}, {"a": 1}, datetime.date(2024, 1, 5), b"x"]  # fmt: skip


@pytest.mark.parametrize("name", TRAIN_FLAGS)
def test_a_value_is_one_that_the_command_line_could_give_or_a_sentence(name, tmp_path):
    path, flag = tmp_path / "opt.yaml", TRAIN_FLAGS[name]
    for value in ODD:
        path.write_text(yaml.safe_dump({"cfg": "c.yaml", name: value}))
        try:
            opt = read_options(path)[0]
            check_train_options(opt)
        except ValueError as error:
            assert name in str(error) or flag.name in str(error) or "--cfg" in str(error), (value, error)
        else:
            kinds = (int, float) if flag.type is float else int if flag.type else (bool, str)
            for item in getattr(opt, name) if flag.nargs == "+" else [getattr(opt, name)]:
                assert isinstance(item, kinds) or item is flag.default is None


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match="opt.yaml is missing: a run can only be resumed"):
        read_options(tmp_path / "opt.yaml")[0]


def test_written_file_is_plain_yaml(tmp_path):
    save_options(parsed("--epochs 2"), tmp_path / "opt.yaml")
    content = yaml.safe_load((tmp_path / "opt.yaml").read_text())
    assert list(content)[:4] == ["weights", "cfg", "data", "hyp"] and content["epochs"] == 2
