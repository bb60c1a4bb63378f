"""A data set and a model so small that a whole training run takes half a second on a CPU.

Runs draw nothing unless told so with `pictures`: drawing takes eight times as long as all the rest, and has tests of
its own.
"""

import logging
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import cv2
import numpy as np
import torch
import yaml

import export
import test
import train
from utils.config.data_yaml import load_data_yaml
from utils.config.hyp import load_hyp
from utils.config.options import export_parser, test_parser, train_parser
from utils.run import entry
from utils.run.context import Run
from utils.run.folder import open_run_folder, prepare_train_options
from utils.system.distributed import Ranks

# What `python train.py` does, without drawing, as a program of its own.
UNDRAWN = (sys.executable, "-c", "import sys; from tests import small_run; "
                                 "sys.exit(small_run.program('train', sys.argv[1:]))")  # fmt: skip
BACKBONE = [[-1, 1, "Conv", [width, 3, 2]] for width in (8, 16, 32, 32, 32)]
ANCHORS = [[8, 8, 12, 10, 10, 14], [16, 16, 24, 20, 20, 28], [32, 32, 48, 40, 40, 56]]
HYP = {"lr0": 0.01, "lrf": 0.1, "momentum": 0.9, "weight_decay": 0.0005, "warmup_epochs": 1.0, "warmup_momentum": 0.8,
       "warmup_bias_lr": 0.1, "box": 0.05, "cls": 0.5, "cls_pw": 1.0, "obj": 1.0, "obj_pw": 1.0, "iou_t": 0.2,
       "anchor_t": 4.0, "fl_gamma": 0.0, "hsv_h": 0.015, "hsv_s": 0.7, "hsv_v": 0.4, "degrees": 0.0, "translate": 0.1,
       "scale": 0.3, "shear": 0.0, "perspective": 0.0, "flipud": 0.0, "fliplr": 0.5, "mosaic": 1.0, "mixup": 0.1,
       "copy_paste": 0.0, "paste_in": 0.1, "loss_ota": 1, "warmup_min_iters": 2}  # fmt: skip


def make_data(folder, num_images=6, num_empty=0, size=64):
    """Images with one coloured rectangle each; the class is the colour. Returns the data yaml."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        (folder / "images" / split).mkdir(parents=True)
        (folder / "labels" / split).mkdir(parents=True)
        for i in range(num_images):
            image = rng.integers(0, 90, (size, size, 3), dtype=np.uint8)
            x, y, w, h = rng.integers(2, size // 2, 2).tolist() + rng.integers(10, size // 2 - 2, 2).tolist()
            class_id = i % 2
            row = f"{class_id} {(x + w / 2) / size} {(y + h / 2) / size} {w / size} {h / size}\n"
            if i >= num_images - num_empty:
                row = ""
            else:
                image[y : y + h, x : x + w] = ((0, 0, 255), (0, 255, 0))[class_id]
            cv2.imwrite(str(folder / "images" / split / f"{i:02d}.png"), image)
            (folder / "labels" / split / f"{i:02d}.txt").write_text(row)
    path = folder / "data.yaml"
    path.write_text("train: images/train\nval: images/val\nnc: 2\nnames: [red, green]\n")
    return path


def make_cfg(folder, auxiliary=False):
    """Five convolutions and a head over three levels; with `auxiliary` a second head. Returns the cfg."""
    sources, head = [2, 3, 4], "IDetect"
    if auxiliary:
        sources, head = [2, 3, 4, 2, 3, 4], "IAuxDetect"
    content = {"nc": 2, "depth_multiple": 1.0, "width_multiple": 1.0, "anchors": ANCHORS, "backbone": BACKBONE,
               "head": [[sources, 1, head, ["nc", "anchors"]]]}  # fmt: skip
    path = folder / ("aux.yaml" if auxiliary else "cfg.yaml")
    path.write_text(yaml.safe_dump(content))
    return path


def arguments(folder, *flags, hyp=None, auxiliary=False, **data):
    """The command line of a small run in `folder`: 2 epochs, batch 3, 64 px; `flags` follow and win."""
    data_yaml = folder / "data.yaml"
    if not data_yaml.exists():
        make_data(folder, **data)
    (folder / "hyp.yaml").write_text(yaml.safe_dump(HYP | (hyp or {}), sort_keys=False))
    return ["--data", str(data_yaml), "--cfg", str(make_cfg(folder, auxiliary)), "--hyp", str(folder / "hyp.yaml"),
            "--img", "64", "--batch-size", "3", "--epochs", "2", "--workers", "0", "--device", "cpu", "--noautoanchor",
            "--project", str(folder / "runs"), "--name", "run", *flags]  # fmt: skip


@contextmanager
def drawing(pictures):
    """While this lasts, train.py and test.py draw only if `pictures`."""
    report, evaluate = train.open_report, test.evaluate

    def open_report(*args):
        opened = report(*args)
        opened.draws_images = False
        return opened

    def evaluate_only(*args, **options):
        return evaluate(*args, **(options | {"plot_dir": None}))

    with ExitStack() as patches:
        if not pictures:
            patches.enter_context(mock.patch.object(train, "open_report", open_report))
            patches.enter_context(mock.patch.object(train, "evaluate", evaluate_only))
            patches.enter_context(mock.patch.object(test, "evaluate", evaluate_only))
        yield


@contextmanager
def group_kept():
    """While this lasts, train.py leaves its process group open, for further runs."""
    with mock.patch("utils.system.distributed.stop_processes"):
        yield


def run(folder, *flags, pictures=False, **options):
    """Train in this process; returns the run folder."""
    return run_line(arguments(folder, *flags, **options), pictures)


def run_line(line, pictures=False):
    """Train with a given command line; returns the run folder."""
    with mock.patch("sys.argv", ["train.py", *line]):
        opt = prepare_train_options(train_parser().parse_args(line), Ranks())
    data = load_data_yaml(opt.data, opt.single_cls)
    open_run_folder(opt, Ranks())
    with drawing(pictures):
        train.train(Run(opt, load_hyp(opt.hyp), data, torch.device("cpu"), Ranks()))
    return Path(opt.save_dir)


def program(name, line):
    """What `python NAME.py LINE` does, in this process; returns its exit status."""
    main, parser = {
        "train": (train.main, train_parser()),
        "test": (test.main, test_parser()),
        "export": (export.main, export_parser()),
    }[name]
    with mock.patch("sys.argv", [f"{name}.py", *line]), mock.patch.object(logging.root, "handlers", []):
        try:
            with drawing(pictures=False):
                entry.run(main, parser.parse_args(line))
        except SystemExit as end:
            return end.code
    return 0


def leave(name, line):
    """What `python NAME.py LINE` does: the end of this process."""
    sys.exit(program(name, line))
