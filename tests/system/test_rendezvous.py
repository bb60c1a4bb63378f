"""Processes that meet in a store which still holds what earlier ones have written."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from utils.system import rendezvous


@pytest.fixture
def start(monkeypatch):
    """`start(number)`: so many processes, here threads, start; what each of them got. All starts have one store."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 0)]))

    def start(number, say):
        rendezvous.fresh_store.cache_clear()
        with ThreadPoolExecutor(number) as threads:
            return list(threads.map(lambda rank: say(rank, number), reversed(range(number))))

    yield start
    rendezvous.fresh_store.cache_clear()


def test_each_start_has_a_store_of_its_own(start):
    def say(rank, number):
        mine = rendezvous.fresh_store(rank, number)
        is_new = not mine.check([str(rank)])
        mine.set(str(rank), "here")
        return is_new and all(mine.get(str(other)) == b"here" for other in range(number))

    for number in (3, 3, 1, 2):
        assert start(number, say) == [True] * number


def test_text_of_rank_zero(start, monkeypatch):
    monkeypatch.setattr(rendezvous, "_number", iter([0] * 3))  # each of three processes counts by itself
    assert start(3, lambda rank, number: rendezvous.text_of_rank_zero(f"of {rank}", rank, number)) == ["of 0"] * 3
    assert rendezvous.text_of_rank_zero("alone", 0, 1) == "alone"
