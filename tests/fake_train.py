"""Stands in for train.py where only the process matters: writes results.csv row by row, in milliseconds.

The mAP@.5 of epoch e is lr0 x (e + 1), with lr0 from --hyp. --batch-size 0 fails as train.py does; --workers is how
many children it starts that never end; FAKE_SECONDS is the time of an epoch.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

COLUMNS = "epoch,metrics/mAP_0.5,train/total_loss,seconds,memory_gb"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--project", default="")
    parser.add_argument("--name", default="")
    parser.add_argument("--hyp", default="")
    parser.add_argument("--resume", default="")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    options, _ = parser.parse_known_args()
    print("Device: fake")
    if options.batch_size == 0:
        sys.exit("error: --batch-size 0 is too small: it has to be at least 1")
    for _ in range(options.workers):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if options.resume:
        folder = Path(options.resume).parent.parent
        options = argparse.Namespace(**yaml.safe_load((folder / "opt.yaml").read_text()))
    else:
        folder = Path(options.project, options.name)
        (folder / "weights").mkdir(parents=True, exist_ok=True)
        (folder / "opt.yaml").write_text(yaml.safe_dump(vars(options)))
        (folder / "results.csv").write_text(COLUMNS + "\n")
    rate = yaml.safe_load(Path(options.hyp).read_text())["lr0"]
    for epoch in range(len((folder / "results.csv").read_text().splitlines()) - 1, options.epochs):
        time.sleep(float(os.environ.get("FAKE_SECONDS", 0.01)))
        with (folder / "results.csv").open("a") as file:
            file.write(f"{epoch},{rate * (epoch + 1)},{1 / (epoch + 1)},0.5,{epoch}\n")
        (folder / "weights" / "last.pt").write_text(str(epoch))


if __name__ == "__main__":
    main()
