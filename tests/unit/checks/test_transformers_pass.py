"""A reference by transformers on a CPU, in an environment with kernels for a GPU."""

import os
import subprocess
import sys

import numpy as np

from tools.tiny_models import save_tiny

PLAIN = """
import sys
from transformers import AutoModelForCausalLM
from rl.checks.transformers_pass import hf_logprobs, random_batch
hf_logprobs(AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval(), random_batch(45))
"""


def test_delta_nets_compute_with_torch_although_kernels_are_installed(tmp_path):
    package = tmp_path / "fla" / "ops" / "gated_delta_rule"
    package.mkdir(parents=True)
    for path in (tmp_path / "fla", tmp_path / "fla" / "ops"):
        (path / "__init__.py").touch()
    package.joinpath("__init__.py").write_text(
        "def chunk_gated_delta_rule(q, k, v, g, beta, **options):\n    raise ValueError('cpu tensor')\n"
    )
    model = save_tiny("Qwen3NextForCausalLM", tmp_path / "model", seed=0)

    def run(*arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True).stderr

    assert "ValueError: cpu tensor" in run("-c", PLAIN, model)
    errors = run("-m", "rl.checks.transformers_pass", model, "1.0", str(tmp_path / "out.npy"))
    assert np.isfinite(np.load(tmp_path / "out.npy")).all(), errors
