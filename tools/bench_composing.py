"""--cache-images gpu: what a sample costs its worker, the loader alone by workers, and what the kernel takes.

    python tools/bench_composing.py         # 320 px, batch 384, tiny
    python tools/bench_composing.py --img 640 --batch 32 \\
        --hyp data/hyp.scratch.p5.yaml --workers 1 2 4 8

The data set is that of bench_samples.py, or `--data`, with its images in RAM. Three tables, results.json and
results.png:

    sample   CPU ms of a sample in one process, all forms with equal draws:
             pixels at once, last steps left to the GPU (--fast-step), drawn
             only (--cache-images gpu, with the images on the card; the labels
             of a micro-batch at once, which is as large as with the first of
             `--workers`)
    loader   images/s of loaders that nothing else waits for, each run a
             process of its own; and the share of a core that the main process
             uses
    kernel   ms of the GPU for a batch, images on the card and in page-locked
             memory of the host; and the share of it in a step of `--step` ms,
             if given

Without a GPU only the first table is made.
"""

import logging
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.bench_loader import in_process, measure, open_dataset, parser_of, rooms_on_gpu, write_results
from tools.experiments import command_line
from tools.experiments.markdown import spread, table
from utils.data.fast.deferred import DeferredDataset, steps_bytes
from utils.data.fast.shm_batches import choose_micro_batch
from utils.data.gpu.compose import ComposedBatch, composes, open_composing
from utils.data.gpu.host_memory import HostMemory
from utils.data.gpu.recipes import RECIPE, RecipeDataset
from utils.data.gpu.store import ImageStore
from utils.plots.style import PALETTE, new_figure, save_figure, set_title
from utils.system.random_state import seed_generators

IN_MEMORY = {"persistent_workers": True, "worker_tensor": True}
LOADERS = {
    "reference": {},
    "--fast-step": IN_MEMORY | {"defer_steps": True},
    "--cache-images gpu": IN_MEMORY | {"compose": lambda dataset, _, with_groups: open_composing(dataset, with_groups)},
}
PLACES = "card", "host"


def store_of(dataset, place):
    """The cached images of `dataset` on the "card", in page-locked memory of the "host", or nowhere (None)."""
    shapes, pixels = [img.shape[:2] for img in dataset.imgs], torch.from_numpy(dataset.memory_cache.copy())
    if place == "card":
        return ImageStore(pixels.cuda(), shapes)
    if place == "host":
        memory = HostMemory(len(pixels))
        memory.bytes[:] = pixels.numpy()
        if (problem := memory.lock(torch.device("cuda"))) is not None:
            raise ValueError(problem)
        return ImageStore(memory.on_device(torch.device("cuda")), shapes)
    return ImageStore(pixels, shapes)


def sample_forms(dataset, batch):
    """{name: the data set as a worker has it}, each with its place for pixels and for the steps of `batch` samples."""
    size, forms = dataset.img_size, {"reference": dataset}
    dataset.image_store = store_of(dataset, None)
    for name, form, num_bytes in (
        ("--fast-step", DeferredDataset, steps_bytes(size, True)),
        ("--cache-images gpu", RecipeDataset, RECIPE),
    ):
        forms[name], places = form(dataset), {}
        forms[name].steps_place = np.zeros((batch, num_bytes), np.uint8)
        forms[name].new_image = lambda shape, dtype, places=places: places.setdefault(shape, np.empty(shape, dtype))
    return forms


def sample_costs(dataset, options):
    """{form: CPU ms of a sample in each repeat}, measured in turns."""
    micro_batch = choose_micro_batch(options.batch, options.workers[0])
    forms = sample_forms(dataset, micro_batch)
    costs = {name: [] for name in forms}
    for _ in range(options.repeats):
        for name, form in forms.items():
            began = time.thread_time()
            for start in range(0, options.samples, micro_batch):
                samples = []
                for k in range(start, min(start + micro_batch, options.samples)):
                    seed_generators(0, k)
                    if name == "--fast-step":
                        form.begin(form.steps_place[0])
                    samples.append(form[k % len(form)][1])
                if name == "--cache-images gpu":
                    form.finish(samples, 0, form.steps_place[: len(samples)])
            costs[name].append(1e3 * (time.thread_time() - began) / options.samples)
    return costs


def measure_loader(dataset, options, name):
    """bench_loader's numbers, the store filled before the clock runs."""
    if name == "--cache-images gpu":
        dataset.image_store = store_of(dataset, options.place)
        assert composes(dataset), "the warning above says why not"
    return measure(dataset, options, LOADERS[name])


