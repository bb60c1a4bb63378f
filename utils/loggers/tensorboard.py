"""What the event file of a run (TensorBoard) holds beside stock's scalars: speed, pictures, settings and final scores.

The report of a run has a Board, or a NullBoard with the same methods where there is no event file or nobody asked.
"""

import time
from pathlib import Path

import numpy as np
from PIL import Image

from utils.config.data_yaml import read_yaml
from utils.loggers.monitor import Utilisation

NUM_MOSAICS = 3  # training batches shown; every one is a large PNG in the event file
LONGEST_SIDE = 1280  # pixels
SPEED_TAGS = {"gpu": "speed/gpu_utilisation", "main_cpu": "speed/main_cpu", "worker_cpu": "speed/worker_cpu"}


class Board:
    """Adds to the event file behind `writer` (a SummaryWriter).

    `world_size` is the number of processes that train, of which this one sees its share of the images.
    """

    def __init__(self, writer, save_dir, world_size=1):
        self.writer, self.save_dir, self.world_size = writer, Path(save_dir), world_size
        self.watched = Utilisation(interval=1.0)
        self.is_watching = False
        self.sources = []
        self.num_mosaics = 0

    def also(self, source):
        """`source()` gives further scalars {tag: value} after every epoch."""
        self.sources.append(source)

    def begin_epoch(self):
        """The training part of an epoch begins."""
        if not self.is_watching:
            self.watched.__enter__()
            self.is_watching = True
        self.watched.sample()
        self.watched.forget()
        self.started = self.trained = time.monotonic()
        self.num_images = 0

    def exclude(self, seconds):
        """Leave what happened in the last `seconds` out of the epoch, its use of the machine included."""
        self.started += seconds
        self.watched.sample()
        self.watched.forget()

    def batch(self, num_images):
        """A batch has been trained."""
        self.num_images += num_images
        self.trained = time.monotonic()

    def end_training(self):
        """The training part of the epoch ends here, with the last batch or later."""
        self.watched.sample()
        self.trained = time.monotonic()

    def end_epoch(self, epoch):
        """Write the scalars of the epoch."""
        seconds = self.trained - self.started
        scalars = {"speed/training_seconds": seconds, "speed/other_seconds": time.monotonic() - self.trained}
        if self.num_images and seconds > 0:
            scalars["speed/images_per_second"] = self.num_images * self.world_size / seconds
        usage = self.watched.usage(end=self.trained)
        scalars |= {tag: getattr(usage, name) for name, tag in SPEED_TAGS.items()}
        for source in self.sources:
            scalars |= source()
        for tag, value in scalars.items():
            if value is not None:
                self.writer.add_scalar(tag, value, epoch)

    def mosaic(self, picture, number):
        """Show a drawn training batch [height x width x 3, RGB, uint8], if it is one of the first."""
        if self.num_mosaics < NUM_MOSAICS:
            self.num_mosaics += 1
            self._show(f"mosaics/batch{number}", picture)

    def finish(self, scores):
        """Show the predictions that the last validation drew, and write settings and `scores` {tag: value} for HPARAMS.

        The settings are read from the opt.yaml and hyp.yaml of the run.
        """
        if self.is_watching:
            self.watched.stop()
        for path in sorted(self.save_dir.glob("test_batch*_pred.jpg")):
            with Image.open(path) as picture:
                self._show(f"predictions/{path.stem.removesuffix('_pred')}", np.asarray(picture.convert("RGB")))
        settings = run_settings(self.save_dir)
        if settings and scores:
            from torch.utils.tensorboard.summary import hparams

            metrics = {f"hparam/{tag}": value for tag, value in scores.items()}
            for summary in hparams(settings, metrics):
                self.writer.file_writer.add_summary(summary)
            for tag, value in metrics.items():
                self.writer.add_scalar(tag, value)

    def _show(self, tag, picture):
        picture = Image.fromarray(picture)
        picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        self.writer.add_image(tag, np.asarray(picture), dataformats="HWC")


class NullBoard:
    """The board of a report without an event file."""

    def also(self, source):
        pass

    def begin_epoch(self):
        pass

    def exclude(self, seconds):
        pass

    def batch(self, num_images):
        pass

    def end_training(self):
        pass

    def end_epoch(self, epoch):
        pass

    def mosaic(self, picture, number):
        pass

    def finish(self, scores):
        pass


def run_settings(save_dir):
    """Options and hyper-parameters {name: number, bool or text} from the files of a run; empty before it wrote them."""
    settings = {}
    for prefix, name in (("", "opt.yaml"), ("hyp/", "hyp.yaml")):
        path = Path(save_dir) / name
        for key, value in read_yaml(path).items() if path.is_file() else ():
            settings[prefix + str(key)] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return settings
