"""What Triton needs to compile, and how a run says that it is missing."""

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from utils.config.options import train_parser
from utils.loss.batched import BatchedLoss
from utils.run import fast_paths
from utils.system import compilers
from utils.system.files import PROJECT_ROOT

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


@pytest.fixture
def triton(tmp_path, monkeypatch):
    """A package with the key of Triton, which counts how often it is made; `start()` gives the key as a new process."""
    (tmp_path / "triton").mkdir()
    binary = tmp_path / "triton" / "binary.so"
    binary.write_text("one")
    made = []

    def start(cache=tmp_path / "cache"):
        module = SimpleNamespace(triton_key=lambda: made.append(1) or f"key of {binary.read_text()}")
        package = SimpleNamespace(__file__=str(tmp_path / "triton" / "__init__.py"))
        modules = {"triton": package, "triton.runtime.cache": module, "triton.compiler.compiler": SimpleNamespace()}
        monkeypatch.setattr(compilers, "import_module", modules.__getitem__)
        for _ in range(2):
            compilers.keep_triton_key({"XDG_CACHE_HOME": str(cache), "HOME": ""})
        assert module.triton_key() == module.triton_key()
        return module.triton_key()

    return SimpleNamespace(start=start, made=made, binary=binary, kept=tmp_path / "cache" / "yolov7fast")


def test_the_key_of_triton_is_made_once_for_the_same_files(triton):
    assert triton.start() == triton.start() == "key of one" and len(triton.made) == 1
    triton.binary.write_text("other")
    assert triton.start() == "key of other" and len(triton.made) == 2
    os.utime(triton.binary, ns=(1, 1))
    assert triton.start() == "key of other" and len(triton.made) == 3


def test_files_of_triton_that_lie_elsewhere_count_as_well(triton):
    """As in a Triton that is installed from its sources, whose backends are links."""
    elsewhere = triton.binary.parents[1] / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "driver.py").touch()
    (triton.binary.parent / "backend").symlink_to(elsewhere)
    triton.start()
    (elsewhere / "driver.py").write_text("other")
    triton.start()
    assert len(triton.made) == 2


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"files": 1, "key": "wrong"}', "\udcff", "[" * 100_000])
def test_a_damaged_file_with_the_key_is_replaced(content, triton):
    triton.start()
    [file] = triton.kept.iterdir()
    whole = file.read_text()
    file.write_bytes(content.encode(errors="surrogateescape"))
    assert triton.start() == "key of one" and len(triton.made) == 2 and file.read_text() == whole


@pytest.mark.parametrize("cache", ["/dev/null", "relative"])
def test_without_a_folder_the_key_of_triton_is_made_at_each_start(cache, triton):
    for count in (1, 2):
        assert triton.start(cache) == "key of one" and len(triton.made) == count
    assert not os.path.exists("relative")


def test_the_key_of_the_installed_triton_stays_what_it_is(tmp_path):
    cache = pytest.importorskip("triton.runtime.cache")
    if not hasattr(cache, "triton_key"):
        pytest.skip("of another version")
    program = """
from triton.runtime import cache
from utils.system import compilers
make = cache.triton_key
compilers.keep_triton_key()
print(cache.triton_key is not make, cache.triton_key() == make())
"""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, env=environment, capture_output=True,
                             text=True, timeout=60)  # fmt: skip
        assert run.stdout == "True True\n", run.stderr
