"""The losses by kernels of Triton: see on_gpu_cases.py."""

from tests import triton_cases
from tests.loss_cases import random_case
from utils.loss.batched import BatchedLoss


@triton_cases.needs_triton
def test_kernels_against_the_reference():
    triton_cases.run("tests/loss/on_gpu_cases.py")


def test_without_a_gpu_there_are_no_kernels():
    assert not BatchedLoss(random_case(0, "ordinary").model).has_kernels()
