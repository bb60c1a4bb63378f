"""Composing by the kernel: see composing_cases.py."""

import os

import pytest

from tests import triton_cases
from tests.data.gpu.configurations import ON_THE_HOST, dataset_of
from utils.data.gpu.compose import open_composing, why_not_composed


@triton_cases.needs_triton
def test_batches_composed_by_the_kernel():
    triton_cases.run("tests/data/gpu/composing_cases.py", timeout=580)


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
