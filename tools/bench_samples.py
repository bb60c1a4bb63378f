"""CPU time of one training sample, ours beside the plain form of the same steps, on one core.

The plain form does every step the direct way, as stock YOLOv7 does: masks of pasted objects on the whole canvas, all
objects cut out at once, every image of a mosaic decoded, one polygon after the other, mixup in floating point.
Both make the same draws, so their samples must be equal, which is checked, too.

    python tools/bench_samples.py           # 320 and 640 px, p5 and tiny
    python tools/bench_samples.py --samples 320 --sizes 640 --cache --boxes

    python tools/bench_samples.py --steps   # microseconds of each step of ours

A step's time is its own: what it calls of the other steps is left out. "later" are samples whose colours, flips and,
mostly, warp are left to the GPU (--fast-dataloader --fast-step), "at once" those of every other loader. Not every
sample has mixup or paste-in: the columns are averages over all.

The data set is synthetic and temporary, unless --data names folders of images: 640 x 480 JPEGs, a quarter upright, with
about 8 polygons of 12 to 44 points.
"""

import argparse
import logging
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import cv2
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.experiments import command_line, markdown
from utils.config.hyp import load_hyp
from utils.data import affine, mosaic, paste
from utils.data import dataset as dataset_module
from utils.data.fast.deferred import CAPACITY, DeferredDataset, rounding_mode, steps_bytes
from utils.datasets import LoadImagesAndLabels as Dataset
from utils.ops.boxes import resample_segments, segment2box, segments2boxes
from utils.run import entry


def make_dataset(folder, num_images, seed=0, boxes=False):
    """Write JPEGs of quality 92, about 85 kB each, and polygon labels, or the `boxes` round them.

    Returns the folder of the images.
    """
    rng = np.random.default_rng(seed)
    images, labels = folder / "images", folder / "labels"
    images.mkdir(), labels.mkdir()
    for k in range(num_images):
        width, height = (480, 640) if k % 4 == 0 else (640, 480)
        coarse = rng.uniform(0, 255, (12, 12, 3)).astype(np.float32)
        smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        grain = cv2.GaussianBlur(rng.normal(0, 25, (height, width, 1)).astype(np.float32), (0, 0), 0.9)
        img = (smooth + grain.reshape(height, width, 1)).clip(0, 255).astype(np.uint8)
        cv2.imwrite(str(images / f"{k:04}.jpg"), img, [cv2.IMWRITE_JPEG_QUALITY, 92])
        rows = [random_polygon(rng) for _ in range(rng.poisson(8))]
        (labels / f"{k:04}.txt").write_text("\n".join(map(box_around, rows) if boxes else rows))
    return images


def random_polygon(rng):
    """One line of a label file: a star-shaped outline of 12 to 44 points."""
    num_points = rng.integers(12, 45)
    angles = np.sort(rng.uniform(0, 2 * np.pi, num_points))
    radii = np.exp(rng.uniform(np.log(0.02), np.log(0.3))) * rng.uniform(0.6, 1.0, num_points)
    centre = rng.uniform(0.1, 0.9, (2, 1))
    points = (centre + radii * np.stack((np.cos(angles), np.sin(angles)))).clip(0, 1)
    return " ".join([str(rng.integers(80)), *(f"{value:.6f}" for value in points.T.ravel())])


def box_around(line):
    """The label file's line of the box round a polygon."""
    category, *values = line.split()
    (box,) = segments2boxes([np.array(values, float).reshape(-1, 2)])
    return " ".join([category, *(f"{value:.6f}" for value in box)])


# The plain form of what our modules do in a quicker way.


class PlainSample:
    """An object cut out at once, with a mask as large as the canvas."""

    def __init__(self, category, box, outline, canvas):
        x1, y1, x2, y2 = box
        self.category, self.size = category, (x2 - x1, y2 - y1)
        image = canvas.plain_pixels
        mask = np.zeros(image.shape, np.uint8)
        cv2.drawContours(mask, [outline], -1, (255, 255, 255), cv2.FILLED)
        shown = cv2.bitwise_and(image, mask) > 0
        mask[shown] = image[shown]
        self.pixels = mask[y1:y2, x1:x2]

    def cut_out(self):
        return self.pixels


def plain_load_samples(dataset, index):
    canvas = mosaic.draw_mosaic4(dataset, index)
    canvas.plain_pixels = canvas[:, :]
    return paste.sample_segments(canvas, canvas.labels(), canvas.segments(), 0.5)


def plain_polygon_boxes(warp, polygons):
    boxes = np.zeros((len(polygons), 4))
    for box, points in zip(boxes, polygons, strict=True):
        box[:] = segment2box(warp.points(resample_segments([points])[0]), warp.width, warp.height)
    return boxes


def plain_mixup(img1, labels1, img2, labels2, _):
    ratio = np.random.beta(8.0, 8.0)
    return (img1 * ratio + img2 * (1 - ratio)).astype(np.uint8), np.concatenate((labels1, labels2))


