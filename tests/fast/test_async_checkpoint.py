"""Checkpoints by a thread: the same files, from a snapshot, in order, and no silent failure."""

import shutil
import subprocess
import sys
import threading
import time
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch

from models.experimental import rebuild
from tests import small_run
from tests.engine.test_trainer import new_trainer, run
from utils.config.options import train_parser
from utils.engine import checkpoint
from utils.engine.checkpoint import NEW_COPIES, Checkpoints, in_stock_order
from utils.engine.checkpoint_reader import read_checkpoint
from utils.fast.async_checkpoint import BackgroundCheckpoints, HostCopies, on_host, snapshot
from utils.loggers.results import RunReport
from utils.run import fast_paths
from utils.system.files import PROJECT_ROOT


@pytest.fixture
def held(monkeypatch):
    """`save` waits until the event is set."""
    go, save = threading.Event(), checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda content, path: go.wait(20) and save(content, path))
    yield go
    go.set()


def test_snapshot_shares_nothing():
    content = {"a": torch.ones(2), "b": [torch.ones(1), (torch.ones(1), "x")], "c": None, "d": 3}
    copy = snapshot(content)
    for tensor in (content["a"], content["b"][0], content["b"][1][0]):
        tensor.zero_()
    assert copy["a"].tolist() == [1, 1] and copy["b"][0] == 1 and copy["b"][1][0] == 1
    assert copy["b"][1][1] == "x" and copy["c"] is None and copy["d"] == 3 and isinstance(copy["b"][1], tuple)


def test_files_hold_the_state_at_the_time_of_saving(tmp_path, held):
    trainer = run(new_trainer(), 2)
    checkpoints = BackgroundCheckpoints(tmp_path, epochs=10)
    weights = deepcopy(trainer.model.state_dict())
    momentum = trainer.optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
    checkpoints.after_epoch(lambda: trainer.checkpoint(0, 0.5, "text\n"), 0, is_best=True)
    run(trainer, 2)  # goes on while nothing is written yet
    assert not (tmp_path / "last.pt").exists()
    held.set()
    assert checkpoints.written() == [tmp_path / "last.pt", tmp_path / "best.pt"]
    assert (tmp_path / "epoch_000.pt").exists() and not list(tmp_path.glob(".*"))
    for path in checkpoints.written():
        stored = read_checkpoint(path)
        assert (stored.epoch, stored.updates, stored.training_results) == (0, 2, "text\n")
        assert torch.equal(stored.optimizer["state"][0]["momentum_buffer"], momentum)
        for name, value in stored.model.state.items():
            assert torch.equal(value, weights[name].to(value.dtype)), name


def assert_same_content(path, other):
    """All that the files hold, to the bit and in the same order."""
    one, two = (torch.load(file, weights_only=False) for file in (path, other))
    assert list(one) == list(two) and one["epoch"] == two["epoch"] and one["best_fitness"] == two["best_fitness"]
    for name, layer in one["model"].named_modules():
        known = two["model"].get_submodule(name)
        assert list(vars(layer)) == list(vars(known)), name
        plain = [{k: v for k, v in vars(m).items() if isinstance(v, str | int | float | list | dict) and k[0] != "_"}
                 for m in (layer, known)]  # fmt: skip
        assert plain[0] == plain[1], name
    states = [content["model"].state_dict() for content in (one, two)]
    assert list(states[0]) == list(states[1]) and path.stat().st_size == pytest.approx(other.stat().st_size, abs=500)
    for name, value in states[0].items():
        known = states[1][name]
        assert value.dtype == known.dtype and value.stride() == known.stride() and torch.equal(value, known), name


