"""The kernels of models/fused/pools.py beside torch's, each alone in a CUDA graph.

python tests/bench_pools.py [--rounds 3] [--cases tiny384]

Milliseconds are medians of replays, with the 10th and 90th percentile in brackets; both sides in turns, channels-last,
fp16. `pyramid` is three 5x5 pools in a chain with their concatenation, and backward the additions of its slices. Ours
writes into slices, torch concatenates.
"""

import argparse
import logging
import platform
import sys
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.fused import pools
from tests.bench_step import replayed
from tools.experiments import command_line
from utils.run import entry

# name: batch, channels and side of the pyramid, of 2x2 pooling, of up-sampling
CASES = {
    "tiny384": (384, (256, 10), ((64, 80), (128, 40), (256, 20)), ((128, 10), (64, 20))),
    "tiny64": (64, (256, 10), ((64, 80), (128, 40), (256, 20)), ((128, 10), (64, 20))),
    "yolov7-320": (64, (512, 10), ((256, 80), (512, 40), (1024, 20)), ((256, 10), (128, 20))),
    "yolov7-640": (32, (512, 20), ((256, 160), (512, 80), (1024, 40)), ((256, 20), (128, 40))),
}  # fmt: skip


def half(*shape):
    return torch.randn(shape, device="cuda").half().contiguous(memory_format=torch.channels_last)


def pyramid(batch, channels, side):
    whole, gradient = (half(batch, 4 * channels, side, side) for _ in range(2))
    parts = whole.split(channels, 1)
    slices, choices = gradient.split(channels, 1), [None] * 3

    def forward():
        for level in (2, 1, 0):
            choices[level] = pools.max_pool(parts[level + 1], 5, out=parts[level])[1]

    def backward():
        found = slices[0]
        for level in (0, 1, 2):
            found = pools.max_pool_gradient([found], choices[level], 5, plus=[slices[level + 1]])

    source = parts[3].clone().requires_grad_()

    def torch_forward():
        levels = [source]
        for _ in range(3):
            levels.insert(0, functional.max_pool2d(levels[0], 5, 1, 2))
        return torch.cat(levels, 1)

    def torch_backward():
        torch.autograd.grad(torch_forward(), source, gradient)

    forward()
    yield "pyramid", forward, torch_forward
    yield "pyramid, forward and backward", lambda: (forward(), backward()), torch_backward


def halving(batch, sides):
    maps = [half(batch, channels, side, side) for channels, side in sides]
    gradients = [half(batch, channels, side // 2, side // 2) for channels, side in sides]
    sources = [x.clone().requires_grad_() for x in maps]

    def both():
        for x, gradient in zip(maps, gradients, strict=True):
            pools.max_pool_gradient([gradient], pools.max_pool(x, 2, 2)[1], 2, 2)

    def torch_both():
        torch.autograd.grad([functional.max_pool2d(x, 2) for x in sources], sources, gradients)

    yield "2x2 pools, forward and backward", both, torch_both


def up(batch, sides):
    maps = [half(batch, channels, side, side) for channels, side in sides]
    beside = [half(batch, channels, 2 * side, 2 * side) for channels, side in sides]
    wholes = [torch.cat((x, x), 1) for x in beside]
    sources = [x.clone().requires_grad_() for x in maps]

    def both():
        for x, whole in zip(maps, wholes, strict=True):
            pools.upsample(x, whole[:, x.shape[1] :])
            pools.upsample_gradient([whole[:, x.shape[1] :]])

    def torch_both():
        found = [torch.cat((y, functional.interpolate(x, scale_factor=2.0)), 1)
                 for x, y in zip(sources, beside, strict=True)]  # fmt: skip
        torch.autograd.grad(found, sources, wholes)

    yield "up-sampling into slices, forward and backward", both, torch_both


def pieces(case):
    batch, levels, halves, ups = CASES[case]
    yield from pyramid(batch, *levels)
    yield from halving(batch, halves)
    yield from up(batch, ups)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    parser.add_argument("--rounds", type=int, default=1, help="how often each side is measured, in turns")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, metavar="CASE", default=list(CASES), help=f"of {', '.join(CASES)}"
    )
    return parser.parse_args()


def main(opt):
    torch.backends.cudnn.benchmark = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}")
    print("| case | piece | ours, ms | torch, ms |\n|---|---|---|---|")
    for case in opt.cases:
        for name, ours, theirs in pieces(case):
            for _ in range(opt.rounds):
                row = ["{:.3f} ({:.3f}-{:.3f})".format(*replayed(side)) for side in (ours, theirs)]
                print(f"| {case} | {name} | {row[0]} | {row[1]} |", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    command_line.run_tool(main, parse(), logging.WARNING)
