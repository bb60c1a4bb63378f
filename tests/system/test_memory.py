"""How much memory is free: of the machine, and of a container with a limit."""

import platform
import subprocess
import sys

import pytest

from utils.system.files import PROJECT_ROOT
from utils.system.memory import available_memory

VERSION_1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")
VERSION_2 = ("memory.max", "memory.current", "memory.stat")


@pytest.mark.parametrize(
    ("names", "texts", "free"),
    [
        (VERSION_2, ("1000\n", "900\n", "anon 5\ninactive_file 50\n"), 150),
        (VERSION_2, ("max\n", "900\n", "anon 5\ninactive_file 50\n"), None),
        (VERSION_1, ("1000\n", "900\n", "inactive_file 7\ntotal_inactive_file 50\n"), 150),
        (VERSION_1, ("9223372036854771712\n", "900\n", "inactive_file 7\ntotal_inactive_file 50\n"), None),
        (VERSION_1, ("1000\n", "900\n", "no statistics"), None),
        ((), (), None),
    ],
)
def test_limits_of_both_versions_of_cgroup(names, texts, free, tmp_path):
    """Without a limit it is what the machine has."""
    for name, text in zip(names, texts, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = available_memory(tmp_path, tmp_path / "none")
    assert found == free if free is not None else found is None or found > 1e6


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another library of C")
def test_memory_that_threads_free_is_used_again():
    """By the page faults of a thread that takes megabytes again and again."""
    program = """
import resource, threading
from utils.system.memory import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=lambda: [len([bytearray(b"1") * 1_000_000 for _ in range(4)]) for _ in range(99)])
    thread.start(), thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = faults()
keep_freed_memory()
print(before, faults())
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60)
    before, after = map(int, run.stdout.split())
    assert before > 10_000 and after < 2_000, run.stderr
