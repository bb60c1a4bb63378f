"""The event file beside stock's scalars: speed of every epoch, images, settings with their final scores."""

import time
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from utils.loggers.clock import TrainingClock
from utils.loggers.monitor import Usage
from utils.loggers.results import RunReport
from utils.loggers.tensorboard import TensorBoardLogger, event_image, run_settings

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def events_of(folder):
    events = accumulator.EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    return events


def run(folder, world_size=1, epochs=2):
    """A run of two batches an epoch, [4 x 3 x 32 x 32] each."""
    (folder / "opt.yaml").write_text("epochs: 2\nadam: true\nimg_size: [32, 32]\nname: exp\ncfg: null\n")
    (folder / "hyp.yaml").write_text("lr0: 0.01\n")
    Image.new("RGB", (3000, 1500), "red").save(folder / "test_batch0_pred.jpg")
    report = RunReport(folder, epochs, ["a", "b"], world_size=world_size)
    report.also(lambda: {"readback/waits": 7})
    for epoch in range(epochs):
        for items in report.epoch(epoch, [(0.1, 0.2, 0.3, 0.6)] * 2, 2):
            time.sleep(0.02)
            report.batch(torch.tensor(items), torch.zeros(4, 3, 32, 32), torch.zeros(0, 6), ["x.jpg"] * 4)
        report.end_training(torch.zeros(0, 4))
        report.epoch_done((0.5, 0.25, 0.125, 0.1, 1, 2, 3), (0.01, 0.01, 0.1))
    report.last_plots()
    report.finish()
    return report


def test_speed_is_that_of_the_training_part(tmp_path):
    run(tmp_path, world_size=2)
    events = events_of(tmp_path)
    rates = events.Scalars("speed/images_per_second")
    seconds = events.Scalars("speed/training_seconds")
    assert [e.step for e in rates] == [0, 1]
    for rate, second in zip(rates, seconds, strict=True):
        assert second.value > 0.04
        assert rate.value == pytest.approx(2 * 8 / second.value, rel=1e-5)  # two processes with 8 images each
    assert [e.value for e in events.Scalars("readback/waits")] == [7, 7]
    assert 0 <= events.Scalars("speed/main_cpu")[0].value < 4


def test_images_of_mosaics_and_predictions(tmp_path):
    run(tmp_path)
    events = events_of(tmp_path)
    assert set(events.Tags()["images"]) == {
        "mosaics/batch0",
        "mosaics/batch1",
        "mosaics/batch2",
        "predictions/test_batch0",
    }
    (shown,) = events.Images("predictions/test_batch0")
    assert (shown.width, shown.height) == (1280, 640)


def test_a_damaged_image_of_an_earlier_run_is_left_out(tmp_path):
    (tmp_path / "test_batch1_pred.jpg").write_bytes(b"\xff\xd8\xff")
    run(tmp_path)
    tags = events_of(tmp_path).Tags()
    assert "predictions/test_batch1" not in tags["images"] and "hparam/metrics/mAP_0.5" in tags["scalars"]


def test_settings_and_final_scores(tmp_path):
    run(tmp_path)
    events = events_of(tmp_path)
    assert [e.value for e in events.Scalars("hparam/metrics/mAP_0.5")] == [0.125]
    assert set(events.PluginTagToContent("hparams")) >= {"_hparams_/experiment", "_hparams_/session_start_info"}
    assert b"hyp/lr0" in events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    assert run_settings(tmp_path) == {
        "epochs": 2, "adam": True, "img_size": "[32, 32]", "name": "exp", "cfg": "None", "hyp/lr0": 0.01
    }  # fmt: skip


def test_settings_of_a_folder_without_any(tmp_path):
    assert run_settings(tmp_path) == {}


def test_gpu_use_is_written_where_it_is_measured(tmp_path):
    class Writer(dict):
        file_writer = property(lambda self: self)

        def add_summary(self, summary, step):
            self.update({value.tag: value.simple_value for value in summary.value})

    tensorboard = TensorBoardLogger(Writer(), tmp_path)
    tensorboard.begin_epoch()
    tensorboard.monitor.usage = lambda end: Usage(1.0, main_cpu=0.2, gpu=0.9)
    tensorboard.end_epoch(0, {"x/lr0": 0.1}, TrainingClock())
    tensorboard.monitor.stop()
    written = tensorboard.writer
    found = written["speed/gpu_utilisation"], written["speed/main_cpu"], written["x/lr0"]
    assert found == pytest.approx((0.9, 0.2, 0.1))
    assert "speed/worker_cpu" not in written


def test_compilation_is_not_part_of_the_speed(tmp_path):
    report = RunReport(tmp_path, 1, ["a"], images=False)
    for _ in report.epoch(0, [None], 1):
        time.sleep(0.5)
        report.exclude(0.4)
        report.batch(torch.zeros(4), torch.zeros(2, 3, 8, 8), torch.zeros(0, 6), ["a", "b"])
    report.end_training(torch.zeros(0, 4))
    report.epoch_done((0,) * 7, (0.01,) * 3)
    report.finish()
    assert 0.09 < events_of(tmp_path).Scalars("speed/training_seconds")[0].value < 0.4


def test_late_losses_belong_to_the_training_part(tmp_path):
    report = RunReport(tmp_path, 1, ["a"], images=False)
    for _ in report.epoch(0, [None], 1):
        report.batch(torch.zeros(0, 4), torch.zeros(2, 3, 8, 8), torch.zeros(0, 6), ["a", "b"])
    time.sleep(0.2)  # the device is still at it
    report.end_training(torch.zeros(1, 4))
    report.epoch_done((0,) * 7, (0.01,) * 3)
    report.finish()
    assert events_of(tmp_path).Scalars("speed/training_seconds")[0].value > 0.19


def test_an_epoch_without_batches(tmp_path):
    report = RunReport(tmp_path, 1, ["a"], images=False)
    list(report.epoch(0, [], 0))
    report.epoch_done((0,) * 7, (0.01,) * 3)
    report.finish()
    assert "speed/images_per_second" not in events_of(tmp_path).Tags()["scalars"]


def test_images_keep_their_colours_and_small_ones_their_size():
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, 16:] = 200, 100, 50
    image = event_image(pixels)
    assert (image["width"], image["height"]) == (32, 16)
    with Image.open(BytesIO(image["encoded_image_string"])) as stored:
        flat = np.r_[:14, 18:32]  # the edge between the colours is not sharp
        assert stored.format == "JPEG"
        assert np.abs(np.asarray(stored).astype(int) - pixels)[:, flat].max() < 10
