"""The kernels of pools and stem: see pool_and_stem_cases.py."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from utils.system.files import PROJECT_ROOT


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_pools_and_stem_against_torch():
    interpreted = "0" if torch.cuda.is_available() else "1"
    environment = {**os.environ, "TRITON_INTERPRET": interpreted, "OMP_NUM_THREADS": "1"}
    cases = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/models/fused/pool_and_stem_cases.py"]
    done = subprocess.run(cases, cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