@pytest.mark.parametrize("best", [1, 2])
@pytest.mark.parametrize("can_link", [True, False])
def test_stripped_from_memory_as_from_the_files(best, can_link, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    checkpoints, trainer = BackgroundCheckpoints(tmp_path / "memory", epochs=3), new_trainer()
    trainer.ema.ema.names, trainer.ema.ema.class_weights = ["cat"], torch.ones(1)
    for epoch in range(3):
        run(trainer, 2)
        make = partial(trainer.checkpoint, epoch, 0.5, "text\n", checkpoints.copies)
        checkpoints.after_epoch(make, epoch, is_best=epoch == best)
    checkpoints.wait()
    shutil.copytree(tmp_path / "memory", tmp_path / "files")
    if not can_link:
        monkeypatch.setattr("os.link", refuse)
    with monkeypatch.context() as patch:
        if best == 2:
            patch.setattr("utils.engine.checkpoint.read_checkpoint", lambda path: pytest.fail(f"{path} is in memory"))
        checkpoints.strip(rebuild)
    Checkpoints(tmp_path / "files", epochs=3).strip(rebuild)
    names = {path.name for path in (tmp_path / "files").iterdir()}
    assert names == {path.name for path in (tmp_path / "memory").iterdir()}
    for name in names:
        assert_same_content(tmp_path / "memory" / name, tmp_path / "files" / name)
    last, full = (tmp_path / "memory" / name for name in ("last.pt", "last_full.pt"))
    assert read_checkpoint(last).optimizer is None and last.stat().st_nlink == 1
    assert full.read_bytes() == (tmp_path / "files" / "last_full.pt").read_bytes()
    checkpoints.strip(rebuild)
    assert read_checkpoint(full).optimizer, "stripping twice changes nothing"


def test_no_model_is_built_of_what_is_in_memory(tmp_path):
    checkpoints, trainer = BackgroundCheckpoints(tmp_path, epochs=1), run(new_trainer(), 2)
    checkpoints.after_epoch(lambda: trainer.checkpoint(0, 0.5, "", checkpoints.copies), 0, is_best=True)
    checkpoints.strip(lambda stored: pytest.fail("it is there already"))
    state = read_checkpoint(tmp_path / "last.pt").for_inference().state
    for name, value in trainer.ema.ema.state_dict().items():
        assert torch.equal(state[name], value.half() if value.is_floating_point() else value), name


def test_a_run_without_an_epoch_has_nothing_to_strip(tmp_path, held):
    checkpoints = BackgroundCheckpoints(tmp_path, epochs=1)
    checkpoints.initial(new_trainer().model)
    threading.Timer(0.1, held.set).start()
    checkpoints.strip(rebuild)
    assert [path.name for path in tmp_path.iterdir()] == ["init.pt"]


def test_ctrl_c_while_the_thread_begins_leaves_none_that_is_waited_for(tmp_path):
    program = """
import signal, sys, threading
from tests.engine.test_trainer import new_trainer
from utils.fast.async_checkpoint import BackgroundCheckpoints
checkpoints, trainer, start = BackgroundCheckpoints(sys.argv[1], epochs=1), new_trainer(), threading.Thread.start
def interrupted(thread):
    start(thread)
    signal.raise_signal(signal.SIGINT)
threading.Thread.start = interrupted
try:
    checkpoints.initial(trainer.model)
except KeyboardInterrupt:
    print("interrupted")
"""
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=PROJECT_ROOT, capture_output=True,
                         text=True, timeout=60)  # fmt: skip
    assert (run.stdout, run.returncode) == ("interrupted\n", 0), run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["init.pt"]


