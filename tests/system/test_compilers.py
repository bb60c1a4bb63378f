"""What Triton needs to compile, and how a run says that it is missing."""

import logging

import pytest
import torch

from utils.config.options import train_parser
from utils.loss.batched import BatchedLoss
from utils.run import fast_paths
from utils.system import compilers

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder that is the whole PATH; Triton and the headers are there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compilers, "has_headers", lambda: True)
    monkeypatch.setattr(compilers, "find_spec", lambda name: name == "triton")
    compilers.missing_for_triton.cache_clear()
    yield tmp_path
    compilers.missing_for_triton.cache_clear()


def program(folder, name):
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)
    return str(folder / name)


def test_the_compiler_is_the_one_that_triton_takes(tools, monkeypatch):
    assert compilers.c_compiler() is None
    clang = program(tools, "clang")
    assert compilers.c_compiler() == clang
    gcc = program(tools, "gcc")
    assert compilers.c_compiler() == gcc
    monkeypatch.setenv("CC", "clang")
    assert compilers.c_compiler() == clang
    monkeypatch.setenv("CC", "no-such-compiler")
    assert compilers.c_compiler() is None


def test_headers_are_looked_for_where_triton_does(tmp_path, monkeypatch):
    schemes = {"posix_local": tmp_path / "local", "posix_prefix": tmp_path / "prefix"}
    monkeypatch.setattr(compilers.sysconfig, "get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr(compilers.sysconfig, "get_paths", lambda scheme: {"include": str(schemes[scheme])})
    for name in ("CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert not compilers.has_headers()
    (tmp_path / "prefix").mkdir()
    (tmp_path / "prefix" / "Python.h").touch()
    assert compilers.has_headers()
    schemes["posix_prefix"] = tmp_path / "empty"
    monkeypatch.setenv("CPATH", f"/nowhere:{tmp_path / 'prefix'}")
    assert compilers.has_headers()


def test_reasons(tools):
    assert compilers.why_no_kernels(CPU) == "Triton and a GPU are needed"
    assert "a C compiler missing: pip install triton" in compilers.why_no_kernels(GPU)
    program(tools, "gcc")
    compilers.missing_for_triton.cache_clear()
    assert compilers.why_no_kernels(GPU) is None


def test_a_run_without_a_compiler_says_so_and_goes_without_kernels(tools, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(fast_paths, "load", lambda name: lambda *_, **__: lambda *_, **__: None)
    opt = train_parser().parse_args(["--fast"])
    _, rows = fast_paths.fill_seams(opt, GPU)
    reasons = {seam: (chosen, why) for seam, chosen, why in rows}
    assert reasons["forward"][0].startswith("not ") and "a C compiler missing" in reasons["forward"][1]
    assert "a C compiler missing" in next(chosen for seam, chosen, _ in rows if seam == "losses")
    assert "last steps on the GPU" not in reasons["loader"][0]


def test_the_loss_does_not_even_try(tools):
    class Head:
        nl, na, nc = 1, 1, 3
        anchors = type("Anchors", (), {"device": GPU})

    loss = BatchedLoss.__new__(BatchedLoss)
    loss.use_kernels, loss.layers = None, [Head]
    assert loss.has_kernels() is False
