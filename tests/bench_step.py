"""The training step with a batch that is already there: reference, --fast-step and --cuda-graph, in one process.

python tests/bench_step.py [--short] [--seconds 170] [--paths cuda-graph limits] [--out runs/bench_step]

A case is model, image size, batch and loss; COCO-like random boxes, 80 classes, four sets of them in turn, fp16
autocast. Each path starts from a model of its own. Milliseconds a step are medians with the 10th and 90th percentile in
brackets, between events at the end of consecutive steps, after a warm-up; images a second come from the whole window.
`host` is the time that the main process spends in a step, with its parts `plan` (the loss's preparation) and `run`
(copies and launch of the graph), `cpu` its processor time, `waits` the synchronisations that torch reports.
`forward+backward` is the limit: the network alone, backward from given gradients, in a CUDA graph; `update` is SGD and
moving average alone, in a graph. `cuda-graph, copied` takes its batches from page-locked host memory through the
batches of --fast-step.

A case that fails prints its traceback, and the others go on.
"""

import argparse
import gc
import json
import logging
import platform
import statistics
import sys
import time
import traceback
import warnings
from collections import deque
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.yolo import Model
from tests.bench_loss import graph_replay, random_targets
from tools.experiments import command_line
from utils.config.hyp import load_hyp, scale_hyp
from utils.engine import optimizer as optim
from utils.engine.batches import Batch
from utils.engine.ema import ModelEMA
from utils.engine.trainer import Trainer
from utils.fast.graph_step import GraphSteps
from utils.fast.prefetcher import AHEAD, Prefetcher
from utils.fast.train_step import FastSteps
from utils.loss import batched, criterion
from utils.run import entry

REPLAY = GraphSteps.replay
ROOT = Path(__file__).resolve().parents[1]
CASES = [("yolov7-tiny", 320, 64), ("yolov7-tiny", 320, 384), ("yolov7", 320, 64), ("yolov7", 640, 32)]
CPU_CASES = [("yolov7-tiny", 64, 4)]
NUM_CLASSES, BOXES, NUM_SETS = 80, 14, 4
COLUMNS = ("case", "loss", "path", "ms a step", "img/s", "host ms", "plan ms", "run ms", "cpu", "GB", "waits in 2",
           "graphs")  # fmt: skip


def build(case, kind, path, device, precision):
    """What makes the steps of `path`, for a new model."""
    name, size, batch = case
    torch.manual_seed(0)
    hyp = load_hyp(ROOT / f"data/hyp.scratch.{'tiny' if 'tiny' in name else 'p5'}.yaml")
    model = Model(ROOT / f"cfg/training/{name}.yaml", nc=NUM_CLASSES).to(device)
    model.nc, model.gr = NUM_CLASSES, 1.0
    model.hyp = scale_hyp(hyp, model.model[-1].nl, NUM_CLASSES, size, 0.0)
    optimizer = optim.build_optimizer(model, hyp["lr0"], hyp["momentum"], hyp["weight_decay"])
    scheduler = LambdaLR(optimizer, optim.lr_factor(300, hyp["lrf"]))
    trainer = Trainer(model, hyp, batch, optimizer, scheduler, ModelEMA(model), precision)
    steps = {"reference": lambda t: t, "fast-step": FastSteps, "cuda-graph": GraphSteps}[path](trainer)
    classes = criterion.REFERENCE if path == "reference" else batched.CLASSES
    compute_loss, _ = criterion.build_losses(model, classes=classes, use_ota=kind == "ota")
    trainer.start(model, compute_loss, 1.0, 0, 1000, network=network_of(model, path, device))
    steps.begin_epoch()
    return steps


def network_of(model, path, device):
    """What the forward pass calls: the fused form, where its kernels can run."""
    from utils.run.fast_paths import load
    from utils.system.compilers import why_no_kernels

    is_fused = path != "reference" and not why_no_kernels(device)
    return load("models.fused.network:fused_model")(model) if is_fused else model


def endless(case, path, sets, device):
    """Batches as those of `path` would yield them, without a copy."""
    _, size, batch = case
    images = torch.randint(256, (batch, 3, size, size), dtype=torch.uint8, device=device)
    if path == "reference":
        images, sets = images.float() / 255, [targets.to(device) for targets in sets]
    while True:
        for targets in sets:
            yield Batch(images, targets, ("resident",) * batch)


