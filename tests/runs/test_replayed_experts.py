"""Runs of a mixture of experts that replay the choices of the engine or of the old policy."""

import pytest

from tests.checkpoints import save_tiny
from tests.toy import train


@pytest.mark.parametrize("mode", ["engine", pytest.param("old_policy", marks=pytest.mark.slow)])
def test_a_run_replays_experts_in_every_update(config, tmp_path, mode):
    model = save_tiny("Qwen3MoeForCausalLM", tmp_path / "moe", seed=1)
    layout = ("training.pp=2", "training.recompute=true", "training.epochs=2", "objective.kl_coef=0.01")
    steps = train(2, config, f"model.path={model}", f"training.router_replay={mode}", *layout)
    assert len(steps) == 2
    for step in steps:
        # In float32, engine and trainer rarely choose other experts.
        assert step["training/rollout_probs_diff_max"] < 1e-3 and step["actor/grad_norm"] > 0
        if mode == "engine":
            assert step["perf/held_bytes_received"] == step["perf/held_bytes_planned"] > 0
            assert step["training/router_mismatch"] < 0.01
        else:
            assert "perf/held_bytes_received" not in step and "training/router_mismatch" not in step
