"""What the watch of a process takes for a fault, by a clock and a store of the test's own."""

import time

import pytest
import torch

from utils.system import watch
from utils.system.watch import DONE, Watch

CPU = torch.device("cpu")


class Store(dict):
    """The part of TCPStore that is used; `is_gone`: it does not answer."""

    is_gone = False

    def add(self, key, count):
        if self.is_gone:
            raise RuntimeError("no answer")
        self[key] = self.get(key, 0) + count
        return self[key]


class Event:
    """Stands for an event of a GPU."""

    has_happened = False

    def query(self):
        return self.has_happened


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(watch, "open_store", lambda timeout: store)
    return store


@pytest.fixture
def watched(clock, store):
    return Watch(0, 2, 10, CPU, "run")


def other_reports(watched, store, count=1):
    store.add(watched.keys[1], count)


def look(watched, clock, seconds):
    clock[0] += seconds
    watched._report(1)
    return watched.fault(clock[0])


def test_who_reports_is_no_fault(watched, store, clock):
    for _ in range(20):
        other_reports(watched, store)
        assert look(watched, clock, 7) is None


def test_who_is_silent_is_named(watched, store, clock):
    other_reports(watched, store)
    assert look(watched, clock, 1) is None and look(watched, clock, 7) is None
    assert "no sign of life from rank 1 for 8 s (--loader-timeout 10)" in look(watched, clock, 2)


def test_who_never_came_has_longer(watched, clock):
    """One that has ended before it could report, such as on another machine where a file is missing."""
    for _ in range(50):
        assert look(watched, clock, 5.9) is None
    assert "no sign of life from rank 1 for 300 s" in look(watched, clock, 6)


def test_who_has_finished_may_be_silent(watched, store, clock):
    other_reports(watched, store, DONE)
    assert look(watched, clock, 100) is None and look(watched, clock, 100) is None


def test_a_store_that_is_gone_is_silence_of_all(watched, store, clock):
    other_reports(watched, store)
    assert look(watched, clock, 1) is None
    store.is_gone = True
    assert look(watched, clock, 7) is None
    assert "from rank 1 for" in look(watched, clock, 2)


def test_an_exchange_that_does_not_end_is_a_fault(watched, clock):
    watched.heard = [1e9] * 2
    with watched.exchange("the gradients", 7):
        assert watched.fault(clock[0] + 10) is None
        assert "the gradients of iteration 7 has not ended for 10 s" in watched.fault(clock[0] + 11)
    assert watched.fault(clock[0] + 11) is None
    with watched.exchange("a first number"):
        assert "GLOO_SOCKET_IFNAME" in watched.fault(clock[0] + 11)


def test_the_first_exchange_of_an_epoch_may_take_long_and_those_behind_it(watched, clock, monkeypatch):
    """On a GPU they are queued: the second one waits for the first, on a device that the host does not wait for."""
    watched.heard = [1e9] * 2
    events = [Event(), Event()]
    monkeypatch.setattr(torch.cuda, "Event", lambda: type("New", (), {"record": lambda self: None, "query": None})())
    watched.device = torch.device("cuda")
    watched.allow_waiting()
    with watched.exchange("the gradients", 0):
        pass
    watched.pending.event = events[0]
    with watched.exchange("the gradients", 1):
        pass
    assert watched.fault(clock[0] + 100) is None
    events[0].has_happened = True
    clock[0] += 100
    assert watched.fault(clock[0]) is None and watched.pending is None
    with watched.exchange("the gradients", 2):
        pass
    watched.pending.event = events[1]
    assert watched.fault(clock[0] + 9) is None
    assert "of iteration 2 has not ended" in watched.fault(clock[0] + 11)


def test_an_exchange_may_be_given_more_time(watched, clock):
    watched.heard = [1e9] * 2
    watched.allow_waiting(30)
    with watched.exchange("the gradients", 0):
        assert watched.fault(clock[0] + 29) is None
        assert "has not ended for 30 s (--loader-timeout 10)" in watched.fault(clock[0] + 31)
    watched.allow_waiting(3)
    with watched.exchange("the gradients", 1):
        assert watched.fault(clock[0] + 9) is None and watched.fault(clock[0] + 11)
