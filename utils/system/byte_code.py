"""Byte code of what a fast run imports, kept in the user's cache folder where Python may keep none beside the sources.

Installers such as uv leave torch without byte code, and images for containers often have PYTHONDONTWRITEBYTECODE set or
packages that cannot be written to. Then each start compiles thousands of files: two of three seconds of torch's import.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from utils.system.children import end_with
from utils.system.cores import usable_cores
from utils.system.driver import wants_speed
from utils.system.files import user_cache

# Bytes that have to be free: on a full disk Python may leave a file that ends early, which no later start gets past.
ROOM = 2**30
FEWEST_CORES = 8  # with which more processes than the one that imports compile, at the first start
# Folders of torch from which a training run imports nothing, or that hold no modules.
NOT_IMPORTED = {"testing", "_inductor", "_dynamo", "onnx", "include", "lib", "share", "bin", "__pycache__"}
COMPILING = """
import sys
from contextlib import suppress
from py_compile import compile
for file in sys.argv[1:]:
    with suppress(Exception):
        compile(file, doraise=True)
"""


def keep_ahead(words: Sequence[str], environment: Mapping[str, str] = os.environ, package: str = "torch") -> bool:
    """Let Python keep byte code in `folder`, if the command line `words` asks for a fast run and `package` has none.

    Call it before `package` is imported. Nothing changes where PYTHONPYCACHEPREFIX names a folder. What cannot be
    written is compiled again at the next start; nothing is said. Returns whether that was done.

    At the first start all cores compile `package`, while it is imported.
    """
    if sys.pycache_prefix or not wants_speed(words):
        return False
    spec = find_spec(package)
    if not (spec and spec.origin and spec.cached) or os.path.exists(spec.cached):
        return False
    if not sys.dont_write_bytecode and os.access(os.path.dirname(spec.origin), os.W_OK):
        return False  # Python keeps it there as soon as it is imported
    try:
        place = folder(environment)
    except OSError:
        return False
    if _free(place) < ROOM:
        return False
    sys.pycache_prefix, sys.dont_write_bytecode = str(place), False
    if not os.path.exists(cache_from_source(spec.origin)):
        _compile_beside(os.path.dirname(spec.origin))
    return True


def _compile_beside(package_folder):
    """Let other processes compile the modules in a folder; they end with this one."""
    count = usable_cores() - 1
    if count + 1 < FEWEST_CORES:
        return
    files = []
    for folder, inner, names in os.walk(package_folder):
        inner[:] = [name for name in inner if name not in NOT_IMPORTED]
        files += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    line = [sys.executable, "-X", f"pycache_prefix={sys.pycache_prefix}", "-c", COMPILING]
    for number in range(count):
        subprocess.Popen([*line, *files[number::count]], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                         preexec_fn=partial(end_with, os.getpid()))  # fmt: skip


def _free(place):
    """Bytes that are free where `place` would be made; 0 if nobody knows."""
    try:
        return shutil.disk_usage(next(path for path in place.parents if path.is_dir())).free
    except OSError:
        return 0


def folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where it lies; tools that measure a first start remove it."""
    return user_cache(environment) / "byte_code"
