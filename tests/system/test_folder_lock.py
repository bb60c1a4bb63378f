"""Who owns a folder: one living process, however the others ended."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from utils.system import folder_lock
from utils.system.files import PROJECT_ROOT
from utils.system.folder_lock import ABANDONED, NAME, check_free, keep, own

ADVICE = "choose another --name"
OWNER = """
import os, sys, time
from utils.system.folder_lock import own
own(sys.argv[1], "")
if "fork" in sys.argv and os.fork() == 0:
    os.setsid()
os.write(1, b"%d\\n" % os.getpid())  # in one piece: two processes share the pipe
if "end" not in sys.argv:
    time.sleep(600)
"""


@pytest.fixture
def start():
    """Starts another process that owns a folder; returns it and the ids of it and its workers."""
    started, pids = [], []

    def run(folder, *words):
        process = subprocess.Popen([sys.executable, "-c", OWNER, str(folder), *words], cwd=PROJECT_ROOT,
                                   stdout=subprocess.PIPE, text=True)  # fmt: skip
        started.append(process)
        ids = [int(process.stdout.readline()) for _ in range(1 + ("fork" in words))]
        pids.extend(ids)
        return process, ids

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def no_locks(monkeypatch):
    """A file system without locks."""

    def fail(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folder_lock.fcntl, "lockf", fail)


def owner_file(folder, **changes):
    process = psutil.Process()
    content = {"pid": process.pid, "host": socket.gethostname(), "started": process.create_time()} | changes
    (folder / NAME).write_text(json.dumps(content))


def write_run(folder, age):
    (folder / "weights").mkdir()
    path = folder / "weights" / "last.pt"
    path.write_text("")
    os.utime(path, (time.time() - age,) * 2)


def test_a_living_owner_is_named(tmp_path, start):
    _, (pid,) = start(tmp_path)
    for ask in (own, check_free):
        with pytest.raises(ValueError, match=rf"{tmp_path} is in use: process {pid} on .* or choose another --name$"):
            ask(tmp_path, ADVICE)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="is in use"):
        own(tmp_path / "link" / ".", ADVICE)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_lock_ends_with_its_process_although_a_worker_lives_on(number, tmp_path, start):
    process, pids = start(tmp_path, "fork")
    process.send_signal(number)
    process.wait()
    worker = next(pid for pid in pids if pid != process.pid)
    assert psutil.pid_exists(worker), "it has inherited the open file"
    check_free(tmp_path, ADVICE)
    own(tmp_path, ADVICE)
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_nothing_is_left_after_a_normal_end(tmp_path, start):
    process, _ = start(tmp_path, "end")
    process.wait()
    assert list(tmp_path.iterdir()) == []
    check_free(tmp_path, ADVICE)
    check_free(tmp_path / "none", ADVICE)
    assert list(tmp_path.iterdir()) == [], "a question leaves nothing either"


def test_the_owner_may_ask_again(tmp_path, start):
    own(tmp_path, ADVICE)
    own(tmp_path, ADVICE)
    check_free(tmp_path, ADVICE)
    answer = subprocess.run([sys.executable, "-c", OWNER, str(tmp_path)], cwd=PROJECT_ROOT, capture_output=True,
                            text=True)  # fmt: skip
    assert f"process {os.getpid()} on" in answer.stderr, "to ask did not give the lock back"


def test_a_forked_worker_is_not_the_owner(tmp_path):
    own(tmp_path, ADVICE)
    pid = os.fork()
    if pid == 0:
        try:
            own(tmp_path, ADVICE)
        except ValueError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_the_end_removes_nothing_that_is_anothers(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    own(folder, ADVICE)
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    owner_file(folder, pid=1)
    folder_lock._give_up(folder)
    assert (folder / NAME).exists()


def test_a_file_that_its_owner_has_just_removed_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    lockf, path, calls = folder_lock.fcntl.lockf, tmp_path / NAME, []

    def remove_first(descriptor, flags):
        if not calls:
            path.unlink()
        calls.append(descriptor)
        lockf(descriptor, flags)

    monkeypatch.setattr(folder_lock.fcntl, "lockf", remove_first)
    own(tmp_path, ADVICE)
    assert len(calls) == 2 and path.exists()


def test_a_container_that_was_made_anew_goes_on(tmp_path, caplog):
    owner_file(tmp_path, host="elsewhere", pid=7)
    own(tmp_path, ADVICE)
    assert "was not given back by process 7 on elsewhere; end that process if it is still alive" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', "\x00" * 10, '{"pid": 1e999}', "[" * 4000])
def test_text_that_makes_no_sense_does_not_matter(text, tmp_path):
    (tmp_path / NAME).write_text(text)
    own(tmp_path, ADVICE)
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_a_lock_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / NAME).mkdir()
    with pytest.raises(ValueError, match=r"\.lock cannot be written \(Is a directory\); choose another --name"):
        own(tmp_path, ADVICE)
    with pytest.raises(ValueError, match=r"cannot be written \(No such file or directory\)"):
        own(tmp_path / "none", ADVICE)


def test_a_process_that_was_killed_gets_the_time_to_end(tmp_path, monkeypatch):
    owner_file(tmp_path, pid=2**22 + 1)
    answers = [False, False, True]
    monkeypatch.setattr(folder_lock, "_lock", lambda descriptor: answers.pop(0))
    own(tmp_path, ADVICE)
    assert not answers
    monkeypatch.setattr(folder_lock, "_lock", lambda descriptor: False)
    monkeypatch.setattr(folder_lock, "END_LIMIT", 0.2)
    (tmp_path / "b").mkdir()
    owner_file(tmp_path / "b", pid=2**22 + 1)
    with pytest.raises(ValueError, match="is in use"):  # of another container, for instance
        own(tmp_path / "b", ADVICE)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_something_that_is_no_file(make, tmp_path):
    make(tmp_path / NAME)
    with pytest.raises(ValueError, match=rf"\.lock cannot be written .*; {ADVICE}"):
        own(tmp_path, ADVICE)


def test_a_lock_that_was_removed_is_made_anew(tmp_path, caplog):
    own(tmp_path, ADVICE)
    keep(tmp_path)
    (tmp_path / NAME).unlink()
    keep(tmp_path)
    assert "was removed by somebody" in caplog.text
    other = subprocess.run(
        [sys.executable, "-c", OWNER, str(tmp_path)], cwd=PROJECT_ROOT, capture_output=True, text=True
    )
    assert f"is in use: process {os.getpid()} on" in other.stderr, "another one is refused as before"


def test_a_folder_that_another_process_has_taken_meanwhile_is_given_up(tmp_path, start):
    own(tmp_path, ADVICE)
    (tmp_path / NAME).unlink()
    start(tmp_path)
    with pytest.raises(ValueError, match="was taken by another process while this one wrote there"):
        keep(tmp_path)


def test_a_folder_that_was_never_owned_is_not_looked_at(tmp_path):
    keep(tmp_path)
    assert not (tmp_path / NAME).exists()


# ---- without locks --------------------------------------------------------------------------------------------------


def test_without_locks_a_living_process_of_this_host_is_the_owner(tmp_path, start, no_locks):
    _, (pid,) = start(tmp_path)
    with pytest.raises(ValueError, match=f"is in use: process {pid} on"):
        own(tmp_path, ADVICE)


@pytest.mark.parametrize("changes", [{"started": 1.0}, {"pid": 2**22 + 1}, {"pid": -1}, {"pid": 10**30}])
def test_without_locks_a_process_that_has_ended_is_none(changes, tmp_path, no_locks):
    owner_file(tmp_path, **changes)
    own(tmp_path, ADVICE)
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_without_locks_a_process_that_was_killed_and_that_nobody_has_waited_for_is_none(tmp_path, no_locks):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = psutil.Process(process.pid).create_time()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table of processes
    owner_file(tmp_path, pid=process.pid, started=started)
    own(tmp_path, ADVICE)
    process.communicate()


def test_without_locks_another_host_that_has_taken_over_is_noticed(tmp_path, no_locks):
    own(tmp_path, ADVICE)
    owner_file(tmp_path, host="elsewhere")
    with pytest.raises(ValueError, match="was taken by another process"):
        keep(tmp_path)


def test_without_locks_another_host_is_believed_for_an_hour(tmp_path, no_locks, caplog):
    owner_file(tmp_path, host="elsewhere", pid=7)
    write_run(tmp_path, ABANDONED - 60)
    with pytest.raises(ValueError, match=r"is in use: process 7 on elsewhere .* or remove .*\.lock if that process"):
        own(tmp_path, ADVICE)
    os.utime(tmp_path / "weights" / "last.pt", (time.time() - ABANDONED - 60,) * 2)
    os.utime(tmp_path / "weights", (time.time() - ABANDONED - 60,) * 2)
    own(tmp_path, ADVICE)
    assert "taken over from process 7 on elsewhere: nothing was written there for 61 minutes" in caplog.text


def test_a_system_without_locks_at_all(tmp_path, monkeypatch):
    """Windows, which has not all functions of `os` either."""
    monkeypatch.setattr(folder_lock, "fcntl", None)
    for name in ("pread", "pwrite"):
        monkeypatch.delattr(os, name)
    own(tmp_path, ADVICE)
    keep(tmp_path)
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
