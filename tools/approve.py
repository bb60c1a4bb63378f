"""The staged approval: six stages, each a set of checks that write a report for a person to judge.

    python tools/approve.py status
    python tools/approve.py run 1 [--data data/coco320.yaml --img 320 --batch-size 64 --workers 8 --subset 512]
    python tools/approve.py approve 1 --by NAME [--note "why"]

A stage does not run before the one in front of it is approved. Without --data the stages train on a small embedded set,
in minutes on two CPU cores. approvals.json keeps who approved what, when, at which commit, and the content of the files
that the stage is about: when one of them changes, the approval no longer holds. Reports lie in runs/approval/stage_N:
report.md (what ran, passed or failed, timings, CPU and GPU use), report.json, report.png.
"""

import argparse
import json
import logging
import shlex
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.approval.setup import NOT_MADE, Setup
from tools.approval.stages import STAGES, Approvals, fingerprint
from tools.experiments import runner
from utils.config.options import explicit_options, train_parser
from utils.plots.style import PALETTE, new_figure, save_figure, set_title, whole_numbers
from utils.system.files import PROJECT_ROOT, atomic_write

# Options of train.py that make the runs what they are.
GIVEN = {"data", "cfg", "hyp", "weights", "img_size", "batch_size", "workers", "epochs", "seed", "device",
         "subset_size", "project", "name", "exist_ok", "resume", "evolve"}  # fmt: skip
COLOURS = {"passed": PALETTE[2], "failed": PALETTE[4], "not measured": PALETTE[7], NOT_MADE: PALETTE[7]}


def run_stage(number, setup, approvals):
    """Make every check of a stage and write its report; returns whether the stage passed."""
    approvals.check_may_run(number)
    from tools.approval.checks import CHECKS

    stage = STAGES[number]
    setup.prepare()
    print(f"stage {number}: {stage.title}", flush=True)
    started, machine = time.monotonic(), runner.machine()
    for _ in setup.check_all(CHECKS[number]):  # a report after each: whatever ends this leaves what was found
        content = {
            "stage": number, "title": stage.title, "passed": setup.passed(), "date": time.strftime("%Y-%m-%d %H:%M"),
            "seconds": time.monotonic() - started, "machine": machine, "arguments": setup.in_words(),
            **setup.as_dict(), "files": fingerprint(stage),
        }  # fmt: skip
        write_report(approvals.folder(number), content)
    plot(setup, approvals.folder(number) / "report.png")
    return setup.passed()


