"""Devices of trainings that run at the same time, and lines on the terminal that show their progress.

`--devices 0,1` of a tool is a list of what train.py takes as --device; a device that stands there twice runs two
trainings at a time.
"""

import logging
import re
import sys

from tqdm import tqdm

from tools.experiments import command_line, runner
from utils.config.options import train_parser
from utils.system.cores import usable_cores
from utils.system.files import shown

logger = logging.getLogger(__name__)
COUNT = "import torch; print(torch.cuda.device_count())"


def read_devices(text, words, where):
    """The list of devices in `text`, the value of --devices; [None], the device that `words` name, when it is empty.

    `words` of train.py came from the option `where`. Raises ValueError for what is no device or is not there, and for
    a second --device. Warns when the workers of all trainings outnumber the cores.
    """
    if not text:
        return [None]
    if "device" in command_line.typed_names(words):
        raise ValueError(f"{where}: --device cannot be given together with --devices; drop one of them")
    devices = [word.strip().lower() for word in text.split(",")]
    for device in devices:
        if device != "cpu" and not re.fullmatch(r"[0-9]+", device):
            raise ValueError(f"--devices {shown(text)}: {shown(device)} is no device; give a list such as 0,1 or "
                             "cpu,cpu, which runs one training on each")  # fmt: skip
    if cards := sorted(set(devices) - {"cpu"}, key=int):  # as train.py sees them: numbers of all cards of this machine
        answer = runner.call_python("-c", COUNT, environment={"CUDA_VISIBLE_DEVICES": ",".join(cards)}).stdout.split()
        if answer != [str(len(cards))]:
            raise ValueError(f"--devices {text} names {len(cards)} GPUs, but {' '.join(answer) or 'none'} of them can "
                             "be seen")  # fmt: skip
    warn_about_cores(len(devices), train_parser().parse_args(list(words)).workers, where)
    return devices


def warn_about_cores(num_runs, workers, where):
    """Warn when `num_runs` trainings with `workers` each have more workers than there are cores."""
    if num_runs > 1 and num_runs * workers > (cores := usable_cores()):
        logger.warning("%d trainings at a time with --workers %d each need %d cores, this machine has %d: give fewer "
                       "--workers in %s", num_runs, workers, num_runs * workers, cores, where)  # fmt: skip


def on_device(words, device):
    """The command line `words` of train.py, on `device`; None leaves it as it is."""
    return list(words) if device is None else [*words, "--device", device]


class ProgressLines:
    """A line on the terminal for each training that runs; without a terminal nothing is printed.

    Log messages go above the lines inside of tqdm's logging_redirect_tqdm(). The bars are blank: they make tqdm cut a
    line that is longer than the terminal is wide.
    """

    def __init__(self, num_places, file=None):
        self.lines = [
            tqdm(position=k, bar_format="{desc}{bar}", leave=False, dynamic_ncols=True, disable=None,
                 file=file or sys.stderr) for k in range(num_places)
        ]  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for line in reversed(self.lines):
            line.close()

    def show(self, place, text=""):
        """Replace the line of a place; without `text` it becomes empty."""
        self.lines[place].set_description_str(text)
