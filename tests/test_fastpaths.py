"""Which implementation a run takes: the reference, unless a flag asks for more."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from utils import fastpaths, feed, loss, loss_batched
from utils.options import check_train_options, train_parser

CPU = torch.device("cpu")


def test_no_flag_means_the_reference(caplog):
    paths = fastpaths.choose(train_parser().parse_args([]), CPU)
    assert paths is fastpaths.REFERENCE and paths.feed is feed.plain and paths.losses is loss.losses_by_epoch
    assert not caplog.records


def test_choice_is_frozen():
    with pytest.raises(FrozenInstanceError):
        fastpaths.REFERENCE.feed = None


def test_flag_that_cannot_be_served_is_a_warning(caplog):
    opt = train_parser().parse_args(["--fast-dataloader", "--worker-tensor"])
    assert fastpaths.choose(opt, CPU) == fastpaths.REFERENCE
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelname == "WARNING"
    assert "--fast-dataloader --worker-tensor" in message and "--persistent-workers" not in message


def test_every_announced_flag_exists():
    assert set(fastpaths.ANNOUNCED) <= set(vars(train_parser().parse_args([])))


def test_fast_loss_and_ota_last_choose_the_losses(caplog):
    opt = train_parser().parse_args(["--fast-loss", "--ota-last", "3"])
    with caplog.at_level("INFO"):
        paths = fastpaths.choose(opt, CPU)
    assert paths.feed is feed.plain
    assert paths.losses.func is loss.losses_by_epoch
    assert paths.losses.keywords == {"classes": loss_batched.CLASSES, "ota_last": 3}
    assert "seam" in caplog.text and "--fast-loss" in caplog.text and "--ota-last 3" in caplog.text


def test_on_a_gpu_the_fast_loss_gets_its_targets_on_the_host():
    paths = fastpaths.choose(train_parser().parse_args(["--fast-loss"]), torch.device("cuda"))
    images, targets = torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 6)
    (batch,) = paths.feed([(images, targets, ("a.jpg",), None)], torch.device("meta"))
    assert batch.images.device.type == "meta" and batch.targets.device.type == "cpu"


def test_ota_last_has_to_be_positive():
    with pytest.raises(ValueError, match="--ota-last 0"):
        check_train_options(train_parser().parse_args(["--cfg", "c.yaml", "--ota-last", "0"]))
