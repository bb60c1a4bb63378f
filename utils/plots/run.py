"""Plots of a run: its course, its curves, its confusions, its labels.

Everything draws through style.py: no display, no global state, safe in a thread. Nothing here touches a random
generator.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from utils.metrics.detection import fitness
from utils.plots.fonts import drawable
from utils.plots.images import class_name
from utils.plots.style import FAINT, INK, PALETTE, class_colour, new_figure, save_figure, set_title, whole_numbers
from utils.system.children import enter_child, forked_pool
from utils.system.cores import usable_cores
from utils.system.files import cause_of

logger = logging.getLogger(__name__)

MOST_PROCESSES = 4  # that draw: what a validation ends in takes three times as long as its confusion matrix
MANY_CLASSES = 20  # above, curves of single classes are thin grey lines without a legend
HIDDEN_CELL = 0.005  # shares below it leave a confusion cell empty

# title and column in results.txt, in reading order: 2 rows of 5
RESULT_PANELS = (
    ("box loss, train", 2),
    ("objectness loss, train", 3),
    ("class loss, train", 4),
    ("precision", 8),
    ("recall", 9),
    ("box loss, val", 12),
    ("objectness loss, val", 13),
    ("class loss, val", 14),
    ("mAP@.5", 10),
    ("mAP@.5:.95", 11),
)
NUM_RESULT_COLUMNS = 15
TEST_COLUMNS = slice(8, 15)  # precision, recall, mAP@.5, mAP@.5:.95, val box, obj, cls


# ---- drawing in the background -------------------------------------------------------------------------------------

_PENDING: list[Future] = []


def in_background(function: Callable, *args) -> Future:
    """Let another process run `function(*args)`: figures take seconds of Python, which a thread takes from the run.

    Both must be such that pickle can send them; `drawn` tells what the function returned. Errors are logged. The
    interpreter waits at exit for what is not drawn yet.
    """
    for task in [task for task in _PENDING if task.done()]:
        drawn(task)
    try:
        task = _open_pool(os.getpid()).submit(function, *args)
    except BrokenExecutor:  # a process of it was killed since the last plot
        _open_pool.cache_clear()
        task = _open_pool(os.getpid()).submit(function, *args)
    _PENDING.append(task)
    return task


def wait_for_background() -> None:
    """Return when every plot handed to `in_background` is written."""
    for task in list(_PENDING):
        drawn(task)


def end_drawing() -> None:
    """Let the processes that draw end as soon as they have nothing left to draw; the next plot begins new ones."""
    if _open_pool.cache_info().currsize:
        pool = _open_pool(os.getpid())
        _open_pool.cache_clear()
        pool.shutdown(wait=False)


def drawn(task: Future) -> Any:
    """What the function of `in_background` returned, waited for; None after an error, which is logged once."""
    try:
        return task.result()
    except Exception as error:  # a plot that fails must not end a training run
        if task in _PENDING:
            _say_what_failed(error)
        return None
    finally:
        if task in _PENDING:
            _PENDING.remove(task)


def _say_what_failed(error):
    if isinstance(error, BrokenExecutor):
        logger.warning("a plot is missing: a process that draws was killed, perhaps because memory ran out")
    elif isinstance(error, OSError):
        logger.warning("a plot is missing: %s", cause_of(error, with_file=True))
    else:
        logger.error("a plot failed; the run goes on without it", exc_info=error)


def at_once(function: Callable, *args) -> Any:
    """What else than `in_background` can run a function."""
    return function(*args)


@lru_cache(maxsize=1)
def _open_pool(owner: int) -> Executor:
    """The processes that draw for the process `owner`, ready with matplotlib.

    They live as long as `owner`, so that nothing is forked or imported when a run ends, and are forked before any
    plot is drawn: a lock of a drawing thread would stay locked in them.
    """
    return forked_pool(min(max(usable_cores() // 2, 1), MOST_PROCESSES), partial(_get_ready, owner))


def _get_ready(owner, parent):
    """A process that draws begins; `parent` as `enter_child` wants it."""
    enter_child(parent)
    if parent is None:
        threading.Thread(target=_end_after, args=(owner,), daemon=True).start()
    new_figure()  # imports matplotlib


def _end_after(owner):
    while os.getppid() == owner:
        time.sleep(1)
    os._exit(1)


def _class_label(names, index):
    """The name of a class in a plot, where a dollar would begin a formula."""
    return drawable(class_name(names, index)).replace("$", r"\$")


# ---- the course of a run -------------------------------------------------------------------------------------------


def read_results(path: str | Path) -> np.ndarray:
    """results.txt as an array [epochs x 15]: epoch number, memory in GB, then the numbers as written.

    Lines that are not 15 columns (a run that was killed in mid-line) are left out. The seven test columns of an epoch
    before the first test are NaN. Raises ValueError when the file is missing.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: name the results.txt of a run")
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split()
        if len(words) != NUM_RESULT_COLUMNS:
            continue
        try:
            rows.append([float(words[0].split("/")[0]), float(words[1].rstrip("G")), *map(float, words[2:])])
        except ValueError:
            logger.warning("%s: this line is not a row of results: %s", path, line)
    table = np.array(rows, dtype=np.float64).reshape(-1, NUM_RESULT_COLUMNS)
    table[~table[:, TEST_COLUMNS].any(axis=1), TEST_COLUMNS] = np.nan
    return table


