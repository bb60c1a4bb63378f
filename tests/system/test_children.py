"""Processes that are started by others, and end with them."""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context

import numpy as np
import pytest

from tests.data.fast.test_worker_pool import is_running
from tests.forked import Forked
from utils.system import children
from utils.system.children import PARENT
from utils.system.files import PROJECT_ROOT
from utils.system.signals import Terminated, sigterm_raised

WAITING = """
import time
from utils.run import entry

entry.run(lambda _: print("runs", flush=True) or time.sleep(600), None)
"""
STARTER = """
import os, subprocess, sys, threading, time
from utils.system.children import PARENT

def start():
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    print(child.pid, flush=True)
    child.wait()

if sys.argv[2] == "tool":
    os.environ[PARENT] = str(os.getpid())
if sys.argv[2] == "torchrun":
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
thread = threading.Thread(target=start)
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux sends that signal")
@pytest.mark.parametrize(("starter", "ends"), [("tool", True), ("torchrun", True), ("shell", False)])
def test_a_run_ends_with_the_process_that_waits_for_it(starter, ends):
    words = [sys.executable, "-c", STARTER, WAITING, starter]
    with subprocess.Popen(words, cwd=PROJECT_ROOT, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + (20 if ends else 2)
    while (lives := is_running(child)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if lives:
        os.kill(child, signal.SIGKILL)
    assert lives != ends


def test_a_run_whose_starter_is_gone_already_ends_at_once():
    variables = os.environ | {PARENT: "1"}  # this process is another
    done = subprocess.run([sys.executable, "-c", WAITING], cwd=PROJECT_ROOT, env=variables, timeout=120)
    assert done.returncode == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what threads do")
def test_a_process_is_forked_when_no_other_thread_works(monkeypatch):
    """Else it would have the locks of that thread, and nobody to open them."""
    monkeypatch.setattr(children, "_patience", 60)
    numbers = np.zeros(5_000_000)
    thread = threading.Thread(target=np.arctan2, args=(np.ones(1), np.ones(1)), kwargs={"out": numbers})
    thread.start()
    while not numbers[0]:
        time.sleep(0.001)
    child = get_context("fork").Process(target=lambda: os._exit(0 if numbers[-1] else 1))
    child.start()
    child.join()
    thread.join()
    assert child.exitcode == 0


def test_forks_wait_for_a_thread_that_never_sleeps_less_and_less(monkeypatch):
    looks = []
    monkeypatch.setattr(children, "_patience", 0.01)
    monkeypatch.setattr(children, "_others_work", lambda: looks.append(1) or True)
    children.let_threads_rest()
    children.let_threads_rest()
    assert looks and children._patience == 0.0025
    monkeypatch.setattr(children, "_others_work", lambda: False)
    children.let_threads_rest()
    assert children._patience == children.PATIENCE


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_while_a_fork_waits_is_not_lost(number, raised, monkeypatch):
    """Python prints and drops what is raised there."""
    looks = []

    def look():
        looks.append(1)
        if len(looks) == 1:
            signal.raise_signal(number)
        return len(looks) < 3

    monkeypatch.setattr(children, "_others_work", look)
    with pytest.raises(raised), sigterm_raised():
        child = get_context("fork").Process(target=int)
        child.start()
        child.join()
        time.sleep(10)
    assert len(looks) == 3 and child.exitcode == 0


def test_ctrl_c_in_the_midst_of_a_fork_is_not_lost():
    """It comes in the hook of another module; the new process gets its usual handler, and not the signal."""
    program = """
import os, signal, time
os.register_at_fork(before=lambda: signal.raise_signal(signal.SIGINT))
from utils.system import children
try:
    child = os.fork()
    if not child:
        time.sleep(0.5)
        os._exit(7 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)
    time.sleep(20)
except KeyboardInterrupt:
    print("interrupted", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("interrupted 7\n", "")


def wait_for_a_worker():
    worker = get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    worker.start()
    worker.join()


def test_a_program_that_is_stuck_says_where_it_is_and_its_workers(tmp_path):
    status, text = Forked(tmp_path / "output.txt", wait_for_a_worker).end(timeout=1)
    assert status is None and text.count("in wait_for_a_worker\n") == 2
