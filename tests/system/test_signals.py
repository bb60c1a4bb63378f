"""Ctrl-C and SIGTERM that are held back, and those that are not."""

import signal
import threading

import pytest

from utils.system import signals

NUMBERS = signal.SIGINT, signal.SIGTERM


@pytest.fixture(autouse=True)
def no_loader_of_torch():
    """Its handler stays when other tests have had one."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, signals.Terminated)]
)
def test_the_first_is_held_back_until_the_end(number, error):
    before, done = [signal.getsignal(each) for each in NUMBERS], []
    with pytest.raises(KeyboardInterrupt) as raised, signals.sigterm_raised(), signals.held_back():
        signal.raise_signal(number)
        done.append("all")
    assert done == ["all"] and raised.type is error and signals.status_of(raised.value) == 128 + number
    assert [signal.getsignal(each) for each in NUMBERS] == before


def test_the_second_is_not_held_back():
    done = []
    with pytest.raises(signals.Terminated), signals.sigterm_raised(), signals.held_back():
        signal.raise_signal(signal.SIGTERM)
        done.append("one")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        done.append("two")
    assert done == ["one", "two"]


def test_nothing_is_changed_without_a_signal_or_in_another_thread():
    before, seen = [signal.getsignal(each) for each in NUMBERS], []

    def elsewhere():
        with signals.held_back(), signals.sigterm_raised():
            seen.append([signal.getsignal(each) for each in NUMBERS])

    with signals.held_back():
        assert [signal.getsignal(each) for each in NUMBERS] != before
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before] and [signal.getsignal(each) for each in NUMBERS] == before


def test_compilers_ignore_what_their_parent_ignores():
    """A script starts its background jobs so; exec would give a handler of Python back to the kernel, which kills."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals.sigterm_raised(), signals.held_back():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and callable(signal.getsignal(signal.SIGTERM))
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_workers_that_end_by_the_same_signal_are_no_error():
    """Nor does a search take it for one of its candidate, and go on."""

    def of_torch(number, frame):
        raise RuntimeError("DataLoader worker is killed by signal")

    signal.signal(signal.SIGCHLD, of_torch)
    with pytest.raises(signals.Terminated), signals.sigterm_raised():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGCHLD)
