"""Models that train as their class in transformers: log-probs, gradients, refit and export equal the class's
own, on two ranks."""

import json
from pathlib import Path

import pytest

from tests.checkpoints import save_tiny
from tests.ranks.training.test_parity import (
    assert_equal_gradients,
    assert_equal_logprobs,
    assert_same_tensors,
)
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "class_worker.py"
LAYOUTS = ["1x1x1x1", "1x1x1x2"]
"""The last number: ranks that share a copy of the weights."""
CASES = {
    "a family that Megatron trains too": ("LlamaForCausalLM", False, 1),
    "windows, capped scores and logits": ("Gemma2ForCausalLM", True, 1),
    "experts, joined by the class": ("OlmoeForCausalLM", False, 2),
    "states": ("NemotronHForCausalLM", False, 1),
    "windows in half of the layers": ("Cohere2ForCausalLM", True, 1),
    "an engine with tensor parallelism": ("Gemma2ForCausalLM", True, 2),
}


@pytest.mark.parametrize(
    "case", [case if "capped" in case else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_class_of_transformers_trains_and_is_served(tmp_path, case):
    architecture, tie, rollout_tp = CASES[case]
    checkpoints = [save_tiny(architecture, tmp_path / n, seed=seed, tie=tie) for seed, n in enumerate("ab")]
    run_ranks(2, WORKER, *checkpoints, tmp_path, rollout_tp, *LAYOUTS, timeout=600)
    results = json.loads((tmp_path / "out.json").read_text())
    assert_equal_logprobs(results, LAYOUTS, fallback=case == "states")  # vLLM holds -exp(A_log)
    assert_equal_gradients(results, LAYOUTS)
    assert_same_tensors(tmp_path / "export", tmp_path / "b")
