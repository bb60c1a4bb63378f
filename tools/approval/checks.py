"""The checks of stages 1, 5 and 6: command line, torch.compile, everything together; 2 to 4 have their own file."""

import itertools
import math
from pathlib import Path

import torch

from tools import ab_compare
from tools.approval import loader_checks
from tools.approval.setup import NotMeasured, Setup, expect, same_results
from tools.experiments import runner
from tools.experiments.markdown import median, show
from utils.config.flags import TRAIN_FLAGS
from utils.config.options import train_parser
from utils.engine.checkpoint_reader import read_checkpoint
from utils.run import fast_paths

SHORTCUT = """import sys
sys.argv = ['train.py', '--fast-dataloader', '--workers', '8']
exec(open('train.py').read().split('opt = parser.parse_args()')[0] + 'opt = parser.parse_args(); \
print(opt.fast_dataloader, opt.persistent_workers, opt.worker_tensor)')
"""
WRONG = (["--epochs", "0"], ["--micro-batch-size", "-1"], ["--nonsense"], ["--data", "none.yaml"])
TIMEOUT_PERFORMANCE = 3600  # seconds for one run of the performance comparison
# How far training losses may differ between flags, relative: rounding differs, and every step makes more of it.
FIRST_EPOCH, LATER_EPOCHS = 0.01, 0.25


# ---- stage 1 ---------------------------------------------------------------------------------------------------------


def help_names_every_flag(setup):
    answer = runner.call_python("train.py", "--help")
    expect(answer.returncode == 0, f"train.py --help ended with {answer.returncode}")
    missing = [flag.name for flag in TRAIN_FLAGS.values() if flag.name not in answer.stdout]
    expect(not missing, f"train.py --help does not name {', '.join(missing)}")
    return f"{len(TRAIN_FLAGS)} flags"


def off_by_default(setup):
    opt = train_parser().parse_args([])
    opt_in = [flag for flag in TRAIN_FLAGS.values() if flag.stage]
    wrong = [flag.name for flag in opt_in if getattr(opt, flag.dest) not in (False, 0, None)]
    expect(not wrong, f"on without being asked for: {', '.join(wrong)}")
    chosen = fast_paths.choose(opt, torch.device("cpu"))
    expect(chosen is fast_paths.REFERENCE, f"an opt-in path without a flag: {chosen}")
    return "no flag, no opt-in path"


def the_shortcut(setup):
    answer = runner.call_python("-c", SHORTCUT)
    expect(answer.stdout.split() == ["True", "False", "False"], f"printed {answer.stdout!r} {answer.stderr[-200:]!r}")
    return "--fast-dataloader leaves the two flags that it stands for off: True False False"


def wrong_values_are_refused(setup):
    for words in WRONG:
        answer = runner.call_python("train.py", "--cfg", setup.cfg, "--project", str(setup.out / "runs"), *words)
        expect(answer.returncode == 2, f"{' '.join(words)}: exit status {answer.returncode} instead of 2")
        expect("Traceback" not in answer.stderr, f"{' '.join(words)}: a traceback instead of a sentence")
    return f"{len(WRONG)} wrong command lines, each refused with a sentence"


def a_run_without_flags(setup: Setup):
    run = setup.train("no flag", epochs=2)
    losses = [row[runner.LOSS] for row in run.rows]
    expect(all(map(math.isfinite, losses)), f"training losses {losses}")
    return f"two epochs, training loss {losses[0]:.4f} to {losses[1]:.4f}"


# ---- stage 5 ---------------------------------------------------------------------------------------------------------


def compiled_run(setup: Setup):
    eager = setup.train("no flag")
    run = setup.train("USE_COMPILE=1", environment={"USE_COMPILE": "1"})
    equality = same_results(eager, run, LATER_EPOCHS)
    if "Model compiled successfully" in run.log():
        return f"Model compiled successfully; {equality}"
    warning = next((line for line in run.log().splitlines() if "compile" in line.lower()), "")
    expect(warning, "neither 'Model compiled successfully' nor a warning about falling back")
    return f"fell back to eager: {warning.strip()}; {equality}"


def same_keys(setup: Setup):
    files = [setup.folder_of(name) / "weights" / "last.pt" for name in ("no flag", "USE_COMPILE=1")]
    if not files[1].is_file():
        raise NotMeasured("there is no compiled run")
    plain, compiled = (list(read_checkpoint(path).for_training().state) for path in files)
    expect(plain == compiled, f"other names in the checkpoint: {sorted(set(plain) ^ set(compiled))[:3]}")
    return f"{len(plain)} entries of the same names"


def diagnosis(setup: Setup):
    place = ["--project", str(setup.out / "runs"), "--name", "diagnosis", "--exist-ok"]
    answer = runner.call_python("train.py", *setup.arguments(1), *place, environment={"DIAGNOSE_COMPILE": "1"})
    (setup.out / "diagnosis.txt").write_text(answer.stdout + answer.stderr)
    expect(answer.returncode == 0, f"exit status {answer.returncode}: {answer.stderr[-300:]}")
    expect("DYNAMO EXPLANATION REPORT" in answer.stdout, "no DYNAMO EXPLANATION REPORT was printed")
    lines = [line.strip() for line in answer.stdout.splitlines() if "break" in line.lower()]
    return f"the report is in {setup.out / 'diagnosis.txt'}; {'; '.join(lines[:3])}"


# ---- stage 6 ---------------------------------------------------------------------------------------------------------


