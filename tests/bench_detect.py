"""Detection from files to rows: detect.py beside a loop that takes one image after the other.

    python tests/bench_detect.py [--images 1000] [--batch 32] \\
        [--weights best.pt] [--device cuda:0] [--save]

JPEGs of 640 x 480, some upright (copies of 100 drawn ones). Without --weights the model is an untrained yolov7-tiny
whose objectness is shifted until an image has about --candidates boxes above the threshold, .001. The loop reads with
OpenCV, letterboxes, copies to the device, runs the fused network and the NMS of this project, and with --save draws and
writes: what a straightforward program does, nothing ahead of time. On a GPU in half precision and in float32.
After a warm-up all sides run in turns, --repeats times; medians with the extremes of images a second, with decoding.
"""

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import cv2
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from models.experimental import attempt_load  # noqa: E402
from models.yolo import Model  # noqa: E402
from tests.bench_val import shift_objectness  # noqa: E402
from tools.bench_loader import write_images  # noqa: E402
from tools.experiments import command_line  # noqa: E402
from utils.detect import writers  # noqa: E402
from utils.detect.loop import detect  # noqa: E402
from utils.detect.names import find_items  # noqa: E402
from utils.detect.predict import Predictor, Thresholds  # noqa: E402
from utils.detect.sources import FileSource, prepare  # noqa: E402
from utils.ops.boxes import scale_coords  # noqa: E402
from utils.ops.nms import non_max_suppression  # noqa: E402
from utils.plots.images import draw_detections  # noqa: E402
from utils.run import entry  # noqa: E402

THRESHOLDS = Thresholds(0.001, 0.45)


@torch.no_grad()
def make_weights(path, items, size, candidates):
    """An untrained yolov7-tiny that finds something: its norms fit these images, so that cells differ."""
    torch.manual_seed(0)
    model = Model(ROOT / "cfg/training/yolov7-tiny.yaml")
    squares = [cv2.resize(cv2.imread(item.path), (size, size)) for item in items[:4]]
    images = torch.stack([torch.from_numpy(prepare(square, size, 32)) for square in squares])
    for norm in (module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)):
        norm.momentum = 1.0
    model(images.float() / 255)
    shift_objectness(model.eval(), images, candidates)
    torch.save({"model": model}, path)
    return path


@torch.inference_mode()
def one_by_one(model, items, names, folder, size):
    """Rows of all images [k x 6], by the simple loop."""
    weight, found = next(model.parameters()), []
    for item in items:
        image = cv2.imread(item.path)
        pixels = torch.from_numpy(prepare(image, size, 32)).to(weight.device)
        pixels = pixels.to(weight.dtype)[None] / 255
        rows = non_max_suppression(model(pixels)[0], THRESHOLDS.confidence, THRESHOLDS.iou)[0]
        found.append(scale_coords(pixels.shape[2:], rows, image.shape[:2]).cpu())
        if folder:
            cv2.imwrite(str(folder / f"{item.name}.jpg"), draw_detections(image, found[-1], names))
    return found


class Kept:
    """A writer that keeps the rows."""

    def __init__(self):
        self.found = {}

    def add(self, frame, detections):
        self.found[frame.name] = detections

    def close(self):
        pass


def pipeline(predictor, items, names, folder, size, batch):
    """Rows of all images [k x 6], by the parts of detect.py."""
    kept = Kept()
    sinks = [kept, writers.Pictures(folder, names)] if folder else [kept]
    source = FileSource(items, partial(prepare, size=size, stride=32), batch)
    detect(source, predictor, names, sinks, num_items=len(items))
    return [kept.found[item.name] for item in items]


def main(options):
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with tempfile.TemporaryDirectory() as place:
        items = find_items([str(write_images(Path(place), options.images, num_different=100))])
        weights = options.weights or make_weights(Path(place) / "tiny.pt", items, options.img, options.candidates)
        folder = Path(place) / "drawn" if options.save else None
        if folder:
            folder.mkdir()
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print(f"{machine}, {os.cpu_count()} cores, torch {torch.__version__}, OpenCV {cv2.__version__}")
        print(f"{options.images} images, {options.img} px, saved: {options.save}\n")
        print("| precision | side | images | img/s | times | rows an image |\n|---|---|---|---|---|---|")
        for half in (True, False) if device.type == "cuda" else (False,):
            model = attempt_load(weights, map_location=device)
            predictor, names = Predictor(model, THRESHOLDS, half), list(model.names)
            sides = {"one by one": (partial(one_by_one, predictor.model), items[: options.single])}
            for size in dict.fromkeys((1, options.batch)):
                few = items[: options.single] if size == 1 else items
                sides[f"detect.py, batch {size}"] = (partial(pipeline, predictor, batch=size), few)
            show("fp16" if half else "fp32", *measure(sides, names, folder, options), sides)


def measure(sides, names, folder, options):
    """({side: images a second of each repeat}, {side: rows}), in turns after a short warm-up."""
    rates, rows = {name: [] for name in sides}, {}
    for repeat in range(options.repeats + 1):
        for name, (side, items) in sides.items():
            chosen = items if repeat else items[: 3 * options.batch]  # the first one warms up
            start = time.perf_counter()
            rows[name] = sum(map(len, side(items=chosen, names=names, folder=folder, size=options.img)))
            if repeat:
                rates[name].append(len(chosen) / (time.perf_counter() - start))
    return rates, rows


def show(precision, rates, rows, sides):
    base = statistics.median(rates["one by one"])
    for name, values in rates.items():
        middle, count = statistics.median(values), len(sides[name][1])
        spread = f"{min(values):.1f}-{max(values):.1f}"
        found = rows[name] / count
        print(
            f"| {precision} | {name} | {count} | {middle:.1f} ({spread}) | {middle / base:.2f} | {found:.0f} |",
            flush=True,
        )


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--single", type=int, default=300, help="of them for the sides that take one at a time")
    parser.add_argument("--img", type=int, default=640)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--weights", default="", help="a checkpoint instead of an untrained yolov7-tiny")
    parser.add_argument("--candidates", type=int, default=300, help="an image, of the untrained model")
    parser.add_argument("--save", action="store_true", help="draw and write the images too")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="")
    return parser.parse_args()


if __name__ == "__main__":
    command_line.run_tool(main, parse(), logging.WARNING)
