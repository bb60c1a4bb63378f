"""Byte code that a fast run keeps where Python may not: for which command lines, where, and that it is used."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from utils.system import byte_code
from utils.system.files import PROJECT_ROOT

PROGRAM = """
import sys
from utils.system import byte_code
print(byte_code.keep_ahead(sys.argv[1:], package="pack"))
import pack.part
print(pack.part.__cached__)
"""


@pytest.fixture
def start(tmp_path):
    """Call with an environment and a command line: (whether byte code is kept, where that of a module lies)."""
    (tmp_path / "pack").mkdir()
    for name in ("__init__", "part"):
        (tmp_path / "pack" / f"{name}.py").touch()

    def call(line="--fast --epochs 3", **environment):
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{PROJECT_ROOT}{os.pathsep}{tmp_path}",
                       "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment}  # fmt: skip
        run = subprocess.run([sys.executable, "-c", PROGRAM, *line.split()], env=environment, capture_output=True,
                             text=True, check=True)  # fmt: skip
        is_kept, place = run.stdout.splitlines()
        return is_kept == "True", place

    return call


def test_it_is_kept_and_found_again_where_python_may_not(start, tmp_path):
    is_kept, place = start(PYTHONDONTWRITEBYTECODE="1")
    assert is_kept and place.startswith(f"{tmp_path}/cache/yolov7fast/byte_code/")
    written = os.stat(place).st_ino
    assert start(PYTHONDONTWRITEBYTECODE="1") == (True, place)
    assert os.stat(place).st_ino == written and not (tmp_path / "pack" / "__pycache__").exists()


def test_a_folder_that_cannot_be_written_to_is_no_fault(start, tmp_path):
    (tmp_path / "file").touch()
    is_kept, place = start(PYTHONDONTWRITEBYTECODE="1", XDG_CACHE_HOME=str(tmp_path / "file"))
    assert is_kept and not os.path.exists(place)


@pytest.mark.parametrize(
    ("line", "environment"),
    [
        ("--epochs 3", {"PYTHONDONTWRITEBYTECODE": "1"}),
        ("--fast", {}),  # Python keeps it beside the sources
        ("--fast", {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/nowhere"}),
        ("--fast", {"PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": "cache"}),
    ],
)
def test_else_nothing_is_changed(line, environment, start, tmp_path):
    is_kept, _ = start(line, **environment)
    assert not is_kept and not (tmp_path / "cache").exists()


def test_byte_code_of_an_installation_is_used(start, tmp_path):
    start(line="")
    assert (tmp_path / "pack" / "__pycache__").exists()
    assert start(PYTHONDONTWRITEBYTECODE="1")[0] is False


def test_none_is_kept_on_a_disk_that_is_nearly_full(monkeypatch, tmp_path):
    """Python would leave a file that ends early there, with which no later start gets past its import."""
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(byte_code, "find_spec", lambda package: SimpleNamespace(origin="/no/pack.py", cached="/no/pyc"))
    given = ["--fast"], {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    monkeypatch.setattr(byte_code, "ROOM", 2**62)
    assert not byte_code.keep_ahead(*given) and sys.pycache_prefix is None
    monkeypatch.setattr(byte_code, "ROOM", 0)
    assert byte_code.keep_ahead(*given) and sys.pycache_prefix == str(tmp_path / "cache/yolov7fast/byte_code")


def test_all_cores_compile_at_the_first_start(monkeypatch, tmp_path):
    for name in ("__init__", "part/__init__", "part/wrong", "part/last", "testing/never"):
        path = tmp_path / "pack" / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("def" if "wrong" in name else "")
    origin = str(tmp_path / "pack" / "__init__.py")
    monkeypatch.setattr(byte_code, "find_spec", lambda package: SimpleNamespace(origin=origin, cached="/no/pyc"))
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: started.append(popen(*args, **kwargs)))
    given = ["--fast"], {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    for cores in (7, 8, 8):
        monkeypatch.setattr(byte_code, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(sys, "pycache_prefix", None)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        assert byte_code.keep_ahead(*given)
        assert len(started) == (0 if cores < byte_code.FEWEST_CORES else 7), "and not again"
        assert [process.wait(60) for process in started] == [0] * len(started)
    made = (tmp_path / "cache").rglob("*.pyc")
    assert sorted(path.name.split(".")[0] for path in made) == ["__init__", "__init__", "last"]


def test_a_package_that_is_missing_is_left_to_its_import():
    assert byte_code.keep_ahead(["--fast"], package="no_such_package") is False


def test_nothing_of_torch_is_needed():
    program = "import sys; import utils.system.byte_code; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "numpy"} & set(run.stdout.split())
