"""Where the time of a training step goes: the flags-off path, each flag alone, and all of them, through train.train.

    python tests/profile_training_loop.py --short    # tiny: off, graph, all
    python tests/profile_training_loop.py --jobs tiny384 tiny64 full64 full640
    python tests/profile_training_loop.py --cfg cfg/training/yolov7.yaml \\
        --img 640 --batch 32 --variants="off, --fast"
    python tests/profile_training_loop.py --ranks 1 2 --jobs tiny384 full640 \\
        --variants=--fast

Every row is a process of its own that runs train.py's own code on a drawn data set of 640 x 480 JPEGs with polygons,
kept in RAM: warm-up, then 200 steps whose rate counts, then 40 steps with the phases timed, then steps on a batch that
lies on the device already, which is the limit without a loader; --seconds ends a stage of a slow path before that.

A variant is a list of flags and environment variables (NAME=VALUE). What fails is said, and the rest goes on. Prints a
markdown table and writes it with results.json and phases.png into --out.

With several --ranks every variant is run by so many processes of torchrun, one a card; the batch is that of one card,
and there are as many batches in an epoch. Stages then end by their steps, which the first one tells to all.

    img/s       of all cards, end to end, epoch changes included, pictures,
                validation and checkpoints not
    scaling     img/s of a card, as a share of what one card alone reached
    resident    the same with one batch for ever
    gpu         utilisation in percent, as NVML tells it
    main, workers   cores that the main process (the busiest one), and all
                children together, use
    the phases  ms a step; on a GPU between events of the stream, so that
                waiting for the host counts; `graph` is the replay of a
                captured step, `optimiser` includes clearing the gradients,
                `read-back` the progress bar
"""

import argparse
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.experiments import markdown  # noqa: E402  (needs the path above)

JOBS = {  # cfg, hyp, pixels, batch
    "tiny384": ("yolov7-tiny", "tiny", 320, 384),
    "tiny64": ("yolov7-tiny", "tiny", 320, 64),
    "full64": ("yolov7", "p5", 320, 64),
    "full640": ("yolov7", "p5", 640, 32),
}
COLUMNS = ("job", "variant", "cards", "img/s", "scaling", "steps", "resident", "gpu %", "main", "workers", "GB",
           "ms/step")  # fmt: skip
LOADER, STEP = "--fast-dataloader", "--fast-loss --fast-step"
VARIANTS = ["off", LOADER, "--fast-loss", "--fast-step", "--amp bf16", "--amp off", "USE_COMPILE=1",
            f"{LOADER} {STEP}", f"{LOADER} {STEP} --cuda-graph", "--fast", "--fast USE_COMPILE=1"]  # fmt: skip
SHORT = ["off", f"{LOADER} {STEP}", "--fast"]


def main(options):
    if options.child:
        path = Path(options.child + os.environ.get("RANK", ""))
        path.write_text(json.dumps(measure(options)))
        return
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for job in options.jobs or [None]:
            chosen = job_options(job, options)
            for variant, ranks in itertools.product(options.variants, options.ranks):
                num_images = chosen["num_images"] * ranks
                data = write_data(Path(folder) / f"data{num_images}", num_images)
                rows.append(run_child(job, chosen, variant, data, Path(folder), options, ranks))
                add_scaling(rows)
                print(in_one_line(rows[-1]), flush=True)
                written = write(rows, options, out)
    print(f"\n{heading(options)}\n\n{table(rows)}\n\nwritten to {out}: {', '.join(written)}")


# ---- one row, in a process of its own ------------------------------------------------------------------------------


def job_options(job, options):
    """What a job stands for, with the command line's own choices in its place if there is no job."""
    name, hyp, pixels, batch = JOBS[job] if job else (options.cfg, options.hyp, options.img, options.batch)
    cfg = ROOT / f"cfg/training/{name}.yaml" if job else name
    hyp = ROOT / f"data/hyp.scratch.{hyp}.yaml" if job else hyp
    num_images = options.images or min(max(16 * batch, 2048), 8192)
    return {"cfg": str(cfg), "hyp": str(hyp), "img": pixels, "batch": batch, "num_images": num_images}


