"""The reference losses against the batched ones (--fast-loss): forward + backward, random predictions, COCO-like boxes.

python tests/bench_loss.py [--short] [--seconds 1] [--device cpu --threads 2] [--out runs/bench_loss]

Prints a markdown table, and writes it with a json of every number into --out. Milliseconds are medians with
the smallest and the largest in brackets; both sides run in this one process, on float32 predictions (as the heads give
them) under float16 autocast on a GPU. `step` is forward + backward, targets on the device for the reference and on the
host for the fast losses, whose work on the host is part of it. `prepare` is that work alone, `compute` the step without
it, `graph` the replay of a captured `compute`, `torch` the step without kernels of Triton; `assign` is the assignment
alone, without those kernels too, from prepared candidates on the fast side.
Kernels, launches (what the host starts: kernels, copies, graphs), waits (synchronisations) and MB (memory beyond what
was there, the gradient included) are those of one step. The second table compares OTA with the plain loss, both fast.

--captured measures the fast losses alone, as they are part of a captured training step: from the output of a head's
convolution in float16 and channels-last order to its gradient in the same order. --base FOLDER measures the same in an
older checkout first, in a process of its own.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, os.environ.get("BENCH_LOSS_ROOT") or str(Path(__file__).resolve().parents[1]))

from tests.loss_cases import model_with_head
from tools.experiments import command_line, markdown
from utils.loss import assigner, batched, batched_assigner, criterion
from utils.run import entry

ANCHORS = ((10, 13, 16, 30, 33, 23), (30, 61, 62, 45, 59, 119), (116, 90, 156, 198, 373, 326))  # pixels
STRIDES = (8, 16, 32)
# batch, boxes an image, classes, pixels
ALL = [(batch, boxes, classes, size) for size in (320, 640) for classes in (3, 80) for batch in (16, 64, 384)
       for boxes in (5, 15, 40)]  # fmt: skip
SHORT = [(64, 14, 80, 320), (384, 14, 80, 320), (64, 40, 80, 320), (64, 14, 3, 320), (16, 15, 80, 640)]
SHORT_CPU = [(1, 14, 80, 320), (4, 14, 80, 320), (16, 15, 80, 320), (64, 27, 80, 320)]
KINDS = {
    "plain": (criterion.ComputeLoss, batched.BatchedLoss),
    "ota": (criterion.ComputeLossOTA, batched.BatchedLossOTA),
}


def make_case(batch, boxes, num_classes, size, device):
    """Model, predictions and targets (on the host)."""
    torch.manual_seed(0)
    strides = torch.tensor(STRIDES, dtype=torch.float32)
    anchors = torch.tensor(ANCHORS).view(3, 3, 2) / strides[:, None, None]
    model = model_with_head(anchors.to(device), strides, num_classes, box=0.05, cls=0.3, obj=0.7)
    on_device = torch.Generator(device).manual_seed(0)
    shapes = [(batch, 3, size // stride, size // stride, 5 + num_classes) for stride in STRIDES]
    predictions = [torch.randn(shape, generator=on_device, device=device).requires_grad_() for shape in shapes]
    return model, predictions, random_targets(batch, boxes, num_classes)


def random_targets(batch, boxes, num_classes, seed=0):
    """Targets [n x 6]: about `boxes` for an image, their number and sizes spread as in COCO mosaics."""
    generator = torch.Generator().manual_seed(seed)
    mean = boxes * torch.rand(batch, generator=generator) * 2
    image = torch.arange(batch).repeat_interleave(torch.poisson(mean, generator=generator).long())[:, None]
    sides = (torch.randn(len(image), 2, generator=generator) * 0.9 - 2.2).exp().clamp(0.01, 0.95)
    centres = sides / 2 + torch.rand(len(image), 2, generator=generator) * (1 - sides)
    classes = torch.randint(num_classes, (len(image), 1), generator=generator)
    return torch.cat((image, classes, centres, sides), 1)


def measure(function, device, most=50, seconds=1.0):
    """Milliseconds of `function`: (median, smallest, largest) of 3 to `most` repetitions after a warm-up."""
    for _ in range(2):
        function()
    times, deadline = [], time.perf_counter() + seconds
    while len(times) < most and (len(times) < 3 or time.perf_counter() < deadline):
        if device.type == "cuda":
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            start = time.perf_counter()
            function()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), min(times), max(times)


def count(function):
    """Kernels, launches and waits (synchronisations) of one call on a GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        function()
    names = [(event.name, event.device_type) for event in profile.events()]
    on_gpu = [name for name, kind in names if kind == torch.autograd.DeviceType.CUDA]
    calls = [name for name, kind in names if kind != torch.autograd.DeviceType.CUDA]
    launches = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
    return {
        "kernels": sum(not name.startswith(("Memcpy", "Memset")) for name in on_gpu),
        "launches": sum(name.startswith(launches) for name in calls),
        "waits": max(sum(name in waits for name in calls) - 1, 0),  # leaving the profiler waits for the device once
    }