def plot_results(save_dir: str | Path) -> Path | None:
    """Draw results.txt of the run folder `save_dir` as results.png; None if there is no finished epoch."""
    return compare_results({"": Path(save_dir) / "results.txt"}, Path(save_dir) / "results.png")


def compare_results(files: dict[str, str | Path], save_path: str | Path) -> Path | None:
    """Overlay the course of several runs: `files` maps labels to results.txt files. Returns `save_path` or None."""
    runs = {label: read_results(path) for label, path in files.items()}
    for label in [label for label, table in runs.items() if not len(table)]:
        logger.warning("%s holds no finished epoch; it is not drawn", files[label])
        del runs[label]
    if not runs:
        return None

    legend = len(files) > 1
    everything = np.nan_to_num(np.concatenate(list(runs.values())))
    panels = [panel for panel in RESULT_PANELS if everything[:, panel[1]].any()] or list(RESULT_PANELS)
    columns = -(-len(panels) // 2)
    figure, axes = new_figure(2, columns, size=(3.2 * columns, 6.4 if legend else 6), used=len(panels))
    for ax, (title, column) in zip(axes, panels, strict=True):
        for index, (label, table) in enumerate(runs.items()):
            colour = PALETTE[index % len(PALETTE)]
            marker = "o" if len(table) < 30 else None
            ax.plot(
                table[:, 0], table[:, column], color=colour, linewidth=1.6, marker=marker, markersize=3, label=label
            )
            if title.startswith("mAP"):
                _mark_best(ax, table[:, 0], table[:, column], colour)
                handles = [line for line in ax.lines if line.get_label().startswith("best")]
                ax.legend(handles=handles, loc="lower right", frameon=False, fontsize=8)
        set_title(ax, title)
        ax.set_xlabel("epoch", fontsize=8)
        whole_numbers(ax.xaxis)
    if legend:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return save_figure(figure, save_path)


def _mark_best(ax, epochs, values, colour):
    if np.isfinite(values).any():
        best = int(np.nanargmax(values))
        ring = {"marker": "o", "markersize": 8, "markerfacecolor": "none", "linestyle": "none"}
        ax.plot(epochs[best], values[best], color=colour, label=f"best {values[best]:.3f}", **ring)


# ---- the quality of a model ----------------------------------------------------------------------------------------


def plot_curves(curves, save_dir, names=None, call=at_once):
    """PR_curve.png, F1_curve.png, P_curve.png and R_curve.png of the curves that the metrics returned.

    `curves` is the metrics.Curves of a test, `names` names its class ids. Returns what `call(function, *args)` returns
    for each: as it is the files, with `in_background` tasks. No class, no file.
    """
    if not len(curves.classes):
        logger.warning("there is no class with labels and so no curve to draw in %s", save_dir)
        return []
    files = [call(_plot_precision_recall, curves, names, Path(save_dir) / "PR_curve.png")]
    for file, quantity in (("F1_curve.png", "F1"), ("P_curve.png", "precision"), ("R_curve.png", "recall")):
        values = getattr(curves, quantity.lower())
        files.append(call(_plot_by_confidence, curves, quantity, values, names, Path(save_dir) / file))
    return files


def _plot_precision_recall(curves, names, path):
    ap50 = np.asarray(curves.ap)[:, 0]
    labels = [f"{_class_label(names, index)} {ap:.3f}" for index, ap in zip(curves.classes, ap50, strict=True)]
    mean = f"all classes {np.nanmean(ap50):.3f} mAP@.5"
    lines = curves.pr_recall, curves.pr_precision, np.asarray(curves.classes)
    return _draw_curve(*lines, labels, mean, ("recall", "precision"), path)


def _plot_by_confidence(curves, quantity, values, names, path):
    mean = np.nanmean(values, axis=0)
    peak = int(np.nanargmax(mean)) if np.isfinite(mean).any() else 0
    summary = f"all classes {mean[peak]:.2f} at {curves.confidence[peak]:.3f}"
    labels = [_class_label(names, class_id) for class_id in curves.classes]
    lines = curves.confidence, values, np.asarray(curves.classes)
    return _draw_curve(*lines, labels, summary, ("confidence", quantity), path)


def _draw_curve(x, rows, class_ids, labels, summary, axis_labels, path):
    """One line per class [classes x points] and their mean, thick, on the unit square."""
    figure, (ax,) = new_figure(size=(9, 6))
    few = len(labels) <= MANY_CLASSES
    for row, class_id, label in zip(rows, class_ids, labels, strict=True):
        style = ("-", "--", ":")[class_id // len(PALETTE) % 3]
        colour = class_colour(class_id) if few else FAINT
        ax.plot(
            x, row, style if few else "-", color=colour, linewidth=1.1 if few else 0.6, label=label if few else None
        )
    ax.plot(x, np.nanmean(rows, axis=0), color="black", linewidth=2.6, label=summary)
    ax.set_xlabel(axis_labels[0])
    ax.set_ylabel(axis_labels[1])
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1.02)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return save_figure(figure, path)


def plot_confusion_matrix(matrix, names, save_dir):
    """confusion_matrix.png; matrix [(classes + 1) x (classes + 1): predicted, true; background last], in counts.

    Each column is divided by its sum, so that it says what became of the true objects of a class.
    """
    from matplotlib.colors import PowerNorm

    matrix = np.asarray(matrix, dtype=np.float64)
    size = len(matrix)
    shares = matrix / np.maximum(matrix.sum(axis=0, keepdims=True), 1e-9)
    shares[~(shares >= HIDDEN_CELL)] = np.nan
    labels = [_class_label(names, index) for index in range(size - 1)] + ["background"]

    inches = min(max(3 + 0.45 * size, 6), 16)
    figure, (ax,) = new_figure(size=(inches + 1, inches))
    ax.grid(False)
    ax.spines[["top", "right"]].set_visible(True)
    few = size <= MANY_CLASSES + 10
    edges = np.arange(size + 1) - 0.5  # cells, not an image, of which each pixel of the figure would be looked up
    image = ax.pcolormesh(edges, edges, shares, cmap="Blues", norm=PowerNorm(1 if few else 0.5, vmin=0, vmax=1))
    ax.set_aspect("equal")
    ax.invert_yaxis()
    figure.colorbar(image, ax=ax, shrink=0.8, fraction=0.05, label="share of the true objects")
    font_size = 9 if few else 7
    ax.set_xticks(range(size), labels, rotation=90, fontsize=font_size)
    ax.set_yticks(range(size), labels, fontsize=font_size)
    ax.set_xlabel("True")
    ax.set_ylabel("Predicted")
    for row, column in np.argwhere(np.isfinite(shares)) if few else ():
        share = shares[row, column]
        ax.text(column, row, f"{share:.2f}", ha="center", va="center", fontsize=min(10, 150 / size),
                color="white" if share > 0.6 else INK)  # fmt: skip
    return save_figure(figure, Path(save_dir) / "confusion_matrix.png")


# ---- the data ------------------------------------------------------------------------------------------------------


def plot_labels(labels, names, save_dir):
    """labels.jpg: objects per class, box outlines, centres and sizes; labels [n x 5: class, x, y, w, h normalised]."""
    labels = np.asarray(labels, dtype=np.float64).reshape(-1, 5)
    if not len(labels):
        logger.warning("there are no labels to draw in %s", save_dir)
        return None
    figure, axes = new_figure(2, 2, size=(10, 10))
    _draw_class_counts(axes[0], labels[:, 0].astype(int), names)
    _draw_box_outlines(axes[1], labels)
    for ax, columns, axis_labels, title in (
        (axes[2], (1, 2), ("x", "y"), "centres (share of the image)"),
        (axes[3], (3, 4), ("width", "height"), "sizes (share of the image)"),
    ):
        bins = 50 if len(labels) > 5000 else 25
        counts = ax.hist2d(*labels[:, columns].T, bins=bins, range=((0, 1), (0, 1)), cmap="viridis_r", cmin=1)[3]
        figure.colorbar(counts, ax=ax, shrink=0.8)
        ax.set_xlabel(axis_labels[0])
        ax.set_ylabel(axis_labels[1])
        ax.set_aspect("equal")
        set_title(ax, title)
    axes[2].invert_yaxis()
    return save_figure(figure, Path(save_dir) / "labels.jpg")


def _draw_class_counts(ax, class_ids, names):
    num_classes = max(len(names) if names is not None else 0, class_ids.max() + 1)
    colours = [class_colour(class_id) for class_id in range(num_classes)]
    ax.bar(range(num_classes), np.bincount(class_ids, minlength=num_classes), color=colours)
    few = num_classes <= 40
    if few:
        labels = [_class_label(names, index) for index in range(num_classes)]
        ax.set_xticks(range(num_classes), labels, rotation=90 if len("".join(labels)) > 24 else 0)
    ax.set_xlabel("" if few else "class")
    ax.grid(axis="x", visible=False)
    set_title(ax, f"{len(class_ids)} objects by class")


def _draw_box_outlines(ax, labels, most=800):
    """Up to `most` boxes, evenly picked, all moved to one centre."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    picked = labels[:: -(-len(labels) // most)]
    outlines = [Rectangle((-w / 2, -h / 2), w, h) for w, h in picked[:, 3:5]]
    colours = [class_colour(class_id) for class_id in picked[:, 0]]
    ax.add_collection(PatchCollection(outlines, facecolor="none", edgecolor=colours, linewidth=0.6, alpha=0.5))
    reach = 0.52 * max(labels[:, 3:5].max(), 1e-3)
    ax.set_xlim(-reach, reach)
    ax.set_ylim(-reach, reach)
    ax.set_aspect("equal")
    ax.grid(False)
    set_title(ax, "boxes, moved to one centre")


# ---- searches and studies ------------------------------------------------------------------------------------------


def plot_evolution(table, hyp_keys, save_dir):
    """evolve.png: every hyper-parameter in `hyp_keys` against the fitness of its generation.

    `table` has a row for each: 7 results, then the value of each hyper-parameter.
    """
    scores = fitness(table)
    best = int(np.nanargmax(scores))
    columns = 6
    rows = -(-len(hyp_keys) // columns)
    figure, axes = new_figure(rows, columns, size=(2.6 * columns, 2.3 * rows), used=len(hyp_keys))
    for ax, key, values in zip(axes, hyp_keys, table[:, 7:].T, strict=True):
        ax.scatter(values, scores, s=10, color=PALETTE[0], alpha=0.5, linewidths=0)
        ax.plot(values[best], scores[best], "+", markersize=14, markeredgewidth=2, color=PALETTE[4])
        set_title(ax, f"{key} = {values[best]:.3g}")
    figure.supylabel("fitness", fontsize=9)
    return save_figure(figure, Path(save_dir) / "evolve.png")


def plot_study(files, save_path):
    """Accuracy against image size and time, one line per file of the study task.

    Rows are 7 results, then ms for inference, NMS and both, image size twice, batch size. `files` is a list of paths.
    """
    figure, (by_size, by_time) = new_figure(1, 2, size=(12, 5))
    for index, file in enumerate(files):
        table = np.loadtxt(file, ndmin=2)
        style = {"color": PALETTE[index % len(PALETTE)], "marker": "o", "markersize": 4, "label": Path(file).stem}
        by_size.plot(table[:, 10], 100 * table[:, 3], **style)
        by_time.plot(table[:, 9], 100 * table[:, 3], **style)
    by_size.set_xlabel("image size (pixels)")
    by_time.set_xlabel("inference + NMS (ms per image)")
    by_size.set_ylabel("mAP@.5:.95 (%)")
    by_time.legend(frameon=False, fontsize=8)
    return save_figure(figure, save_path)
