"""What every test shares: one thread, the checkout on the path, and the parity table at the end."""

import logging
import signal
import sys
from pathlib import Path

import cv2
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import golden_data, parity

cv2.setNumThreads(0)
# In the background and in the processes of `pytest -n` this signal is ignored, and every program that a test starts
# would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the golden data set, which the tests of a file may write to."""
    return golden_data.copy_dataset(tmp_path_factory.mktemp("golden"))


@pytest.fixture(autouse=True)
def one_thread():
    """The golden values were computed with one thread; two threads sum in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def handlers_of_a_new_process():
    """Programs that other tests ran to their end in this process have left other ones; a signal would end the tests."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)
    of_children = signal.getsignal(signal.SIGCHLD)
    yield
    if callable(of_children):  # that of torch's loader, which sets it once, and waits in vain without it
        signal.signal(signal.SIGCHLD, of_children)


@pytest.fixture(autouse=True)
def log_level():
    """A program that a test runs in this process sets the level of the root logger."""
    before = logging.root.level
    yield
    logging.root.setLevel(before)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_sessionfinish(session):
    """One of the processes of `pytest -n` hands on what it has compared."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["parity"] = parity.as_rows()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    parity.add_rows(getattr(node, "workeroutput", {}).get("parity", []))


def pytest_terminal_summary(terminalreporter):
    lines = parity.table()
    if lines:
        terminalreporter.section("parity with the golden values")
        for line in lines:
            terminalreporter.write_line(line)