def peak_memory(function):
    """Megabytes that one call needs beyond what is there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def stepper(compute_loss, predictions, targets, images, device):
    def step():
        with torch.autocast(device.type, torch.float16, enabled=device.type == "cuda"):
            total, items = compute_loss(predictions, targets, images)
        return items, torch.autograd.grad(total, predictions)

    return step


def prepared_step(compute_loss, predictions, targets, size, device):
    """Forward + backward with candidates that are on the device already."""
    shapes = [prediction.shape for prediction in predictions]
    candidate_sets = [c.to(device) for c in compute_loss.prepare(targets, shapes, (size, size))]

    def step():
        with torch.autocast(device.type, torch.float16, enabled=device.type == "cuda"):
            total, items = compute_loss.compute(predictions, candidate_sets)
        return items, torch.autograd.grad(total, predictions)

    return step


def graph_replay(step):
    """The replay of a captured `step`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which copies the candidates that the step reads
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = step()

    def replay(step=step):  # with it the memory that the graph reads is held
        graph.replay()
        return outputs

    return replay


def assigners(model, predictions, targets, size, kind):
    """The assignment of both sides as calls; the candidates of the fast one are prepared before."""
    head, detached = model.model[-1], [prediction.detach() for prediction in predictions]
    on_device = targets.to(detached[0].device)
    reference = assigner.ota if kind == "ota" else assigner.plain
    fast = KINDS[kind][1](model)
    fast.use_kernels = False
    (candidates,) = fast.prepare(targets, [p.shape for p in detached], (size, size))
    candidates = candidates.to(on_device.device)

    def assign():
        rows = batched_assigner.gather_rows(candidates.tensors.cell_index, candidates.sizes.cells, detached)
        return batched_assigner.assign(rows, candidates)

    inputs = detached, on_device, head.anchors, head.stride, (size, size)
    return (lambda: reference(*inputs)), assign if kind == "ota" else None


def run(case, kind, device, seconds):
    """All numbers of one row: {"reference": {...}, "fast": {...}}, after a check that both sides agree."""
    _, _, _, size = case
    model, predictions, targets = make_case(*case, device)
    images = torch.empty(1, 3, size, size)
    row = {
        "batch": case[0],
        "boxes": case[1],
        "classes": case[2],
        "pixels": size,
        "loss": kind,
        "targets": len(targets),
    }
    timed = partial(measure, seconds=seconds)
    steps = {}
    for side, loss_class in zip(("reference", "fast"), KINDS[kind], strict=True):
        where = targets.to(device) if side == "reference" else targets
        steps[side] = stepper(loss_class(model), predictions, where, images, device)
    torch.testing.assert_close(steps["fast"]()[0], steps["reference"]()[0], rtol=1e-4, atol=1e-6)

    for (side, step), assign in zip(steps.items(), assigners(model, predictions, targets, size, kind), strict=True):
        numbers = {"step": timed(step, device)}
        if assign:
            numbers["assign"] = timed(assign, device)
        if device.type == "cuda":
            numbers |= count(step)
            numbers["MB"] = peak_memory(step)
        row[side] = numbers
    fast, shapes = KINDS[kind][1](model), [prediction.shape for prediction in predictions]
    on_host = torch.device("cpu")
    row["fast"]["prepare"] = timed(lambda: fast.prepare(targets, shapes, (size, size)), on_host)
    compute = prepared_step(fast, predictions, targets, size, device)
    row["fast"]["compute"] = timed(compute, device)
    if device.type == "cuda":
        row["fast"]["graph"] = timed(graph_replay(compute), device)
        fast.use_kernels = False
        row["fast"]["torch"] = timed(stepper(fast, predictions, targets, images, device), device)
    row["speed-up"] = row["reference"]["step"][0] / row["fast"]["step"][0]
    return row


CAPTURED = [(64, 14, 80, 320), (384, 14, 80, 320), (32, 14, 80, 640)]


def run_captured(case, kind, device, seconds):
    """Numbers of the fast loss as a part of a captured training step."""
    batch, _, num_classes, size = case
    model, predictions, targets = make_case(*case, device)
    shapes = [prediction.shape for prediction in predictions]
    outputs = [p.detach().permute(0, 1, 4, 2, 3).reshape(batch, -1, *p.shape[2:4]).half() for p in predictions]
    outputs = [output.contiguous(memory_format=torch.channels_last).requires_grad_() for output in outputs]
    compute_loss = KINDS[kind][1](model)

    def prepare():
        return compute_loss.prepare(targets, shapes, (size, size))

    static = [candidates.to(device) for candidates in prepare()]

    def step():
        maps = [output.view(batch, 3, 5 + num_classes, *output.shape[2:]).permute(0, 1, 3, 4, 2) for output in outputs]
        with torch.autocast(device.type, torch.float16, enabled=device.type == "cuda"):
            total, items = compute_loss.compute(maps, static)
        gradients = torch.autograd.grad(total * 1024, outputs)
        return items, [gradient.contiguous(memory_format=torch.channels_last) for gradient in gradients]

    on_host = measure(prepare, torch.device("cpu"), most=500, seconds=seconds)
    numbers = {"prepare": on_host, "step": measure(step, device, seconds=seconds)}
    if device.type == "cuda":
        replay = graph_replay(step)
        numbers |= {"graph": measure(replay, device, seconds=seconds), **count(replay), "MB": peak_memory(step)}
        numbers["by kernel"] = kernel_times(replay)
    case = dict(zip(COLUMNS, (*case, kind), strict=True))
    return {"tree": os.environ.get("BENCH_LOSS_ROOT", "this"), **case, "targets": len(targets), **numbers}