def combinations(on_gpu, everything):
    """[(name, flags, environment)] to train with: loader, loss and step combined; --fast; compile with none and all.

    With `everything`, compile joins every combination.
    """
    loaders = ["", "--persistent-workers", "--worker-tensor", "--fast-dataloader"]
    steps = ["", "--fast-step"] + (["--fast-step --cuda-graph"] if on_gpu else [])
    flags = [" ".join(chosen).split() for chosen in itertools.product(loaders, ["", "--fast-loss"], steps)]
    compiled = flags if everything else [flags[0], flags[-1]]
    return [(" ".join(words) or "no flag", words, {}) for words in [*flags, ["--fast"]]] + [
        (" ".join(["USE_COMPILE=1", *words]), words, {"USE_COMPILE": "1"}) for words in compiled
    ]


def gpu_is_used(setup):
    """Whether the runs of this setup train on a GPU."""
    return setup.device != "cpu" and torch.cuda.is_available()


def all_combinations(setup: Setup):
    chosen = combinations(gpu_is_used(setup), setup.all_combinations)
    reference, largest = None, [0.0] * 3
    for (name, *_), run in zip(chosen, setup.train_all(chosen, epochs=3), strict=True):
        losses = [row[runner.LOSS] for row in run.rows]
        expect(all(map(math.isfinite, losses)), f"{name}: training losses {losses}")
        reference = reference or losses
        away = [abs(a - b) / b for a, b in zip(losses, reference, strict=True)]
        within = away[0] <= FIRST_EPOCH and max(away) <= LATER_EPOCHS
        expect(within, f"{name}: training losses differ by {_percent(away)} from those without flags")
        largest = [max(pair) for pair in zip(largest, away, strict=True)]
    return f"{len(chosen)} combinations; their losses differ by at most {_percent(largest)} in epochs 1, 2 and 3"


def _percent(shares):
    return ", ".join(f"{share:.2%}" for share in shares)


def performance(setup: Setup):
    """Flags off against everything: leaves the judged comparison for the checks after it."""
    base = setup.arguments(setup.epochs, small=False)
    a, b = ab_compare.Side.parse("A", ""), ab_compare.Side.parse("B", "--fast")
    out = setup.out / "ab"
    runs = ab_compare.compare(base, a, b, out, setup.repeats, 0, TIMEOUT_PERFORMANCE)
    measured = {name: ab_compare.measure(side) for name, side in runs.items()}
    before, after = (median(side["images_per_second"]) for side in measured.values())
    setup.comparison = {
        "verdicts": {target: rest for target, *rest in ab_compare.write(out, runs, a, b, base)},
        "memory": [run.memory for run in runs["B"]],
        "step_ms": setup.batch_size / after * 1e3 if after else None,
        "worker_cpu": median(measured["B"]["worker_cpu"]),
    }
    setup.curves |= {"A: no flag": runs["A"][0].rows, "B: --fast": runs["B"][0].rows}
    return f"no flag: {show(before, '{:,.0f} img/s')}, --fast: {show(after, '{:,.0f} img/s')}; {out}/report.md"


def compared(setup, key):
    """A result of the performance run."""
    if not setup.comparison:
        raise NotMeasured("the performance run did not come to its end")
    return setup.comparison[key]


def target(name):
    """A check: the verdict of the comparison on one target."""

    def check(setup: Setup):
        verdict, found = compared(setup, "verdicts")[name]
        if verdict in (ab_compare.NOT_HERE, "undecided"):
            raise NotMeasured(f"{verdict}: {found}" if verdict == "undecided" else found)
        expect(verdict == "met", found)
        return found

    return check


def workers_are_busy(setup: Setup):
    share = compared(setup, "worker_cpu")
    if not gpu_is_used(setup) or share is None:
        raise NotMeasured("no GPU" if not gpu_is_used(setup) else "no workers")
    expect(share > 0.5, f"each worker uses {share:.0%} of a core: the loader has capacity to spare")
    return f"{share:.0%} of a core each"


def step_time(setup: Setup):
    milliseconds = compared(setup, "step_ms")
    if not gpu_is_used(setup) or milliseconds is None:
        raise NotMeasured("no GPU")
    if (Path(setup.cfg).name, setup.img, setup.batch_size) != ("yolov7.yaml", 320, 64):
        raise NotMeasured(f"asked of yolov7 at 320 px with batch 64; here {milliseconds:.1f} ms")
    expect(milliseconds < 25, f"{milliseconds:.1f} ms")
    return f"{milliseconds:.1f} ms"


def memory_does_not_grow(setup: Setup):
    """In the epochs after the first of the fast run: their last quarter against the one before."""
    growth = []
    for samples in compared(setup, "memory"):
        if (quarter := len(samples) // 4) >= 2 and any(samples):
            before, end = samples[-2 * quarter : -quarter], samples[-quarter:]
            growth.append(sum(end) / sum(before) - 1)
    if not growth:
        raise NotMeasured("the epochs after the first are over too soon to tell; give more --epochs")
    expect(max(growth) < 0.05, f"memory grew by {max(growth):.1%} in the last quarter of the run")
    return f"{max(growth):+.1%} in the last quarter of the run"


CHECKS = {
    1: {
        "--help names every flag": help_names_every_flag,
        "off by default": off_by_default,
        "the shortcut": the_shortcut,
        "wrong values": wrong_values_are_refused,
        "a run without flags": a_run_without_flags,
    },
    **loader_checks.CHECKS,
    5: {"USE_COMPILE=1": compiled_run, "checkpoint of the compiled run": same_keys, "DIAGNOSE_COMPILE=1": diagnosis},
    6: {
        "every combination of flags": all_combinations,
        "performance run": performance,
        **{name: target(name) for name in ab_compare.TARGETS},
        "workers above 50 % of a core": workers_are_busy,
        "step below 25 ms": step_time,
        "memory does not grow": memory_does_not_grow,
    },
}
