"""What a run tells the world: progress bars, results.txt, results.csv, TensorBoard, images.

The main process has a RunReport, every other rank a NullReport with the same methods, so that callers never ask.
"""

import csv
import io
import logging
import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from utils.loggers.clock import TrainingClock, per_second
from utils.loggers.tensorboard import NUM_MOSAICS, NullLogger, event_image, open_tensorboard, tag_form
from utils.metrics.multi_head import HeadScore
from utils.metrics.names import class_names
from utils.plots.images import plot_images
from utils.plots.run import end_drawing, in_background, plot_labels, plot_results, wait_for_background
from utils.system.distributed import Ranks
from utils.system.files import atomic_write
from utils.system.progress import progress

logger = logging.getLogger(__name__)

BAR = "{desc} |{bar}| {n_fmt}/{total_fmt} {rate_fmt} {remaining}"
TRAIN_TAGS = ("train/box_loss", "train/obj_loss", "train/cls_loss")
TEST_TAGS = ("metrics/precision", "metrics/recall", "metrics/mAP_0.5", "metrics/mAP_0.5:0.95",
             "val/box_loss", "val/obj_loss", "val/cls_loss")  # fmt: skip
HEAD_TAGS = tuple(f"head_{{}}/{name}" for name in ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95"))
NUM_PREVIEWS = 10  # training batches drawn at the start of a run
PREVIEW_IMAGES = 16


def open_report(opt: Namespace, names: Sequence[str], ranks: Ranks, heads: Sequence = ()) -> "RunReport | NullReport":
    """The report of this process: a search (--evolve) leaves no images and no event file, other ranks nothing.

    `heads` (name, class ids) of a model with several detection heads; its report has scores by head and by class.
    """
    if not ranks.is_main:
        return NullReport()
    shown = not opt.evolve
    return RunReport(
        opt.save_dir, opt.epochs, names, images=shown, tensorboard=shown, per_class=bool(heads), num_heads=len(heads),
        world_size=ranks.world_size,
    )  # fmt: skip


class RunReport:
    """The record of one training run in the folder `save_dir`.

    `num_epochs` is the last epoch number plus one, `names` the class names. Off on request: `images`,
    `tensorboard` (the event file). On request: `per_class`, results_per_class.csv and events with the AP@.5:.95 of
    every class; the scores of `num_heads` detection heads. `world_size` is the number of training processes.

    results.txt has 15 columns, one line per epoch: epoch, memory, box, obj, cls and total loss, labels of the last
    batch, image size, precision, recall, mAP@.5, mAP@.5:.95, and box, obj, cls loss on the validation set. It and the
    CSV files start anew with the first epoch, unless `resume` was called.
    """

    def __init__(self, save_dir: str | Path, num_epochs: int, names: Sequence[str], images=True,
                 tensorboard=True, per_class=False, num_heads=0, world_size=1):  # fmt: skip
        self.save_dir = Path(save_dir)
        self.num_epochs = num_epochs
        self.names = class_names(names)
        self.draws_images = images
        self.save_dir.mkdir(parents=True, exist_ok=True)
        self.results_file = self.save_dir / "results.txt"
        self.table = _CsvTable(self.save_dir / "results.csv")
        self.class_table = _CsvTable(self.save_dir / "results_per_class.csv") if per_class else None
        self.tensorboard = open_tensorboard(self.save_dir) if tensorboard else NullLogger()
        self.clock = TrainingClock(world_size)
        self.last_scores: dict[str, float] = {}
        self.is_open, self.is_finite = False, True
        self.head_scalars = dict.fromkeys((tag.format(head) for head in range(num_heads) for tag in HEAD_TAGS), 0.0)

    # ---- before the first epoch

    def resume(self, results_text: str, num_epochs: int) -> None:
        """Go on after the last line of `results_text`, the results.txt in a checkpoint; later lines are cut off."""
        lines = results_text.splitlines()
        self.num_epochs = num_epochs
        self._open_files(lines, int(lines[-1].split("/")[0]) + 1 if lines else 0)

    def labels(self, labels: Sequence[np.ndarray]) -> None:
        """Draw the training labels, a list of [n x 5: class, x, y, w, h normalised] per image; log their classes."""
        rows = np.concatenate([np.zeros((0, 5)), *labels])
        if self.draws_images:  # first: a fork waits until the threads rest that sum up a histogram
            in_background(plot_labels, rows, self.names, self.save_dir)
        self.tensorboard.labels(rows[:, 0])

    def also(self, source: Callable[[], dict[str, float]]) -> None:
        """`source()` gives further scalars {tag: value} for the event file after every epoch."""
        self.tensorboard.also(source)

    # ---- every epoch

    def epoch(self, epoch: int, batches: Iterable, num_batches: int) -> Iterable:
        """Begin epoch number `epoch`: return `batches` wrapped in a progress bar."""
        if not self.is_open:
            self._open_files([], 0)
        self.epoch_number = epoch
        self.clock.begin_epoch()
        self.batches_before, self.batches_done, self.losses_seen = epoch * num_batches, 0, 0
        self.mean_losses = torch.full((4,), math.nan)
        self.num_labels = self.image_size = 0
        self.tensorboard.begin_epoch()
        self.bar = progress(batches, total=num_batches, bar_format=BAR, desc=self._title(), unit="batch")
        return self.bar

    def exclude(self, seconds: float) -> None:
        """Leave the last `seconds` out of the epoch's time and speed."""
        self.bar.start_t += seconds
        self.clock.exclude(seconds)
        self.tensorboard.exclude()

    def batch(
        self, loss_items: torch.Tensor, images: torch.Tensor, targets: torch.Tensor, paths: Sequence[str]
    ) -> None:
        """Account for one training batch.

        loss_items as in `losses`; images [B x 3 x H x W] as trained, targets [n x 6] and paths of the batch. The first
        batches of a run are drawn.
        """
        self.num_labels, self.image_size = len(targets), images.shape[-1]
        self.losses(loss_items)
        number = self.batches_before + self.batches_done
        if self.draws_images and number < NUM_PREVIEWS:
            # copies, because the buffers of a batch may be used again before they are sent
            copies = [_first(images, PREVIEW_IMAGES), _first(targets), list(paths)]
            file = self.save_dir / f"train_batch{number}.jpg"
            preview = in_background(draw_preview, *copies, file, self.names, number < NUM_MOSAICS)
            self.tensorboard.image(f"mosaics/batch{number}", preview)
        self.batches_done += 1
        self.clock.batch(len(images))

    def losses(self, loss_items: torch.Tensor) -> None:
        """Take into the means of this epoch what is new: [4: box, obj, cls, total] of a batch, or a row for several."""
        if not len(loss_items):
            return
        for items in loss_items.detach().view(-1, 4):
            seen = self.losses_seen
            self.mean_losses = (self.mean_losses.to(items) * seen + items) / (seen + 1) if seen else items
            self.losses_seen += 1
        self.bar.set_description_str(self._losses_text(), refresh=False)

    def end_training(self, late_items: torch.Tensor) -> None:
        """The last batch is done, and with its `late_items`, as in `losses`, the device as well: log the epoch."""
        self.losses(late_items)
        self.tensorboard.end_training()  # looks at the machine once more, within the time that counts
        self.clock.end_training()
        memory = f", {_reserved_memory():.3g} GB" if torch.cuda.is_available() else ""
        logger.info("%s, %d px%s, %s", self._losses_text(), self.image_size, memory, per_second(self.clock.rate))

    def heads_done(self, heads: Sequence[HeadScore]) -> None:
        """Take in the HeadScore of every head, if there are several; `epoch_done` records the last ones."""
        for head, score in enumerate(heads):
            values = (score.precision, score.recall, score.map50, score.map)
            self.head_scalars |= {tag.format(head): value for tag, value in zip(HEAD_TAGS, values, strict=True)}

    def epoch_done(
        self, results: Sequence[float], learning_rates: Sequence[float], class_ap: np.ndarray | None = None
    ) -> None:
        """Record the epoch: one line in every file.

        results (7: precision, recall, mAP@.5, mAP@.5:.95, val box, obj, cls loss) of this or the last tested epoch,
        zeros before; the learning rate of every parameter group; class_ap [classes] or None if not tested.
        """
        results = [float(value) for value in results]
        with self.results_file.open("a") as file:
            file.write(self._columns() + "".join(f"{value:10.4g}" for value in results) + "\n")

        *losses, total = self.mean_losses.tolist()
        if not math.isfinite(total) and self.is_finite:
            logger.warning(
                "epoch %d: the loss is %g, so the weights are lost; start again from an earlier checkpoint with a "
                "smaller lr0", self.epoch_number, total,
            )  # fmt: skip
            self.is_finite = False
        scalars = dict(zip(TRAIN_TAGS, losses, strict=True)) | dict(zip(TEST_TAGS, results, strict=True))
        scalars |= {f"x/lr{group}": rate for group, rate in enumerate(learning_rates)} | self.head_scalars
        others = {"train/total_loss": total, "labels": self.num_labels, "image_size": self.image_size}
        others |= {"memory_gb": _reserved_memory(), "seconds": time.monotonic() - self.clock.started}
        self.table.add({"epoch": self.epoch_number, **scalars, **others})
        self.last_scores = dict(zip(TEST_TAGS, results, strict=True))
        if self.class_table and class_ap is not None:
            columns = class_names(self.names, taken=("epoch",))
            self.class_table.add({"epoch": self.epoch_number, **dict(zip(columns, class_ap, strict=True))})
            tags = class_names(self.names, form=tag_form)
            scalars |= {f"class_mAP_0.5:0.95/{tag}": ap for tag, ap in zip(tags, class_ap, strict=True)}
        self.tensorboard.end_epoch(self.epoch_number, scalars, self.clock)

    def results_text(self) -> str:
        """The content of results.txt, for the checkpoint."""
        return self.results_file.read_text()

    # ---- after the last epoch

    def last_plots(self) -> None:
        """Let be drawn what shows the whole run; `finish` waits for it."""
        if self.draws_images:
            in_background(plot_results, self.save_dir)

    def finish(self) -> None:
        """Return when all plots are written and the event file is closed."""
        wait_for_background()
        self.tensorboard.predictions()  # which the last validation drew
        end_drawing()  # a process of a large one takes time to end
        self.tensorboard.finish(self.last_scores)

    # ---- details

    def _title(self):
        return f"train {self.epoch_number}/{self.num_epochs - 1}:"

    def _losses_text(self):
        """The epoch and the means so far; reading them waits for the device."""
        return "{} box {:.3g} obj {:.3g} cls {:.3g}".format(self._title(), *self.mean_losses[:3].tolist())

    def _columns(self):
        """The first eight columns of results.txt."""
        words = f"{self.epoch_number}/{self.num_epochs - 1}", f"{_reserved_memory():.3g}G"
        numbers = (*self.mean_losses.tolist(), self.num_labels, self.image_size)
        return "".join([f"{word:>10}" for word in words] + [f"{number:10.4g}" for number in numbers])

    def _open_files(self, lines, num_kept_epochs):
        if not lines and self.results_file.is_file() and self.results_file.stat().st_size:
            logger.warning("%s of an earlier run is replaced", self.results_file)
        with atomic_write(self.results_file, "w") as file:
            file.writelines(line + "\n" for line in lines)
        for table in filter(None, (self.table, self.class_table)):
            table.keep(num_kept_epochs)
        self.is_open = True


class NullReport(NullLogger):
    """The report of a rank that reports nothing. Its other methods do nothing."""

    def epoch(self, epoch: int, batches: Iterable, num_batches: int) -> Iterable:
        return batches

    def results_text(self) -> str:
        return ""


class _CsvTable:
    """A CSV file that grows by one row at a time; its first row decides the columns."""

    def __init__(self, path):
        self.path = path
        self.columns = None

    def keep(self, num_epochs):
        """Keep only the rows of epochs below `num_epochs`, and nothing that a killed run or a power cut left behind."""
        rows = []
        if num_epochs and self.path.is_file():
            text = self.path.read_text(encoding="utf-8", errors="replace").replace("\0", "")
            titles, *rows = csv.reader(io.StringIO(text)) if text else [[]]
            self.columns = titles if titles[:1] == ["epoch"] else None
        rows = [row for row in rows if len(row) == len(self.columns or ()) and _is_below(num_epochs, row[0])]
        with atomic_write(self.path, "w", newline="") as file:
            csv.writer(file).writerows([self.columns, *rows] if self.columns else [])

    def add(self, row):
        """Append the values of the dict `row`, whose first key is the epoch."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if self.columns is None:
                self.columns = list(row)
                writer.writerow(self.columns)
            writer.writerow([f"{row[column]:.6g}" if column in row else "" for column in self.columns])


def _is_below(num_epochs, text):
    return text.isascii() and text.isdecimal() and int(text) < num_epochs


def _reserved_memory():
    """Device memory that PyTorch holds, in GB; 0 without a CUDA device."""
    return torch.cuda.memory_reserved() / 1e9 if torch.cuda.is_available() else 0


def draw_preview(images, targets, paths, file, names, is_shown):
    """Draw a training batch as `plot_images` does; returns the image for the event file if it `is_shown` there."""
    grid = plot_images(images, targets, paths, file, names)
    return event_image(grid) if is_shown else None


def _first(tensor, count=None):
    return tensor[:count].detach().cpu().numpy().copy()
