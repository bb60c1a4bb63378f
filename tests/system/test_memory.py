"""How much memory is free: of the machine, and of a container with a limit."""

import pytest

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
