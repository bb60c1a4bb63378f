"""The loaders side by side: the reference (equal to stock) and each flag, same data, same workers, in turns.

    python tools/bench_loader.py --workers 16 --img 320 --batch 64 \\
        --hyp data/hyp.scratch.tiny.yaml --cache

Every measurement is a process of its own, forked from one that holds the data set, so that nothing warms up for the
next. It reads one epoch to warm up and then `--epochs` more; a consumer does nothing with a batch but copy it to the
GPU, where there is one. Prints a table of medians with the lowest and highest value, writes results.json and
results.png.

    first batch   seconds from the start of making the loader (the data set is
                  there) to the first batch
    gap           milliseconds that the first batch of a later epoch takes;
                  compare it with `batch`, any other batch
    main, workers share of a core that the main process (with its threads) and
                  each worker use
    worker ms/img CPU time of all workers for an image
    memory        proportional set size of main process and workers together,
                  images in RAM included
"""

import argparse
import json
import logging
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.bench_samples import make_dataset
from tools.experiments import command_line, markdown
from utils import datasets
from utils.config.hyp import load_hyp
from utils.loggers import monitor
from utils.plots.style import INK, PALETTE, new_figure, save_figure, set_title
from utils.run import entry

LOADERS = {
    "reference": {},
    "--persistent-workers": {"persistent_workers": True},
    "--worker-tensor": {"worker_tensor": True},
    "--fast-dataloader": {"persistent_workers": True, "worker_tensor": True},
    "--fast-dataloader --seed 7": {"persistent_workers": True, "worker_tensor": True, "seed": 7},
    "--fast-dataloader --fast-step": {"persistent_workers": True, "worker_tensor": True, "defer_steps": True},
}
COLUMNS = {
    "img/s": ("rate", "{:,.0f}"), "main": ("main_share", "{:.2f}"), "workers": ("worker_share", "{:.2f}"),
    "worker ms/img": ("worker_cost", "{:.2f}"), "first batch s": ("first_batch", "{:.2f}"),
    "gap ms": ("gap", "{:.1f}"), "batch ms": ("interval", "{:.1f}"), "memory GB": ("memory", "{:.2f}"),
}  # fmt: skip


def write_images(folder, num_images, num_different=250):
    """A folder of `num_images` JPEGs, not all different, with labels; returns the folder of the images."""
    images = make_dataset(folder, min(num_images, num_different))
    for k in range(num_different, num_images):
        for kind, suffix in (("images", "jpg"), ("labels", "txt")):
            os.link(folder / kind / f"{k % num_different:04}.{suffix}", folder / kind / f"copy{k:06}.{suffix}")
    return images


def children():
    """The processes that this one has started."""
    return psutil.Process().children()


def cpu_seconds(processes):
    """User and system time of all of them; one that has ended counts nothing."""
    return sum(monitor.cpu_seconds(process) or 0.0 for process in processes)


def measure(dataset, options, flags):
    """One run of one loader, as a dict of numbers."""
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.zeros(1, device="cuda")
    start = time.perf_counter()
    with mock.patch.object(datasets, "LoadImagesAndLabels", lambda *args, **kw: dataset):
        loader, _ = datasets.create_dataloader(
            "", options.img, options.batch, 32, SimpleNamespace(single_cls=False), hyp=dataset.hyp, augment=True,
            workers=options.workers, **flags, **fine_tuning(options, flags),
        )  # fmt: skip
    first_batch, gaps, intervals, num_images = None, [], [], 0
    room = rooms_on_gpu()
    for epoch in range(1 + options.epochs):
        if epoch == 1:
            began, main_began, workers_began = time.perf_counter(), time.process_time(), cpu_seconds(children())
        before = time.perf_counter()
        for k, (images, *_) in enumerate(loader):
            waited = time.perf_counter() - before
            first_batch = first_batch or time.perf_counter() - start
            if epoch:
                num_images += len(images)
                (intervals if k else gaps).append(waited * 1e3)
            if on_gpu:
                on_device(images, room)
            before = time.perf_counter()
    if on_gpu:
        torch.cuda.synchronize()
    wall = time.perf_counter() - began
    workers = children()
    worker_seconds = cpu_seconds(workers) - workers_began
    return {
        "rate": num_images / wall,
        "main_share": (time.process_time() - main_began) / wall,
        "worker_share": worker_seconds / wall / max(len(workers), 1),
        "worker_cost": 1e3 * worker_seconds / num_images,
        "first_batch": first_batch,
        "gap": statistics.median(gaps),
        "interval": statistics.median(intervals or gaps),
        "memory": monitor.proportional_memory([psutil.Process(), *workers]),
    }


