"""Two settings of the same training side by side: how fast, how busy, how good.

    python tools/ab_compare.py --a "" --b "--fast" --repeats 3 \\
        --args "--data data/coco320.yaml \\
            --cfg cfg/training/yolov7-tiny.yaml --img 320"

Runs alternate (A B, B A, A B, ...). Both runs of a pair have the same --seed, so they see the same batches; each pair
has another one, which shows how far mAP differs by chance. Variables may stand in front of the flags:
--b "USE_COMPILE=1 --fast". report.md, ab.png and ab.json in --out hold medians over the epochs (without the first) with
the lowest and highest run, the mAP of each pair, and a verdict on each target: met, missed, undecided, or not measured
on this machine.

With --devices 0,1 several pairs run at the same time, each with one device for both of its runs; --side-by-side runs
the two of a pair at the same time instead. Either is fair to the rates only where the machine has the cores for all.
"""

import argparse
import json
import logging
import re
import shlex
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.experiments import command_line, runner
from tools.experiments.devices import on_device, read_devices
from tools.experiments.markdown import known, median, show, spread, table
from tools.experiments.runner import LOSS, MAP50
from utils.config.flags import TRAIN_FLAGS
from utils.config.limits import SEED, above, at_least
from utils.config.options import check_train_options, train_parser
from utils.plots.style import PALETTE, new_figure, save_figure, set_title, whole_numbers
from utils.run import entry
from utils.system.files import atomic_write

logger = logging.getLogger("ab_compare")

FASTER, MAP_POINTS, GPU_BUSY, MAIN_BUSY = 4.0, 0.01, 0.80, 0.40  # the targets, in words:
TARGETS = (
    "training more than 4x faster",
    "mAP@.5 within 1 % (0.01)",
    "GPU utilisation above 80 %",
    "main process below 40 % of a core",
)
SEED_IS_OURS = "use the --seed of the comparison, or its --no-seed"
NOT_HERE = "not measured on this machine"

# name in the report: (key, how a run is measured, format)
MEASURES = {
    "img/s, training part": ("images_per_second", lambda run: run.typical("speed/images_per_second"), "{:,.1f}"),
    "epoch, s": ("epoch_seconds", lambda run: run.typical("seconds"), "{:.2f}"),
    "of it training, s": ("training_seconds", lambda run: run.typical("speed/training_seconds"), "{:.2f}"),
    "whole process, s": ("process_seconds", lambda run: run.seconds, "{:.1f}"),
    "GPU utilisation": ("gpu", lambda run: run.typical("speed/gpu_utilisation"), "{:.0%}"),
    "main process, share of a core": ("main_cpu", lambda run: run.typical("speed/main_cpu"), "{:.0%}"),
    "each worker, share of a core": ("worker_cpu", lambda run: run.typical("speed/worker_cpu"), "{:.0%}"),
    "peak memory of the processes, GB": ("memory", lambda run: run.usage.memory, "{:.2f}"),
    "peak memory of the GPU, GB": ("gpu_memory", lambda run: run.peak("memory_gb") or None, "{:.2f}"),
    "mAP@.5, last epoch": ("map50", lambda run: run.last(MAP50), "{:.4f}"),
    "mAP@.5:.95, last epoch": ("map", lambda run: run.last("metrics/mAP_0.5:0.95"), "{:.4f}"),
    "training loss, last epoch": ("loss", lambda run: run.last(LOSS), "{:.4f}"),
}


@dataclass(frozen=True)
class Side:
    """One of the two: its flags (words of train.py) and environment variables."""

    name: str
    flags: list
    environment: dict

    @classmethod
    def parse(cls, name, text):
        words, environment = command_line.split(text, f"--{name.lower()}"), {}
        while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
            key, _, environment[key] = words.pop(0).partition("=")
        return cls(name, words, environment)

    def describe(self):
        words = [*(f"{key}={value}" for key, value in self.environment.items()), *self.flags]
        return " ".join(words) or "no flag"


# ---- what is asked for -----------------------------------------------------------------------------------------------


