"""Which implementation a run takes: the reference, unless a flag asks for more."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from utils.config.options import check_train_options, train_parser
from utils.data.fast.loader import LoaderOptions
from utils.engine import batches
from utils.fast.graph_step import GraphSteps
from utils.fast.prefetcher import Prefetch
from utils.fast.train_step import FastSteps
from utils.loss import batched, criterion
from utils.run import fast_paths

CPU = torch.device("cpu")


def test_no_flag_means_the_reference(caplog):
    paths = fast_paths.choose(train_parser().parse_args([]), CPU)
    assert paths is fast_paths.REFERENCE and paths.feed is batches.plain and paths.losses is criterion.losses_by_epoch
    assert not caplog.records


def choose(*flags, device="cuda", **facts):
    opt = train_parser().parse_args(flags)
    vars(opt).update(facts)
    return fast_paths.choose(opt, torch.device(device))


def test_without_flags_a_training_makes_its_own_steps():
    assert fast_paths.REFERENCE.steps("a training") == "a training"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fast_step(device, caplog):
    caplog.set_level("INFO")
    paths = choose("--fast-step", "--sync-interval", "4", device=device)
    assert paths.steps.func is FastSteps and paths.steps.keywords == {"interval": 4}
    assert isinstance(paths.feed, Prefetch) and paths.feed.targets_device is None and not paths.feed.floats
    assert paths.losses is criterion.losses_by_epoch and "losses every 4 steps" in caplog.text


def test_fast_step_with_other_flags():
    paths = choose("--fast-step", "--fast-loss", "--multi-scale")
    assert paths.feed.targets_device == CPU and paths.feed.floats
    assert paths.losses.keywords == {"classes": batched.CLASSES}


def test_a_graph_needs_the_other_two(caplog):
    caplog.set_level("INFO")
    paths = choose("--cuda-graph")
    assert paths.steps.func is GraphSteps and paths.losses.keywords == {"classes": batched.CLASSES}
    assert "--cuda-graph needs --fast-loss" in caplog.text and "--cuda-graph needs --fast-step" in caplog.text


@pytest.mark.parametrize(
    ("flags", "facts", "reason"),
    [(("--multi-scale",), {}, "multi-scale"), (("--adam",), {}, "SGD has"), ((), {"world_size": 2}, "processes"),
     (("--device", "0,1"), {}, "several GPUs"), ((), {"device_name": "cpu"}, "no CUDA device")],
)  # fmt: skip
def test_a_graph_that_cannot_be_is_a_warning(flags, facts, reason, caplog):
    device = facts.pop("device_name", "cuda")
    paths = choose("--cuda-graph", *flags, device=device, **facts)
    assert paths.steps.func is FastSteps
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("--cuda-graph: ") and reason in warning


def test_fast_is_everything_that_can_run(caplog):
    caplog.set_level("INFO")
    assert choose("--fast").steps.func is GraphSteps
    for text in ("captured in a CUDA graph", "| fp16", "workers stay", "whole batch at once", "side stream"):
        assert text in caplog.text
    caplog.clear()
    paths = choose("--fast", device="cpu")
    assert paths.steps.func is FastSteps and paths.losses.keywords == {"classes": batched.CLASSES}
    assert "there is no CUDA device" in caplog.text and "| off" in caplog.text
    assert all(record.levelname == "INFO" for record in caplog.records), "nobody asked for a graph by name"
    options = loader_options("--fast")
    assert options["persistent_workers"] and options["worker_tensor"]


def test_an_interval_without_the_step_is_a_warning(caplog):
    assert choose("--sync-interval", "3") is fast_paths.REFERENCE and "has no effect without --fast-step" in caplog.text


def test_choice_is_frozen():
    with pytest.raises(FrozenInstanceError):
        fast_paths.REFERENCE.feed = None


def loader_options(*flags):
    return fast_paths.loader_options(train_parser().parse_args(flags), first_epoch=3)


def test_fast_loss_and_ota_last_choose_the_losses(caplog):
    opt = train_parser().parse_args(["--fast-loss", "--ota-last", "3"])
    with caplog.at_level("INFO"):
        paths = fast_paths.choose(opt, CPU)
    assert paths.feed is batches.plain
    assert paths.losses.func is criterion.losses_by_epoch
    assert paths.losses.keywords == {"classes": batched.CLASSES, "ota_last": 3}
    assert "seam" in caplog.text and "--fast-loss" in caplog.text and "--ota-last 3" in caplog.text


def test_on_a_gpu_the_fast_loss_gets_its_targets_on_the_host():
    paths = fast_paths.choose(train_parser().parse_args(["--fast-loss"]), torch.device("cuda"))
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
    LoaderOptions(**options)
