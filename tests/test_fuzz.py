"""A short run of the fuzzer, and that it would notice what it is there for."""

import os
import time

import pytest

from tests import fuzz, mutations


@pytest.fixture(autouse=True)
def back_home(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", fuzz.kinds())
def test_every_file_loads_or_is_refused_in_words(kind, capsys):
    good = fuzz.main(["--inputs", "100" if kind == "picture" else "40", "--seed", "5", "--kinds", kind])
    assert good, capsys.readouterr().out


def faulty(read):
    """A kind that is read by `read`."""
    return fuzz.Kind({"a": b"a", "b": b"b"}, "file", read)


def refuse_without_name(file):
    raise ValueError("something is wrong")


def refuse_properly(file):
    raise ValueError(f"{file} is wrong")


def run_what_is_there(file):
    file.with_name("canary").touch()


@pytest.mark.parametrize(
    ("read", "outcomes", "canary"),
    [
        (lambda file: None, ["loaded"] * 2, False),
        (refuse_properly, ["refused"] * 2, False),
        (refuse_without_name, ["crashed"] * 2, False),
        (lambda file: {}["key"], ["crashed"] * 2, False),
        (lambda file: os._exit(3), ["crashed"] * 2, False),
        (lambda file: time.sleep(9) if file.read_bytes() == b"b" else None, ["loaded", "hung"], False),
        (run_what_is_there, ["loaded"] * 2, True),
    ],
    ids=["good", "refusal", "no name", "bug", "death", "hang", "code"],
)
def test_faults_are_noticed(read, outcomes, canary, monkeypatch):
    monkeypatch.setattr(fuzz, "PATIENCE", 2.0)
    results, found = fuzz.run_kind(faulty(read), 2, 0)
    assert [outcome for _, outcome, _, _ in results] == outcomes and found == canary


def test_a_seed_gives_the_same_files():
    kind = fuzz.kinds()["hyp yaml"]
    first, again, other = (list(mutations.broken_files(kind.healthy, 30, seed, True)) for seed in (1, 1, 2))
    assert first == again != other
    assert [data for _, data in first[:2]] == list(kind.healthy.values()), "healthy files come first"
