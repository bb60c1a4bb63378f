"""What a training step moves and multiplies, and how many images a second a GPU should train: a model, not a run.

python tools/roofline.py [--cfg cfg/training/yolov7.yaml --img 640 --batch 32] [--form planned] [--kernels H100]

The network runs once on tensors without memory (PyTorch's meta device). FORMS says which kernels each of its operations
becomes, and which maps each of these reads and writes. A kernel takes the longer of moving its bytes and doing its
products, and its launch. Whether a batch fits into the memory of a card is not asked.

BANDWIDTH, MATRIX and LAUNCH come from kernels timed by themselves, not from the rates of MEASURED: those judge them,
and the errors are shown. The form "planned" was measured on an H200 only, "plain" on an H100 only; all other rates are
predictions that nobody has measured.
"""

import argparse
import logging
import math
import sys
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.yolo import Model
from utils.run import entry

# name: (memory TB/s, dense fp16 TFLOP/s with float32 sums), from the makers' data sheets (SXM; A100 with 80 GB)
GPUS = {"H100": (3.35, 989), "H200": (4.8, 989), "A100": (2.039, 312), "4090": (1.008, 165.2), "5090": (1.792, 209.5)}
# Share of the bandwidth that kernels reach: the batch norms of yolov7-tiny, 320 px, batch 384 took 11.4 ms for 30.4 GB
# on an H100 (statistics 1.7, apply 2.3, gradient sums 3.8, gradient 3.6).
BANDWIDTH = 0.8
# Share of the matrix rate that convolutions reach. With it those of an H100 take 15.8 ms (tiny as above; 14.9 and 17
# were timed), 13.0 (yolov7, 320 px, batch 64: 11.5) and 24.4 (640 px, batch 32: 24).
MATRIX = 0.55
# Seconds that a kernel of a graph takes beside that, however small: the loss alone, batch 64, takes 0.185 ms on an H200
# for 24 kernels, of which 0.04 are its bytes.
LAUNCH = 6e-6
TILE = 64  # channels of a tile of a matrix product: fewer take as long
# (cfg, side in pixels, batch): {GPU: images a second} of steps in a graph, OTA, fp16, with a batch that is there,
# timed before the first convolution was a kernel of our own, which saves 1.2 ms of the first job's 27
MEASURED = {
    "planned": {
        ("yolov7-tiny", 320, 384): {"H200": 15276},
        ("yolov7-tiny", 320, 64): {"H200": 9614},
        ("yolov7", 320, 64): {"H200": 2818},
        ("yolov7", 640, 32): {"H200": 783},
    },
    "plain": {  # forward and backward with a trivial loss
        ("yolov7-tiny", 320, 384): {"H100": 5920},
        ("yolov7-tiny", 320, 64): {"H100": 4630},
        ("yolov7", 320, 64): {"H100": 1580},
        ("yolov7", 640, 32): {"H100": 432},
    },
}


class Operation(NamedTuple):
    """One of the network, for one image: the numbers in its input x, output y and weight w, and its multiply-adds.

    Kinds beside those of layers: `merged`, a further convolution of one input and geometry; `fork`, a map with one more
    reader, `merged fork` if that is such a convolution; `place`, a map that a concatenation and a convolution read.
    """

    kind: str
    x: int
    y: int
    w: int = 0
    macs: int = 0
    filled: float = 1.0  # as if there were so many times the multiply-adds: channels do not fill the tiles


class Kernel(NamedTuple):
    """What one kernel reads and writes, each word a map once.

    x, y, w: in half precision; X, Y, W: in float32; bytes, indices: 1 and 8 bytes for each number of y; images: a byte
    for each number of x. `slow`: how many times longer it takes than its bytes need, where that was timed.
    """

    name: str
    reads: str
    writes: str
    is_matrix: bool = False
    slow: float = 1.0
    launches: int = 1  # 0: part of another one


