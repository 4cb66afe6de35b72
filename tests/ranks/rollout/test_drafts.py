"""Draft tokens do not change samples: tokens, log-probs and sampling masks are bitwise equal without drafts.

A draft model that is the policy is always right; one with other weights ends drafting, as does a random head
for multi-token prediction. vLLM's rejection sampler on a GPU is not covered.
"""

from pathlib import Path

import pytest

from tests.checkpoints import save_qwen2, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "draft_worker.py"


@pytest.mark.parametrize(
    "tp, num_samples",
    [(1, 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 24), (1, 1024)))],
)
def test_samples_are_those_without_drafts(tmp_path, tp, num_samples):
    policy, other = (save_qwen2(tmp_path / name, seed=seed) for name, seed in (("policy", 4), ("other", 5)))
    for text in run_ranks(tp, WORKER, policy, other, tp, num_samples, timeout=2400):
        print(text)
        assert text.strip().endswith("drafts are right")


@pytest.mark.parametrize(
    "tp, num_samples", [pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 64), (1, 1024))]
)
def test_samples_are_those_without_drafts_of_the_head(tmp_path, tp, num_samples):
    policy = save_tiny("DeepseekV3ForCausalLM", tmp_path / "policy", seed=3, num_nextn_predict_layers=1)
    for text in run_ranks(tp, WORKER, policy, "mtp", tp, num_samples, timeout=2400):
        print(text)
        assert text.strip().endswith("drafts are right")
