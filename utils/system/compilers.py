"""Whether Triton can compile kernels here, found out without trying: it needs a C compiler and Python's headers."""

import json
import logging
import os
import shutil
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from utils.system.files import atomic_write, user_cache

logger = logging.getLogger(__name__)

TRITON_MODULES = "triton.runtime.cache", "triton.compiler.compiler"
ADVICE = "pip install triton, apt-get install -y gcc python3-dev"


def why_no_kernels(device: Any) -> str | None:
    """One clause that says why our kernels cannot run on `device` (a torch.device); None where nothing is missing."""
    if device.type != "cuda":
        return "Triton and a GPU are needed"
    missing = missing_for_triton()
    return f"{', '.join(missing)} missing: {ADVICE}" if missing else None


@cache
def missing_for_triton() -> tuple[str, ...]:
    """What Triton lacks: of its package, a C compiler, and the headers for what it compiles. Nothing is imported."""
    there = {"Triton": find_spec("triton"), "a C compiler": c_compiler(), "Python.h": has_headers()}
    return tuple(name for name, found in there.items() if not found)


def c_compiler() -> str | None:
    """The compiler that Triton would take: $CC, or gcc, or clang."""
    names = (os.environ["CC"],) if os.environ.get("CC") else ("gcc", "clang")
    return next(filter(None, map(shutil.which, names)), None)


def has_headers() -> bool:
    """Whether Python's C headers are installed where Triton looks for them."""
    scheme = sysconfig.get_default_scheme()
    # Debian's Python names a folder for additions first, which holds no headers of its own.
    include = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    folders = [include, *os.environ.get("CPATH", "").split(":"), *os.environ.get("C_INCLUDE_PATH", "").split(":")]
    return any(Path(folder, "Python.h").is_file() for folder in filter(None, folders))


def keep_triton_key(environment: Mapping[str, str] = os.environ) -> None:
    """Let Triton take the digest of its own files from an earlier start, while their sizes and times are the same.

    The name of every compiled kernel in Triton's cache begins with it, and to make it half a gigabyte is read: 0.5 to 1
    second of each start. It is kept in the user's cache folder; where that cannot be, it is made as before.
    """
    for name in TRITON_MODULES:  # one of them has it, depending on the version
        try:
            module, triton = import_module(name), import_module("triton")
        except Exception as error:  # whoever needs Triton meets it, and reports it
            logger.debug("the key of Triton is not kept: %s", error)
            continue
        make = vars(module).get("triton_key")
        if make and not hasattr(make, "is_kept"):
            kept = cache(partial(_kept_key, make, Path(str(triton.__file__)).parent, environment))
            vars(kept)["is_kept"] = True
            vars(module)["triton_key"] = kept


def _kept_key(make, folder, environment):
    file = present = None
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # no file, or another one
        present = _sizes_and_times(folder)
        file = user_cache(environment) / f"triton_{sha256(os.fsencode(folder)).hexdigest()[:8]}.json"
        kept = json.loads(file.read_text())
        if kept["files"] == present and isinstance(kept["key"], str):
            return kept["key"]
    key = make()
    with suppress(OSError):  # a folder that cannot be written to, a full disk
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file, "w") as stream:
                json.dump({"files": present, "key": key}, stream)
    return key


def _sizes_and_times(folder):
    """A digest of the names, sizes and times of all modules in `folder`, also of folders that are links."""
    digest = sha256()
    for place, inner, names in os.walk(folder, followlinks=True):
        inner.sort()
        for path in (os.path.join(place, name) for name in sorted(names) if name.endswith((".py", ".so", ".pyd"))):
            status = os.stat(path)
            digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