@contextmanager
def plain_form():
    replacements = (
        (paste, "Sample", PlainSample),
        (dataset_module, "load_samples", plain_load_samples),
        (dataset_module, "mixup", plain_mixup),
        (affine.Affine, "polygon_boxes", plain_polygon_boxes),
        (affine.Affine, "source_area", lambda warp: (-np.inf, -np.inf, np.inf, np.inf)),
    )
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


FORMS = {"plain": plain_form, "ours": nullcontext}


def measure(dataset, form, num_samples, seed):
    """(CPU milliseconds per sample, check sum of all samples)."""
    random.seed(seed)
    np.random.seed(seed)
    total, check_sum = 0.0, []
    with form():
        for k in range(num_samples):
            start = time.thread_time()
            image, targets, _, _ = dataset[k % len(dataset)]
            total += time.thread_time() - start
            check_sum.append((int(image.long().sum()), float(targets.double().sum())))
    return 1e3 * total / num_samples, check_sum


def compare(dataset, num_samples, repeats):
    """CPU ms per sample of each form in each repeat, measured in turns."""
    times = {name: [] for name in FORMS}
    for repeat in range(repeats):
        runs = [measure(dataset, form, num_samples, repeat) for form in FORMS.values()]
        for name, (duration, _) in zip(FORMS, runs, strict=True):
            times[name].append(duration)
        if runs[0][1] != runs[1][1]:
            raise ValueError(f"our samples differ from those of the plain form (seed {repeat})")
    return times


# What each step of ours takes.

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
    "colours": [(dataset_module, "draw_colours"), (Dataset, "recolour"), (DeferredDataset, "recolour")],
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


def print_steps(dataset, options, title):
    """A table of the median microseconds of each step, with and without steps deferred to the GPU."""
    columns = {}
    for later in (True, False):
        profile(dataset, 20, later, 0)  # warm up
        runs = [profile(dataset, options.samples, later, seed) for seed in range(options.repeats)]
        columns["later" if later else "at once"] = [statistics.median(run[step] for run in runs) for step in runs[0]]
    rows = [[step, *(f"{time:,.0f}" for time in times)]
            for step, *times in zip([*STEPS, "the rest"], *columns.values(), strict=True)]  # fmt: skip
    rows.append(["all", *(f"{sum(times):,.0f}" for times in columns.values())])
    print(f"\n{markdown.table([title.strip(), *columns], rows)}", flush=True)


def print_forms(dataset, options, title):
    """A line of the median milliseconds of each form."""
    times = compare(dataset, options.samples, options.repeats)
    medians = "".join(f"{statistics.median(values):>15.2f}" for values in times.values())
    ratios = [b / a for a, b in zip(times["plain"], times["ours"], strict=True)]
    each = " ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"{title:>11}{medians}  {statistics.median(ratios):.2f}: {each}", flush=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    parser.add_argument("--data", help="folder of images; default: drawn for the occasion")
    parser.add_argument("--images", type=int, default=200, help="images to draw")
    parser.add_argument("--samples", type=int, default=160, help="samples in one measurement")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each form, in turns")
    parser.add_argument("--sizes", type=int, nargs="+", default=[320, 640])
    parser.add_argument("--hyps", nargs="+", choices=("p5", "tiny"), default=["p5", "tiny"])
    parser.add_argument("--cache", action="store_true", help="images in RAM")
    parser.add_argument("--boxes", action="store_true", help="labels without polygons")
    parser.add_argument("--steps", action="store_true", help="what each step takes, images in RAM")
    return parser.parse_args()


def main(options):
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    is_cached = options.cache or options.steps
    with tempfile.TemporaryDirectory() as folder:
        images = Path(options.data or make_dataset(Path(folder), options.images, boxes=options.boxes))
        sizes = [path.stat().st_size for path in images.iterdir()]
        kinds = options.data or ("boxes" if options.boxes else "polygons")
        print(f"OpenCV {cv2.__version__}, NumPy {np.__version__}; {len(sizes)} JPEGs of {np.mean(sizes) / 1e3:.0f} kB, "
              f"{kinds}, {'cached' if is_cached else 'from files'}")  # fmt: skip
        if not options.steps:
            print(f"{'size':>5}{'hyp':>6}" + "".join(f"{f'{name} ms':>15}" for name in FORMS) + "  ours/plain, each")
        for side in options.sizes:
            for name in options.hyps:
                hyp = load_hyp(f"data/hyp.scratch.{name}.yaml")
                dataset = Dataset(str(images), side, augment=True, hyp=hyp, cache_images=is_cached)
                (print_steps if options.steps else print_forms)(dataset, options, f"{side:>5}{name:>6}")


if __name__ == "__main__":
    command_line.run_tool(main, parse(), logging.WARNING)
