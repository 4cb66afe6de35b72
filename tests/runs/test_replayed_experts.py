"""Runs of a mixture of experts that replay the choices of the engine or of the old policy."""

import shutil

import pytest

from tests.checkpoints import save_tiny
from tests.records import comparable
from tests.runs.test_carried_agents import GAME
from tests.toy import train


@pytest.mark.parametrize("mode", ["engine", pytest.param("old_policy", marks=pytest.mark.slow)])
def test_a_run_replays_experts_in_every_update(config, tmp_path, mode):
    """The export compares log-probs of tokens that no engine sampled, which have neither routes nor masks."""
    model = save_tiny("Qwen3MoeForCausalLM", tmp_path / "moe", seed=1)
    layout = ("training.pp=2", "training.recompute=full", "training.epochs=2", "objective.kl_coef=0.01")
    masked = ("rollout.top_k=12", "checkpoint.export_hf=true")
    steps = train(2, config, f"model.path={model}", f"training.router_replay={mode}", *layout, *masked)
    assert len(steps) == 2 and (tmp_path / "run" / "hf" / "config.json").exists()
    for step in steps:
        # In float32, engine and trainer rarely choose other experts.
        assert step["training/rollout_probs_diff_max"] < 1e-3 and step["actor/grad_norm"] > 0
        if mode == "engine":
            assert step["perf/held_bytes_received"] == step["perf/held_bytes_planned"] > 0
            assert step["training/router_mismatch"] < 0.01
        else:
            assert "training/router_mismatch" not in step


HELD = ("training.router_replay=engine", "rollout.top_k=12", "rollout_correction.truncate_tokens=2")
"""Routes and sampling masks. Both stay with the rank that has them."""


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


AGENTS = (f"agents.environment={GAME}:Varied", "agents.max_tokens_per_turn=6", "agents.workers=1")


@pytest.mark.parametrize("form", [(), pytest.param((*AGENTS, "agents.order=waves"), marks=pytest.mark.slow)])
@pytest.mark.covers("carry-over", "replay of the engine's experts", "sampling masks")
def test_held_columns_of_carried_samples_are_joined(config, tmp_path, form):
    """With a learning rate of 0 older and present weights choose the same experts."""
    model = save_tiny("Qwen3MoeForCausalLM", tmp_path / "moe", seed=1)
    carried = ("rollout.carry_over=true", "rollout.oversample=1.5", "rollout.max_concurrent_samples=8")
    lengths = ("rollout.max_response_tokens=40", f"rollout.stop_token_ids={list(range(10, 22))}")
    saves = ("run.max_steps=4", "checkpoint.every=2", "checkpoint.keep_last=0")
    still = ("training.optimizer.lr=0", "objective.loss=ppo")
    options = (f"model.path={model}", *HELD, *carried, *lengths, *saves, *still, *form)
    steps = train(2, config, *options, run=tmp_path / "straight")
    received, planned = (
        [step[f"perf/held_collected_bytes_{name}"] for step in steps] for name in ("received", "planned")
    )
    assert received == planned and sum(step["carry_over/tokens"] for step in steps) > 0
    assert max(step["staleness/max"] for step in steps) >= 1
    for step in steps:
        assert step["training/router_mismatch"] < 0.01 and step["training/rollout_probs_diff_max"] < 1e-3
    shutil.copytree(tmp_path / "straight", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "step_000004")
    again = train(2, config, *options, run=tmp_path / "killed")[2:]  # from rank 0, which had them all
    received, planned = (
        sum(step[f"perf/held_collected_bytes_{name}"] for step in again) for name in ("received", "planned")
    )
    assert received == planned > 0
    assert comparable(tmp_path / "killed") == comparable(tmp_path / "straight")
