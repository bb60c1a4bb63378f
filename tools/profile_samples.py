"""What a training sample costs, step by step: microseconds of CPU time on one core, images in RAM.

    python tools/profile_samples.py         # 320 px tiny and 640 px p5, drawn
    python tools/profile_samples.py --data folder --samples 400

A step's time is its own: what it calls of the other steps is left out. "later" are samples whose colours, flips and,
mostly, warp are left to the GPU (--fast-dataloader --fast-step), "at once" those of every other loader. The share of
samples that contain a step's work is not 1 for mixup and paste-in, so the columns are averages over all samples.
"""

import argparse
import logging
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import cv2
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.bench_samples import make_dataset
from tools.experiments import command_line, markdown
from utils.config.hyp import load_hyp
from utils.data import affine, mosaic
from utils.data import dataset as dataset_module
from utils.data.fast.deferred import CAPACITY, DeferredDataset, rounding_mode, steps_bytes
from utils.datasets import LoadImagesAndLabels as Dataset
from utils.run import entry

STEPS = {
    "draw the mosaic": [(mosaic, "draw_mosaic4"), (mosaic, "draw_mosaic9")],
    "labels in pixels": [(mosaic.Mosaic, "labels"), (mosaic.Mosaic, "segments")],
    "draw the transform": [(mosaic, "draw_affine")],
    "paint": [(mosaic.Mosaic, "paint")],
    "warp the image": [(affine.Affine, "image")],
    "warp the labels": [(mosaic, "warp_labels")],
    "mixup": [(dataset_module, "mixup")],
    "objects to paste": [(Dataset, "samples_to_paste")],
    "paste in": [(dataset_module, "pastein")],
    "colours": [
        (dataset_module, "draw_colours"),
        (Dataset, "recolour"),
        (DeferredDataset, "recolour"),
    ],
    "flips": [(Dataset, "flip"), (DeferredDataset, "flip")],
    "hand over": [(Dataset, "pixels"), (DeferredDataset, "pixels")],
}


class StepClock:
    """CPU time of each step by itself, in seconds."""

    def __init__(self):
        self.seconds = dict.fromkeys([*STEPS, "the rest"], 0.0)
        self.open, self.last = ["the rest"], time.thread_time()

    def switch(self):
        now = time.thread_time()
        self.seconds[self.open[-1]] += now - self.last
        self.last = now

    def timed(self, step, function):
        def wrapper(*args, **kwargs):
            self.switch()
            self.open.append(step)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self.open.pop()

        return wrapper


def profile(dataset, num_samples, later, seed):
    """Microseconds per sample of each step, as a dict."""
    size = dataset.img_size
    place = np.empty(3 * CAPACITY * size**2, np.uint8)
    steps = np.empty(steps_bytes(size, rounding_mode(size) is not None), np.uint8)
    dataset = DeferredDataset(dataset) if later else dataset
    dataset.new_image = lambda shape, dtype: place[: int(np.prod(shape))].reshape(shape)
    random.seed(seed)
    np.random.seed(seed)
    clock = StepClock()
    with ExitStack() as stack:
        for step, functions in STEPS.items():
            for owner, name in functions:
                stack.enter_context(mock.patch.object(owner, name, clock.timed(step, getattr(owner, name))))
        clock.last = time.thread_time()
        for k in range(num_samples):
            if later:
                dataset.begin(steps)
            dataset[k % len(dataset)]
        clock.switch()
    return {step: 1e6 * seconds / num_samples for step, seconds in clock.seconds.items()}


def columns_of(dataset, options):
    """(header, median microseconds of each step) with and without steps deferred to the GPU."""
    for later in (True, False):
        profile(dataset, 20, later, 0)  # warm up
        runs = [profile(dataset, options.samples, later, seed) for seed in range(options.repeats)]
        yield "later" if later else "at once", {step: statistics.median(run[step] for run in runs) for step in runs[0]}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    parser.add_argument("--data", nargs="*", help="folders of images; default: drawn, with polygons and with boxes")
    parser.add_argument("--images", type=int, default=200, help="images to draw")
    parser.add_argument("--samples", type=int, default=200, help="samples in one measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", nargs="+", default=["320:tiny", "640:p5"], help="image size:hyper-parameters")
    return parser.parse_args()


def main(options):
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        sources = {Path(path).name: path for path in options.data or []}
        for kind in () if sources else ("polygons", "boxes"):
            root = Path(folder, kind)
            root.mkdir()
            sources[kind] = str(make_dataset(root, options.images, boxes=kind == "boxes"))
        table = {}
        for job in options.jobs:
            size, name = job.split(":")
            for kind, source in sources.items():
                dataset = Dataset(
                    source, int(size), augment=True, hyp=load_hyp(f"data/hyp.scratch.{name}.yaml"), cache_images=True
                )
                for header, steps in columns_of(dataset, options):
                    table[f"{size} {name} {kind}, {header}"] = steps
    versions = f"OpenCV {cv2.__version__}, NumPy {np.__version__}"
    print(f"\n{versions}; microseconds per sample, medians of {options.repeats}\n")
    rows = [[step, *(f"{column[step]:,.0f}" for column in table.values())] for step in [*STEPS, "the rest"]]
    rows.append(["all", *(f"{sum(column.values()):,.0f}" for column in table.values())])
    print(markdown.table(["step", *table], rows))


if __name__ == "__main__":
    command_line.run_tool(main, parse(), logging.WARNING)
