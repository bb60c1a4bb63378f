"""Processes that are started by others, and end with them."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.data.fast.test_worker_pool import is_running
from utils.system.children import PARENT
from utils.system.files import PROJECT_ROOT

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
