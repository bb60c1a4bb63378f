"""Does everything work on this machine? A handful of tiny runs, a line for each: PASS, FAIL or SKIP.

    python tools/smoke.py [--device 0] [--size 96] [--out runs/smoke]

draws 100 images, trains yolov7-tiny for two epochs, scores the weights with test.py, kills the same run after its first
epoch and resumes it, memorises ten images, and trains with and without mixed precision where there is a GPU. The output
of every run is in OUT/<run>/output.log. Status 1 when a step fails.
"""

import argparse
import logging
import math
import shutil
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.approval.setup import Failed, NotMeasured, draw_shapes, expect, make_check
from tools.experiments import command_line, runner
from tools.experiments.runner import LOSS, MAP50
from tools.make_shapes import STAMP
from utils.config.limits import SIDE
from utils.engine.checkpoint_reader import read_checkpoint
from utils.run import entry
from utils.system.files import PROJECT_ROOT

NUM_TRAIN, NUM_VAL = 80, 20
LIMIT = 1800  # seconds for a run
OVERFIT_MAP = 0.9  # mAP@.5 on ten memorised images
OWN_NAMES = {"shapes", "shapes.yaml", "train", "test", "resume", "overfit", "amp_fp16", "amp_off"}  # in --out
VERDICTS = {"passed": "PASS", "failed": "FAIL", "not measured": "SKIP"}


class Smoke:
    """The steps; each returns a few words about what it found."""

    def __init__(self, out, size, device):
        self.out, self.size, self.device = Path(out).resolve(), size, device
        self.data = self.out / "shapes.yaml"

    def train(self, name, epochs, *flags, on_epoch=None):
        """Train into OUT/name; the FinishedRun."""
        words = ["--data", self.data, "--cfg", "cfg/training/yolov7-tiny.yaml", "--hyp", "data/hyp.shapes.yaml",
                 "--img", self.size, "--batch-size", 16, "--workers", 0, "--adam", "--device", self.device,
                 "--epochs", epochs, *flags]  # fmt: skip
        return runner.run_training(words, self.out / name, on_epoch, LIMIT)

    def rows(self, run, num_epochs):
        """results.csv of a run, after a look at it and at the weights."""
        expect(run.completed, f"{run.message[-200:]} ({run.folder / runner.LOG})")
        expect([row["epoch"] for row in run.rows] == list(range(num_epochs)), f"results.csv has {len(run.rows)} epochs")
        expect(all(math.isfinite(row[LOSS]) for row in run.rows), "a training loss is not a number")
        for weights in ("last.pt", "best.pt"):
            read_checkpoint(run.folder / "weights" / weights)
        return run.rows

    def images(self):
        draw_shapes(self.data.with_suffix(""), NUM_TRAIN, NUM_VAL, self.size)
        return f"{NUM_TRAIN} to train on and {NUM_VAL} to validate with"

    def two_epochs(self):
        losses = [row[LOSS] for row in self.rows(self.train("train", 2), 2)]
        return f"loss {losses[0]:.3f}, then {losses[1]:.3f}"

    def test(self):
        answer = runner.call_python(
            "test.py", "--weights", self.out / "train" / "weights" / "best.pt", "--data", self.data, "--img", self.size,
            "--batch-size", 16, "--device", self.device, "--project", self.out, "--name", "test", timeout=LIMIT,
        )  # fmt: skip
        expect(answer.returncode == 0, runner.last_words(answer.stdout + answer.stderr, answer.returncode))
        return "test.py reads best.pt"

    def resume(self):
        """The same run again, killed as soon as its first epoch is saved."""
        last = self.out / "resume" / "weights" / "last.pt"

        def when_saved(rows):
            deadline = time.monotonic() + LIMIT
            while not last.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            return "its first epoch is saved"

        ended = self.train("resume", 2, on_epoch=when_saved)
        expect(last.exists(), f"the run ended before its first checkpoint: {ended.message}")
        epoch = read_checkpoint(last).epoch
        self.rows(runner.run_training(runner.resume_arguments(ended.folder), ended.folder, None, LIMIT), 2)
        texts = [(self.out / name / "results.txt").read_text() for name in ("train", "resume")]
        if self.device == "cpu" and texts[0] != texts[1]:
            raise Failed("results.txt differs from that of the run that was left alone")
        return f"killed after epoch {epoch}" + (", results.txt is the same" if texts[0] == texts[1] else "")

    def overfit(self):
        rows = self.rows(self.train("overfit", 110, "--overfit", "--eval-interval", 10), 110)
        best = max(row[MAP50] for row in rows)
        expect(best >= OVERFIT_MAP, f"mAP@.5 on ten memorised images is {best:.3f}, less than {OVERFIT_MAP}")
        return f"mAP@.5 {best:.3f} on ten images"

    def amp(self, kind):
        if self.device == "cpu" and kind != "off":
            raise NotMeasured("needs a GPU")
        return f"loss {self.rows(self.train(f'amp_{kind}', 1, '--amp', kind), 1)[0][LOSS]:.3f}"


def clear(out):
    """Make the folder `out`, own it, and empty it; ValueError when it is no folder of an earlier smoke test.

    Hidden files (.lock, .gitkeep, .DS_Store) stay. What tells that it is such a folder goes last.
    """
    kept = [place for place in (Path.cwd(), PROJECT_ROOT, Path.home()) if place.resolve().is_relative_to(out)]
    if kept:
        raise ValueError(f"--out {out} holds {kept[0]}, and would be emptied; choose another --out")
    names = {path.name for path in out.iterdir() if not path.name.startswith(".")} if out.is_dir() else set()
    if names and not (names <= OWN_NAMES and ("shapes.yaml" in names or (out / "shapes" / STAMP).is_file())):
        raise ValueError(
            f"--out {out} is no folder of an earlier smoke test, and would be emptied; choose another --out"
        )
    command_line.open_folder(out, "--out")
    for path in sorted(map(out.joinpath, names), key=lambda path: (path.name.startswith("shapes"), path)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def main():
    """Make every step; status 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    parser.add_argument("--device", default="0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=96, help="pixels")
    parser.add_argument("--out", default="runs/smoke", help="folder for everything; what was in it goes")
    opt = parser.parse_args()
    SIDE.check("--size", opt.size)
    smoke = Smoke(opt.out, opt.size, opt.device)
    clear(smoke.out)
    steps = {
        "draw 100 images": smoke.images,
        "train 2 epochs": smoke.two_epochs,
        "test": smoke.test,
        "kill and resume": smoke.resume,
        "overfit 10 images": smoke.overfit,
        "mixed precision on": lambda: smoke.amp("fp16"),
        "mixed precision off": lambda: smoke.amp("off"),
    }
    statuses = []
    for name, step in steps.items():
        found = make_check(name, step)
        print(f"{VERDICTS[found.status]}  {name:<20}{found.seconds:6.1f} s  {found.detail}", flush=True)
        statuses.append(found.status)
    return int("failed" in statuses)


if __name__ == "__main__":
    command_line.run_tool(lambda _: main(), None, logging.WARNING)