def write_report(folder, content):
    """report.json and report.md."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "report.json", "w") as file:
        json.dump(content, file, indent=1)
    with atomic_write(folder / "report.md", "w") as file:
        file.write(report_text(content))


def report_text(content):
    """report.md from the content of report.json."""
    statuses = {finding["status"] for finding in content["findings"]}
    unfinished = "not complete" if NOT_MADE in statuses and "failed" not in statuses else "failed"
    verdict = "passed" if content["passed"] else unfinished
    lines = [f"# Stage {content['stage']}, {content['title']}: {verdict}", ""]
    lines += [f"- {name}: {value}" for name, value in content["machine"].items()]
    lines += [f"- runs: `{content['arguments']}`", f"- time: {content['seconds']:.0f} s", ""]
    lines += ["| check | result | what was found | s |", "|---|---|---|---|"]
    for finding in content["findings"]:
        detail = finding["detail"].replace("|", "/").replace("\n", " ")
        lines.append(f"| {finding['name']} | **{finding['status']}** | {detail} | {finding['seconds']:.1f} |")
    columns = list(dict.fromkeys(name for row in content["measured"].values() for name in row))
    if columns:
        lines += ["", "| measured | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for label, row in content["measured"].items():
            cells = ["" if row.get(name) is None else f"{row[name]:.3g}" for name in columns]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        if not any(row.get("GPU") is not None for row in content["measured"].values()):
            lines += ["", "GPU utilisation: not measured on this machine."]
    files = ", ".join(content["files"]) or "none yet"
    lines += [""] if NOT_MADE in statuses else ["", "![report](report.png)", ""]
    return "\n".join([*lines, f"An approval is about: {files}", ""])


def plot(setup, path):
    """Time of each check, what was measured, and the training losses, side by side."""
    columns = list(dict.fromkeys(name for row in setup.measured.values() for name in row if row[name] is not None))
    panels = 1 + len(columns) + bool(setup.curves)
    height = max(3, 0.3 * max(len(setup.findings), len(setup.measured)) + 1)
    figure, axes = new_figure(-(-panels // 3), min(panels, 3), size=(18, height * -(-panels // 3)))
    for index, finding in enumerate(setup.findings):
        axes[0].barh(index, finding.seconds, color=COLOURS[finding.status])
    _label(axes[0], "seconds (green: passed, red: failed, grey: not measured)", [f.name for f in setup.findings])
    for ax, column in zip(axes[1:], columns, strict=False):
        rows = {label: row[column] for label, row in setup.measured.items() if row.get(column) is not None}
        ax.barh(range(len(rows)), list(rows.values()), color=PALETTE[0])
        _label(ax, column, list(rows))
    for ax in axes[1 + len(columns) :]:
        ax.set_visible(False)
    if setup.curves:
        _draw_curves(axes[1 + len(columns)], setup.curves)
    return save_figure(figure, path)


def _label(ax, title, names):
    set_title(ax, title)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()


def _draw_curves(ax, curves):
    ax.set_visible(True)
    for index, (label, rows) in enumerate(curves.items()):
        ax.plot([row["epoch"] for row in rows], [row[runner.LOSS] for row in rows], marker="o", markersize=3,
                color=PALETTE[index % len(PALETTE)], label=label)  # fmt: skip
    set_title(ax, "training loss")
    ax.set_xlabel("epoch", fontsize=8)
    whole_numbers(ax.xaxis)
    if len(curves) <= 10:
        ax.legend(frameon=False, fontsize=7)


def parse(arguments=None):
    places = argparse.ArgumentParser(add_help=False)  # accepted before and after the command
    places.add_argument("--approvals", default=argparse.SUPPRESS, help="file of the approvals")
    places.add_argument("--out", default=argparse.SUPPRESS, help="folder of reports and runs")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[places]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="where every stage stands", parents=[places])
    run = commands.add_parser("run", help="make the checks of a stage", parents=[places])
    run.add_argument("stage", type=int, choices=STAGES)
    run.add_argument("--data", default="", help="data yaml; default: embedded shapes")
    run.add_argument("--cfg", default=Setup.cfg)
    run.add_argument("--hyp", default="", help="default: the tiny hyper-parameters, with OTA")
    run.add_argument("--img", type=int, default=Setup.img)
    run.add_argument("--batch-size", type=int, default=Setup.batch)
    run.add_argument("--workers", type=int, default=Setup.workers)
    run.add_argument("--device", default="", help="as in train.py")
    run.add_argument("--subset", type=int, help="training images of the short runs, where train.py has --subset-size")
    run.add_argument("--epochs", type=int, default=Setup.epochs, help="of the performance run in stage 6")
    run.add_argument("--repeats", type=int, default=Setup.repeats, help="pairs of the performance run in stage 6")
    run.add_argument("--all-combinations", action="store_true", help="stage 6: USE_COMPILE with every combination")
    run.add_argument("--args", default="", help="further options of train.py for every run, e.g. --cache-images")
    at_once = "stage 6: combinations of flags that train at the same time; their speed is then not told"
    run.add_argument("--at-once", type=int, default=Setup.at_once, choices=range(1, 17), metavar="N", help=at_once)
    approve = commands.add_parser("approve", help="approve a stage that has been run", parents=[places])
    approve.add_argument("stage", type=int, choices=STAGES)
    approve.add_argument("--by", required=True, metavar="NAME")
    approve.add_argument("--note", default="")
    approve.add_argument("--despite-failures", action="store_true", help="needs a --note that says why")
    defaults = argparse.Namespace(approvals=str(PROJECT_ROOT / "approvals.json"), out="runs/approval")
    words = sys.argv[1:] if arguments is None else arguments
    return parser.parse_args(runner.bind_values(words, ("--args",)), defaults)


def further_words(text):
    """The words of --args. Raises ValueError for what train.py does not know, and for what the stages give it."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"--args {text!r}: {error}") from error
    runner.check_arguments(words, "--args")
    for name in explicit_options(train_parser(), words):
        if name in GIVEN:
            raise ValueError(f"--args: --{name.replace('_', '-')} is what the stages give their runs themselves")
    return tuple(words)


def perform(options):
    """Do what the command line asks; returns the exit status."""
    out = Path(options.out)
    approvals = Approvals(options.approvals, out)
    if options.command == "status":
        for number, stage in STAGES.items():
            print(f"{number}  {stage.title:<22}  {approvals.in_words(number)}")
        return 0
    number = options.stage
    if options.command == "approve":
        approvals.approve(number, options.by, runner.current_commit(), options.note, options.despite_failures)
        print(f"stage {number}: {approvals.in_words(number)}")
        return 0
    setup = Setup(
        approvals.folder(number), options.data, options.cfg, options.hyp, options.img, options.batch_size,
        options.workers, options.device, options.subset, options.repeats, options.epochs, options.all_combinations,
        options.at_once, further_words(options.args),
    )  # fmt: skip
    passed = run_stage(number, setup, approvals)
    print(f"stage {number}: {approvals.in_words(number)}\nreport: {approvals.folder(number) / 'report.md'}")
    return 0 if passed else 1


def main():
    logging.basicConfig(stream=sys.stdout, level=logging.ERROR, format="    %(message)s")
    runner.exit_on_sigterm()
    try:
        sys.exit(perform(parse()))
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    main()
