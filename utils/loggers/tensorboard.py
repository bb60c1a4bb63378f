"""The event file of a run, for TensorBoard: stock's scalars, speed, images, settings and final scores."""

import logging
import re
import time
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from utils.config.data_yaml import read_yaml
from utils.loggers.monitor import ResourceMonitor
from utils.plots.run import drawn, in_background

logger = logging.getLogger(__name__)

NUM_MOSAICS = 3  # training batches shown
LONGEST_SIDE, QUALITY = 1280, 85  # of images in the event file: pixels, as JPEG
SPEED_TAGS = {"gpu": "speed/gpu_utilisation", "main_cpu": "speed/main_cpu", "worker_cpu": "speed/worker_cpu"}


class NullLogger:
    """Takes the place of a logger that is not wanted: every method accepts anything and does nothing."""

    def __getattr__(self, name):
        return lambda *arguments, **options: None


def open_tensorboard(save_dir):
    """The TensorBoardLogger of a run folder; a NullLogger, with a warning, where TensorBoard does not work."""
    try:
        from torch.utils.tensorboard import SummaryWriter

        return TensorBoardLogger(SummaryWriter(str(save_dir)), save_dir)
    except ImportError:
        logger.warning("tensorboard is not installed: no event file is written (pip install tensorboard)")
    except Exception as error:  # an installation that does not fit its other packages fails in any way
        logger.warning("tensorboard cannot be used (%s): no event file is written", error)
    return NullLogger()


class TensorBoardLogger:
    """Writes with `writer` (a SummaryWriter) what a run in the folder `save_dir` tells."""

    def __init__(self, writer, save_dir):
        self.writer, self.save_dir = writer, Path(save_dir)
        self.monitor = ResourceMonitor(interval=1.0)
        self.sources = []
        self.images = []  # (tag, task) that wait to be drawn

    def labels(self, class_ids):
        """Show how often each class occurs in the training labels, `class_ids` [n]."""
        if len(class_ids):
            self.writer.add_histogram("classes", class_ids, 0)

    def also(self, source):
        """`source()` gives further scalars {tag: value} after every epoch."""
        self.sources.append(source)

    def begin_epoch(self):
        """The training part of an epoch begins."""
        self.monitor.start()
        self.monitor.restart()

    def exclude(self):
        """Leave the use of the machine so far out of the epoch."""
        self.monitor.restart()

    def end_training(self):
        """The training part of the epoch ends here."""
        self.monitor.sample()

    def end_epoch(self, epoch, scalars, clock):
        """Write the `scalars` {tag: value} of the epoch, its speed by a TrainingClock, and what other sources give."""
        others = time.monotonic() - clock.trained
        scalars = scalars | {"speed/training_seconds": clock.seconds, "speed/other_seconds": others}
        if clock.rate:
            scalars["speed/images_per_second"] = clock.rate
        usage = self.monitor.usage(end=clock.trained)
        scalars |= {tag: getattr(usage, name) for name, tag in SPEED_TAGS.items()}
        for source in self.sources:
            scalars |= source()
        self._write([{"tag": tag, "simple_value": value} for tag, value in scalars.items() if value is not None], epoch)
        self._write_images([entry for entry in self.images if entry[1].done()])

    def image(self, tag, task):
        """Show what the `task` of a drawing process returns: an `event_image`, or None."""
        self.images.append((tag, task))

    def predictions(self):
        """Show the predictions that the last validation drew."""
        for path in sorted(self.save_dir.glob("test_batch*_pred.jpg")):
            self.image(f"predictions/{path.stem.removesuffix('_pred')}", in_background(event_image_of_file, path))

    def finish(self, scores):
        """Write the images that are not written yet, `scores` {tag: value} for HPARAMS, and close the file.

        The settings beside the scores are read from the opt.yaml and hyp.yaml of the run.
        """
        self.monitor.stop()
        self._write_images(list(self.images))
        settings = run_settings(self.save_dir)
        if settings and scores:
            from torch.utils.tensorboard.summary import hparams

            metrics = {f"hparam/{tag}": value for tag, value in scores.items()}
            for summary in hparams(settings, metrics):
                self.writer.file_writer.add_summary(summary)
            for tag, value in metrics.items():
                self.writer.add_scalar(tag, value)
        self.writer.close()

    def _write_images(self, entries):
        for tag, task in entries:
            self.images.remove((tag, task))
            if fields := drawn(task):
                self._write([{"tag": tag, "image": {"colorspace": 3, **fields}}])

    def _write(self, values, epoch=None):
        """Write the `values`, fields of a Summary.Value, as one event; each one takes its time."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self.writer.file_writer.add_summary(Summary(value=values), epoch)


def event_image(array):
    """An image [height x width x 3, RGB, uint8] as a drawing process packs it for the event file: fields of a Summary.

    As few bytes as such an image needs: TensorBoard sums them up in Python, whose one lock the training waits for.
    """
    image, content = Image.fromarray(array), BytesIO()
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    image.save(content, format="JPEG", quality=QUALITY)
    return {"width": image.width, "height": image.height, "encoded_image_string": content.getvalue()}


def event_image_of_file(path):
    """`event_image` of a file; None if it cannot be read: one of an earlier run may be damaged."""
    with suppress(OSError), Image.open(path) as image:
        return event_image(np.asarray(image.convert("RGB")))
    return None


def tag_form(name):
    """What becomes of a name in a tag: some versions of PyTorch write other characters as _ ."""
    return re.sub(r"[^-/\w.]", "_", name).strip("/")


def run_settings(save_dir):
    """Options and hyper-parameters {name: number, bool or text} from the files of a run; empty before it wrote them."""
    settings = {}
    for prefix, name in (("", "opt.yaml"), ("hyp/", "hyp.yaml")):
        path = Path(save_dir) / name
        for key, value in read_yaml(path).items() if path.is_file() else ():
            settings[prefix + str(key)] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return settings
