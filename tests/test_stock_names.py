"""The names that scripts written for stock YOLOv7 import from utils.general and utils.torch_utils."""

import logging
import time

import pytest
import torch

from tests.tiny_model import tiny_model
from utils import general, torch_utils


@pytest.mark.parametrize("face", [general, torch_utils])
def test_every_name_is_there(face):
    assert all(callable(getattr(face, name)) for name in face.__all__)


def test_image_size_is_rounded_up_with_a_warning(caplog):
    assert general.check_img_size(640) == 640 == general.check_img_size(640, s=64) and not caplog.records
    assert general.check_img_size(641) == 672 and "672 is used" in caplog.text


def test_boxes_are_clipped_in_place():
    boxes = torch.tensor([[-5.0, 3.0, 90.0, 70.0]])
    general.clip_coords(boxes, (60, 80))
    assert boxes.tolist() == [[0, 3, 80, 60]]


@pytest.mark.parametrize(("rank", "level"), [(-1, logging.INFO), (0, logging.INFO), (1, logging.WARNING)])
def test_logging_by_rank(rank, level, monkeypatch):
    chosen = {}
    monkeypatch.setattr(logging, "basicConfig", lambda **settings: chosen.update(settings))
    general.set_logging(rank)
    assert chosen["level"] == level


def test_time_goes_on():
    before = time.time()
    assert before <= torch_utils.time_synchronized() <= time.time()


def test_common_entries():
    mine, theirs = {"a.w": torch.zeros(2), "b.w": torch.zeros(3), "c.w": torch.zeros(1)}, tiny_model().state_dict()
    assert torch_utils.intersect_dicts(mine, theirs) == {}
    other = {"a.w": torch.ones(2), "b.w": torch.ones(4), "c.w": torch.ones(1)}
    assert list(torch_utils.intersect_dicts(mine, other)) == ["a.w", "c.w"]
    assert list(torch_utils.intersect_dicts(mine, other, exclude=("c",))) == ["a.w"]
