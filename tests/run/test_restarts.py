"""Which run the processes of a launcher go on with when they are started again."""

import json
import logging
import os
from argparse import Namespace

import pytest

from utils.run import restarts
from utils.system.folder_lock import identity


@pytest.fixture(autouse=True)
def launched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")


def begun(folder, *names, pid=None, process=1, seconds=0):
    """A run, with checkpoints `names`, that a process of the launcher `pid` (ours) has begun `seconds` from now."""
    (folder / "weights").mkdir(parents=True)
    record = folder / restarts.NAME
    record.write_text(json.dumps({"launcher": identity(pid or os.getppid()), "process": process}))
    for name in names:
        (folder / "weights" / name).write_text("")
    os.utime(record, (record.stat().st_mtime + seconds,) * 2)
    return folder


def options(**given):
    return Namespace(**{"resume": False, "evolve": 0, "project": "runs", "name": "exp", "save_dir": "", **given})


def outcome(opt):
    return restarts.go_on(opt), opt.resume, opt.save_dir


def test_first_start(tmp_path, caplog):
    begun(tmp_path / "runs/exp", "last.pt", pid=os.getpid())  # of another launcher
    begun(tmp_path / "runs/exp2", "last.pt", process=os.getpid())  # of this very process
    (tmp_path / "runs/exp3").mkdir()
    (tmp_path / "runs/exp3" / restarts.NAME).write_text("[")
    begun(tmp_path / "runs/other", "last.pt")
    with caplog.at_level(logging.INFO):
        assert outcome(options()) == (False, False, "")
    assert not caplog.text


def test_goes_on_from_the_last_checkpoint(tmp_path, monkeypatch, caplog):
    begun(tmp_path / "runs/exp", "last.pt", pid=os.getpid())
    last = "runs/exp2/weights/last.pt"
    begun(tmp_path / "runs/exp2", "last.pt", seconds=-60)
    with caplog.at_level(logging.INFO):
        assert outcome(options()) == (True, last, "")
    assert caplog.messages == [f"Started again by torchrun: the run goes on from {last}"]
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert outcome(options()) == (False, False, "")


@pytest.mark.parametrize("names", [(), ("last.pt",)], ids=["no checkpoint", "that of an older run"])
def test_begins_anew_in_its_folder_before_the_first_checkpoint(names, tmp_path, caplog):
    begun(tmp_path / "runs/exp", *names, seconds=60)
    with caplog.at_level(logging.INFO):
        assert outcome(options()) == (True, False, "runs/exp")
    assert "before the first checkpoint: runs/exp begins anew" in caplog.text


@pytest.mark.parametrize("resume", [True, "runs/exp/weights/epoch_003.pt"])
@pytest.mark.parametrize("seconds", [-60, 60])
def test_a_resumed_run(resume, seconds, tmp_path):
    """It goes on from its last checkpoint, but not from one that was there before it was resumed."""
    begun(tmp_path / "runs/exp", "last.pt", seconds=seconds)
    opt = options(resume=resume)
    assert restarts.go_on(opt) and opt.save_dir == ""
    last = "runs/exp/weights/last.pt"
    assert (os.path.abspath(opt.resume) == str(tmp_path / last)) if seconds < 0 else opt.resume == resume


def test_a_checkpoint_that_is_named_from_inside_its_run(tmp_path, monkeypatch):
    begun(tmp_path / "runs/exp", "last.pt", seconds=-60)
    monkeypatch.chdir(tmp_path / "runs/exp")
    last = str(tmp_path / "runs/exp/weights/last.pt")
    assert outcome(options(resume="weights/last.pt")) == (True, last, "")


def test_note_keeps_the_time_of_the_first_start(tmp_path, monkeypatch):
    record = tmp_path / restarts.NAME
    restarts.note(tmp_path)
    first = record.read_bytes()
    assert json.loads(first) == {"launcher": identity(os.getppid()), "process": os.getpid()}
    os.utime(record, (1, 1))
    restarts.note(tmp_path)
    assert record.stat().st_mtime == 1, "an epoch may have ended since then"
    record.write_text(json.dumps({"launcher": identity(os.getpid()), "process": 1}))  # it is resumed by another one
    restarts.note(tmp_path)
    assert record.read_bytes() == first
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    record.unlink()
    restarts.note(tmp_path)
    assert not record.exists()
