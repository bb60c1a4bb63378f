"""The last lines of a training: what it achieved and where that lies, and the command that scores it."""

import logging
import shlex
from argparse import Namespace
from pathlib import Path

import numpy as np

from utils.loggers.clock import TrainingClock, per_second
from utils.metrics.detection import fitness
from utils.plots.run import read_results
from utils.system.files import duration

logger = logging.getLogger("train")

LONGEST_LINE, LONGEST_COMMAND = 100, 79  # columns; what is longer goes on in the next line
COLUMNS = slice(8, 12)  # of results.txt: P, R, mAP@.5, mAP@.5:.95


def log_result(opt: Namespace, progress, clock: TrainingClock, seconds: float, weights: list[Path]) -> None:
    """Log the best epoch of a run that has ended, its time and rate, and how to score its `weights` [last, best].

    Epochs count from 0, as in results.txt. `seconds` are those since this start, with validation and files; the rate is
    that of training alone.
    """
    rows = read_results(Path(opt.save_dir) / "results.txt")
    if not len(rows):
        return
    scores = fitness(np.nan_to_num(rows[:, COLUMNS]))
    places = np.flatnonzero(rows[:, 0] == progress.best_epoch)  # -1 where the checkpoint did not say
    best = rows[places[-1] if len(places) else int(scores.argmax())]
    since = f" since epoch {progress.start_epoch}" if progress.start_epoch else ""
    numbers = f"{best[0]:.0f}" + (f" of 0-{rows[-1, 0]:.0f}" if rows[-1, 0] else "")
    parts = [f"best mAP@.5 {best[10]:.3f}, mAP@.5:.95 {best[11]:.3f} at epoch {numbers}", f"{duration(seconds)}{since}"]
    parts += [per_second(clock.total_rate)] if progress.trained else []
    line = f"{', '.join(parts)} -> {opt.save_dir}"
    logger.info("%s", line if len(line) <= LONGEST_LINE else line.replace(" -> ", "\n    -> ", 1))
    if weights:
        logger.info("%s", test_command(opt, weights[-1]))


def test_command(opt: Namespace, weights: Path) -> str:
    """The command line that scores `weights` on the validation images of a training with the options `opt`."""
    words = ["python", "test.py", "--weights", str(weights), "--data", str(opt.data), "--img", str(opt.img_size[-1])]
    words += ["--single-cls"] * opt.single_cls + ["--v5-metric"] * opt.v5_metric
    line = shlex.join(words)
    return line if len(line) <= LONGEST_COMMAND else line.replace(" --data", " \\\n    --data", 1)
