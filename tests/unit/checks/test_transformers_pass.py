"""A reference by transformers on a CPU, in an environment with kernels for a GPU."""

import sys

import pytest

from rl.checks.transformers_pass import hf_logprobs, random_batch, without_kernels
from tools.tiny_models import save_tiny


def test_delta_nets_compute_with_torch_although_kernels_are_installed(tmp_path, monkeypatch):
    package = tmp_path / "fla" / "ops" / "gated_delta_rule"
    package.mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").touch()
    (tmp_path / "fla" / "ops" / "__init__.py").touch()
    package.joinpath("__init__.py").write_text(
        "def chunk_gated_delta_rule(q, k, v, g, beta, **options):\n    raise ValueError('cpu tensor')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    modules = [name for name in sys.modules if "models.qwen3_next" in name]
    for name in modules:
        monkeypatch.delitem(sys.modules, name)
    from transformers.models.qwen3_next import Qwen3NextForCausalLM as with_kernels

    path = save_tiny("Qwen3NextForCausalLM", tmp_path / "model", seed=0)
    batch = random_batch(45)
    with pytest.raises(ValueError, match="cpu tensor"):
        hf_logprobs(with_kernels.from_pretrained(path).eval(), batch)
    for name in [name for name in sys.modules if "models.qwen3_next" in name]:
        monkeypatch.delitem(sys.modules, name)
    with without_kernels():
        from transformers.models.qwen3_next import Qwen3NextForCausalLM

        hf_logprobs(Qwen3NextForCausalLM.from_pretrained(path).eval(), batch)
    import fla.ops.gated_delta_rule  # noqa: F401  (it can be imported again)
