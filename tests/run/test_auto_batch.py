"""--batch-size -1: the search, and what is measured on a GPU."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.small_run import HYP
from tests.tiny_model import tiny_model
from utils.config.options import check_train_options, train_parser
from utils.run import auto_batch, fast_paths
from utils.run.context import Run
from utils.system.distributed import Ranks


@pytest.mark.parametrize("fixed", [0, 3.7, 200])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 11, 16, 100, 383, 384, 1000, 4096])
def test_the_largest_that_fits_up_to_a_grain(limit, fixed):
    tried = []

    def need(size):
        """A share for each image, a fixed part, and what an allocator rounds up; fails far above the limit."""
        tried.append(size)
        return math.inf if size > 1.2 * limit else fixed + size + (0.3 if size % 3 else 0)

    found = auto_batch.largest(need, fixed + limit + 0.3)
    assert found <= limit and found in tried, "only what was tried is taken"
    assert limit - found <= max(auto_batch.GRAIN, limit // 8) if limit > auto_batch.GRAIN else limit - found <= 1
    assert len(tried) < 12 and len(tried) == len(set(tried)) and max(tried) <= auto_batch.MOST
    assert found < 2 * auto_batch.GRAIN or found % auto_batch.GRAIN == 0


def test_nothing_or_everything_fits():
    assert auto_batch.largest(lambda size: math.inf, 10) == 0
    assert auto_batch.largest(lambda size: 11.0, 10) == 0
    assert auto_batch.largest(lambda size: 1.0, 10) == auto_batch.MOST
    assert auto_batch.largest(lambda size: 1.0, 10, most=100) >= 88
    assert auto_batch.largest(lambda size: 1.0, 10, most=3) == 3


def test_a_step_that_grows_faster_than_its_batch():
    assert 84 <= auto_batch.largest(lambda size: size**2.0, 96**2) <= 96


DATA = SimpleNamespace(nc=2, train="")


def options(line=""):
    opt = train_parser().parse_args(["--cfg", "c.yaml", "--batch-size", "-1", *line.split()])
    check_train_options(opt)
    opt.total_batch_size = opt.batch_size
    return opt


def run(opt, data=DATA, device="cpu"):
    return Run(opt, HYP, data, torch.device(device), Ranks())


def test_on_the_cpu_it_says_that_it_needs_a_gpu():
    with pytest.raises(ValueError, match="--batch-size -1 measures what fits on a GPU, and this run uses the CPU"):
        auto_batch.settle(run(options()), tiny_model)


def test_a_number_is_left_alone():
    opt = SimpleNamespace(batch_size=16)
    auto_batch.settle(run(opt), None)
    assert opt.batch_size == 16


def test_the_largest_images_are_tried():
    assert auto_batch.largest_side(options("--img 320")) == 320
    assert auto_batch.largest_side(options("--img 100")) == 128
    assert auto_batch.largest_side(options("--img 320 --multi-scale")) == 512  # 480, in steps of 64
    assert auto_batch.largest_side(options("--resize-schedule 0:640,3:320")) == 640


@pytest.mark.parametrize("flags", ["", "--fast", "--fast-loss", "--adam"])
def test_a_trial_makes_the_steps_of_the_run(flags):
    model = tiny_model()
    trial = auto_batch.new_trial(run(options(f"--img 64 {flags}")), 64, model)
    steps, before = [], model.state_dict()["model.0.bn.running_mean"].clone()
    step = trial.steps.step
    trial.steps.step = lambda iteration, epoch, batch: steps.append(batch) or step(iteration, epoch, batch)
    trial.step(3)
    (batch,) = steps
    assert batch.images.shape == (3, 3, 64, 64) and len(batch.paths) == 3
    assert batch.targets[:, 0].unique().tolist() == [0, 1, 2] and set(batch.targets[:, 1].tolist()) <= {0.0, 1.0}
    assert batch.targets[:, 2:].min() >= 0 and batch.targets[:, 2:].max() <= 1
    assert trial.num_waiting == (8 if flags == "--fast" else 0), "three slots of the Prefetcher"
    assert not torch.equal(model.state_dict()["model.0.bn.running_mean"], before), "it has been trained"


def test_batches_on_their_way_take_memory(monkeypatch):
    made, empty = [], torch.empty
    monkeypatch.setattr(auto_batch.torch, "empty", lambda *size, **kind: made.append(size) or empty(*size, **kind))
    auto_batch.new_trial(run(options("--img 64 --fast-step")), 64, tiny_model()).step(2)
    assert (8 * 2 * 3 * 64 * 64,) in made


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ["", "--fast"])
def test_measured_on_the_gpu(flags, tmp_path):
    for k in range(100):
        (tmp_path / f"{k}.jpg").touch()
    device, opt = torch.device("cuda"), options(f"--img 640 {flags}")
    data = SimpleNamespace(nc=2, train=str(tmp_path))
    auto_batch.settle(run(opt, data, device), lambda: tiny_model().to(device))
    assert opt.batch_size == opt.total_batch_size == 96, "no more than there are images"
    total = torch.cuda.get_device_properties(device).total_memory
    assert torch.cuda.memory_reserved(device) < 0.2 * total, "what the trials took is given back"


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("", 300 * 5),
        ("--epochs 7", 35),
        ("--epochs 7 --max-iter 3", 21),
        ("--epochs 7 --subset-size 4", 14),
        ("--epochs 7 --overfit", 28),
    ],
)
def test_what_a_step_costs_is_measured_beside_the_run(flags, steps, monkeypatch, tmp_path):
    """Bytes beyond those that are taken already; the draws of the run go on as if nothing had happened.

    cuDNN searches as the run will, for torch takes what it finds for the run, too.
    """
    for k in range(13):
        (tmp_path / f"{k}.jpg").touch()
    told, for_trials = [], fast_paths.for_trials
    monkeypatch.setattr(fast_paths, "for_trials", lambda *given: replace(
        for_trials(*given), ahead=lambda steps, shape, num_steps: told.append((shape, num_steps))))  # fmt: skip
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    sizes = []
    monkeypatch.setattr(auto_batch, "memory_of", lambda trial, size: sizes.append((trial.image_size, size)) or 5000)
    opt = options(f"--img 64 --fast {flags}")
    opt.batch_size = opt.total_batch_size = 3
    torch.manual_seed(1)
    before = torch.rand(3)
    torch.manual_seed(1)
    num_bytes, seconds = auto_batch.step_cost(run(opt, SimpleNamespace(nc=2, train=str(tmp_path))), tiny_model)
    assert told == [((3, 3, 64, 64), steps)]
    assert num_bytes == 4000 and 0 < seconds < 60 and sizes == [(64, 3)]
    assert torch.equal(torch.rand(3), before)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ["", "--fast"])
def test_what_a_step_costs_on_the_gpu(flags, tmp_path):
    (tmp_path / "0.jpg").touch()
    device, opt = torch.device("cuda"), options(f"--img 640 {flags}")
    data = SimpleNamespace(nc=2, train=str(tmp_path))
    costs = []
    for opt.batch_size in (8, 64):
        costs.append(auto_batch.step_cost(run(opt, data, device), lambda: tiny_model().to(device)))
    (few_bytes, _), (many_bytes, seconds) = costs
    assert 0 < few_bytes < many_bytes and 0 < seconds < 1