def run_child(job, chosen, variant, data, folder, options, ranks=1):
    """The row of one variant: what `measure` found in all `ranks` processes, or the reason why it found nothing."""
    from tools.experiments import runner

    flags, environment = split_variant(variant)
    row = {"job": job or Path(chosen["cfg"]).stem, **chosen, "variant": variant, "cards": ranks}
    results = [folder / f"result.json{rank}" for rank in (range(ranks) if ranks > 1 else [""])]
    for result in results:
        result.unlink(missing_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    line = [sys.executable, *launcher, __file__, "--child", str(folder / "result.json"), "--data", str(data),
            "--cfg", chosen["cfg"], "--hyp", chosen["hyp"], "--img", str(chosen["img"]), "--batch",
            str(chosen["batch"]), "--steps", str(options.steps), "--seconds", str(options.seconds), "--workers",
            str(options.workers), "--device", options.device, "--", *flags]  # fmt: skip
    started, log = time.perf_counter(), Path(options.out) / "last_run.log"
    status = runner.run_program(line, log, os.environ | environment, options.timeout)
    if status is None:
        return row | {"error": f"not done after {options.timeout} s"}
    row["whole_seconds"] = time.perf_counter() - started
    if not all(result.exists() for result in results):
        return row | {"error": runner.last_words(log.read_text(errors="replace"), status)[-200:]}
    return row | merged([json.loads(result.read_text()) for result in results])


def merged(of_ranks):
    """The results of all processes as one: rates and workers added, the busiest main process, the mean GPU."""
    whole = of_ranks[0]
    for name, stage in whole.items():
        if name == "memory_gb":
            continue
        stages = [results[name] for results in of_ranks]
        loads = [stage["gpu"] for stage in stages if stage["gpu"] is not None]
        stage |= {key: sum(other[key] for other in stages) for key in ("rate", "images", "worker_cores")}
        stage |= {"main_cores": max(other["main_cores"] for other in stages)}
        stage |= {"gpu": sum(loads) / len(loads) if loads else None}
    return whole


def add_scaling(rows):
    """Give the last row its rate as a share of what as many single cards would reach, if one card was measured."""
    last = rows[-1]
    for row in rows:
        is_alone = row["cards"] == 1 and all(row[key] == last[key] for key in ("job", "variant"))
        if is_alone and "end to end" in row and "end to end" in last:
            last["scaling"] = last["end to end"]["rate"] / row["end to end"]["rate"] / last["cards"]


def split_variant(variant):
    """(flags, environment) of a variant."""
    words = [] if variant == "off" else variant.split()
    variables = [word for word in words if not word.startswith("-") and "=" in word]
    return [word for word in words if word not in variables], dict(word.split("=", 1) for word in variables)


def measure(options):
    """Train until everything is measured; returns the results of each stage, with the memory that was needed."""
    from unittest import mock

    import torch

    import train
    from tests.profiling import Done, Source, Timeline, Watched
    from utils.config.data_yaml import load_data_yaml
    from utils.config.hyp import load_hyp
    from utils.config.options import train_parser
    from utils.run import entry
    from utils.run.context import Run
    from utils.run.folder import open_run_folder, prepare_train_options
    from utils.system import distributed

    ranks = distributed.read_ranks()
    line = ["--data", options.data, "--cfg", options.cfg, "--hyp", options.hyp, "--img", str(options.img),
            "--batch-size", str(options.batch * ranks.world_size), "--workers", str(options.workers),
            "--device", options.device, "--epochs", "10000", "--noautoanchor", "--cache-images", "--notest", "--nosave",
            "--project", str(Path(options.child).parent / "runs"), *options.flags]  # fmt: skip
    watched, sources = [], []

    def open_watched(*args):
        report = Watched(open_report(*args), plan, device, timeline, sources, ranks.is_distributed)
        watched.append(report)
        return report

    def open_sources(*args):
        loaders = open_loaders(*args)
        sources.append(Source(loaders.train, device, timeline))
        return replace(loaders, train=sources[0])

    def run(opt):
        nonlocal device, timeline
        opt = prepare_train_options(opt, ranks)
        device = distributed.select_device(opt.device, opt.batch_size, ranks)
        timeline = Timeline(device)
        distributed.start_processes(ranks, device)
        open_run_folder(opt, ranks)
        hyp, data = load_hyp(opt.hyp), load_data_yaml(opt.data, opt.single_cls)
        with (
            mock.patch("train.open_report", open_watched), mock.patch("train.open_loaders", open_sources),
            instruments(timeline),
        ):  # fmt: skip
            train.train(Run(opt, hyp, data, device, ranks))

    open_report, open_loaders, device, timeline = train.open_report, train.open_loaders, None, None
    plan = stages(options)
    with suppress(Done):
        entry.run(run, train_parser().parse_args(line))
    distributed.stop_processes()
    results = dict(watched[0].results)
    if device.type == "cuda":
        results["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return results


def stages(options):
    """(name, steps, seconds) of what is measured; a slow path ends a stage by its seconds."""
    fifth = options.seconds / 5
    return [("warm-up", min(60, options.steps), fifth), ("end to end", options.steps, 2.5 * fifth),
            ("phases", min(40, options.steps), fifth / 2), ("resident", min(60, options.steps), fifth)]  # fmt: skip


def instruments(timeline):
    """A context in which the pieces of a step mark their phases in `timeline`."""
    from unittest import mock

    import torch

    from models.yolo import Model
    from utils.engine.ema import ModelEMA
    from utils.fast.exchange import Exchange
    from utils.fast.graph_step import GraphSteps

    stack = ExitStack()
    call = torch.nn.Module.__call__

    def timed_call(model, *args, **kwargs):
        return (timeline.around(call, "forward", "loss") if model.training else call)(model, *args, **kwargs)

    stack.enter_context(mock.patch.object(Model, "__call__", timed_call))
    for owner, name, *phases in (
        (torch.Tensor, "backward", "backward", "optimiser"), (ModelEMA, "update", "EMA"),
        (GraphSteps, "backward", "graph"), (GraphSteps, "update", "optimiser"),
        (Exchange, "add_gradients", "exchange"),
    ):  # fmt: skip
        stack.enter_context(mock.patch.object(owner, name, timeline.around(getattr(owner, name), *phases)))
    return stack


def write_data(folder, num_images):
    """A drawn data set with 8 images to validate; returns its yaml."""
    from tools.bench_loader import write_images

    path = folder / "data.yaml"
    if not path.exists():
        folder.mkdir(parents=True)
        images = write_images(folder, num_images)
        (folder / "val.txt").write_text("".join(f"{file}\n" for file in sorted(images.glob("*.jpg"))[:8]))
        names = ", ".join(f"c{i}" for i in range(80))
        path.write_text(f"train: {images}\nval: {folder / 'val.txt'}\nnc: 80\nnames: [{names}]\n")
    return path


# ---- what is shown -------------------------------------------------------------------------------------------------


def in_one_line(row):
    name = f"{row['job']} {row['img']} px, batch {row['batch']}, {row['variant']}"
    if row["cards"] > 1:
        name += f", {row['cards']} cards"
    if "error" in row:
        return f"{name}: FAILED: {row['error']}"
    scaling = f", scaling {row['scaling']:.2f}" if "scaling" in row else ""
    return f"{name}: {row['end to end']['rate']:,.0f} img/s, resident {row['resident']['rate']:,.0f}{scaling}"


def phases_of(rows):
    from tests.profiling import PHASES

    return [name for name in PHASES if any(row["phases"]["device_ms"].get(name, 0) > 0.005 for row in rows)]


def table(rows):
    """Markdown; a failed row says why."""
    done = [row for row in rows if "error" not in row]
    phases, lines = phases_of(done), []
    for row in rows:
        cells = [f"{row['job']}, batch {row['batch']}", f"`{row['variant']}`", str(row["cards"])]
        if "error" in row:
            lines.append([*cells, row["error"].replace("|", "/")])
            continue
        whole = row["end to end"]
        gpu = "-" if whole["gpu"] is None else f"{whole['gpu']:.0f}"
        memory = f"{row['memory_gb']:.1f}" if "memory_gb" in row else "-"
        scaling = f"{row['scaling']:.2f}" if "scaling" in row else "-"
        cells += [f"{whole['rate']:,.0f}", scaling, str(whole["steps"]), f"{row['resident']['rate']:,.0f}", gpu,
                  f"{whole['main_cores']:.2f}", f"{whole['worker_cores']:.1f}", memory,
                  f"{1e3 * whole['seconds'] / whole['steps']:.1f}"]  # fmt: skip
        cells += [f"{row['phases']['device_ms'].get(name, 0):.1f}" for name in phases]
        lines.append(cells)
    return markdown.table([*COLUMNS, *phases], lines)


def heading(options):
    import torch

    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    machine = torch.cuda.get_device_name() if on_gpu else "CPU, wall clock"
    return f"{machine}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"


def write(rows, options, out):
    """Write what there is into the folder `out`; returns the names of the files."""
    (out / "results.json").write_text(json.dumps({"machine": heading(options), "rows": rows}, indent=1))
    (out / "table.md").write_text(f"{heading(options)}\n\n{table(rows)}\n")
    done = [row for row in rows if "error" not in row]
    (out / "phases.png").unlink(missing_ok=True)  # of an earlier run
    if done:
        plot(done, out / "phases.png", heading(options))
    return ["results.json", "table.md", *["phases.png"] * bool(done)]


def plot(rows, path, title):
    """A bar for each row, stacked by phases, ms an image."""
    from matplotlib.figure import Figure

    phases = phases_of(rows)
    figure = Figure(figsize=(11, 0.45 * len(rows) + 2), layout="constrained")
    axes = figure.subplots()
    labels = [f"{row['job']}: {row['variant']}" + f", {row['cards']} cards" * (row["cards"] > 1) for row in rows]
    left = [0.0] * len(rows)
    for number, name in enumerate(phases):
        widths = [row["phases"]["device_ms"].get(name, 0) / row["batch"] for row in rows]
        axes.barh(range(len(rows)), widths, left=left, label=name, color=f"C{number}")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for position, row in enumerate(rows):
        axes.text(left[position], position, f" {row['end to end']['rate']:,.0f} img/s", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(right=1.1 * max(left))  # room for the rates
    axes.set(xlabel="ms for an image, by phase", title=title)
    axes.legend(ncols=5, fontsize=8)
    figure.savefig(path, dpi=120)


def parse():
    from utils.run import entry

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), metavar="JOB",
                        help=f"presets, of {', '.join(JOBS)}; without them --cfg, --img, --batch")  # fmt: skip
    parser.add_argument("--cfg", default=str(ROOT / "cfg/training/yolov7-tiny.yaml"))
    parser.add_argument("--hyp", default=str(ROOT / "data/hyp.scratch.tiny.yaml"))
    parser.add_argument("--img", type=int, default=320)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--images", type=int, default=0, help="in the drawn data set; 0: 16 batches, 2048 to 8192")
    parser.add_argument("--variants", help="with commas: --variants='off, --fast-loss, --fast USE_COMPILE=1'")
    parser.add_argument("--steps", type=int, default=200, help="end to end, at most")
    parser.add_argument("--seconds", type=float, default=90, help="for the stages of a row together, at most")
    parser.add_argument("--timeout", type=int, default=400, help="seconds after which a row is given up")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="processes, one a card: 1 2 compares them")
    parser.add_argument("--workers", type=int, help="of a process; by default a core of the machine for each")
    parser.add_argument("--device", default="", help="cpu, or empty for the first GPU")
    parser.add_argument(
        "--short", action="store_true", help="tiny, 320 px, batch 64, three variants, about two minutes"
    )
    parser.add_argument("--out", default="runs/profile_training_loop")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.short:
        options.jobs, options.seconds = options.jobs or ["tiny64"], min(options.seconds, 25)
        options.timeout = min(options.timeout, 60)
    chosen = [variant.strip() for variant in (options.variants or "").split(",") if variant.strip()]
    options.workers = os.cpu_count() // max(options.ranks) if options.workers is None else options.workers
    options.variants = chosen or (SHORT if options.short else VARIANTS)
    return options


if __name__ == "__main__":
    options = parse()
    if options.child:
        main(options)
    else:
        from tools.experiments import command_line

        command_line.run_tool(main, options)
