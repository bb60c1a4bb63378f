"""The fused model and what each of its pieces gains: forward and backward pass alone, in a CUDA graph, in one process.

    python tests/bench_pieces.py [--base FOLDER] [--cases 0 1 2 3] \\
        [--variants now before] [--profile] [--out runs/pieces]

Variants:

    ordinary    the model itself, channels-last
    before      models/fused/network.py of the checkout in FOLDER
    now         models/fused/network.py
    without X   the same, but piece X is done in the ordinary way: what it is
                slower than `now` is what X gains alone

fp16 autocast; the gradients of the maps are fixed, in the layout of the maps. Each variant has a model of its own, is
warmed up and captured; then the graphs are replayed in turns, `--rounds` times. Milliseconds are medians between
events, with the 10th and 90th percentile; GB is the peak of the variant alone. `--profile` also writes what each kernel
of one pass takes, by name and in order.
"""

import argparse
import gc
import importlib
import logging
import platform
import sys
import traceback
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.bench_step import CASES, gradient_like, spread  # noqa: E402  (needs the path above)
from tools.experiments import command_line  # noqa: E402
from utils.run import entry  # noqa: E402


@contextmanager
def models_from(folder):
    """Inside, `models` and all below it are those of `folder`."""
    others = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "models"}
    for name in others:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == "models"]:
            del sys.modules[name]
        sys.modules.update(others)


def model_of(cfg, device):
    torch.manual_seed(0)
    model = importlib.import_module("models.yolo").Model(ROOT / f"cfg/training/{cfg}.yaml", nc=80)
    return model.to(device).to(memory_format=torch.channels_last).train()


def network(variant, cfg, base, device):
    """What makes the maps of images; its parameters are trained."""
    if variant == "before":
        with models_from(base):
            return importlib.import_module("models.fused.network").fused_model(model_of(cfg, device)).train()
    if variant == "ordinary":
        return model_of(cfg, device)
    from models.fused import convolutions, operations, plan
    from models.fused.network import fused_model

    def joined(translator, sources):
        target = operations.Value(sum(source.channels for source in sources), packed=True)
        return translator._do(operations.Join(sources, target, list(range(len(sources)))))

    without = {
        "now": nullcontext(),
        "without merging": mock.patch.object(plan, "merged", list),
        "without stem": mock.patch.object(convolutions.Stem, "fits", staticmethod(lambda *_: False)),
        "without places": mock.patch.object(plan.Translator, "_joined", joined),
    }
    with without[variant]:
        return fused_model(model_of(cfg, device)).train()


VARIANTS = ("now", "before", "ordinary", "without merging", "without stem", "without places")


class Captured:
    """One forward and backward pass of a variant as a graph; `body` runs it without."""

    def __init__(self, variant, case, base, device):
        cfg, size, batch = case
        self.network, self.times = network(variant, cfg, base, device), []
        self.images = torch.rand(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
        self.gradients = None
        torch.cuda.reset_peak_memory_stats()
        before, stream = torch.cuda.memory_allocated(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.body()
        torch.cuda.synchronize()
        self.peak = (torch.cuda.max_memory_allocated() - before) / 1e9
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.body()

    def body(self):
        with torch.autocast("cuda", torch.float16):
            maps = self.network(self.images)
        if self.gradients is None:
            self.gradients = list(map(gradient_like, maps))
        torch.autograd.backward(maps, self.gradients)
        for parameter in self.network.parameters():
            parameter.grad = None

    def replay(self):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        self.graph.replay()
        marks[1].record()
        torch.cuda.synchronize()
        self.times.append(marks[0].elapsed_time(marks[1]))


def profile(body, path):
    """Write what each kernel of `body` takes: by name, and in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        body()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if str(event.device_type).endswith("CUDA")]
    kernels.sort(key=lambda event: event.time_range.start)
    by_name = defaultdict(list)
    for event in kernels:
        by_name[event.name].append(event.time_range.elapsed_us())
    lines = [f"{sum(map(sum, by_name.values())) / 1e3:.3f} ms in {len(kernels)} kernels"]
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        lines.append(f"{sum(times) / 1e3:8.3f} ms {len(times):4d} {name[:150]}")
    lines += ["", *(f"{event.time_range.elapsed_us():9.1f} {event.name[:100]}" for event in kernels)]
    path.write_text("\n".join(lines))


def compare(case, opt, device):
    """Capture all variants of a case, replay them in turns, print a line for each."""
    captured = {}
    for variant in opt.variants or VARIANTS:
        if variant == "before" and not opt.base:
            continue
        try:
            captured[variant] = Captured(variant, case, opt.base, device)
        except Exception:
            print(f"failed: {case} {variant}\n{traceback.format_exc()}", flush=True)
    for number in range(opt.rounds + 2):
        for run in captured.values():
            run.replay()
            if number < 2:
                run.times.clear()
    for variant, run in captured.items():
        middle, low, high = spread(run.times)
        name = f"{case[0]} {case[1]} px batch {case[2]}"
        print(f"| {name} | {variant} | {middle:.2f} ({low:.2f}-{high:.2f}) | {run.peak:.1f} |", flush=True)
    if opt.profile:
        for variant in {"now", "before"} & captured.keys():
            profile(captured[variant].body, Path(opt.out) / f"{case[0]}_{case[1]}_{case[2]}_{variant}.txt")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    parser.add_argument("--base", help="folder of the checkout that `before` comes from")
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help=f"numbers in {CASES}")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help="only these")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", default="runs/pieces", help="folder of the profiles")
    return parser.parse_args()


def main(opt):
    torch.backends.cudnn.benchmark = True
    Path(opt.out).mkdir(parents=True, exist_ok=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}")
    print("| case | variant | ms forward + backward | GB |", "|---|---|---|---|", sep="\n", flush=True)
    for number in opt.cases:
        compare(CASES[number], opt, torch.device("cuda"))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    command_line.run_tool(main, parse(), logging.WARNING)
