"""The staged approval: six stages, each a set of checks that write a report for a person to judge.

    python tools/approve.py status
    python tools/approve.py run 1 [--data data/coco320.yaml --img 320 \\
        --batch-size 64 --subset 512]
    python tools/approve.py approve 1 --by NAME [--note "why"]

A stage does not run before the one in front of it is approved. Without --data the stages train on a small embedded set,
in minutes on two CPU cores. approvals.json keeps who approved what, when, at which commit, and the content of the files
that the stage is about: when one of them changes, the approval no longer holds. Reports lie in runs/approval/stage_N:
report.md (what ran, passed or failed, timings, CPU and GPU use), report.json, report.png.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.approval import report
from tools.approval.setup import Setup
from tools.approval.stages import STAGES, Approvals, fingerprint, has_passed
from tools.experiments import command_line, runner
from tools.experiments.devices import read_devices
from utils.config.flags import TRAIN_FLAGS
from utils.config.limits import at_least
from utils.config.options import check_values
from utils.run import entry
from utils.system.distributed import check_device
from utils.system.files import PROJECT_ROOT, check_file

# Options of train.py that make the runs what they are.
GIVEN = {"data", "cfg", "hyp", "weights", "img_size", "batch_size", "workers", "epochs", "seed", "device",
         "subset_size", "project", "name", "exist_ok", "resume", "evolve"}  # fmt: skip


def run_stage(number, setup, approvals):
    """Make every check of a stage and write its report; returns whether the stage passed."""
    from tools.approval.checks import CHECKS

    stage = STAGES[number]
    setup.prepare()
    print(f"stage {number}: {stage.title}", flush=True)
    started, machine = time.monotonic(), runner.machine()
    for _ in setup.check_all(CHECKS[number]):  # a report after each: whatever ends this leaves what was found
        found = setup.as_dict()
        content = {
            "stage": number, "title": stage.title, "passed": has_passed(found["findings"]),
            "date": time.strftime("%Y-%m-%d %H:%M"), "seconds": time.monotonic() - started, "machine": machine,
            "arguments": setup.describe(), **found, "files": fingerprint(stage),
        }  # fmt: skip
        report.write_report(approvals.folder(number), content)
    report.plot(setup, approvals.folder(number) / "report.png")
    return content["passed"]


def parse(arguments=None):
    places = argparse.ArgumentParser(add_help=False)  # accepted before and after the command
    places.add_argument("--approvals", default=argparse.SUPPRESS, help="file of the approvals")
    places.add_argument("--out", default=argparse.SUPPRESS, help="folder of reports and runs")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help, parents=[places])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="where every stage stands", parents=[places])
    add = commands.add_parser("run", help="make the checks of a stage", parents=[places]).add_argument
    add("stage", type=int, choices=STAGES)
    add("--data", default="", help="data yaml; default: embedded shapes")
    add("--cfg", default=Setup.cfg)
    add("--hyp", default="", help="default: the tiny hyper-parameters, with OTA")
    add("--img", type=int, default=Setup.img)
    add("--batch-size", type=int, default=Setup.batch_size)
    add("--workers", type=int, default=Setup.workers)
    add("--device", default="", help="as in train.py")
    add("--subset", type=int, help="training images of the short runs (--subset-size)")
    add("--epochs", type=int, default=Setup.epochs, help="of the performance run in stage 6")
    add("--repeats", type=int, default=Setup.repeats, help="pairs of the performance run in stage 6")
    add("--all-combinations", action="store_true", help="stage 6: USE_COMPILE with every combination")
    add("--args", default="", help="further options of train.py for every run, e.g. --cache-images")
    add("--devices", default="", help="such as 0,1: stage 6 trains the combinations on all of them at the same time, "
        "and everything that is timed on the first")  # fmt: skip
    add("--at-once", type=int, default=1, choices=range(1, 17), metavar="N",
        help="stage 6: combinations of flags that train at the same time; their speed is then not told")  # fmt: skip
    add = commands.add_parser("approve", help="approve a stage that has been run", parents=[places]).add_argument
    add("stage", type=int, choices=STAGES)
    add("--by", required=True, metavar="NAME")
    add("--note", default="")
    add("--despite-failures", action="store_true", help="needs a --note that says why")
    defaults = argparse.Namespace(approvals=str(PROJECT_ROOT / "approvals.json"), out="runs/approval")
    return command_line.parse(parser, arguments, ("--args",), defaults)


def further_words(text):
    """The words of --args. Raises ValueError for what train.py does not know, and for what the stages give it."""
    words = command_line.train_words(text, "--args", {})
    for name in command_line.typed_names(words):
        if name in GIVEN:
            raise ValueError(f"--args: --{name.replace('_', '-')} is what the stages give their runs themselves")
    command_line.check_run(words, "--args", check_values)
    return tuple(words)


def check_run_options(options):
    """Raise ValueError for a number of `approve.py run` that no run could use, or a missing file or device."""
    rows = {"img": "img_size", "batch_size": "batch_size", "workers": "workers", "epochs": "epochs",
            "subset": "subset_size"}  # fmt: skip
    for name, row in rows.items():
        TRAIN_FLAGS[row].range.check(f"--{name.replace('_', '-')}", getattr(options, name))
    at_least(1).check("--batch-size", options.batch_size)  # -1 would be measured anew in each run
    at_least(1).check("--repeats", options.repeats)
    for name in ("data", "cfg", "hyp"):
        setattr(options, name, check_file(getattr(options, name)))  # the checks look for it nowhere else
    check_device(options.device)


def choose_places(options):
    """(--device of what is timed, devices of the runs that may share the machine)."""
    if not options.devices:
        return options.device, [options.device] * options.at_once
    if options.device or options.at_once > 1:
        raise ValueError("--devices says where and how many runs train at the same time; drop --device and --at-once")
    logging.getLogger("tools.experiments.devices").setLevel(logging.WARNING)  # this tool shows no other warning
    places = read_devices(options.devices, ["--workers", str(options.workers)], "--workers")
    return places[0], places


def perform(options):
    """Do what the command line asks; returns the exit status."""
    approvals = Approvals(options.approvals, options.out)
    if options.command == "status":
        for number, stage in STAGES.items():
            print(f"{number}  {stage.title:<22}  {approvals.describe(number)}")
        return 0
    number = options.stage
    if options.command == "approve":
        approvals.approve(number, options.by, runner.current_commit(), options.note, options.despite_failures)
        print(f"stage {number}: {approvals.describe(number)}")
        return 0
    check_run_options(options)
    more = further_words(options.args)
    device, places = choose_places(options)
    approvals.check_may_run(number)
    command_line.open_folder(options.out, "--out")
    given = {name: value for name, value in vars(options).items() if name in Setup.__dataclass_fields__}
    setup = Setup(**given | {"out": approvals.folder(number), "more": more, "device": device, "places": places})
    passed = run_stage(number, setup, approvals)
    print(f"stage {number}: {approvals.describe(number)}\nreport: {approvals.folder(number) / 'report.md'}")
    return 0 if passed else 1


if __name__ == "__main__":
    command_line.run_tool(perform, parse(), logging.ERROR, "    %(message)s")
