"""A step with old log-probs from its only update equals a step with a separate pass, bitwise."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import save_qwen2
from tests.records import MACHINE
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "old_logprobs_worker.py"


@pytest.mark.parametrize("stages", [1, 2])
def test_the_only_update_of_a_step_gives_the_old_log_probs(tmp_path, stages):
    checkpoint, out = save_qwen2(tmp_path / "model", seed=2, tie=True), tmp_path / "out.pt"
    run_ranks(2, WORKER, checkpoint, out, stages, timeout=120)
    for case, results in torch.load(out).items():
        (expected, weights, columns), (metrics, *found) = results["separate"], results["deferred"]
        # Metrics, weights and the batch afterwards are bitwise equal.
        assert {k: v for k, v in metrics.items() if not MACHINE.match(k)} == {
            k: v for k, v in expected.items() if not MACHINE.match(k)
        }, case
        for tensors, others in zip(found, (weights, columns)):
            assert tensors.keys() == others.keys(), case
            assert all(torch.equal(tensors[name], others[name]) for name in others), case
        assert metrics["actor/grad_norm"] > 0
        if case == "selected tokens":
            assert 0 < columns["selected_tokens"].sum() < len(columns["mask"])
            continue
        assert "old_logprobs" in columns
        assert ("loss_weights" in columns) == (case == "weights")
        if case == "weights":
            assert 0.5 < metrics["rollout_corr/weight_mean"] < 1.5
            assert columns["loss_weights"].unique().numel() > 9
        assert "timing_s/old_log_prob" in expected
        assert ("timing_s/old_log_prob" in metrics) == (case in ("two epochs", "several updates"))
