"""Runs of a mixture of experts that replay the choices of the engine or of the old policy."""

import pytest

from tests.checkpoints import save_tiny
from tests.records import comparable
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


HELD = ("training.router_replay=engine", "rollout.top_k=12", "rollout_correction.truncate_tokens=2")
"""Routes and sampling masks, both of which stay with the rank that has them."""


def comparable_steps(run) -> list[dict]:
    """Records without what differs between forms of generation: staleness and bytes."""
    return [
        {name: value for name, value in record.items() if not name.startswith(("staleness/", "perf/"))}
        for record in comparable(run)
    ]


def test_held_columns_come_from_generators(config, tmp_path):
    model = save_tiny("Qwen3MoeForCausalLM", tmp_path / "moe", seed=1)
    options = (f"model.path={model}", *HELD)
    train(1, config, *options, run=tmp_path / "alone")
    steps = train(2, config, *options, "roles.train=0-0", "roles.rollout=1-1", "roles.lag=0")
    assert comparable_steps(tmp_path / "run") == comparable_steps(tmp_path / "alone")
    for step in steps:
        received, planned = (step[f"perf/held_collected_bytes_{name}"] for name in ("received", "planned"))
        assert received == planned > 0 and step["training/rollout_probs_diff_max"] < 1e-3
