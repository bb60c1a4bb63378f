"""Whether Triton can compile kernels here, found out without trying: it needs a C compiler and Python's headers."""

import os
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