def copied(case, sets, device):
    """Batches through Prefetcher, from page-locked memory."""
    _, size, batch = case
    images = torch.randint(256, (batch, 3, size, size), dtype=torch.uint8)
    images = images.pin_memory() if device.type == "cuda" else images

    def loader():
        while True:
            for targets in sets:
                yield images, targets, ("copied",) * batch, None

    yield from Prefetcher(torch.device("cpu"))(loader(), device)


def measure(steps, batches, num_steps, warm_up, is_reference, batch_size):
    """Milliseconds a step, images a second, time of the host [ms], peak memory [GB]."""
    marks, host, ahead, parts = [], [], deque(), watch(steps)
    is_cuda = steps.trainer.device_type == "cuda" if not is_reference else steps.device_type == "cuda"
    for iteration, batch in enumerate(batches):
        if iteration == warm_up and is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if iteration == warm_up:
            busy, began = time.thread_time(), time.perf_counter()
            for times in parts.values():
                times.clear()
        if iteration >= warm_up:
            marks.append(_mark(is_cuda))
        if iteration == warm_up + num_steps:
            break
        started = time.perf_counter()
        items = steps.step(iteration, 0, batch)
        if is_reference:
            items.tolist()  # as the progress bar does
        host.append(time.perf_counter() - started)
        if is_cuda:
            ahead.append(torch.cuda.Event(blocking=True))
            ahead[-1].record()
            if len(ahead) > AHEAD:
                ahead.popleft().synchronize()
    share = (time.thread_time() - busy) / (time.perf_counter() - began)
    if is_cuda:
        torch.cuda.synchronize()
    times = [_between(a, b) for a, b in zip(marks, marks[1:], strict=False)]
    total = _between(marks[0], marks[-1])
    row = {"step": spread(times), "img/s": num_steps * batch_size / total * 1e3,
           "host": spread([t * 1e3 for t in host[warm_up:]]), "cpu": share}  # fmt: skip
    row |= {name: spread([t * 1e3 for t in times]) for name, times in parts.items() if times}
    if is_cuda:
        row["GB"] = torch.cuda.max_memory_reserved() / 1e9
    return row


def watch(steps):
    """The seconds of each call of the loss's preparation and of the graph, as lists that grow."""
    parts = {"plan": [], "run": []}

    def timed(function, times):
        def call(*arguments, **options):
            started = time.perf_counter()
            result = function(*arguments, **options)
            times.append(time.perf_counter() - started)
            return result

        return call

    if isinstance(steps, GraphSteps):
        steps.loss.prepare = timed(steps.loss.prepare, parts["plan"])
        replay = timed(REPLAY, parts["run"])  # the update has no inputs
        GraphSteps.replay = lambda steps, captured, new: (replay if new else REPLAY)(steps, captured, new)
    return parts


def _mark(is_cuda):
    if not is_cuda:
        return time.perf_counter() * 1e3
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def _between(a, b):
    return b - a if isinstance(a, float) else a.elapsed_time(b)


def spread(times):
    ordered = sorted(times)
    return statistics.median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]


def replayed(body, most=20):
    """Milliseconds of a captured `body`."""
    replay, times = graph_replay(body), []
    for _ in range(most):
        start = _mark(True)
        replay()
        end = _mark(True)
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return spread(times[3:])


