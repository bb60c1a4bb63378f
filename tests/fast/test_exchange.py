"""Two processes that add their gradients, against DistributedDataParallel; and processes that end or hang."""

import os
import signal
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import train
from tests import small_run, step_cases
from tests.fast.test_graph_step import OnCPU
from tests.rank_cases import run_ranks
from tests.step_cases import batches, new_trainer
from utils.config.options import train_parser
from utils.engine.checkpoint_reader import read_checkpoint
from utils.fast.exchange import Exchange
from utils.fast.train_step import FastSteps
from utils.ops import cuda_graph
from utils.plots.run import read_results
from utils.run import entry
from utils.system.distributed import gather_everywhere, unwrap
from utils.system.watch import START, Watch

CPU = torch.device("cpu")
NUM_STEPS, BAD_STEP, SCALE = 14, 2, 1024.0


def open_exchange(device, timeout=60):
    return Exchange(device, timeout)


def trainer_of(rank, wrapped):
    """A Trainer whose weights only rank 0 has, and whose loss overflows in one step of rank 1."""
    trainer = new_trainer(batched=not wrapped)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=4)
    with torch.no_grad():
        next(trainer.model.parameters()).add_(rank)
        next(trainer.ema.ema.parameters()).add_(0 if wrapped else rank)  # DDP does not send the average
    warm_up = trainer.warm_up

    def warm_up_and_overflow(iteration, epoch):
        warm_up(iteration, epoch)
        trainer.loss_factor = float("inf") if rank and iteration == BAD_STEP else 2.0

    trainer.warm_up = warm_up_and_overflow
    network = DistributedDataParallel(trainer.model) if wrapped else trainer.model
    trainer.start(network, trainer.compute_loss, 2.0, 0, 6)
    return trainer


def given(rank, **options):
    """The batches of a process, with other numbers of boxes than those of the others."""
    pairs = batches(2 * NUM_STEPS, sizes=(4, 4, 4, 4, 2, 2), **options)
    return [batch for i, batch in enumerate(pairs) if i % 2 == rank]


def compare(rank, kind, expected):
    trainer = trainer_of(rank, wrapped=False)
    steps = kind(trainer, 4, open_exchange=open_exchange)
    found = step_cases.run(steps, given(rank), 2)
    captured = getattr(steps, "captured_update", None)
    steps.finish()
    finite = expected.items.isfinite()
    torch.testing.assert_close(found.items[finite], expected.items[finite], rtol=2e-4, atol=2e-5)
    mine, theirs = found.state(), expected.state()
    for name, value in theirs.items():
        if "running" not in name or rank == 0:  # DDP leaves the others with those of their last batch
            torch.testing.assert_close(mine[name], value, rtol=2e-4, atol=2e-5, msg=lambda t, n=name: f"{n}: {t}")
    assert trainer.scaler.state_dict() == expected.trainer.scaler.state_dict()
    assert trainer.scaler.get_scale() < SCALE * 2 ** (trainer.ema.updates // 4), "an overflow halved it"
    everywhere = [None, None]
    dist.all_gather_object(everywhere, mine)
    assert all(torch.equal(value, everywhere[1 - rank][name]) for name, value in mine.items())
    return steps, captured


def parity(rank):
    cuda_graph.CROWDED_RATIO = 1000.0
    expected = step_cases.run(trainer_of(rank, wrapped=True), given(rank, as_bytes=False), 2)
    assert expected.trainer.accumulate == 4
    expected.trainer.model = unwrap(expected.trainer.model)
    compare(rank, FastSteps, expected)
    steps, captured = compare(rank, OnCPU, expected)
    assert steps.counts["replayed"] > 5 and captured is not None and steps.captured_update is None


def test_two_processes_follow_ddp(tmp_path):
    """Warm-up, accumulation, small batches, a step that overflows in one process: within rounding, ranks bit-equal."""
    for ended in run_ranks(parity, tmp_path):
        assert ended.status == 0, ended.text


# ---- through train.py -----------------------------------------------------------------------------------------------


def train_both_ways(line, rank):
    with small_run.drawing(pictures=False):
        for name, flags in (("off", ()), ("fast", ("--fast",)), ("adam", ("--fast-step", "--adam", "--epochs", "1"))):
            words = [*line, "--name", name, *flags]
            with small_run.group_kept():
                train.main(train_parser().parse_args(words))


def test_whole_runs_agree(tmp_path):
    line = small_run.arguments(tmp_path, "--batch-size", "4", "--seed", "3", num_images=10)
    for ended in run_ranks(partial(train_both_ways, line), tmp_path):
        assert ended.status == 0, ended.text
    tables = [read_results(tmp_path / "runs" / name / "results.txt") for name in ("off", "fast", "adam")]
    assert tables[1] == pytest.approx(tables[0], rel=2e-3, abs=1e-6) and len(tables[2]) == 1
    stored = [read_checkpoint(tmp_path / "runs" / name / "weights" / "last_full.pt") for name in ("off", "fast")]
    for kind in ("model", "ema"):
        for key, value in getattr(stored[0], kind).state.items():
            mine = getattr(stored[1], kind).state[key]
            torch.testing.assert_close(mine.float(), value.float(), rtol=5e-3, atol=1e-3, msg=f"{kind} {key}")


# ---- what must not be -----------------------------------------------------------------------------------------------


def differ(rank):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)  # of a machine whose own process failed, and another one
    earlier = open_exchange(CPU)
    earlier.finish()
    exchange = open_exchange(CPU)
    keys = gather_everywhere(exchange.watch.keys)
    assert keys[0] == keys[1] and not {*keys[0]} & {*earlier.watch.keys}
    exchange.is_started = True
    exchange.begin_epoch(None)
    assert exchange.watch.next_limit == START, "all have come; an epoch whose only exchange is its end ends as well"
    ones = torch.ones(3)
    exchange.end_epoch([], {"weights": ones, "momentum": ones})
    buffer = ones * rank
    with pytest.raises(ValueError, match="do not have the same momentum any more"):
        exchange.end_epoch([buffer], {"weights": ones, "momentum": ones + 1e-7 * rank})
    assert torch.equal(buffer, torch.zeros(3)), "that of rank 0"
    with pytest.raises(ValueError, match="train different parameters"):
        exchange.add_gradients(torch.ones(3 + rank), 0)
    exchange.finish()


