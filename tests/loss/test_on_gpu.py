"""The losses by kernels of Triton: see on_gpu_cases.py."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.loss_cases import random_case
from utils.loss.batched import BatchedLoss
from utils.system.files import PROJECT_ROOT


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_against_the_reference():
    interpreted = "0" if torch.cuda.is_available() else "1"
    environment = {**os.environ, "TRITON_INTERPRET": interpreted, "OMP_NUM_THREADS": "1"}
    cases = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/loss/on_gpu_cases.py"]
    done = subprocess.run(cases, cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_without_a_gpu_there_are_no_kernels():
    assert not BatchedLoss(random_case(0, "ordinary").model).has_kernels()
