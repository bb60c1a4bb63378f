"""Which implementation a run takes: the reference, unless a flag asks for more."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from utils import fastpaths, feed
from utils.fast_loader import Settings
from utils.options import train_parser

CPU = torch.device("cpu")


def test_no_flag_means_the_reference(caplog):
    paths = fastpaths.choose(train_parser().parse_args([]), CPU)
    assert paths is fastpaths.REFERENCE and paths.feed is feed.plain
    assert not caplog.records


def test_choice_is_frozen():
    with pytest.raises(FrozenInstanceError):
        fastpaths.REFERENCE.feed = None


def loader_options(*flags):
    return fastpaths.loader_options(train_parser().parse_args(flags), first_epoch=3)


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