def gradient_like(maps):
    """Small random numbers that lie in memory as `maps` do: what a loss writes without copies."""
    room = torch.empty(maps.untyped_storage().nbytes() // maps.element_size(), dtype=maps.dtype, device=maps.device)
    return room.normal_(std=1e-4).as_strided(maps.shape, maps.stride(), maps.storage_offset())


def limits(case, device):
    """The model alone, and the update alone."""
    steps = build(case, "plain", "fast-step", device, "fp16")
    _, size, batch = case
    images = steps.as_input(torch.randint(256, (batch, 3, size, size), dtype=torch.uint8, device=device))
    parameters = list(steps.trainer.model.parameters())

    def network():
        with steps.trainer.autocast():
            return steps.trainer.network(images)

    gradients = [gradient_like(maps) for maps in network()]

    def alone():
        torch.autograd.backward(network(), gradients)
        for parameter in parameters:
            parameter.grad = None

    rows = {"forward+backward": {"step": replayed(alone)}}
    steps.trainer.scaler.scale(torch.ones((), device=device))  # its tensors come with the first use
    torch.autograd.backward(network(), gradients)
    steps._lay_out()
    steps.sgd.collect()
    rows["update"] = {"step": replayed(steps.update)}
    return rows


def count_waits(steps, batches):
    """Synchronisations in two steps, as torch's debug mode reports them."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            steps.step(5000, 0, next(batches))
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchron" in str(warning.message) for warning in caught)


def run(case, kind, path, device, precision):
    """One row."""
    sets = [random_targets(case[2], BOXES, NUM_CLASSES, seed) for seed in range(NUM_SETS)]  # [n x 6] on the host
    is_reference = path == "reference"
    steps = build(case, kind, path.removesuffix(", copied"), device, precision)
    batches = copied(case, sets, device) if "copied" in path else endless(case, path, sets, device)
    slow = is_reference and kind == "ota"
    num_steps, warm_up = (4, 2) if slow or device.type == "cpu" else (40, 15)
    row = measure(steps, batches, num_steps, warm_up, is_reference, case[2])
    if device.type == "cuda" and not slow:
        row["waits"] = count_waits(steps, batches)
    if isinstance(steps, GraphSteps):
        row["counts"] = dict(steps.counts)
    return row


def in_words(case, kind, path, row):
    step = "{:.2f} ({:.2f}-{:.2f})".format(*row["step"])
    host = " | ".join(f"{row[name][0]:.2f}" if name in row else "-" for name in ("host", "plan", "run"))
    host += f" | {row['cpu']:.2f}" if "cpu" in row else " | -"
    rate = f"{row['img/s']:.0f}" if "img/s" in row else f"{case[2] / row['step'][0] * 1e3:.0f}"
    memory = f"{row['GB']:.1f}" if "GB" in row else "-"
    rest = f"{row.get('waits', '-')} | {row.get('counts', '')}"
    return (
        f"| {case[0]} {case[1]} px batch {case[2]} | {kind} | {path} | {step} | {rate} | {host} | {memory} | {rest} |"
    )


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--short", action="store_true", help="without the slow reference of OTA at large batches")
    parser.add_argument("--seconds", type=float, default=600, help="no row is started after so long")
    parser.add_argument("--paths", nargs="+", help="only these of the paths in the table, and limits")
    parser.add_argument("--amp", default=None, choices=["fp16", "bf16", "off"])
    parser.add_argument("--out", default="runs/bench_step", help="folder of the json and the table")
    return parser.parse_args()


def main(opt):
    device, started = torch.device(opt.device), time.perf_counter()
    torch.backends.cudnn.benchmark = True
    title = f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}, "
    title += f"Python {platform.python_version()}"
    print(title, "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS), sep="\n", flush=True)

    cases = CASES if device.type == "cuda" else CPU_CASES
    jobs = [(case, "ota", path) for case in cases for path in ("cuda-graph", "fast-step")]
    jobs += [(case, "-", "limits") for case in cases if device.type == "cuda"]
    jobs += [(case, "ota", "cuda-graph, copied") for case in cases]
    jobs += [(case, "plain", "cuda-graph") for case in cases]
    jobs += [
        (case, kind, "reference") for kind in ("plain", "ota") for case in cases if kind == "plain" or not opt.short
    ]
    if device.type == "cpu":
        jobs = [job for job in jobs if "cuda-graph" not in job[2]]
    if opt.paths:
        jobs = [job for job in jobs if job[2] in opt.paths]
    rows, out = [], Path(opt.out)
    out.mkdir(parents=True, exist_ok=True)
    for case, kind, path in jobs:
        if time.perf_counter() - started > opt.seconds:
            print(f"(not run: {case} {kind} {path})")
            continue
        try:
            found = limits(case, device) if path == "limits" else {path: run(case, kind, path, device, opt.amp)}
            for name, row in found.items():
                rows.append({"case": case, "loss": kind, "path": name, **row})
                print(in_words(case, kind, name, row), flush=True)
        except Exception:
            print(f"failed: {case} {kind} {path}\n{traceback.format_exc()}", flush=True)
        (out / "bench_step.json").write_text(json.dumps({"machine": title, "rows": rows}, indent=1))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.empty_cache()
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    command_line.run_tool(main, parse(), logging.WARNING)
