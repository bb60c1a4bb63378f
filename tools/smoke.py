"""Does everything work on this machine? A handful of tiny runs, a line for each: PASS, FAIL or SKIP.

    python tools/smoke.py [--device 0] [--size 96] [--out runs/smoke]

draws 100 images, trains yolov7-tiny for two epochs, scores the weights with test.py, kills the same run after its first
epoch and resumes it, memorises ten images, and trains with and without mixed precision where there is a GPU. The output
of every step is in OUT/*.log. Status 1 when a step fails.
"""

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.engine.checkpoint_reader import read_checkpoint  # noqa: E402  (needs the path above)
from utils.plots.run import read_results  # noqa: E402

NUM_TRAIN, NUM_VAL = 80, 20
LIMIT = 1800  # seconds for a step
OVERFIT_MAP = 0.9  # mAP@.5 on ten memorised images
MAP_COLUMN = 10  # of results.txt: mAP@.5


class Failed(Exception):
    """A step failed; the message says how."""


class Skipped(Exception):
    """A step cannot be done here; the message says why."""


class Smoke:
    """The steps; each returns a few words about what it found."""

    def __init__(self, out, size, device):
        self.out, self.size, self.device = Path(out).resolve(), size, device
        self.data = self.out / "data.yaml"

    def train(self, name, *flags):
        """The command of a training run named `name`."""
        return [sys.executable, "train.py", "--data", self.data, "--cfg", "cfg/training/yolov7-tiny.yaml",
                "--hyp", "data/hyp.shapes.yaml", "--img", self.size, "--batch-size", 16, "--workers", 0, "--adam",
                "--device", self.device, "--project", self.out, "--name", name, *flags]  # fmt: skip

    def run(self, name, command):
        """Run a command to its end, its output in <name>.log."""
        with self.started(name, command) as process:
            try:
                status = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                raise Failed(f"still running after {LIMIT} s") from None
        if status:
            last = self.log(name).read_text(errors="replace").strip().splitlines()[-1:]
            raise Failed(f"status {status}: {' '.join(last)[-200:]} ({self.log(name)})")

    def log(self, name):
        return self.out / f"{name}.log"

    def started(self, name, command):
        with self.log(name).open("ab") as file:
            return subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=file, stderr=file)

    def results(self, name, num_epochs):
        """results.txt of a run as an array, after a look at it and at the weights."""
        table = read_results(self.out / name / "results.txt")
        if table[:, 0].tolist() != list(range(num_epochs)):
            raise Failed(f"results.txt has the epochs {table[:, 0].astype(int).tolist()}")
        if not all(math.isfinite(value) for value in table[:, 2:8].ravel()):
            raise Failed("a training loss is not a number")
        for weights in ("last.pt", "best.pt"):
            read_checkpoint(self.out / name / "weights" / weights)
        return table

    def images(self):
        self.run("images", [sys.executable, "tools/make_shapes.py", "--out", self.out / "shapes", "--train", NUM_TRAIN,
                            "--val", NUM_VAL, "--size", self.size])  # fmt: skip
        self.data.write_text(f"path: {self.out / 'shapes'}\ntrain: images/train\nval: images/val\nnc: 4\n"
                             "names: [circle, square, triangle, star]\n")  # fmt: skip
        return f"{NUM_TRAIN} to train on and {NUM_VAL} to validate with"

    def two_epochs(self):
        self.run("train", self.train("train", "--epochs", 2))
        losses = self.results("train", 2)[:, 5]
        return f"loss {losses[0]:.3f}, then {losses[1]:.3f}"

    def test(self):
        weights = self.out / "train" / "weights" / "best.pt"
        self.run("test", [sys.executable, "test.py", "--weights", weights, "--data", self.data, "--img", self.size,
                          "--batch-size", 16, "--device", self.device, "--project", self.out,
                          "--name", "test"])  # fmt: skip
        return "test.py reads best.pt"

    def resume(self):
        """The same run again, killed as soon as its first epoch is saved."""
        last = self.out / "resume" / "weights" / "last.pt"
        with self.started("resume", self.train("resume", "--epochs", 2)) as process:
            deadline = time.monotonic() + LIMIT
            while process.poll() is None and not last.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        if not last.exists():
            raise Failed(f"the run ended before its first checkpoint ({self.log('resume')})")
        epoch = read_checkpoint(last).epoch
        self.run("resume", [sys.executable, "train.py", "--resume", last, "--device", self.device])
        self.results("resume", 2)
        texts = [(self.out / name / "results.txt").read_text() for name in ("train", "resume")]
        if self.device == "cpu" and texts[0] != texts[1]:
            raise Failed("results.txt differs from that of the run that was left alone")
        return f"killed after epoch {epoch}" + (", results.txt is the same" if texts[0] == texts[1] else "")

    def overfit(self):
        epochs = 110
        self.run("overfit", self.train("overfit", "--overfit", "--epochs", epochs, "--eval-interval", 10))
        best = self.results("overfit", epochs)[9:, MAP_COLUMN].max()
        if best < OVERFIT_MAP:
            raise Failed(f"mAP@.5 on ten memorised images is {best:.3f}, less than {OVERFIT_MAP}")
        return f"mAP@.5 {best:.3f} on ten images"

    def amp(self, kind):
        if self.device == "cpu" and kind != "off":
            raise Skipped("needs a GPU")
        self.run(f"amp_{kind}", self.train(f"amp_{kind}", "--epochs", 1, "--amp", kind))
        return f"loss {self.results(f'amp_{kind}', 1)[0, 5]:.3f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=96, help="pixels")
    parser.add_argument("--out", default="runs/smoke", help="folder for everything; what was in it goes")
    opt = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    smoke = Smoke(opt.out, opt.size, opt.device)
    shutil.rmtree(smoke.out, ignore_errors=True)
    smoke.out.mkdir(parents=True)
    steps = {
        "draw 100 images": smoke.images,
        "train 2 epochs": smoke.two_epochs,
        "test": smoke.test,
        "kill and resume": smoke.resume,
        "overfit 10 images": smoke.overfit,
        "mixed precision on": lambda: smoke.amp("fp16"),
        "mixed precision off": lambda: smoke.amp("off"),
    }
    num_failed = 0
    for name, step in steps.items():
        started = time.monotonic()
        try:
            verdict, words = "PASS", step()
        except Skipped as reason:
            verdict, words = "SKIP", str(reason)
        except (Failed, ValueError, OSError) as error:
            verdict, words = "FAIL", str(error)
        num_failed += verdict == "FAIL"
        print(f"{verdict}  {name:<20}{time.monotonic() - started:6.1f} s  {words}", flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
