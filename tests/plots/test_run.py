"""Plots: what is drawn where, that inputs stay as they were, and that odd inputs give a plot or a sentence."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import matplotlib.colors
import numpy as np
import pytest
import torch
from PIL import Image

from utils.metrics.detection import precision_recall_curves
from utils.plots import images as image_grid
from utils.plots import run

ROOT = Path(__file__).resolve().parents[2]
LINE = "      {0}/3        0G   0.07249  0.002652   0.02917    0.1043        28        64"
TEST = "  0.002876    0.1508  {0:.7f} 0.0001209    0.1261  0.003634   0.03906"


def write_results(path, map50=(0.1, 0.3, 0.2)):
    path.write_text("".join(LINE.format(k) + TEST.format(value) + "\n" for k, value in enumerate(map50)))
    return path


def size_of(path):
    """Width and height of an image that holds more than one colour."""
    with Image.open(path) as image:
        assert np.ptp(np.asarray(image.convert("L"))) > 100
        return image.size


# ---- image grids


def test_grid_goes_column_by_column():
    images = np.zeros((3, 3, 320, 320), np.uint8)
    for index in range(3):
        images[index, index] = 255  # red, green, blue
    grid = image_grid.plot_images(images, np.zeros((0, 6)), fname=None)
    cell = 320 + image_grid.GAP
    assert grid.shape == (2 * cell + image_grid.GAP, 2 * cell + image_grid.GAP, 3)
    centres = [(160, 160), (160 + cell, 160), (160, 160 + cell)]  # row, column of images 0, 1, 2
    assert [tuple(grid[centre]) for centre in centres] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


@pytest.mark.parametrize("kind", ["uint8 array", "float tensor"])
def test_images_and_targets_are_never_modified(kind, tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2, 3, 48, 64), dtype=np.uint8)
    targets = np.array([(0, 1, 0.5, 0.5, 0.4, 0.4, 0.9), (1, 0, 0.2, 0.2, 0.1, 0.1, 0.1)])
    if kind == "float tensor":
        images, targets = torch.tensor(images) / 255, torch.tensor(targets)
    before = [torch.as_tensor(images).clone(), torch.as_tensor(targets).clone()]
    image_grid.plot_images(images, targets, ["a/b.jpg", "c.jpg"], tmp_path / "new" / "grid.jpg")
    assert torch.equal(before[0], torch.as_tensor(images)) and torch.equal(before[1], torch.as_tensor(targets))
    assert size_of(tmp_path / "new" / "grid.jpg") == (2 * 256 + 12, 192 + 8)


def test_float_and_integer_images_look_alike():
    images = np.random.default_rng(1).integers(0, 256, (1, 3, 32, 32), dtype=np.uint8)
    grids = [image_grid.plot_images(x, np.zeros((0, 6)), fname=None) for x in (images, torch.tensor(images) / 255)]
    assert np.array_equal(*grids)


def test_box_is_drawn_at_its_corners_in_the_colour_of_its_class():
    images = np.zeros((1, 3, 320, 320), np.uint8)
    grid = image_grid.plot_images(images, np.array([(0, 2, 0.5, 0.5, 0.5, 0.25)]), fname=None)
    cell = grid[image_grid.GAP :, image_grid.GAP :]
    colour = tuple(int(run.PALETTE[2][k : k + 2], 16) for k in (1, 3, 5))
    assert tuple(cell[200, 160]) == colour  # bottom edge: y = 0.5 + 0.125
    assert tuple(cell[160, 80]) == tuple(cell[160, 240]) == colour  # left and right edge
    assert tuple(cell[160, 160]) == (0, 0, 0)


def test_uncertain_detections_are_not_drawn():
    images = np.zeros((1, 3, 320, 320), np.uint8)
    box = (0, 2, 0.5, 0.5, 0.5, 0.25)
    grids = [image_grid.plot_images(images, np.array([(*box, conf)]), fname=None) for conf in (0.25, 0.26)]
    assert grids[0].max() == 0x20 and grids[1].max() > 100  # nothing but the gaps; a box


def test_more_images_than_cells_and_larger_ones_than_a_cell():
    grid = image_grid.plot_images(torch.zeros(5, 3, 100, 800), np.zeros((0, 6)), fname=None, max_subplots=4)
    assert grid.shape == (2 * 80 + 3 * image_grid.GAP, 2 * 640 + 3 * image_grid.GAP, 3)


def test_no_image_is_an_error_that_names_the_file():
    with pytest.raises(ValueError, match="nothing.jpg: there is no image"):
        image_grid.plot_images(np.zeros((0, 3, 8, 8), np.uint8), np.zeros((0, 6)), fname="nothing.jpg")


def test_nan_boxes_and_unknown_classes_do_no_harm():
    targets = np.array([(0, 9, np.nan, 0.5, 0.5, 0.5), (0, 9, 0.5, 0.5, 3.0, 0.5), (0, 9, 0.5, 0.5, -0.1, 0.5)])
    assert image_grid.plot_images(np.zeros((1, 3, 64, 64), np.uint8), targets, fname=None, names=["one"]).max() > 100


def test_output_to_targets_by_hand():
    output = [torch.tensor([(10.0, 20, 30, 60, 0.9, 3)]), torch.zeros(0, 6), torch.tensor([(0.0, 0, 100, 200, 0.5, 1)])]
    rows = image_grid.output_to_targets(output, width=100, height=200)
    np.testing.assert_allclose(
        rows, [(0, 3, 0.2, 0.2, 0.2, 0.2, 0.9), (2, 1, 0.5, 0.5, 1, 1, 0.5)], rtol=1e-6
    )  # fmt: skip
    assert image_grid.output_to_targets([], 100, 100).shape == (0, 7)


def test_class_names_from_lists_dicts_and_nothing():
    assert [image_grid.class_name(names, 1.0) for names in (["a", "b"], {1: "b"}, {0: "a"}, ["a"], None)] == [
        "b", "b", "1", "1", "1"
    ]  # fmt: skip


# ---- results


def test_class_names_that_cannot_be_drawn_as_they_are(tmp_path, recwarn):
    names = ["é", "名", "a\nb", "$x$y", "\ud800"]
    shown = [image_grid.class_name(names, index) for index in range(5)]
    assert shown == ["é", "名", "a\\nb", "$x$y", "\\ud800"], "in text; images: see test_fonts"
    images, rows = np.zeros((1, 3, 64, 64), np.uint8), np.array([(0, index, 0.5, 0.5, 0.4, 0.4) for index in range(5)])
    image_grid.plot_images(images, rows, ["名\n.jpg"], tmp_path / "grid.jpg", names)
    plot = run.plot_labels(np.array([(index, 0.5, 0.5, 0.4, 0.4) for index in range(5)]), names, tmp_path)
    assert size_of(tmp_path / "grid.jpg") and size_of(plot)
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_read_results_by_hand(tmp_path):
    table = run.read_results(write_results(tmp_path / "results.txt"))
    assert table.shape == (3, 15)
    np.testing.assert_allclose(table[1, [0, 1, 2, 5, 6, 7, 10, 14]], [1, 0, 0.07249, 0.1043, 28, 64, 0.3, 0.03906])


def test_half_lines_untested_epochs_and_nan_are_understood(tmp_path):
    file = tmp_path / "results.txt"
    file.write_text(f"{LINE.format(0)} 0 0 0 0 0 0 0\n{LINE.format(1)} nan 0 0 0 1 nan 1\n{LINE.format(2)}  0.1")
    table = run.read_results(file)
    assert table[:, 0].tolist() == [0, 1]
    assert np.isnan(table[0, 8:]).all() and np.isnan(table[1, [8, 13]]).all() and table[1, 12] == 1
    assert run.plot_results(tmp_path) == tmp_path / "results.png"


def test_plots_of_results(tmp_path):
    write_results(tmp_path / "results.txt")
    other = write_results(tmp_path / "other.txt", map50=(0.0, 0.5))
    assert size_of(run.plot_results(tmp_path))[0] > 2000
    assert size_of(run.compare_results({"a": tmp_path / "results.txt", "b": other}, tmp_path / "ab" / "ab.png"))


def test_no_finished_epoch_is_said_and_a_missing_file_is_an_error(tmp_path, caplog):
    (tmp_path / "results.txt").write_text("")
    assert run.plot_results(tmp_path) is None
    assert "no finished epoch" in caplog.text
    with pytest.raises(ValueError, match="gone.txt does not exist"):
        run.compare_results({"a": tmp_path / "gone.txt"}, tmp_path / "ab.png")


# ---- curves, confusion, labels, searches


@pytest.mark.parametrize("num_classes", [1, 3, 30])
def test_curves_of_few_and_many_classes(num_classes, tmp_path):
    rng = np.random.default_rng(0)
    predicted, labels = rng.integers(0, num_classes, 200), np.repeat(np.arange(num_classes), 4)
    curves = precision_recall_curves(rng.random((200, 10)) > 0.5, rng.random(200), predicted, labels)
    files = run.plot_curves(curves, tmp_path, [f"class {k}" for k in range(num_classes)])
    assert [file.name for file in files] == ["PR_curve.png", "F1_curve.png", "P_curve.png", "R_curve.png"]
    assert all(size_of(file)[0] > 1000 for file in files)


def test_curves_without_classes_are_said_not_drawn(tmp_path, caplog):
    empty = precision_recall_curves(np.zeros((0, 10), bool), np.zeros(0), np.zeros(0), np.zeros(0))
    assert run.plot_curves(empty, tmp_path, ["a"]) == []
    assert "no class with labels" in caplog.text and not list(tmp_path.iterdir())


@pytest.mark.parametrize("num_classes", [1, 80])
def test_confusion_matrix(num_classes, tmp_path):
    matrix = np.eye(num_classes + 1)
    matrix[:, 0] = 0  # a class that nobody has seen
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = run.plot_confusion_matrix(matrix, [f"name {k}" for k in range(num_classes)], tmp_path)
    assert path.name == "confusion_matrix.png" and size_of(path)[0] > 800


def test_names_that_leave_no_room_for_the_matrix_are_drawn_in_whole(tmp_path):
    """As Chinese ones are without a font for them: with six characters for each."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        short, long = (run.plot_confusion_matrix(np.eye(4), [name] * 3, tmp_path) for name in ("x", "x" * 150))
        pixels = np.asarray(Image.open(long).convert("L"))
    assert pixels[:, :3].min() == pixels[-3:].min() == 255, "nothing is cut off on the left or below"
    assert min(pixels.shape) > 1500 and short.name == "confusion_matrix.png"