def check_sides(base, a, b, has_seed):
    """Raise ValueError for flags that make no sense in a comparison, by the option that they came from.

    `has_seed`: the comparison gives every run its --seed.
    """
    refused = command_line.OF_THE_TOOL | ({"seed": SEED_IS_OURS} if has_seed else {})
    command_line.check_arguments(base, "--args")
    command_line.check_names(base, "--args", refused)
    shared, length = set(command_line.typed_names(base)), {}
    for side in (a, b):
        option, words = f"--{side.name.lower()}", [*base, *side.flags]
        command_line.check_arguments(words, option)
        command_line.check_names(side.flags, option, refused)
        for name in command_line.typed_names(side.flags):
            if name in shared:
                raise ValueError(f"{option}: {TRAIN_FLAGS[name].name} stands in --args as well; give it to --a and --b")
        command_line.check_run(words, option, check_train_options)
        length[option] = vars(train_parser().parse_args(words))
    for name in ("epochs", "max_iter", "subset_size"):
        a_has, b_has, flag = length["--a"][name], length["--b"][name], TRAIN_FLAGS[name].name
        if a_has != b_has:
            raise ValueError(f"--a trains with {flag} {a_has} and --b with {b_has}; that says nothing about their "
                             f"flags, give {flag} in --args")  # fmt: skip


# ---- running ---------------------------------------------------------------------------------------------------------


def compare(base, a, b, out, repeats=3, seed=0, timeout=None, devices=(None,), side_by_side=False):
    """Run both Sides `repeats` times with the common arguments `base` (words); returns {name of the side: [Run]}.

    Pair k has --seed `seed` + k; None leaves --seed away. Each of `devices` takes one pair after another; with
    `side_by_side` the runs of a pair are on two devices at the same time, which the next pair exchanges. Raises
    ValueError when a run fails: then nothing compares.
    """

    def one(k, side, device):
        arguments = on_device([*base, *side.flags, *([] if seed is None else ["--seed", str(seed + k)])], device)
        logger.info("pair %d of %d, %s: %s", k + 1, repeats, side.name, side.describe())
        folder = Path(out) / f"{side.name}{k + 1}"
        run = yield from runner.training(arguments, folder, None, timeout, side.environment)
        if not run.completed or not run.rows:
            raise ValueError(f"{side.name} ({side.describe()}) failed: {run.message}; see {run.folder / runner.LOG}")
        logger.info("    %s: %.1f s, %s img/s, mAP@.5 %.4f", folder.name, run.seconds,
                    show(run.typical("speed/images_per_second"), "{:,.1f}"), run.last(MAP50))  # fmt: skip
        return run

    def pair(k, device):
        runs = {}
        for side in (a, b) if k % 2 == 0 else (b, a):
            runs[side.name] = yield from one(k, side, device)
        return runs

    if side_by_side:
        pairs = []
        for k in range(repeats):
            first, second = devices if k % 2 == 0 else devices[::-1]
            runs = runner.at_once([one(k, a, first), one(k, b, second)])
            pairs.append(dict(zip((a.name, b.name), runs, strict=True)))
    else:
        pairs = runner.spread([partial(pair, k) for k in range(repeats)], devices)
    return {side.name: [runs[side.name] for runs in pairs] for side in (a, b)}


def sharing(devices, side_by_side, repeats):
    """What a report has to say about runs that shared the machine: {name: text}, empty when each had it alone."""
    at_once = 2 if side_by_side else min(len(devices), repeats)
    return {} if at_once == 1 else {"rates": f"measured side by side, {at_once} runs at a time on {','.join(devices)}"}


def measure(runs):
    """{key: [value of each run]} of the runs of one side; a value is None where it was not measured."""
    return {key: [take(run) for run in runs] for key, take, _ in MEASURES.values()}


# ---- judging ---------------------------------------------------------------------------------------------------------


def verdicts(a, b):
    """[(target, verdict, what was found)] from the measures of both sides."""
    on_gpu = median(b["gpu_memory"]) is not None
    return [
        _speed(median(a["images_per_second"]), median(b["images_per_second"]), on_gpu),
        _quality(a["map50"], b["map50"]),
        _share(TARGETS[2], median(b["gpu"]), GPU_BUSY, on_gpu, above=True),
        _share(TARGETS[3], median(b["main_cpu"]), MAIN_BUSY, on_gpu, above=False),
    ]