NOTHING: list[Kernel] = []
FORWARD = Kernel("convolution", "x w", "y", is_matrix=True)
DATA_GRADIENT = Kernel("data gradient", "y w", "x", is_matrix=True)
WEIGHT_GRADIENT = Kernel("weight gradient", "x y", "w", is_matrix=True)
CONVOLUTION = [FORWARD, DATA_GRADIENT, WEIGHT_GRADIENT]
CASTS = [Kernel("weight cast", "W", "w"), Kernel("weight gradient cast", "w", "W")]
TORCH_POOL = [Kernel("maximum", "x", "y indices", slow=8), Kernel("gradient", "y indices", "x", slow=8)]
UPSAMPLE = [Kernel("copy", "x", "y"), Kernel("gradient", "y", "x")]
ADDITION = [Kernel("addition", "y y", "y")]
NORM = [
    Kernel("statistics", "y", ""), Kernel("statistics of channels", "", ""), Kernel("apply", "y", "y"),
    Kernel("gradient sums", "y y", ""), Kernel("sums of channels", "", ""), Kernel("gradient", "y y", "y"),
]  # fmt: skip
FORMS = {
    # The modules as they are, eager kernels in a graph, forward and backward with a trivial loss
    "plain": {
        "images": [Kernel("to half", "X", "x")],
        "stem": [FORWARD, WEIGHT_GRADIENT, *CASTS],  # images need no gradient
        "convolution": CONVOLUTION + CASTS, "merged": CONVOLUTION + CASTS, "output": CONVOLUTION + CASTS,
        "norm": NORM, "stem norm": NORM,
        "activation": [Kernel("activation", "y", "y"), Kernel("gradient", "y y", "y")],
        "cat": [Kernel("concatenation", "x", "y"), Kernel("slices", "y", "y", slow=3.5)], "place": NOTHING,
        "fork": ADDITION, "merged fork": ADDITION, "add": ADDITION,
        "pool": TORCH_POOL, "halving": TORCH_POOL, "upsample": UPSAMPLE,
        "head": [Kernel("permute", "y", "y"), Kernel("to float, square, sum", "y Y Y", "Y Y"),
                 Kernel("gradient", "Y Y", "Y y"), Kernel("permute back", "y", "y")],
        "loss": NOTHING, "weights": NOTHING,
    },
    # --fast: the whole step with OTA, SGD and moving average, by models/fused and utils/loss/on_gpu.py
    "planned": {
        "images": [Kernel("border", "images", "x")],
        "stem": [Kernel("convolution, statistics", "x w", "y", is_matrix=True),
                 Kernel("gradient, weight gradient", "y y x", "w", is_matrix=True)],
        "stem norm": [kernel for kernel in NORM if kernel.name not in ("statistics", "gradient")],
        "convolution": CONVOLUTION,
        # One of a convolution that others with the same input are part of: the input is read, its gradient written once
        "merged": [Kernel("convolution", "w", "y", is_matrix=True, launches=0),
                   Kernel("data gradient", "y w", "", is_matrix=True, launches=0),
                   Kernel("weight gradient", "y", "w", is_matrix=True, launches=0)],
        "output": [*CONVOLUTION, Kernel("bias gradient", "y", ""), Kernel("folding", "W W", "W w", launches=12)],
        "norm": NORM, "activation": NOTHING,
        "cat": NOTHING, "place": [Kernel("written twice", "", "y", launches=0)],
        "fork": [Kernel("read beside the gradient, twice", "y y", "", launches=0)], "merged fork": NOTHING,
        "add": [Kernel("sum", "x", "y"), Kernel("gradient", "y x", "y")],
        "pool": [Kernel("maximum", "x", "y bytes", slow=2.5), Kernel("gradient", "y bytes", "x", slow=4)],
        "halving": [Kernel("maximum", "x", "y bytes"), Kernel("gradient", "y bytes", "x")],
        "upsample": UPSAMPLE,
        "head": [Kernel("objectness", "y", ""), Kernel("gradient", "", "y")],
        "loss": [Kernel("candidates, assignment, matches, items", "", "", launches=20)],
        "weights": [
            Kernel("to half", "W", "w"), Kernel("gradients to float", "w", "W"), Kernel("collected", "W W", "W"),
            Kernel("unscaled, checked", "W", "W"), Kernel("decay", "W W", "W"), Kernel("overflow", "W", "W"),
            Kernel("momentum", "W W", "W"), Kernel("Nesterov", "W W", "W"), Kernel("step", "W W", "W", launches=3),
            Kernel("zeros", "", "W"), Kernel("average", "W W", "W", launches=2),
        ],
    },
}  # fmt: skip
KINDS = {
    "convolution": "convolution", "native_batch_norm": "norm", "leaky_relu_": "activation", "silu_": "activation",
    "leaky_relu": "activation", "silu": "activation", "cat": "cat", "upsample_nearest2d": "upsample", "clone": "head",
    "max_pool2d_with_indices": "pool",
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Notes the Operations of a pass, and a fork wherever a map has one more reader."""

    def __init__(self):
        super().__init__()
        self.operations, self.uses, self.alive = [], Counter(), []
        self.geometries, self.joined = {}, {}  # of the convolutions of a map; maps that concatenations read

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.alive.append((args, out))  # a map that is gone would give its id to another one
        name, y = function.overloadpacket.__name__, out[0] if isinstance(out, tuple) else out
        maps = [x for x in (args[0] if name == "cat" else args) if isinstance(x, torch.Tensor) and x.dim() == 4]
        kind = KINDS.get(name)
        if name == "add" and len(maps) == 2 and maps[0].shape == maps[1].shape:
            kind = "add"
        if kind == "convolution":
            self._note_convolution(*args[:4], y)
        elif kind == "pool":
            self._note("halving" if args[2][0] == 2 else "pool", maps, y)
        elif kind:
            self._note(kind, maps, y)
        return out

    def _note_convolution(self, x, weight, bias, stride, y):
        outputs, inputs, *window = weight.shape
        kind, filled = "convolution", math.prod(math.ceil(side / TILE) * TILE / side for side in (outputs, inputs))
        geometry = (*window, *stride)
        if all(operation.macs == 0 for operation in self.operations):
            taps = weight[0].numel()
            chunk = 32 if taps <= 32 else TILE  # of the windows, which are rows of a matrix
            kind, filled = "stem", math.ceil(taps / chunk) * chunk / taps
        elif bias is not None:
            kind = "output"  # of the detection layer: the others have no bias
        elif geometry in self.geometries.setdefault(id(x), set()):
            kind = "merged"
        else:
            self.geometries[id(x)].add(geometry)
        self._note(kind, [x], y, weight.numel(), y.numel() * weight[0].numel(), filled)

    def _note(self, kind, maps, y, *more):
        if kind != "activation":  # it writes over its input
            for x in maps:
                self.uses[id(x)] += 1
                if self.uses[id(x)] > 1:
                    fork = "merged fork" if kind == "merged" else "fork"
                    self.operations.append(Operation(fork, x.numel(), x.numel()))
        if kind == "norm" and self.operations[-1].kind == "stem":
            kind = "stem norm"
        if kind == "cat":
            self.joined |= {id(x): x.numel() for x in maps}
        self.operations.append(Operation(kind, sum(x.numel() for x in maps), y.numel(), *more))

    def places(self):
        """Operations for the maps that a concatenation reads, and a convolution as a tensor of its own."""
        both = [size for key, size in self.joined.items() if key in self.geometries]
        return [Operation("place", size, size) for size in both]


@lru_cache
def _model(cfg):
    return Model(cfg).to("meta").train()


@lru_cache
def operations(cfg, side):
    """All Operations of a training step for one image of `side` x `side` pixels. Raises ValueError as Model does."""
    model = _model(cfg)
    with Recorder() as recorder:
        model(torch.empty(1, model.yaml["ch"], side, side, device="meta"))
    pixels, weights = model.yaml["ch"] * side * side, sum(p.numel() for p in model.parameters())
    return [Operation("images", pixels, pixels), *recorder.operations, *recorder.places(), Operation("loss", 0, 0),
            Operation("weights", 0, 0, weights)]  # fmt: skip


def kernels(cfg, side, batch, form):
    """Rows (kind, Kernel, bytes, operations of matrix products) of one step."""
    for operation in operations(cfg, side):
        for kernel in FORMS[form][operation.kind]:
            moved = _bytes(operation, f"{kernel.reads} {kernel.writes}", batch)
            yield operation.kind, kernel, moved, 2 * operation.macs * operation.filled * batch * kernel.is_matrix


def _bytes(operation, maps, batch):
    x, y, w = operation.x * batch, operation.y * batch, operation.w
    size = {"x": 2 * x, "y": 2 * y, "w": 2 * w, "X": 4 * x, "Y": 4 * y, "W": 4 * w, "bytes": y, "indices": 8 * y,
            "images": x}  # fmt: skip
    return sum(size[name] for name in maps.split())


def seconds(kernel, moved, flops, gpu):
    """Of one kernel."""
    terabytes, teraflops = GPUS[gpu]
    at_work = max(moved * kernel.slow / (terabytes * 1e12 * BANDWIDTH), flops / (teraflops * 1e12 * MATRIX))
    return at_work + kernel.launches * LAUNCH


def rate(cfg, side, batch, form, gpu):
    """Images a second."""
    return batch / sum(
        seconds(kernel, moved, flops, gpu) for _, kernel, moved, flops in kernels(cfg, side, batch, form)
    )


def rate_table(jobs, form):
    """A table: job, GPU, predicted rate, measured rate with the error of the prediction."""
    yield "| job | form | GPU | img/s, predicted | measured |\n|---|---|---|---|---|"
    for path, side, batch in jobs:
        for gpu in GPUS:
            found, job = rate(path, side, batch, form, gpu), (Path(path).stem, side, batch)
            real = MEASURED.get(form, {}).get(job, {}).get(gpu)
            note = f"{real}: {found / real - 1:+.0%}" if real else "predicted, not measured"
            yield f"| {job[0]} {side} px batch {batch} | {form} | {gpu} | {found:.0f} | {note} |"


def kernel_table(job, form, gpu):
    """A table: what each kind of kernels moves, multiplies and takes."""
    rows = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for kind, kernel, moved, flops in kernels(*job, form):
        row = kernel.launches, moved / 1e9, flops / 1e12, seconds(kernel, moved, flops, gpu) * 1e3
        rows[kind, kernel.name] = [a + b for a, b in zip(rows[kind, kernel.name], row, strict=True)]
    yield f"| of | kernel | launches | GB | TFLOP, tiles filled | ms on {gpu} |\n|---|---|---|---|---|---|"
    for (kind, name), (count, moved, flops, time) in sorted(rows.items(), key=lambda row: -row[1][3]):
        yield f"| {kind} | {name} | {count} | {moved:.2f} | {flops:.2f} | {time:.2f} |"
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    yield "| all | | {} | {:.2f} | {:.2f} | {:.2f} |".format(*total)


def main(opt):
    if opt.img % 64 or min(opt.img, opt.batch) < 1:
        raise ValueError(f"--img {opt.img} --batch {opt.batch}: give multiples of 64 pixels, and a batch of at least 1")
    jobs = [(opt.cfg, opt.img, opt.batch)] if opt.cfg else [
        (f"cfg/training/{name}.yaml", side, batch) for name, side, batch in MEASURED["planned"]
    ]  # fmt: skip
    for form in opt.form:
        print(*rate_table(jobs, form), sep="\n", end="\n\n")
        for job in jobs if opt.kernels else ():
            print(f"{Path(job[0]).stem}, {job[1]} px, batch {job[2]}, {form}")
            print(*kernel_table(job, form, opt.kernels), sep="\n", end="\n\n")


def parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    parser.add_argument("--cfg", help="model configuration; default: the jobs that were measured")
    parser.add_argument("--img", type=int, default=320, help="side of the images in pixels")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--form", nargs="+", choices=FORMS, default=["planned"])
    parser.add_argument("--kernels", choices=GPUS, help="also what each kind of kernels takes there")
    return parser


if __name__ == "__main__":
    logging.getLogger("models").setLevel(logging.WARNING)  # not the table of layers
    entry.run(main, parser().parse_args())