def test_plot_of_labels(tmp_path, caplog):
    rng = np.random.default_rng(0)
    labels = np.concatenate((rng.integers(0, 50, (1000, 1)), rng.random((1000, 4))), axis=1)
    assert size_of(run.plot_labels(labels, {0: "zero"}, tmp_path))[0] > 1000
    assert run.plot_labels([], ["a"], tmp_path) is None
    assert "no labels" in caplog.text


def test_plot_of_evolution(tmp_path):
    table = np.random.default_rng(0).random((4, 9))
    assert size_of(run.plot_evolution(table, ["lr0", "lrf"], tmp_path))


def test_plot_of_a_study(tmp_path):
    np.savetxt(tmp_path / "study_coco_tiny.txt", np.random.default_rng(0).random((3, 13)))
    assert size_of(run.plot_study([tmp_path / "study_coco_tiny.txt"], tmp_path / "study.png"))


def test_plots_touch_no_random_generator_and_no_pyplot(tmp_path):
    np.random.seed(5)
    torch.manual_seed(5)
    expected = np.random.random(), torch.rand(1).item()
    np.random.seed(5)
    torch.manual_seed(5)
    write_results(tmp_path / "results.txt")
    run.plot_results(tmp_path)
    run.plot_labels(np.full((900, 5), 0.5), ["a"], tmp_path)
    image_grid.plot_images(torch.zeros(2, 3, 32, 32), torch.zeros(0, 6), fname=None)
    assert (np.random.random(), torch.rand(1).item()) == expected
    assert "matplotlib.pyplot" not in sys.modules


