"""Which implementation a run takes: the reference, unless a flag asks for more."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from utils import fastpaths, feed
from utils.options import train_parser

CPU = torch.device("cpu")


def test_no_flag_means_the_reference(caplog):
    paths = fastpaths.choose(train_parser().parse_args([]), CPU)
    assert paths is fastpaths.REFERENCE and paths.feed is feed.plain
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