def kernel_times(function, repetitions=10):
    """{kernel: milliseconds a call of `function`}, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repetitions):
            function()
        torch.cuda.synchronize()
    times = {event.key: event.self_device_time_total / 1e3 / repetitions for event in profile.key_averages()}
    return dict(sorted(times.items(), key=lambda entry: -entry[1]))


def print_captured(device, seconds, out):
    """A line of json for each case and kind, also into `out`."""
    for case in CAPTURED:
        for kind in KINDS:
            line = json.dumps(run_captured(case, kind, device, seconds))
            print(line, flush=True)
            with out.open("a") as file:
                file.write(line + "\n")


COLUMNS = ("batch", "boxes", "classes", "pixels", "loss")
COUNTS = ("kernels", "launches", "waits", "MB")
NUMBERS = {"reference": ("step", "assign", *COUNTS),
           "fast": ("step", "torch", "prepare", "compute", "graph", "assign", *COUNTS)}  # fmt: skip


def table(rows):
    """The rows as markdown, without columns that nobody filled."""
    filled = [
        (side, name) for side, names in NUMBERS.items() for name in names if any(name in row[side] for row in rows)
    ]
    head = [*COLUMNS, *(f"{side}: {name}" for side, name in filled), "speed-up"]
    lines = []
    for row in rows:
        numbers = [in_words(row[side].get(name)) for side, name in filled]
        lines.append([*(row[name] for name in COLUMNS), *numbers, f"{row['speed-up']:.1f}x"])
    return markdown.table(head, lines)


def ota_against_plain(rows):
    """How much longer OTA takes than the plain loss, both fast, as markdown: ratios of the medians."""
    lines, numbers = [], ("step", "compute", "graph")
    fast = {(*(row[name] for name in COLUMNS[:-1]), row["loss"]): row["fast"] for row in rows}
    for *case, kind in fast:
        plain, ota = fast.get((*case, "plain")), fast.get((*case, "ota"))
        if kind == "plain" and plain and ota:
            ratios = (f"{ota[name][0] / plain[name][0]:.2f}" if name in ota else "-" for name in numbers)
            lines.append([*case, *ratios])
    return markdown.table([*COLUMNS[:-1], *numbers], lines)


def in_words(value):
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return "{:.2f} ({:.2f}-{:.2f})".format(*value)
    return f"{value:.0f}"


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--short", action="store_true", help="a handful of cases, within two minutes")
    parser.add_argument("--captured", action="store_true", help="the fast losses as parts of a captured step, as json")
    parser.add_argument("--base", help="folder of an older checkout to measure first, with --captured")
    parser.add_argument("--seconds", type=float, default=1.0, help="for the repetitions of one number")
    parser.add_argument("--threads", type=int, default=None, help="of the CPU")
    parser.add_argument("--out", default="runs/bench_loss", help="folder of table and json")
    return parser.parse_args()


def main(opt):
    device = torch.device(opt.device)
    if opt.threads:
        torch.set_num_threads(opt.threads)
    is_cpu = device.type == "cpu"
    machine = f"{torch.get_num_threads()} threads" if is_cpu else torch.cuda.get_device_name(device)
    title = f"{machine}, torch {torch.__version__}, Python {platform.python_version()}"
    out = Path(opt.out)
    out.mkdir(parents=True, exist_ok=True)
    if opt.captured:
        if opt.base:
            line = [argument for argument in sys.argv if not argument.startswith("--base")]
            line = [argument for argument in line if argument != opt.base]
            environment = {**os.environ, "BENCH_LOSS_ROOT": str(Path(opt.base).resolve())}
            subprocess.run([sys.executable, *line], check=True, env=environment)
        print_captured(device, opt.seconds, out / "captured.jsonl")
        return

    rows = []
    for case in (SHORT_CPU if is_cpu else SHORT) if opt.short else ALL:
        for kind in KINDS:
            rows.append(run(case, kind, device, opt.seconds))
            print(rows[-1], flush=True)
            (out / "bench_loss.json").write_text(json.dumps({"machine": title, "rows": rows}, indent=1))
    text = f"{title}\n\n{table(rows)}\n\nOTA against plain:\n\n{ota_against_plain(rows)}\n"
    (out / "bench_loss.md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    command_line.run_tool(main, parse(), logging.WARNING)