def rooms_on_gpu():
    """Buffers on the GPU by number, made once and used again, as the Prefetcher has them."""
    rooms = {}

    def room(number, shape):
        size = math.prod(shape)
        if number not in rooms or rooms[number].numel() < size:
            rooms[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
        return rooms[number][:size].view(shape)

    return room


def on_device(images, room):
    """A batch on the GPU, and finished there if its workers have left that to it (--fast-step, --cache-images gpu)."""
    if hasattr(images, "on_device"):
        return images.on_device(room)
    return images.to("cuda", non_blocking=True)


def fine_tuning(options, flags):
    """The further options of this benchmark that the loader of `flags` understands."""
    if not flags.get("worker_tensor"):
        return {}
    chosen = {"micro_batch_size": options.micro_batch_size, "prefetch_factor": options.prefetch_factor}
    return {name: value for name, value in chosen.items() if value}


def in_process(*arguments, function=measure):
    """`function(*arguments)` in a forked process."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(function(*arguments)))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise ValueError("the measured process ended without a result; its message is above") from None
    finally:
        process.join()


def table(results):
    """A row for each loader."""
    return markdown.table(
        ["loader", *COLUMNS],
        [[name, *(markdown.spread([run[key] for run in runs], form) for key, form in COLUMNS.values())]
         for name, runs in results.items()],
    )  # fmt: skip


def plot(results, title, path):
    """Bars of the medians, with lines from the lowest to the highest value."""
    figure, axes = new_figure(1, len(COLUMNS), size=(3 * len(COLUMNS), 4))
    for axis, (label, (key, _)) in zip(axes, COLUMNS.items(), strict=True):
        values = [[run[key] for run in runs] for runs in results.values()]
        middle = [statistics.median(row) for row in values]
        spread = [[m - min(row) for m, row in zip(middle, values, strict=True)],
                  [max(row) - m for m, row in zip(middle, values, strict=True)]]  # fmt: skip
        axis.barh(list(results), middle, xerr=spread, color=PALETTE[0], ecolor=INK)
        axis.invert_yaxis()
        axis.tick_params(labelleft=axis is axes[0])
        set_title(axis, label)
    figure.suptitle(title)
    save_figure(figure, path)


def write_results(options, results):
    """results.json in the folder --out, which is returned."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    facts = {"options": vars(options), "python": platform.python_version(), "results": results}
    (out / "results.json").write_text(json.dumps(facts, indent=1))
    return out


@contextmanager
def open_dataset(options, is_cached):
    """The data set of the options, with augmentation."""
    with tempfile.TemporaryDirectory() as folder:
        source = options.data or str(write_images(Path(folder), options.images))
        yield datasets.LoadImagesAndLabels(
            source, options.img, options.batch, augment=True, hyp=load_hyp(options.hyp), cache_images=is_cached
        )


def parser_of(description, out, images, batch):
    """The options that benchmarks of loaders share; their results go to the folder `out`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=entry.Help)
    parser.add_argument("--data", help="folder or list file of images; default: drawn for the occasion, 640 x 480")
    parser.add_argument("--images", type=int, default=images, help="images to draw")
    parser.add_argument("--img", type=int, default=320)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--hyp", default="data/hyp.scratch.tiny.yaml")
    parser.add_argument("--epochs", type=int, default=3, help="measured epochs of each run of a loader")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default=out, help="folder of results.json and results.png")
    return parser


def parse():
    parser = parser_of(__doc__, "runs/bench_loader", images=2000, batch=64)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--cache", action="store_true", help="images in RAM")
    names = [name.removeprefix("--") for name in LOADERS]
    parser.add_argument(
        "--loaders", nargs="+", choices=names, metavar="LOADER", help="of " + ", ".join(map(repr, names))
    )
    parser.add_argument("--micro-batch-size", type=int, default=0)
    parser.add_argument("--prefetch-factor", type=int, default=None)
    return parser.parse_args()


def main(options):
    with open_dataset(options, options.cache) as dataset:
        results = {name: [] for name in LOADERS if name.removeprefix("--") in (options.loaders or name)}
        for repeat in range(options.repeats):
            for name in results:
                results[name].append(in_process(dataset, options, LOADERS[name]))
                print(f"{repeat + 1}/{options.repeats} {name}: {results[name][-1]['rate']:,.0f} img/s", flush=True)
    images = f"{len(dataset)} images {'cached' if options.cache else 'from files'}"
    title = f"{options.img} px, batch {options.batch}, {options.workers} workers, {Path(options.hyp).name}, {images}"
    title += f", {os.cpu_count()} cores"
    print(f"\n{title}; medians of {options.repeats} runs in turns (lowest to highest), {options.epochs} epochs each\n")
    print(table(results))
    out = write_results(options, results)
    plot(results, title, out / "results.png")
    print(f"\nwritten: {out}/results.json, {out}/results.png")


if __name__ == "__main__":
    command_line.run_tool(main, parse(), logging.WARNING)