def _speed(rate_a, rate_b, on_gpu):
    target = TARGETS[0]
    if not rate_a or not rate_b:
        return target, NOT_HERE, "no rate: is tensorboard installed?"
    factor = rate_b / rate_a
    if not on_gpu:
        return target, NOT_HERE, f"no GPU; on this CPU B trains {factor:.2f}x as fast"
    return target, "met" if factor > FASTER else "missed", f"{factor:.2f}x"


def _quality(maps_a, maps_b):
    """mAP@.5 within one point, by the mean difference of the pairs; undecided while chance could explain the answer."""
    target = TARGETS[1]
    differences = [score_b - score_a for score_a, score_b in zip(maps_a, maps_b, strict=True)]
    mean, deviation = statistics.mean(differences), scatter(differences)
    found = f"B - A = {mean:+.4f}"
    found += ", one pair: spread unknown" if deviation is None else f", standard deviation of the pairs {deviation:.4f}"
    if max(maps_a) < MAP_POINTS:
        return target, "undecided", found + "; A itself has learned nothing yet: more epochs"
    if deviation is None:
        return target, "undecided" if mean else "met", found
    error = deviation / len(differences) ** 0.5  # of the mean
    if abs(mean) <= MAP_POINTS:
        return target, "met" if error <= MAP_POINTS else "undecided", found
    return target, "missed" if abs(mean) - MAP_POINTS > error else "undecided", found


def _share(target, value, limit, on_gpu, above):
    if value is None:
        return target, NOT_HERE, "no GPU" if not on_gpu else "install nvidia-ml-py"
    if not on_gpu:
        return target, NOT_HERE, f"no GPU: the main process computes the model itself ({value:.0%})"
    is_met = value > limit if above else value < limit
    return target, "met" if is_met else "missed", f"{value:.0%}"


