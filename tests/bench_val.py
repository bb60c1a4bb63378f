"""Validation: `engine.evaluate` beside --fast-val, alone, with the fused kernels, and with those in the CUDA graphs of
--fast, on the same model and batches, and what share of an epoch that is.

    python tests/bench_val.py [--images 5000] [--img 320] [--batch 128] \\
        [--weights best.pt] [--rate 5600]

5,000 drawn pictures of four shapes (copies of 250), kept in RAM; --cache-images gpu keeps the batches on the device.
Without --weights the model is an untrained yolov7-tiny whose objectness is shifted until an image has about
--candidates boxes above the threshold. The reference runs once, the others until every shape has its graph, and then
--repeats times in turns; medians with the extremes. `warm-up` is its longest pass, in which graphs are captured;
`share` is the part of an epoch of 118,287 images, trained at --rate images a second, that a validation of 5,000 is.
The parts of the fast sides are timed in a further pass, which waits for the device after each.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import cv2
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from models.experimental import attempt_load  # noqa: E402
from models.yolo import Model  # noqa: E402
from tools.bench_loader import write_images  # noqa: E402
from tools.experiments import command_line  # noqa: E402
from utils.config.hyp import load_hyp, scale_hyp  # noqa: E402
from utils.datasets import create_dataloader  # noqa: E402
from utils.engine.evaluate import evaluate  # noqa: E402
from utils.fast import metrics, validation  # noqa: E402
from utils.fast.nms import find_candidates  # noqa: E402
from utils.loss.criterion import ComputeLoss  # noqa: E402
from utils.ops.cuda_graph import WARM_UP_CALLS  # noqa: E402
from utils.run import entry  # noqa: E402
from utils.system.compilers import why_no_kernels  # noqa: E402

NUM_CLASSES = 80
COCO_TRAIN, COCO_VAL = 118_287, 5_000


def make_model(options, loader, device):
    """A model in evaluation mode, in half precision on a GPU, and its validation loss."""
    torch.manual_seed(0)
    if options.weights:
        model = attempt_load(options.weights, map_location=device)
    else:
        model = Model(ROOT / "cfg/training/yolov7-tiny.yaml", nc=NUM_CLASSES).to(device).eval()
        model.names = [str(i) for i in range(NUM_CLASSES)]
    nc = len(model.names)
    model.hyp = scale_hyp(load_hyp(ROOT / "data/hyp.scratch.tiny.yaml"), model.model[-1].nl, nc, options.img, 0.0)
    model.gr = 1.0
    compute_loss = ComputeLoss(model)
    model = model.half() if device.type == "cuda" else model.float()
    if not options.weights:
        shift_objectness(model, next(iter(loader))[0].to(device), options.candidates)
    return model, compute_loss, nc


@torch.no_grad()
def shift_objectness(model, images, wanted):
    """Spread the scores, and raise the objectness until an image has about `wanted` candidates."""
    head = model.model[-1]
    for _, bias, *_ in head.output_biases():
        bias.view(head.na, -1)[:, 5:] += torch.randn(head.na, head.no - 5, device=bias.device).to(bias.dtype) * 2
    images, weight = images[:32], next(model.parameters())
    images = images.to(weight.dtype) / 255
    low, high, shifted = -10.0, 10.0, 0.0
    while high - low > 0.01:
        shift = (low + high) / 2
        for _, bias, *_ in head.output_biases():
            bias.view(head.na, -1)[:, 4] += shift - shifted
        shifted, found = shift, len(find_candidates(model(images)[0], 0.001).rows) / len(images)
        low, high = (low, shift) if found > wanted else (shift, high)
    print(f"{found:.0f} candidates an image")


def reshape_images(images):
    """Give some of 640 x 480 pixels the other shapes that are frequent in COCO; copies are links, and follow."""
    for number, path in enumerate(sorted(images.glob("[0-9]*.jpg"))):
        image, kind = cv2.imread(str(path)), number % 10
        if kind < 3:
            cv2.imwrite(str(path), cv2.resize(image, (640, 426)))
        elif kind < 6:
            cv2.imwrite(str(path), image.transpose(1, 0, 2) if kind < 5 else image[:, :480])


def sides_of(loader, device):
    """Name -> (what evaluates, loader)."""
    sides = {"--fast-val": (validation.FastValidation(), loader)}
    if why_no_kernels(device) is None:
        from models.fused.network import quietly_fused
        from utils.data.gpu.kept_batches import keep
        from utils.fast.graph_network import replayed

        loader.close = lambda: None  # when its batches are kept: the other sides go on with it
        kept = keep(loader, device=device, step_cost=lambda: (0, 0))
        graphs = validation.FastValidation(partial(replayed, quietly_fused))
        sides["fused"] = validation.FastValidation(quietly_fused), loader
        sides["--fast"] = graphs, loader
        sides["--fast --cache-images gpu"] = graphs, kept
    return sides


def timed(function, device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def parts(run, network, loader, device):
    """Seconds of a pass of a fast side by part, each waited for; and of a pass of the loader alone."""
    seconds = defaultdict(float)

    def watch(owner, name, label):
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            took, result = timed(lambda: original(*args, **kwargs), device)
            seconds[label] += took
            return result

        return mock.patch.object(owner, name, watched)

    seconds["loader alone"], _ = timed(lambda: [None for _ in loader], device)
    with (
        watch(network, "forward", "forward"), watch(validation, "detect", "nms"),
        watch(validation.Found, "add", "match"), watch(metrics, "precision_recall", "curves"),
        watch(validation.BatchedLoss, "compute", "loss"),
    ):  # fmt: skip
        seconds["all, waiting"], _ = timed(run, device)
    return dict(seconds)


def main(options):
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.backends.cudnn.benchmark = True
    with tempfile.TemporaryDirectory() as folder:
        images = write_images(Path(folder), options.images)
        reshape_images(images)
        loader, _ = create_dataloader(
            str(images), options.img, options.batch, 32, SimpleNamespace(single_cls=False), rect=True, pad=0.5,
            cache=True, workers=options.workers, persistent_workers=True, worker_tensor=True,
        )  # fmt: skip
        model, compute_loss, nc = make_model(options, loader, device)
        sides = {"reference": (evaluate, loader)} | sides_of(loader, device)
        runs = {
            name: partial(score, model, batches, nc, list(model.names), compute_loss=compute_loss)
            for name, (score, batches) in sides.items()
        }
        first = {name: timed(run, device) for name, run in runs.items()}
        quick, longest = [name for name in runs if name != "reference"], defaultdict(float)
        for name in quick * WARM_UP_CALLS:
            longest[name] = max(longest[name], timed(runs[name], device)[0])
        taken = {name: [first[name][0]] if name not in quick else [] for name in runs}
        for name in quick * options.repeats:
            taken[name].append(timed(runs[name], device)[0])
        of_parts = {name: parts(runs[name], sides[name][0].network, sides[name][1], device) for name in quick}
        show(options, device, first, longest, taken, of_parts)


def show(options, device, first, longest, taken, of_parts):
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    lines = [f"{machine}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}; "
             f"{options.images} images, {options.img} px, batch {options.batch}", "",
             "| validation | s | first time | warm-up | share of an epoch | mAP@.5 | mAP@.5:.95 | box, obj, cls loss |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    epoch = COCO_TRAIN / options.rate
    for name, seconds in taken.items():
        middle, results = statistics.median(seconds), first[name][1].results
        scaled = middle * COCO_VAL / options.images
        losses = ", ".join(f"{value:.6g}" for value in results[4:])
        lines.append(
            f"| {name} | {middle:.3f} ({min(seconds):.3f}-{max(seconds):.3f}) | {first[name][0]:.2f} | "
            f"{longest[name]:.2f} | {100 * scaled / (scaled + epoch):.1f} % | {results[2]:.9f} | "
            f"{results[3]:.9f} | {losses} |"
        )
    for name, seconds in of_parts.items():
        lines += ["", f"{name}, by part [s]: " + ", ".join(f"{part} {value:.3f}" for part, value in seconds.items())]
    print("\n".join(lines))
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text("\n".join(lines) + "\n")
    (out / "results.json").write_text(json.dumps({"options": vars(options), "seconds": taken, "parts": of_parts}))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--img", type=int, default=320)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--weights", default="", help="a checkpoint instead of an untrained yolov7-tiny")
    parser.add_argument("--candidates", type=int, default=2000, help="an image, of the untrained model")
    parser.add_argument("--rate", type=float, default=5600, help="images a second in training")
    parser.add_argument("--repeats", type=int, default=5, help="of the fast sides")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="")
    parser.add_argument("--out", default="runs/bench_val")
    return parser.parse_args()


if __name__ == "__main__":
    command_line.run_tool(main, parse(), logging.WARNING)
