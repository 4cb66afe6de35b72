"""Runs with whole experts on the engine's ranks, and tensor or data parallel attention."""

import re
from pathlib import Path

import pytest

from tests.checkpoints import save_tiny
from tests.records import comparable
from tests.runs.test_run_ends import ending, errors, failed_run
from tests.toy import train, write_config

LAYOUTS = {
    "tensor parallel": ("rollout.tp=2", "rollout.ep=2"),
    "data parallel": ("rollout.ep=2", "rollout.dp_attention=true"),
}
"""By the attention of the engine."""
DIGITS = """
def score(prompt, response, ground_truth, **extra):
    return sum(character.isdigit() for character in response) / 6
"""
BY_ATTENTION = pytest.mark.parametrize("attention", LAYOUTS)


@pytest.fixture
def config(toy, tmp_path) -> Path:
    model = save_tiny("Qwen3MoeForCausalLM", tmp_path / "model", seed=0)
    return write_config(tmp_path, toy, f"model.path={model}", "training.ep=2")


@pytest.mark.slow
@BY_ATTENTION
def test_grpo_learns_with_whole_experts_in_the_engine(config, tmp_path, attention):
    (tmp_path / "digits.py").write_text(DIGITS)
    reward = f"reward.function={tmp_path}/digits.py:score"
    steps = train(2, config, *LAYOUTS[attention], reward, "run.max_steps=20", "rollout.samples_per_prompt=8")
    scores = [step["critic/score/mean"] for step in steps]
    print(attention, [round(score, 3) for score in scores])
    print(attention, max(step["training/rollout_probs_diff_max"] for step in steps))
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.3


@pytest.mark.slow
@BY_ATTENTION
def test_a_resumed_run_continues_bitwise(config, tmp_path, attention):
    options = (*LAYOUTS[attention], "training.router_replay=engine", "checkpoint.every=1", "run.max_steps=4")
    train(2, config, *options, run=tmp_path / "whole")
    train(2, config, *options, "run.max_steps=2", run=tmp_path / "parts")
    train(2, config, *options, run=tmp_path / "parts")
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")


@pytest.mark.parametrize(
    "attention", [pytest.param("tensor parallel", marks=pytest.mark.slow), "data parallel"]
)
def test_a_rank_killed_while_others_step_with_it_is_named(config, tmp_path, attention):
    beats = ("watchdog.beat_s=1", "watchdog.lost_s=20")
    failure = failed_run("kill_this_rank", "engine_step", 1, config, *LAYOUTS[attention], *beats, call=10)
    assert failure.returncodes == [1, -9]
    said = errors(failure)[0]
    assert re.search(r"^error: lost rank 1 \(.+\), last heartbeat \d+ s ago in ", said)
    assert ending(tmp_path / "run") == ("failed", said.removeprefix("error: "))