def scatter(values):
    """Standard deviation; None for a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


# ---- telling ---------------------------------------------------------------------------------------------------------


def measures_table(a, b):
    """Markdown: a row for each measure, both sides and their ratio."""
    rows = []
    for label, (key, _, form) in MEASURES.items():
        first, second = median(a[key]), median(b[key])
        ratio = second / first if first and second is not None else None
        rows.append([label, spread(a[key], form), spread(b[key], form), show(ratio, "{:.2f}")])
    return table(["measure", "A", "B", "B / A"], rows)


def report_text(a, b, judged, facts):
    pairs = [[k, f"{score_a:.4f}", f"{score_b:.4f}", f"{score_b - score_a:+.4f}"]
             for k, (score_a, score_b) in enumerate(zip(a["map50"], b["map50"], strict=True), 1)]  # fmt: skip
    return "\n".join([
        "# A/B comparison", "",
        *(f"- {name}: {value}" for name, value in facts.items()), "",
        "Medians over the epochs without the first; of several runs the median (lowest to highest).", "",
        measures_table(a, b), "",
        "## Verdict", "",
        *(f"- {target}: **{verdict}** ({found})" for target, verdict, found in judged), "",
        "## mAP@.5 of each pair", "",
        table(["pair", "A", "B", "B - A"], pairs), "",
        "![curves](ab.png)", "",
    ])  # fmt: skip


CURVES = {"training loss": LOSS, "box loss, val": "val/box_loss", "mAP@.5": MAP50,
          "mAP@.5:.95": "metrics/mAP_0.5:0.95"}  # fmt: skip
BARS = ("img/s, training part", "epoch, s", "GPU utilisation", "main process, share of a core")
LONGEST_LEGEND = 160  # letters


def plot(runs, words, path):
    """Curves of every run, A blue and B orange, and the measures of speed that were taken, as bars with their spread.

    `words` {side: its flags} for the legend.
    """
    bars = {label: {name: [MEASURES[label][1](run) for run in side] for name, side in runs.items()} for label in BARS}
    bars = {label: sides for label, sides in bars.items() if any(map(known, sides.values()))}
    figure, axes = new_figure(2, 4, size=(16, 7), used=4 + len(bars))
    for ax, (title, column) in zip(axes, CURVES.items(), strict=False):
        for colour, (name, side) in zip(PALETTE, runs.items(), strict=False):
            for k, run in enumerate(side):
                points = [(row["epoch"], row[column]) for row in run.rows if column in row]
                ax.plot(*zip(*points, strict=True), color=colour, linewidth=1.3, alpha=0.8, marker="o", markersize=3,
                        label=None if k else f"{name}: {words[name]}"[:LONGEST_LEGEND])  # fmt: skip
        set_title(ax, title)
        ax.set_xlabel("epoch", fontsize=8)
        whole_numbers(ax.xaxis)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", frameon=False)
    for ax, (label, sides) in zip(axes[4:], bars.items(), strict=True):
        _bars(ax, label, sides)
    return save_figure(figure, path)


def _bars(ax, label, sides):
    set_title(ax, label)
    for colour, (name, values) in zip(PALETTE, sides.items(), strict=False):
        if found := known(values):
            centre = median(found)
            ax.bar(name, centre, color=colour, yerr=[[centre - min(found)], [max(found) - centre]], capsize=4)
        else:
            ax.bar(name, 0)
            ax.text(name, 0, "not measured", ha="center", va="bottom", fontsize=8)


def write(out, runs, a, b, base, more=None):
    """report.md, ab.png and ab.json in `out`, with the facts `more` {name: text}; returns the verdicts."""
    measured = {name: measure(side) for name, side in runs.items()}
    judged = verdicts(measured["A"], measured["B"])
    facts = runner.machine() | {"common arguments": f"`{shlex.join(base)}`", "A": f"`{a.describe()}`",
                                 "B": f"`{b.describe()}`", "pairs": str(len(runs["A"]))} | (more or {})  # fmt: skip
    out = Path(out)
    plot(runs, {side.name: side.describe() for side in (a, b)}, out / "ab.png")
    with atomic_write(out / "ab.json", "w") as file:
        json.dump({"facts": facts, "measures": measured, "verdicts": judged}, file, indent=1)
    with atomic_write(out / "report.md", "w") as file:
        file.write(report_text(measured["A"], measured["B"], judged, facts))
    return judged


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    add = parser.add_argument
    add("--args", required=True, help="command line of train.py that both sides share")
    add("--a", default="", help="flags (and variables) of side A")
    add("--b", required=True, help="flags (and variables) of side B")
    add("--repeats", type=int, default=3, help="pairs of runs")
    add("--seed", type=int, default=0, help="--seed of the first pair")
    add("--no-seed", action="store_true", help="do not pass --seed: stock's order of batches")
    add("--timeout", type=float, help="seconds after which a run counts as hung")
    add("--out", default="runs/ab_compare", help="folder of the report and the runs")
    add("--devices", default="", help="such as 0,1: pairs run at the same time, each on its device")
    add("--side-by-side", action="store_true", help="the two runs of a pair at the same time, on the two --devices")
    return command_line.parse(parser, arguments, ("--args", "--a", "--b"))


def main(options):
    """Compare both sides and print the measures and the verdicts."""
    base = command_line.split(options.args, "--args")
    a, b = Side.parse("A", options.a), Side.parse("B", options.b)
    at_least(1).check("--repeats", options.repeats)
    above(0).check("--timeout", options.timeout)
    SEED.check("--seed", options.seed)
    SEED.check("--seed of the last pair", options.seed + options.repeats - 1)
    check_sides(base, a, b, not options.no_seed)
    devices = read_devices(options.devices, [*base, *a.flags, *b.flags], "--args, --a or --b")
    if options.side_by_side and len(devices) != 2:
        raise ValueError("--side-by-side needs two --devices, such as --devices 0,1")
    command_line.open_folder(options.out, "--out")
    seed, shared = None if options.no_seed else options.seed, sharing(devices, options.side_by_side, options.repeats)
    runs = compare(base, a, b, options.out, options.repeats, seed, options.timeout, devices, options.side_by_side)
    judged = write(options.out, runs, a, b, base, shared)
    print("\n" + measures_table(measure(runs["A"]), measure(runs["B"])) + "\n")
    print(*(f"{name}: {text}\n" for name, text in shared.items()), sep="\n", end="")
    for target, verdict, found in judged:
        print(f"{target}: {verdict} ({found})")
    print(f"\nwritten: {options.out}/report.md, ab.png, ab.json")


if __name__ == "__main__":
    command_line.run_tool(main, parse())
