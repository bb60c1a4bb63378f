"""Composing by the kernel: see composing_cases.py."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.data.gpu.configurations import ON_THE_HOST, dataset_of
from utils.data.gpu.compose import open_composing, why_not_composed
from utils.system.files import PROJECT_ROOT


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_batches_composed_by_the_kernel():
    interpreted = "0" if torch.cuda.is_available() else "1"
    environment = {**os.environ, "TRITON_INTERPRET": interpreted, "OMP_NUM_THREADS": "1"}
    cases = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/data/gpu/composing_cases.py"]
    done = subprocess.run(cases, cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_what_no_kernel_makes(folder):
    words = {"perspective": "perspective is not 0", "copy-paste": "copy_paste is not 0"}
    for name, reason in words.items():
        changes, options = ON_THE_HOST[name]
        assert why_not_composed(dataset_of(folder, changes, **options), with_groups=False) == reason
    dataset = dataset_of(folder, {})
    assert why_not_composed(dataset, with_groups=False) is None
    assert why_not_composed(dataset, with_groups=True) == "--quad makes one image of four"


def test_without_a_store_nothing_is_composed(folder):
    dataset = dataset_of(folder, {})
    dataset.image_store = None
    assert open_composing(dataset, with_groups=False) is None


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs on a CPU")
def test_without_a_gpu_the_workers_make_the_images(folder, caplog):
    assert open_composing(dataset_of(folder, {}), with_groups=False) is None
    assert "not composed on the GPU but by the loader's workers" in caplog.text
