"""Where the seconds of a short run go: to the first step, and from the last one.

    python tests/profile_start.py      # tiny, 320 px, batch 384, 2 epochs
    python tests/profile_start.py --batch 4 --images 16 --device cpu \\
        --variants "off, --fast"

Each variant runs twice, as processes of their own: cold (no label cache, an
empty TRITON_CACHE_DIR, nothing of what fast runs keep themselves) and warm. A
row is a phase: when it began, in seconds since the command, and how long it
took; what lies inside another is indented, what another thread does is
"beside". The first steps are waited for, so that each shows its own work.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
SEAMS = (  # phases in the main process; those that this version or this run does not have are left out
    "train:prepare_train_options", "train:load_hyp", "train:load_data_yaml", "utils.system.distributed:select_device",
    "utils.run.fast_paths:choose", "train:build_model", "train:open_trainer", "train:open_loaders",
    "utils.data.dataset:scan_dataset", "utils.data.dataset:use_memory_cache", "utils.data.dataset:use_disk_cache",
    "utils.data.labels.image_list:find_images", "utils.data.labels.cache:signature", "train:open_records",
    "utils.loggers.results:open_tensorboard", "utils.loggers.results:RunReport.labels", "train:check_anchors",
    "train:prepare_model", "utils.engine.checkpoint:Checkpoints.initial", "train:finish_epoch", "train:validate_ema",
    "utils.engine.checkpoint:Checkpoints.after_epoch", "utils.engine.checkpoint:Checkpoints.strip",
    "utils.loggers.results:RunReport.last_plots", "utils.loggers.results:RunReport.finish",
    "utils.loggers.tensorboard:TensorBoardLogger.finish",
    "utils.loggers.results:wait_for_background",
    "utils.engine.trainer:Trainer.step", "utils.engine.ema:ModelEMA.ema_for_evaluation", "train:log_scores",
    "utils.engine.evaluate:non_max_suppression", "utils.engine.evaluate:grids_of", "utils.plots.run:in_background",
    "utils.engine.evaluate:DetectionScores.summary",
)  # fmt: skip
FAST_SEAMS = (
    "utils.data.fast.loader:agrees_with_table", "utils.data.fast.loader:gpu_agrees",
    "utils.data.fast.worker_pool:WorkerPool.__init__", "utils.data.fast.shm_batches:BatchRing.__init__",
    "utils.fast.train_step:FastSteps.__init__", "utils.fast.train_step:FastSteps.step",
    "utils.fast.graph_step:GraphSteps.record", "models.fused.network:fused_model",
    "utils.fast.async_checkpoint:BackgroundCheckpoints.wait", "utils.fast.async_checkpoint:snapshot",
    "utils.fast.start:compile_ahead", "utils.fast.start:dry_loss", "utils.fast.start:dry_pass",
    "utils.fast.start:load_libraries", "utils.data.fast.device_augment:gpu_agrees",
)  # fmt: skip
WAITED = 6  # steps


class Phases:
    """Spans [name, begin, end, depth] of calls; times in seconds since the command."""

    def __init__(self, began):
        self.began, self.spans, self.depth, self.counts = began, [], 0, Counter()

    def now(self):
        return time.time() - self.began

    def add(self, name, begin):
        self.spans.append([name, begin, self.now(), self.depth])

    def around(self, function, name):
        """`function`, whose calls are phases."""
        is_step = name.endswith(".step")

        @wraps(function)
        def timed(*args, **kwargs):
            if threading.current_thread() is not threading.main_thread():
                return self.beside(function, name, *args, **kwargs)
            self.counts[name] += 1
            if is_step and self.counts[name] > WAITED:
                return function(*args, **kwargs)
            span = [f"{name} {self.counts[name]}" if is_step else name, self.now(), None, self.depth]
            self.spans.append(span)
            self.depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                if is_step:
                    wait_for_device()
                self.depth -= 1
                span[2] = self.now()

        return timed

    def beside(self, function, name, *args, **kwargs):
        """A call in another thread: a phase beside those of the main one."""
        begin = self.now()
        try:
            return function(*args, **kwargs)
        finally:
            self.spans.append([f"beside: {name}", begin, self.now(), 0])


def wait_for_device():
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def child(options):
    """The run itself; writes its phases to options.child."""
    phases = Phases(float(os.environ["YOLOV7FAST_BEGAN"]))
    phases.add("Python", 0.0)
    begin = phases.now()
    from utils.system import byte_code, driver

    patch("utils.system.driver:open_first_gpu", phases)
    driver.start_ahead(options.line)
    byte_code.keep_ahead(options.line)
    import torch  # noqa: F401

    phases.add("import torch", begin)
    begin = phases.now()
    import train

    phases.add("import train", begin)
    is_fast = any(word.startswith("--fast") for word in options.line)
    for seam in (*SEAMS, *FAST_SEAMS * is_fast):
        patch(seam, phases)
    begin = phases.now()
    main = train.main

    def watched(opt):
        try:
            main(opt)
        finally:
            phases.add("main", begin)
            Path(options.child).write_text(json.dumps(phases.spans))

    train.entry.run(watched, train.train_parser().parse_args(options.line))
    if is_fast:
        train.entry.leave()


def patch(seam, phases):
    """Let the function `seam` mark its calls, if it is there."""
    module, path = seam.split(":")
    *owner, name = path.split(".")
    try:
        place = resolve_name(f"{module}:{'.'.join(owner)}" if owner else module)
        function = vars(place)[name]
    except (ImportError, AttributeError, KeyError):
        return
    setattr(place, name, phases.around(function, path))


def measure(options, data, flags, cache, name):
    """The spans of one run, and [name, begin, end, depth] of its end; None if it failed."""
    from tools.experiments import runner  # not in a child, whose imports are measured

    out = Path(options.folder) / f"{name}.json"
    out.unlink(missing_ok=True)
    line = ["--data", str(data), "--cfg", options.cfg, "--hyp", options.hyp, "--img", str(options.img), "--batch-size",
            str(options.batch), "--epochs", str(options.epochs), "--workers", str(options.workers),
            "--project", str(Path(options.folder) / "runs"), "--notest", "--cache-images", *flags]  # fmt: skip
    line += ["--device", options.device] if options.device else []  # with it the driver is not started ahead
    began = time.time()
    command = [sys.executable, __file__, "--child", str(out), "--", *line]
    environment = os.environ | {"YOLOV7FAST_BEGAN": str(began), "TRITON_CACHE_DIR": str(cache)}
    log = out.with_suffix(".log")
    status = runner.run_program(command, log, environment, options.timeout)
    end = time.time() - began
    if status or not out.exists():
        print(log.read_text(errors="replace")[-3000:], flush=True)
        return None
    spans = json.loads(out.read_text())
    last = max(end for _, _, end, _ in spans)
    return [*spans, ["exit", last, end, 0]]


def table(spans):
    rows = sorted(spans, key=lambda span: (span[1], span[3]))
    lines = [f"{begin:8.2f} {end - begin:8.2f}  {'  ' * depth}{name}" for name, begin, end, depth in rows
             if name != "main" and (end - begin >= 0.02 or ".step" in name)]  # fmt: skip
    first = next((end for name, _, end, _ in rows if name.endswith(".step 1")), 0.0)
    return "\n".join(["   begin  seconds", *lines, f"first step done {first:.2f}, all {rows[-1][2]:.2f}"])


def main(options):
    from tests.profile_training_loop import write_data
    from utils.system import byte_code

    with tempfile.TemporaryDirectory() as folder:
        options.folder = options.folder or folder
        data = write_data(Path(options.folder) / f"data{options.images}", options.images)
        for number, variant in enumerate(options.variants.split(",")):
            flags = [] if variant.strip() == "off" else variant.split()
            cache = Path(options.folder) / f"triton{number}"
            for kind in options.kinds.split(","):
                if kind == "cold":
                    for path in Path(options.folder).rglob("*.cache*"):
                        path.unlink()
                    for place in (cache, byte_code.folder()):
                        shutil.rmtree(place, ignore_errors=True)
                    for path in byte_code.folder().parent.glob("triton_*.json"):
                        path.unlink()
                spans = measure(options, data, flags, cache, f"{number}{kind}")
                print(f"{variant.strip()}, {kind}\n{table(spans) if spans else 'failed'}\n", flush=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cfg", default=str(ROOT / "cfg/training/yolov7-tiny.yaml"))
    parser.add_argument("--hyp", default=str(ROOT / "data/hyp.scratch.tiny.yaml"))
    parser.add_argument("--img", type=int, default=320)
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--images", type=int, default=1536)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="")
    parser.add_argument("--variants", default="--fast,off", help="lists of flags, with commas between them")
    parser.add_argument("--kinds", default="cold,warm")
    parser.add_argument("--folder", default="", help="for data and runs; by default one that is removed")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("line", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    if options.child:
        child(options)
    else:  # its imports would be missing in what a child measures
        from tools.experiments import command_line

        command_line.run_tool(main, options)
