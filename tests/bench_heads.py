"""What several heads cost: forward + loss + backward of a model with one head and of the same with four.

python tests/bench_heads.py [--batch 64] [--img 320] [--device cpu] [--out runs/bench_heads]

Both models take the same images and boxes, in turns, in the same precision (float16 autocast and channels-last on a
GPU); optimiser and moving average, which differ by 0.6 % of the weights, are left out. `eager` is the step with
candidates prepared on the host within it, `graph` the replay of a CUDA graph of it, `prepare` the work on the host
alone, all in milliseconds: medians with the smallest and the largest in brackets. `peak` is the most memory in MB,
weights included.
Prints a markdown table and writes it with a json of all numbers into --out.
"""

import argparse
import gc
import json
import logging
import platform
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.yolo import Model
from tests.bench_loss import graph_replay, in_words, make_case, measure
from tools.experiments import command_line, markdown
from utils.head_config import HeadConfig
from utils.loss.batched import CLASSES, grid_shapes
from utils.loss.criterion import build_losses

ROOT = Path(__file__).resolve().parents[1]
HYP = {"box": 0.05, "cls": 0.5, "obj": 0.25, "cls_pw": 1.0, "obj_pw": 1.0, "anchor_t": 4.0, "fl_gamma": 0.0}
MODELS = {
    "one head": ("cfg/training/yolov7-tiny.yaml", None),
    "four heads": ("cfg/training/yolov7-tiny-1b4h.yaml", "data/coco_320_1b4h_standard.yaml"),
}
# what is compared: (loss of one head, loss of four heads)
PAIRS = {"plain, plain": (False, False), "OTA, OTA": (True, True), "as by default: OTA, plain": (True, False)}


class Step:
    """Forward, loss and backward of one model on one batch."""

    def __init__(self, model, use_ota, images, targets):
        self.model, self.images, self.targets = model, images, targets
        self.loss, _ = build_losses(model, classes=CLASSES, use_ota=use_ota)
        self.device = images.device
        self.size, self.shapes = tuple(images.shape[2:]), grid_shapes(model.model[-1], images.shape)

    def prepare(self):
        return self.loss.prepare(self.targets, self.shapes, self.size)

    def compute(self, candidate_sets):
        on_gpu = self.device.type == "cuda"
        with torch.autocast("cuda", torch.float16) if on_gpu else nullcontext():
            loss, _ = self.loss.compute(self.model(self.images), candidate_sets)
        loss.backward()

    def eager(self):
        self.model.zero_grad()
        self.compute([candidates.to(self.device) for candidates in self.prepare()])

    def captured(self):
        """A function that replays the step as a CUDA graph, with its candidates copied before."""
        static, new = [candidates.to(self.device) for candidates in self.prepare()], self.prepare()

        def step():
            self.model.zero_grad()
            self.compute(static)

        replay_step = graph_replay(step)

        def replay():
            for old, fresh in zip(static, new, strict=True):
                old.copy_(fresh)
            replay_step()

        return replay


def build(name, device):
    cfg, heads = MODELS[name]
    model = Model(ROOT / cfg, head_config=heads and HeadConfig(ROOT / heads)).to(device).train()
    model.hyp, model.gr = HYP, 1.0
    return model.to(memory_format=torch.channels_last) if device.type == "cuda" else model


def measure_step(step, device):
    """The numbers of one step, by column."""
    numbers = {"eager": measure(step.eager, device), "prepare": measure(step.prepare, torch.device("cpu"))}
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        step.model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        step.eager()
        numbers["peak"] = torch.cuda.max_memory_allocated() / 1e6
        numbers["graph"] = measure(step.captured(), device)
    return numbers


def table(results):
    """Markdown: a row for each pair and model, and the ratio of four heads to one."""
    columns = ("eager", "graph", "prepare", "peak")
    rows = []
    for pair, models in results.items():
        rows += [[pair, name, *(in_words(numbers.get(c)) for c in columns)] for name, numbers in models.items()]
        one, four = models.values()
        ratios = [f"{_median(four[c]) / _median(one[c]):.2f}x" if c in one else "-" for c in columns]
        rows.append([pair, "four to one", *ratios])
    return markdown.table(["losses", "model", *columns], rows)


def _median(value):
    return value[0] if isinstance(value, tuple) else value


def main(opt):
    device = torch.device(opt.device)
    torch.backends.cudnn.benchmark = True
    targets = make_case(opt.batch, opt.boxes, 80, opt.img, torch.device("cpu"))[2]
    images = torch.rand(opt.batch, 3, opt.img, opt.img, device=device)
    if device.type == "cuda":
        images = images.to(memory_format=torch.channels_last)
    results = {}
    for pair, kinds in PAIRS.items():
        results[pair] = {}
        for name, use_ota in zip(MODELS, kinds, strict=True):
            step = Step(build(name, device), use_ota, images, targets)
            results[pair][name] = measure_step(step, device)
            del step
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    title = f"{where}, torch {torch.__version__}, batch {opt.batch}, {opt.img} px, {len(targets)} boxes"
    text = f"{title}\n\n{table(results)}\n"
    print(text)
    out = Path(opt.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.md").write_text(text)
    (out / "results.json").write_text(json.dumps({"title": title, "results": results}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser("bench_heads.py", description="What several heads cost.")
    add = parser.add_argument
    add("--batch", type=int, default=64)
    add("--boxes", type=int, default=14, help="mean number of boxes an image")
    add("--img", type=int, default=320, help="pixels")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", default="runs/bench_heads")
    command_line.run_tool(main, parser.parse_args(), logging.WARNING)