def kernel_times(dataset, options, place):
    """ms of the GPU for the same batch in each of 50 launches."""
    dataset.image_store = store_of(dataset, place)
    worker, size = RecipeDataset(dataset), dataset.img_size
    pixels = np.zeros((options.batch, size, size, 3), np.uint8)
    recipes = np.zeros((options.batch, RECIPE), np.uint8)
    samples = []
    for k in range(options.batch):
        seed_generators(1, k)
        worker.new_image = lambda shape, dtype, k=k: pixels[k]
        samples.append(worker[k % len(worker)][1])
    worker.finish(samples, 0, recipes)
    batch = ComposedBatch(torch.from_numpy(pixels), torch.from_numpy(recipes), dataset.image_store)
    room, times = rooms_on_gpu(), []
    launch = batch.uploaded(room)
    for k in range(60):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        if k >= 10:
            times.append(begin.elapsed_time(end))
    return times


def print_tables(results, options):
    """The three tables."""
    print("\n" + table(["sample", "CPU ms"], [[name, spread(v, "{:.3f}")] for name, v in results["sample"].items()]))
    if results["loader"]:
        rows = [
            [name, workers, spread([run["rate"] for run in runs], "{:,.0f}"),
             spread([run["main_share"] for run in runs], "{:.2f}")]
            for name, by_workers in results["loader"].items() for workers, runs in by_workers.items()
        ]  # fmt: skip
        print("\n" + table(["loader", "workers", "img/s", "main"], rows))
        rows = [
            [place, spread(times, "{:.3f}"), options.step and f"{100 * statistics.median(times) / options.step:.1f}"]
            for place, times in results["kernel"].items()
        ]  # fmt: skip
        print("\n" + table(["kernel, images on the", "ms a batch", "% of a step"], rows))


def plot(results, title, path):
    """Images/s by workers, one line a loader."""
    figure, (axis,) = new_figure(size=(6, 4))
    for colour, (name, by_workers) in zip(PALETTE, results["loader"].items(), strict=False):
        rates = [statistics.median(run["rate"] for run in runs) for runs in by_workers.values()]
        axis.plot(list(by_workers), rates, marker="o", color=colour, label=name)
    axis.set(xlabel="workers", ylabel="images/s, loader alone", ylim=(0, None))
    axis.set_xticks(list(next(iter(results["loader"].values()))))
    set_title(axis, title)
    axis.legend(frameon=False)
    save_figure(figure, path)


def parse():
    parser = parser_of(__doc__, "runs/bench_composing", images=4000, batch=384)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--place", choices=PLACES, default="card", help="where the loaders have the images")
    parser.add_argument("--samples", type=int, default=300, help="samples of a measurement in one process")
    parser.add_argument("--step", type=float, help="ms of a training step")
    return parser.parse_args()


def measure_all(dataset, options):
    """The numbers of all tables; no process but forked ones touches the GPU."""
    results = {"sample": in_process(dataset, options, function=sample_costs), "loader": {}, "kernel": {}}
    if not os.path.exists("/dev/nvidiactl"):
        return results
    for name in LOADERS:
        results["loader"][name] = {workers: [] for workers in options.workers}
    for repeat in range(options.repeats):
        for workers in options.workers:
            settings = SimpleNamespace(
                **vars(options) | {"workers": workers, "micro_batch_size": 0, "prefetch_factor": None}
            )
            for name in LOADERS:
                run = in_process(dataset, settings, name, function=measure_loader)
                results["loader"][name][workers].append(run)
                print(f"{repeat + 1}/{options.repeats} {name}, {workers} workers: {run['rate']:,.0f} img/s", flush=True)
    for place in PLACES:
        results["kernel"][place] = in_process(dataset, options, place, function=kernel_times)
    return results


def main(options):
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    with open_dataset(options, is_cached=True) as dataset:
        if len(dataset) * options.epochs < 4 * max(options.workers) * options.batch:
            print("The reference makes two batches ahead for each worker, of the few that are measured: its rates will "
                  "be too high; give more --images or --epochs", flush=True)  # fmt: skip
        results = measure_all(dataset, options)
    title = f"{options.img} px, batch {options.batch}, {Path(options.hyp).name}, {len(dataset)} images"
    versions = f"OpenCV {cv2.__version__}, torch {torch.__version__}, {os.cpu_count()} cores"
    print(f"\n{title}; {versions}; medians of {options.repeats} runs in turns (lowest to highest)")
    print_tables(results, options)
    out = write_results(options, results)
    if results["loader"]:
        plot(results, title, out / "results.png")
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    command_line.run_tool(main, parse(), logging.WARNING)