# ---- the drawing processes


def write_process(path, seconds=0.0):
    time.sleep(seconds)
    path.write_text(str(os.getpid()))
    return "written"


def end_itself():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def two_processes(monkeypatch):
    run.wait_for_background()
    run._open_pool.cache_clear()
    monkeypatch.setattr(run, "usable_cores", lambda: 8)
    yield
    run.wait_for_background()
    run._open_pool.cache_clear()


def test_plots_are_drawn_by_other_processes_at_once(two_processes, tmp_path):
    files = [tmp_path / name for name in "ab"]
    tasks = [run.in_background(write_process, file, 0.3) for file in files]
    assert run.drawn(tasks[0]) == "written"
    run.wait_for_background()
    assert len({os.getpid(), *(int(file.read_text()) for file in files)}) == 3


def test_background_error_is_logged_and_the_next_plot_drawn(tmp_path, caplog):
    run.in_background(image_grid.plot_images, np.zeros((0, 3, 8, 8)), np.zeros((0, 6)), None, "nothing.jpg")
    run.in_background(lambda: "cannot be sent")
    run.in_background(write_process, tmp_path / "next")
    run.wait_for_background()
    assert (tmp_path / "next").exists()
    assert caplog.text.count("a plot failed; the run goes on") == 2
    assert "there is no image to draw" in caplog.text and "nothing.jpg" in caplog.text
    assert "Can't pickle" in caplog.text