def test_same_files_as_without_the_thread(tmp_path):
    for kind, folder in ((Checkpoints, tmp_path / "plain"), (BackgroundCheckpoints, tmp_path / "thread")):
        trainer = run(new_trainer(), 1)
        kind(folder, epochs=1).after_epoch(lambda t=trainer: t.checkpoint(0, 0.5, ""), 0, is_best=True)
    checkpoints = BackgroundCheckpoints(tmp_path / "thread", epochs=1)
    checkpoints.wait()
    names = ["best.pt", "epoch_000.pt", "last.pt"]
    for folder in (tmp_path / "plain", tmp_path / "thread"):
        wait_for(folder / "last.pt"), wait_for(folder / "epoch_000.pt")
        assert sorted(path.name for path in folder.glob("*.pt")) == names
    plain, thread = (torch.load(tmp_path / kind / "last.pt", weights_only=False) for kind in ("plain", "thread"))
    assert list(plain) == list(thread)
    assert_same(plain["optimizer"], thread["optimizer"])
    assert_same(plain["model"].state_dict(), thread["model"].state_dict())
    assert_same(plain["ema"].state_dict(), thread["ema"].state_dict())


def test_copies_in_the_same_memory_are_those_that_are_made_anew(tmp_path):
    trainer, copies = new_trainer(), HostCopies()
    trainer.model.to(memory_format=torch.channels_last)
    seen = []
    for names in (["a", "b"], ["c", "d"]):
        run(trainer, 2)
        trainer.model.names = names
        new, ours = (trainer.checkpoint(0, 0.5, "", kind) for kind in (NEW_COPIES, copies))
        new["state"], ours["state"] = (kind.state(trainer.model) for kind in (NEW_COPIES, copies))
        copies.fetch()
        wanted = deepcopy(new)
        run(trainer, 1)  # goes on before the copies are filled
        copies.fill()
        assert_same(ours["optimizer"], wanted["optimizer"])
        assert_same(ours["state"], wanted["state"])
        for key in ("model", "ema"):
            assert_same(ours[key].state_dict(), wanted[key].state_dict())
            assert all(value.is_contiguous() for value in ours[key].state_dict().values())
            assert all(p.dtype is torch.float16 for p in ours[key].parameters())
        assert ours["model"].names == names and ours["model"].training == wanted["model"].training
        seen.append([ours["model"], ours["ema"], *ours["state"].values()])
    assert all(first is second for first, second in zip(*seen, strict=True))


def test_a_copy_that_was_replaced_is_none_any_more():
    """What comes to lie where it lay has its id, and has to be copied."""
    copies, state = HostCopies(), {"weight": torch.ones(2, 3, 4, 4)}
    before = copies.values(state)["weight"]
    state["weight"] = state["weight"].to(memory_format=torch.channels_last)
    now = copies.values(state)["weight"]
    assert now is not before and copies.owned() == {id(now)}


def wait_for(path):
    for _ in range(200):
        if path.exists():
            return
        threading.Event().wait(0.05)


def assert_same(first, second):
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_order_is_kept_and_one_snapshot_at_most(tmp_path, held):
    checkpoints, made = BackgroundCheckpoints(tmp_path, epochs=100), []
    save_next = threading.Thread(target=lambda: [save(checkpoints, epoch, made) for epoch in (30, 31)])
    save_next.start()
    save_next.join(0.3)
    assert save_next.is_alive() and made == [30], "the second waits before it copies anything"
    held.set()
    save_next.join(20)
    checkpoints.wait()
    assert made == [30, 31] and torch.load(tmp_path / "last.pt")["epoch"] == 31


def test_an_epoch_counts_only_when_the_one_before_is_saved(tmp_path, monkeypatch):
    """So that a kill loses one epoch at most, also where an epoch takes less time than its checkpoint."""
    seen, save_now, epoch_done = [], checkpoint.save, RunReport.epoch_done

    def note_what_is_saved(report, *args):
        last = tmp_path / "runs/run/weights/last.pt"
        seen.append(read_checkpoint(last).epoch if last.exists() else -1)
        return epoch_done(report, *args)

    monkeypatch.setattr(checkpoint, "save", lambda content, path: time.sleep(0.5) or save_now(content, path))
    monkeypatch.setattr(RunReport, "epoch_done", note_what_is_saved)
    assert small_run.program("train", small_run.arguments(tmp_path, "--epochs", "4", "--notest", "--fast-step")) == 0
    assert seen == [-1, 0, 1, 2]


