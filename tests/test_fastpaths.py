"""Which implementation a run takes: the reference, unless a flag asks for more."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from utils import fastpaths, feed, loss, loss_batched
from utils.fast_loader import Settings
from utils.options import check_train_options, train_parser

CPU = torch.device("cpu")


def test_no_flag_means_the_reference(caplog):
    paths = fastpaths.choose(train_parser().parse_args([]), CPU)
    assert paths is fastpaths.REFERENCE and paths.feed is feed.plain and paths.losses is loss.losses_by_epoch
    assert not caplog.records


def test_choice_is_frozen():
    with pytest.raises(FrozenInstanceError):
        fastpaths.REFERENCE.feed = None


def loader_options(*flags):
    return fastpaths.loader_options(train_parser().parse_args(flags), first_epoch=3)


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


def test_no_flag_means_the_reference_loader(caplog):
    assert loader_options() == {} == loader_options("--loader-timeout", "5", "--workers", "2")
    assert not caplog.records


def test_fast_dataloader_is_both_loader_flags():
    both = loader_options("--fast-dataloader")
    assert both == loader_options("--persistent-workers", "--worker-tensor")
    assert both["persistent_workers"] and both["worker_tensor"] and both["timeout"] == 300 and both["seed"] is None


@pytest.mark.parametrize(
    "flags",
    [("--persistent-workers",), ("--worker-tensor",), ("--seed", "0"), ("--prefetch-factor", "4"),
     ("--micro-batch-size", "4")],
    ids=" ".join,
)  # fmt: skip
def test_each_loader_flag_alone(flags):
    name = flags[0].removeprefix("--").replace("-", "_")
    options = loader_options(*flags)
    assert options.pop(name) == (int(flags[1]) if len(flags) > 1 else True)
    expected = {"persistent_workers": False, "worker_tensor": False, "micro_batch_size": 0, "prefetch_factor": None,
                "timeout": 300, "seed": None, "first_epoch": 3}  # fmt: skip
    assert options == {key: value for key, value in expected.items() if key != name}
    Settings(**options)
