"""What a run reads, and what it says when its data and its options or weights do not agree."""

from multiprocessing import active_children
from threading import current_thread
from types import SimpleNamespace

import pytest
import yaml

import train
from tests import small_run
from utils.config import resize_schedule
from utils.loggers import results
from utils.run.loaders import Loaders


def data_with(folder, line=None, **changes):
    """The small data set with changes of its data yaml, and with `line` as every label file of the training images."""
    small_run.arguments(folder)
    content = yaml.safe_load((folder / "data.yaml").read_text()) | changes
    (folder / "data.yaml").write_text(yaml.safe_dump(content))
    for file in (folder / "labels").rglob("*.txt") if line is not None else ():
        file.write_text(line)
    return folder


@pytest.mark.parametrize(
    ("shape", "points"), [([2, 2], ".1 .2 .3 .4"), ([2, 3], ".1 .2 0 .3 .4 1"), ([1, 3], ".2 .3 2")]
)
def test_poses_are_trained_as_boxes(shape, points, tmp_path, caplog, monkeypatch):
    seen = []
    prepare = train.prepare_model
    monkeypatch.setattr(train, "prepare_model", lambda *args: seen.extend(args[2]) or prepare(*args))
    small_run.run(data_with(tmp_path, f"0 .5 .5 .25 .5 {points}", kpt_shape=shape), "--epochs", "1")
    assert seen and all(rows.tolist() == [[0, 0.5, 0.5, 0.25, 0.5]] for rows in seen)
    for split in ("train", "val"):
        assert any(text.startswith(f"{split}: ") and "keypoints ignored" in text for text in caplog.messages)


def test_a_small_validation_set_is_read_as_the_training_set(tmp_path, monkeypatch):
    """Its visibility is never 2, so that its few rows alone would be polygons."""
    row, seen = "0 .5 .5 .25 .5 .1 .2 0 .3 .4 {}", []
    monkeypatch.setattr("utils.run.loaders.check_labels", lambda dataset, *_: seen.append(dataset))
    for split, visibility in (("train", 2), ("val", 1)):
        for file in (data_with(tmp_path) / "labels" / split).iterdir():
            file.write_text(row.format(visibility))
    small_run.run(tmp_path, "--epochs", "1")
    assert len(seen) == 2 and not any(len(polygons) for dataset in seen for polygons in dataset.segments)
    assert all(rows.tolist() == [[0, 0.5, 0.5, 0.25, 0.5]] for dataset in seen for rows in dataset.labels)


@pytest.mark.parametrize("flags", [(), ("--strict-data",)])
def test_weights_of_classes_in_another_order(flags, tmp_path, caplog):
    weights = small_run.run(data_with(tmp_path, names=["car", "bus"]), "--epochs", "1") / "weights" / "last.pt"
    data_with(tmp_path, names=["bus", "car"])
    caplog.clear()
    said = f"{weights}: class 0 is called 'car' by the model but 'bus' by the data yaml, which calls class 1 so"
    if flags:
        with pytest.raises(ValueError, match=f"--strict-data: {said}"):
            small_run.run(tmp_path, "--epochs", "1", "--weights", str(weights), *flags)
    else:
        small_run.run(tmp_path, "--epochs", "1", "--weights", str(weights))
        assert sum(said in text for text in caplog.messages) == 1


def test_overfit_says_that_its_images_have_no_boxes(tmp_path):
    data_with(tmp_path, "")
    last = sorted((tmp_path / "labels").rglob("*.txt"))[-1]
    for file in (tmp_path / "labels").rglob(last.name):
        file.write_text("0 .5 .5 .25 .5")
    with pytest.raises(ValueError, match=r"--overfit: the first 1 images, sorted by name, have no boxes, but 1 later"):
        small_run.run(tmp_path, "--overfit", "--subset-size", "1")


@pytest.mark.parametrize("flags", [(), ("--fast",), ("--fast", "--notest")])
def test_workers_have_ended_before_the_figures_are_waited_for(flags, tmp_path, monkeypatch):
    alive = []
    wait = results.wait_for_background
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(results, "wait_for_background", lambda: alive.append(active_children()) or wait())
    small_run.run(tmp_path, "--epochs", "1", "--workers", "2", *flags)
    workers = [process.name for process in alive[0] if process.name.startswith("loader-")]
    assert len(alive) == 1 and not workers


def test_what_closes_the_loaders_uses_the_device_of_the_run(monkeypatch):
    """A thread begins with the first GPU, where it would take memory from another process."""
    seen = []
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: seen.append((device, current_thread().name)))
    dataset = SimpleNamespace(image_store=None, memory_cache=None)
    loader = SimpleNamespace(end=lambda: seen.append("ended"), dataset=dataset)
    Loaders(loader, None, 64, None, resize_schedule.parse("0:64"), None).close().join()
    assert seen == [(3, "closing the loaders"), "ended"]
