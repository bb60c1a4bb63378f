"""What an epoch change costs: from the end of an epoch's last step to the first step of the next, in train.train.

    python tests/bench_epoch_change.py      # tiny, 320 px, batch 384, --fast
    python tests/bench_epoch_change.py \\
        --variants="--fast, --fast --cache-images gpu"

Drawn pictures of four shapes; each variant is a process of its own. The learning rates are next to nothing, so that the
model stays as it is: its biases give every image some two thousand boxes above the threshold of validation. The first
changes are left out, because graphs are captured there. Medians in ms with the extremes, measured on the host.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WARM_UP = 5  # epochs
PARTS = {  # {column: the function that is timed}
    "average": "utils.engine.ema:ModelEMA.ema_for_evaluation", "validation": "train:validate_ema",
    "curves": "utils.fast.metrics:precision_recall",
    "waiting for files": "utils.fast.async_checkpoint:BackgroundCheckpoints.wait",
    "results": "utils.loggers.results:RunReport.epoch_done",
    "snapshot": "utils.fast.async_checkpoint:BackgroundCheckpoints.after_epoch",
}  # fmt: skip


def main(options):
    """Status 1 if a variant failed."""
    from tools.experiments import runner  # not in a child, which is a plain run of train.py

    variants, rows, out = [variant.strip() for variant in options.variants.split(",")], {}, Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(folder), options)
        write_model(Path(folder), options)
        for number, variant in enumerate(variants):
            result, log = (Path(folder) / f"{number}.{suffix}" for suffix in ("json", "log"))
            line = [sys.executable, __file__, *sys.argv[1:], "--child", str(result), "--data", str(data)]
            status = runner.run_program([*line, f"--flags={variant}"], log, os.environ, options.timeout)
            if status != 0 or not result.exists():
                print(f"{variant} failed:\n{log.read_text(errors='replace')[-3000:]}", flush=True)
                continue
            rows[variant] = json.loads(result.read_text())
            (out / "table.md").write_text(table(rows, options) + "\n")
    print(table(rows, options))
    return int(len(rows) < len(variants))


def measure(options):
    """Run train.py; for each epoch change the seconds {part: seconds}, with "all" and "epoch", the one before it."""
    from pkgutil import resolve_name

    import train
    from utils.config.options import train_parser
    from utils.run import entry

    now, changes, spans, ended = time.perf_counter, [], defaultdict(float), []

    def around(name, part):
        owner, _, attribute = name.replace(":", ".").rpartition(".")
        owner = resolve_name(owner)
        original = getattr(owner, attribute)

        def timed(*args, **kwargs):
            start = now()
            try:
                return original(*args, **kwargs)
            finally:
                spans[part] += now() - start

        return mock.patch.object(owner, attribute, timed)

    def one_epoch(epoch, num_batches, batches, steps, report):
        first, step = True, steps.step

        def watched(*args):
            nonlocal first
            if first and ended:
                changes.append({"all": now() - ended[-1], **spans})
            if first:
                spans.clear()
            first = False
            return step(*args)

        with mock.patch.object(steps, "step", watched):
            began = now()
            rates = train_one_epoch(epoch, num_batches, batches, steps, report)
        ended.append(now())  # the last losses have been waited for
        spans["epoch"] = ended[-1] - began
        return rates

    train_one_epoch = train.train_one_epoch
    folder = Path(options.data).parent
    line = ["--data", options.data, "--weights", str(folder / "model.pt"), "--hyp", str(folder / "hyp.yaml"), "--img",
            str(options.img), "--batch-size", str(options.batch), "--epochs", str(options.epochs), "--noautoanchor",
            "--device", options.device, "--project", str(folder / "runs"), *options.flags.split()]  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(train, "train_one_epoch", one_epoch))
        for part, name in PARTS.items():
            stack.enter_context(around(name, part))
        entry.run(train.main, train_parser().parse_args(line))
    return changes


def write_data(folder, options):
    """A drawn data set; returns its yaml."""
    from tests.bench_val import reshape_images
    from tools.bench_loader import write_images

    for kind, count in (("train", options.images), ("val", options.val_images)):
        (folder / kind).mkdir()
        reshape_images(write_images(folder / kind, count))
    names = ", ".join(f"c{i}" for i in range(80))
    path = folder / "data.yaml"
    path.write_text(f"train: {folder}/train/images\nval: {folder}/val/images\nnc: 80\nnames: [{names}]\n")
    return path


def write_model(folder, options):
    """model.pt and hyp.yaml: every cell of the coarsest level finds boxes of eight classes, the other levels none."""
    import torch
    import yaml

    from models.yolo import Model
    from utils.config.hyp import load_hyp
    from utils.engine.checkpoint import save

    torch.manual_seed(0)
    model = Model(str(ROOT / f"cfg/training/{options.cfg}.yaml"), nc=80)
    model.names, head = [f"c{i}" for i in range(80)], model.model[-1]
    with torch.no_grad():
        for level, bias, *_ in head.output_biases():
            rows = bias.view(head.na, -1)
            rows[:, 4], rows[:, 5:] = -4, -10
            if level == head.nl - 1:
                rows[:, 5:13] = torch.randn(head.na, 8) / 4
        for conv in head.m:
            conv.weight.zero_()
    save({"model": model.half(), "epoch": -1}, folder / "model.pt")
    hyp = load_hyp(ROOT / f"data/hyp.scratch.{options.hyp}.yaml") | {"lr0": 1e-9, "warmup_bias_lr": 0.0}
    (folder / "hyp.yaml").write_text(yaml.safe_dump(hyp))


def table(rows, options):
    """Markdown."""
    import torch

    from tools.experiments import markdown

    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    parts = [part for part in ("all", *PARTS, "epoch") if any(part in changes[-1] for changes in rows.values())]
    lines = []
    for name, changes in rows.items():
        lines.append([f"`{name}`"])
        for part in parts:
            values = [1e3 * change.get(part, 0) for change in changes[min(WARM_UP, len(changes) - 1) :]]
            lines[-1].append(f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})")
    title = (f"{machine}, torch {torch.__version__}; {options.cfg}, {options.img} px, batch {options.batch}, "
             f"{options.images} images, {options.val_images} to validate; ms")  # fmt: skip
    return f"{title}\n\n{markdown.table(['', *parts], lines)}"


def parse():
    from utils.run import entry

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    parser.add_argument("--cfg", default="yolov7-tiny")
    parser.add_argument("--hyp", default="tiny")
    parser.add_argument("--img", type=int, default=320)
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--images", type=int, default=3840)
    parser.add_argument("--val-images", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--variants", default="--fast", help="lists of flags, with commas between them")
    parser.add_argument("--device", default="")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one variant")
    parser.add_argument("--out", default="runs/bench_epoch_change", help="folder of table.md")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("--flags", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    if options.child:
        Path(options.child).write_text(json.dumps(measure(options)))
    else:
        from tools.experiments import command_line

        command_line.run_tool(main, options, logging.WARNING)
