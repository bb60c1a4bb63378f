"""Whole runs of train.py whose batches the kernel composes, on a GPU or interpreted on a CPU: the same ones.

Run by test_loaders_gpu.py in a process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

import os
from hashlib import sha256

import pytest
import torch

from tests import small_run
from tests.data.gpu import composing_cases
from tests.data.gpu.store_cases import MANY, simulate
from tests.test_train import results_of
from utils.data.gpu import compose, kept_batches, placing
from utils.fast.train_step import FastSteps
from utils.run import auto_batch, fast_paths

FLAGS = ("--fast-step", "--fast-loss", "--worker-tensor", "--fast-val", "--workers", "2", "--seed", "3")
ON_GPU = torch.cuda.is_available()
interpreted = composing_cases.interpreted  # a fixture


@pytest.fixture
def card(monkeypatch):
    """Without a GPU the CPU has its role, and is not asked for twice what it makes of a batch."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    if ON_GPU:
        return "0"
    for name in ("why_no_images", "why_not_kept"):
        monkeypatch.setattr(fast_paths, name, lambda *_: None)
    monkeypatch.setattr(auto_batch, "step_cost", lambda run, build_model: (0, 1e-4))
    open_composing = placing.open_composing
    simulate(monkeypatch, MANY)
    for name in ("room_on_card", "room_on_host"):
        monkeypatch.setattr(kept_batches, name, getattr(placing, name))
    monkeypatch.setattr(placing, "open_composing", open_composing)
    monkeypatch.setattr(compose, "composes", lambda dataset: True)  # slow where it is interpreted
    return "cpu"


@pytest.fixture
def composed(monkeypatch):
    """The number of images in each batch that was composed."""
    counts, on_device = [], compose.ComposedBatch.on_device

    def watched(batch, room):
        counts.append(len(batch))
        return on_device(batch, room)

    monkeypatch.setattr(compose.ComposedBatch, "on_device", watched)
    return counts


@pytest.fixture
def trained(monkeypatch):
    """A check sum of the images of each step."""
    sums, step = [], FastSteps.step

    def watched(steps, iteration, epoch, batch):
        if batch.paths[0] != "noise":  # of a trial that measures what a step takes
            sums.append(sha256(batch.images.cpu().contiguous().numpy().tobytes()).hexdigest())
        return step(steps, iteration, epoch, batch)

    monkeypatch.setattr(FastSteps, "step", watched)
    return sums


@pytest.mark.parametrize(
    "flags",
    [(), ("--resize-schedule", "0:32,1:64"), ("--rect",), ("--multi-scale",), ("--overfit", "--batch-size", "2"),
     ("--image-weights", "--max-iter", "1")],
    ids=" ".join,
)  # fmt: skip
def test_batches_are_those_of_the_workers(flags, card, composed, trained, tmp_path):
    line = (*FLAGS, "--device", card, *flags)
    plain, batches = results_of(small_run.run(tmp_path, *line)), trained[:]
    assert not composed and len(batches) >= 2
    trained.clear()
    found = results_of(small_run.run(tmp_path, *line, "--cache-images", "gpu"))
    assert trained == batches and sum(composed) == (6 if "--max-iter" in flags else 12)
    assert found == plain or ON_GPU, "a GPU sums in changing order"