def test_processes_end_when_nothing_is_left_to_draw(tmp_path):
    """What they were handed before is drawn, and the next plot as well."""
    first, second = (run.in_background(write_process, tmp_path / name, 0.2) for name in "ab")
    run.end_drawing()
    third = run.in_background(write_process, tmp_path / "c")
    assert [run.drawn(task) for task in (first, second, third)] == ["written"] * 3
    ended, at_work = int((tmp_path / "a").read_text()), int((tmp_path / "c").read_text())
    deadline = time.monotonic() + 20
    while Path(f"/proc/{ended}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{ended}").exists() and Path(f"/proc/{at_work}").exists()
    run.end_drawing(), run.end_drawing()


def test_killed_process_costs_its_plots_only(tmp_path, caplog):
    run.in_background(end_itself)
    run.wait_for_background()
    assert "a process that draws was killed" in caplog.text
    run.in_background(write_process, tmp_path / "next")
    run.wait_for_background()
    assert (tmp_path / "next").exists()


@pytest.mark.parametrize("call", ["draw()", "threading.Thread(target=draw).start()"])
def test_kill_while_a_figure_is_drawn_leaves_no_file(call, tmp_path):
    """Neither half a file nor a temporary one, and no process."""
    code = f"""
import os, threading, time
from utils.plots import run, style
def slow(figure):
    print(os.getpid(), flush=True)
    time.sleep(60)
style.use_fonts = slow
def draw():
    run.in_background(run.plot_confusion_matrix, [[1, 0], [0, 1]], ["a"], {str(tmp_path)!r})
{call}
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    drawing = int(process.stdout.readline())
    process.kill()
    process.wait()
    while is_alive(drawing):
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())


def is_alive(pid):
    """Whether a process works; nobody may be there to collect one that has ended."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


# ---- nothing empty, one colour for a class


def test_panels_without_anything_are_left_out(tmp_path, monkeypatch):
    """One class: its loss is 0 throughout; a run that was never validated has training losses only."""
    drawn = []
    monkeypatch.setattr(run, "save_figure", lambda figure, path: drawn.append(figure) or path)
    line = LINE.replace("0.02917", "0").format(0) + TEST.format(0.1)
    (tmp_path / "results.txt").write_text(f"{line}\n")
    run.plot_results(tmp_path)
    titles = [ax.get_title() for ax in drawn[0].axes]
    assert "class loss, train" not in titles and "class loss, val" in titles and len(titles) == 9
    (tmp_path / "results.txt").write_text(LINE.format(0) + " 0" * 7 + "\n")
    run.plot_results(tmp_path)
    assert [ax.get_title().split()[0] for ax in drawn[1].axes] == ["box", "objectness", "class"]


def test_curves_and_counts_have_the_colours_of_the_boxes(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(run, "save_figure", lambda figure, path: drawn.append(figure) or path)
    run._draw_curve(np.linspace(0, 1, 3), np.ones((2, 3)), np.array([2, 9]), ["c", "j"], "all", ("x", "y"), tmp_path)
    assert [line.get_color() for line in drawn[0].axes[0].lines[:2]] == [run.PALETTE[2], run.PALETTE[1]]
    run.plot_labels(np.array([(2, 0.5, 0.5, 0.1, 0.1)]), list("abc"), tmp_path)
    bars = drawn[1].axes[0].patches
    assert [matplotlib.colors.to_hex(bar.get_facecolor()).upper() for bar in bars] == list(run.PALETTE[:3])
