"""What a run writes into weights/: which files, when, whole ones only, and the models for inference that it leaves."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from models.experimental import rebuild
from tests.engine.checkpoint_files import LAYERS, PLAIN, STOCK_KEYS, content_of_epoch, globals_of, same
from tests.tiny_model import tiny_model
from utils.engine.checkpoint import Checkpoints, NoCheckpoints, save
from utils.engine.checkpoint_reader import full_state_path, read_checkpoint
from utils.system.signals import Terminated


def test_crash_while_saving_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    save({"w": torch.ones(1)}, path)

    def crash(content, file):
        file.write(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(OSError, match="disk full"):
        save({"w": torch.zeros(1)}, path)
    assert read_checkpoint(path).model.state["w"].tolist() == [1.0]
    assert os.listdir(tmp_path) == ["last.pt"]


@pytest.mark.parametrize("signal", [KeyboardInterrupt, Terminated])
def test_ctrl_c_while_saving_is_raised(signal, tmp_path, monkeypatch):
    """Not what torch makes of a part that is missing, which would be taken for a bug."""
    opened, writes = Path.open, []

    def opened_for_once(path, *args, **options):
        file = opened(path, *args, **options)
        write = file.write

        def write_or_raise(data):
            writes.append(data)
            if len(writes) == 3:
                raise signal
            return write(data)

        file.write = write_or_raise
        return file

    monkeypatch.setattr(Path, "open", opened_for_once)
    with pytest.raises(signal):
        save({"w": torch.ones(100_000)}, tmp_path / "last.pt")
    assert len(writes) >= 3 and not os.listdir(tmp_path)


def names_after(checkpoints, epoch, is_best):
    """Of the files that an epoch writes; all have its content."""
    for path in checkpoints.folder.iterdir():
        path.unlink()
    checkpoints.after_epoch(lambda: {"epoch": epoch}, epoch, is_best)
    files = list(checkpoints.folder.iterdir())
    assert all(torch.load(path) == {"epoch": epoch} for path in files)
    return {path.name for path in files}


@pytest.mark.parametrize(
    ("epoch", "is_best", "expected"),
    [
        (0, True, {"last.pt", "best.pt", "epoch_000.pt"}),
        (1, False, {"last.pt"}),
        (23, True, {"last.pt", "best.pt"}),
        (24, False, {"last.pt", "epoch_024.pt"}),
        (25, False, {"last.pt"}),
        (199, True, {"last.pt", "best.pt", "epoch_199.pt"}),
        (200, True, {"last.pt", "best.pt", "best_200.pt"}),
        (200, False, {"last.pt"}),
        (294, False, {"last.pt"}),
        (295, False, {"last.pt", "epoch_295.pt"}),
        (299, True, {"last.pt", "best.pt", "best_299.pt", "epoch_299.pt"}),
    ],
)
def test_file_names(epoch, is_best, expected, tmp_path):
    checkpoints = Checkpoints(tmp_path / "weights", epochs=300)
    assert names_after(checkpoints, epoch, is_best) == expected


def test_nosave_writes_only_after_the_last_epoch(tmp_path):
    checkpoints = Checkpoints(tmp_path, epochs=3, save_every_epoch=False)
    checkpoints.after_epoch(lambda: pytest.fail("built for nothing"), 0, True)
    checkpoints.after_epoch(lambda: pytest.fail("built for nothing"), 1, True)
    assert names_after(checkpoints, 2, True) == {"last.pt", "best.pt", "epoch_002.pt"}


def test_every_nth_epoch_is_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, epochs=300, period=4)
    kept = [e for e in range(1, 24) if f"epoch_{e:03d}.pt" in names_after(checkpoints, e, False)]
    assert kept == [3, 7, 11, 15, 19, 23]


def test_last_is_written_last(tmp_path, monkeypatch):
    names, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda new, old: names.append(Path(old).name) or replace(new, old))
    Checkpoints(tmp_path, epochs=3).after_epoch(dict, 0, True)
    assert names[-1] == "last.pt" and len(names) == 3


def test_a_copy_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, epochs=300)
    checkpoints.after_epoch(lambda: {"epoch": 30}, 30, False)

    def full(source, target):
        Path(target).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left on device.*last.pt"):
        checkpoints.after_epoch(lambda: {"epoch": 31}, 31, True)
    assert torch.load(tmp_path / "last.pt") == {"epoch": 30} and torch.load(tmp_path / "best.pt") == {"epoch": 31}
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt"]


def test_initial_model(tmp_path):
    model = tiny_model()
    Checkpoints(tmp_path / "weights", epochs=1).initial(model)
    stored = read_checkpoint(tmp_path / "weights" / "init.pt")
    assert same(stored.model.state, model.state_dict())


def test_strip(tmp_path):
    checkpoints = Checkpoints(tmp_path, epochs=9)
    assert checkpoints.written() == []
    best, last = content_of_epoch(3, 0.5, updates=1), content_of_epoch(8, 0.5, updates=2)
    checkpoints.after_epoch(lambda: best, 3, True)
    checkpoints.after_epoch(lambda: last, 8, False)
    full = checkpoints.last.read_bytes()
    checkpoints.strip(rebuild)

    assert checkpoints.written() == [tmp_path / "last.pt", tmp_path / "best.pt"]
    assert full_state_path(checkpoints.last).read_bytes() == full, "the full state stays beside the stripped one"
    for path, before in ((checkpoints.last, last), (checkpoints.best, best)):
        content = torch.load(path, weights_only=False)
        assert set(content) == STOCK_KEYS | {"scaler"}
        assert content["epoch"] == -1 and content["best_fitness"] == 0.5
        assert all(content[key] is None for key in set(content) - {"epoch", "best_fitness", "model"})
        model = content["model"]
        assert same(dict(model.state_dict()), dict(before["ema"].state_dict())), "the average, bit by bit, in half"
        assert not any(parameter.requires_grad for parameter in model.parameters()) and not model.training
        assert model.names == ["cat", "dog"] and model.hyp == {"lr0": 0.01, "loss_ota": 1}
        assert globals_of(path) - LAYERS <= PLAIN
    size = checkpoints.last.stat().st_size
    checkpoints.strip(rebuild)
    assert checkpoints.last.stat().st_size == size, "stripping twice changes nothing"
    assert full_state_path(checkpoints.last).read_bytes() == full


@pytest.mark.parametrize("name", ["last.pt", "best.pt", "last_full.pt"])
@pytest.mark.parametrize("is_best", [True, False])
def test_files_that_are_links_elsewhere(name, is_best, tmp_path):
    checkpoints = Checkpoints(tmp_path / "weights", epochs=9)
    checkpoints.after_epoch(lambda: content_of_epoch(3, 0.5, updates=1), 3, True)
    (tmp_path / "weights" / "last_full.pt").touch()
    (tmp_path / "weights" / name).rename(tmp_path / "elsewhere.pt")
    (tmp_path / "weights" / name).symlink_to(tmp_path / "elsewhere.pt")
    checkpoints.after_epoch(lambda: content_of_epoch(8, 0.5, updates=2), 8, is_best)
    full = checkpoints.last.read_bytes()
    checkpoints.strip(rebuild)
    assert full_state_path(checkpoints.last).read_bytes() == full
    assert all(read_checkpoint(path).epoch == -1 for path in checkpoints.written())
    assert (tmp_path / "weights" / name).is_symlink() and not (tmp_path / "elsewhere.pt").is_symlink()


def test_a_full_state_that_is_a_link_to_the_stripped_file(tmp_path):
    checkpoints = Checkpoints(tmp_path, epochs=9)
    checkpoints.after_epoch(lambda: content_of_epoch(8, 0.5), 8, False)
    full_state_path(checkpoints.last).symlink_to(checkpoints.last)
    full = checkpoints.last.read_bytes()
    checkpoints.strip(rebuild)
    assert full_state_path(checkpoints.last).read_bytes() == full and read_checkpoint(checkpoints.last).epoch == -1


def test_a_kill_before_the_last_file_leaves_no_temporary_one_for_good(tmp_path):
    """The full state has both names already, so that to rename a third one does nothing."""
    checkpoints = Checkpoints(tmp_path, epochs=9)
    checkpoints.after_epoch(lambda: content_of_epoch(8, 0.5), 8, True)
    os.link(checkpoints.last, full_state_path(checkpoints.last))
    full = checkpoints.last.read_bytes()
    checkpoints.strip(rebuild)
    names = "best.pt", "epoch_008.pt", "last.pt", "last_full.pt"
    assert {path.name for path in tmp_path.iterdir()} == set(names) and (tmp_path / names[3]).read_bytes() == full


def test_no_checkpoints(tmp_path):
    nothing = NoCheckpoints()
    nothing.initial(None)
    nothing.after_epoch(lambda: pytest.fail("built for nothing"), 0, True)
    nothing.strip(rebuild)
    assert nothing.written() == []
