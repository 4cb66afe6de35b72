"""The log-prob head's Triton kernels equal the torch functions that they replace on CUDA.

Triton's interpreter runs them on the CPU. Skipped if Triton is not installed, as in the CPU set; to run them,
install Triton into a separate directory on PYTHONPATH.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.spawn import run_ranks

WORKER = Path(__file__).with_name("head_kernel_worker.py")
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def errors() -> dict:
    # Triton reads the variable when it is imported, so the interpreter must be new.
    env = {"TRITON_INTERPRET": "1"}
    return json.loads(run_ranks(1, WORKER, "interpret", timeout=240, env=env, fresh=True)[0])


def test_float32_values_and_gradients_within_1e_6(errors):
    assert max(errors["torch.float32"].values()) <= 1e-6


def test_bfloat16_within_one_rounding(errors):
    """Allow one rounding: the interpreter rounds gradients towards 0, torch to nearest."""
    found = errors["torch.bfloat16"]
    assert found["statistics"] <= 1e-6
    assert found["gradient"] <= torch.finfo(torch.bfloat16).eps
    assert found["head"] <= torch.finfo(torch.bfloat16).eps


def test_kernels_compile_for_hopper():
    """Check that the compiler accepts the kernels; the interpreter accepts more programs."""
    assert json.loads(run_ranks(1, WORKER, "compile", timeout=240)[0]) == 8