def test_processes_that_differ_are_an_error(tmp_path):
    for ended in run_ranks(differ, tmp_path):
        assert ended.status == 0, ended.text


# ---- processes that end or hang -------------------------------------------------------------------------------------


def lose_one(name, rank):
    """Twenty exchanges, in the fourth of which rank 1 fails; it may be late for the first."""

    how, pids = LOSSES[name][0], [0, 0]

    def steps(opt):
        exchange = Exchange(CPU, 2)
        dist.all_gather_object(pids, os.getpid())
        exchange.watch.allow_waiting()
        if rank:
            time.sleep(2.5)
        for i in range(20):
            if rank and i == 3:
                how(*pids)
            exchange.add_gradients(torch.ones(5), i)

    entry.run(steps, None)


LOSSES = {
    "killed": (lambda _, me: os.kill(me, signal.SIGKILL), "has ended, or cannot be reached"),
    "stopped": (lambda _, me: os.kill(me, signal.SIGSTOP), "no sign of life from rank 1 for 2 s"),
    "hangs": (lambda *_: time.sleep(100), "gradients of iteration 3 has not ended for 2 s"),
    "launcher": (lambda other, _: (time.sleep(0.3), os.kill(other, signal.SIGTERM), time.sleep(100)), "SIGTERM"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_nobody_waits_for_ever(name, tmp_path):
    _, sentence = LOSSES[name]
    first, _ = run_ranks(partial(lose_one, name), tmp_path, timeout=20)
    assert first.status == 2 and sentence in first.text and "Traceback" not in first.text
    assert first.text.strip().splitlines()[-1].startswith("error: ")


def train_beside_a_stopped_one(line, rank):
    """Without flags: rank 1 is stopped, rank 0 waits for it in an operation of its library."""

    def stop(*_):
        while not Watch.running.reports[1]:
            time.sleep(0.01)
        if rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    with mock.patch.object(train, "train", stop):
        small_run.leave("train", line)


def test_a_run_without_flags_does_not_wait_for_ever_either(tmp_path):
    line = small_run.arguments(tmp_path, "--batch-size", "4", "--loader-timeout", "2")
    first, _ = run_ranks(partial(train_beside_a_stopped_one, line), tmp_path, timeout=20)
    assert first.status == 2 and "no sign of life from rank 1 for 2 s" in first.text
