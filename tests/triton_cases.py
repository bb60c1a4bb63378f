"""Cases of Triton's kernels run in a process of their own: Triton reads TRITON_INTERPRET when it is imported."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from utils.system.files import PROJECT_ROOT

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run(*files, timeout=280):
    """Run the cases in `files` on a GPU, or interpreted on the CPU; the test fails if one of them does."""
    interpreted = "0" if torch.cuda.is_available() else "1"
    environment = {**os.environ, "TRITON_INTERPRET": interpreted, "OMP_NUM_THREADS": "1"}
    cases = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    done = subprocess.run(cases, cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