def save(checkpoints, epoch, made):
    def content():
        made.append(epoch)
        return {"epoch": epoch}

    checkpoints.after_epoch(content, epoch, is_best=False)


def test_a_failed_write_is_warned_about_and_raised_at_the_next_save(tmp_path, monkeypatch, caplog):
    checkpoints = BackgroundCheckpoints(tmp_path, epochs=100)

    def full(content, path):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full)
        checkpoints.initial(torch.nn.Linear(1, 1))
        with pytest.raises(OSError, match="No space left"):
            checkpoints.wait()
        assert "init.pt could not be written: No space left" in caplog.text
        checkpoints.after_epoch(lambda: {"epoch": 1}, 1, is_best=False)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.after_epoch(lambda: {"epoch": 2}, 2, is_best=False)
    assert "could not be written" in caplog.text and "last.pt" in caplog.text
    checkpoints.after_epoch(lambda: {"epoch": 3}, 3, is_best=False)  # the error is told once
    checkpoints.wait()
    assert torch.load(tmp_path / "last.pt")["epoch"] == 3


def test_a_failed_last_write_is_raised_before_the_files_are_read(tmp_path, monkeypatch):
    checkpoints, trainer = BackgroundCheckpoints(tmp_path, epochs=1), new_trainer()
    monkeypatch.setattr(checkpoint, "save", lambda content, path: 1 / 0)
    checkpoints.after_epoch(lambda: trainer.checkpoint(0, 0.5, ""), 0, is_best=False)
    with pytest.raises(ZeroDivisionError):
        checkpoints.strip(rebuild)


@pytest.mark.parametrize("flag", ["--fast-step", "--cuda-graph", "--fast"])
def test_fast_step_has_its_checkpoints_written_by_a_thread(flag):
    opt = train_parser().parse_args([flag])
    assert fast_paths.choose(opt, torch.device("cpu")).checkpoints is BackgroundCheckpoints


def test_a_whole_run_leaves_its_files(tmp_path, monkeypatch):
    paths = replace(fast_paths.REFERENCE, checkpoints=BackgroundCheckpoints)
    monkeypatch.setattr(fast_paths, "choose", lambda opt, device: paths)
    weights = small_run.run(tmp_path, "--epochs", "1") / "weights"
    names = ["best.pt", "epoch_000.pt", "init.pt", "last.pt", "last_full.pt"]
    assert sorted(path.name for path in weights.iterdir()) == names
    assert read_checkpoint(weights / "last.pt").optimizer is None
    assert read_checkpoint(weights / "last_full.pt").optimizer is not None


def test_a_copy_on_the_host_is_that_in_stocks_order():
    """Strides, what is trained, tensors that are neither parameters nor buffers, tensors of several types."""
    model = new_trainer().model.to(memory_format=torch.channels_last)
    model.class_weights, model.names = torch.rand(3), ["cat"]
    first = next(model.parameters()).requires_grad_(False)
    copy, expected = on_host(model), in_stock_order(model)
    for (name, value), (_, known) in zip(copy.state_dict().items(), expected.state_dict().items(), strict=True):
        assert torch.equal(value, known) and (value.dtype, value.stride()) == (known.dtype, known.stride()), name
    assert {value.dtype for value in copy.state_dict().values()} == {torch.float32, torch.int64}
    assert [p.requires_grad for p in copy.parameters()] == [p.requires_grad for p in model.parameters()]
    assert torch.equal(copy.class_weights, model.class_weights) and copy.names == ["cat"]
    taken = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    with torch.no_grad():
        first.add_(1)
    assert not torch.equal(next(copy.parameters()), first)
    assert not taken & {tensor.untyped_storage().data_ptr() for tensor in copy.state_dict().values()}
    sizes = [tensor.untyped_storage().nbytes() for tensor in copy.state_dict().values()]
    assert sizes == [tensor.nbytes for tensor in copy.state_dict().values()], "no file holds a tensor that many share"
