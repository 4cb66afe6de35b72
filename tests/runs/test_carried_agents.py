"""Agents with carry-over: exact resumption, kills, algorithms that learn from carried trajectories."""

import random
import shutil
from pathlib import Path

import pytest

from tests.checkpoints import assert_same_checkpoint, save_tiny
from tests.records import comparable
from tests.spawn import ROOT, RanksFailed, run_ranks
from tests.toy import train, write_config
from tools.consumed import count

GAME = Path(__file__).with_name("agent_game.py")
CARRIED = (
    f"agents.environment={GAME}:Varied",
    "agents.max_tokens_per_turn=6",
    "agents.workers=1",
    "rollout.carry_over=true",
    "rollout.oversample=1.5",
    "rollout_correction.truncate_tokens=2",
    "rollout.max_response_tokens=60",
    f"rollout.stop_token_ids={list(range(10, 22))}",  # so that lengths differ
    "rollout.max_concurrent_samples=8",
    "checkpoint.keep_last=0",
)
WAVES, ARRIVAL = ("agents.order=waves",), ("agents.order=arrival", "rollout.deterministic=false")


@pytest.mark.covers("agents", "carry-over")
def test_a_resumed_run_executes_trajectories_again_and_is_exact(toy, tmp_path):
    """Validations come between the steps; their trajectories have the numbers of waiting trajectories."""
    validation = (f"data.val=[{toy}/test.parquet]", "validation.every=1", "validation.max_prompts=4")
    steps = ("checkpoint.every=2", "run.max_steps=4")
    config = write_config(tmp_path, toy, *CARRIED, *WAVES, *validation, *steps)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    first = train(2, config, run=straight)
    shutil.copytree(straight, killed)
    shutil.rmtree(killed / "checkpoints" / "step_000004")
    second = train(2, config, run=killed)
    assert comparable(killed) == comparable(straight)
    assert_same_checkpoint(*(run / "checkpoints" / "step_000004" for run in (straight, killed)))
    files = [(run / "consumed.jsonl").read_text() for run in (straight, killed)]
    assert files[0] == files[1]
    again = [sum(step.get("perf/executed_again", 0) for step in steps) for steps in (first, second)]
    assert again[0] == 0 < again[1]  # the first run kept the environments
    assert not any("agents/diverged" in step for step in (*first, *second))
    assert sum(step.get("carry_over/tokens", 0) for step in first) > 0 and first[-1]["staleness/max"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "order, stops", [(WAVES, False), (WAVES, True), (ARRIVAL, False)], ids=["waves", "stops", "arrival"]
)
def test_ten_kills_lose_and_double_no_trajectory(toy, tmp_path, order, stops):
    """A stop within a generation continues with the trajectories of the last checkpoint, as a kill does."""
    steps = (*order, "run.max_steps=8", "checkpoint.every=1")
    calls = range(20, 96 * 8, 70)
    numbers = [random.Random(number).randrange(number, number + 60) for number in calls]
    kwargs = f"agents.kwargs={{directory: {tmp_path}, kill_at: {numbers}, stops: {stops}}}"
    config = write_config(tmp_path, toy, *CARRIED, *steps, kwargs)
    ends = 0
    while ends < len(numbers):
        try:
            run_ranks(2, ROOT / "train_rl.py", "--config", config, timeout=300, grace=60)
            if not (stop := tmp_path / "run" / "stop").exists():
                break
            stop.unlink()
        except RanksFailed:
            assert not stops
        ends += 1
    assert len(list(tmp_path.glob("killed_*"))) >= 10
    found = count(tmp_path / "run")
    assert found.is_exact and found.steps == 8 and (found.consumed, found.dropped) == (64, 0)
    if order == WAVES:
        straight = tmp_path / "straight"
        straight.mkdir()
        train(2, write_config(straight, toy, *CARRIED, *steps))
        assert comparable(tmp_path / "run") == comparable(straight / "run")


ROLES = ("roles.train=0-0", "roles.rollout=1-1", "roles.lag=2", "roles.granularity=sample")
FORMS = {
    "carry-over": (*CARRIED, "rollout.oversample=2"),
    "roles": (*(key for key in CARRIED if "carry_over" not in key and "oversample" not in key), *ROLES),
}


@pytest.mark.parametrize("form", ["carry-over", pytest.param("roles", marks=pytest.mark.slow)])
@pytest.mark.covers("agents", "replay of the engine's experts", "sampling masks")
def test_log_probs_are_those_of_each_tokens_version(toy, tmp_path, form):
    """The algorithm compares them, for tokens of several versions in one trajectory, too."""
    model = save_tiny("Qwen3MoeForCausalLM", tmp_path / "moe", seed=1)
    replayed = (f"model.path={model}", "training.router_replay=engine", "rollout.top_p=0.9")
    algorithm = f"algorithm={Path(__file__).with_name('older_weights.py')}"
    options = ("run.max_steps=4", "data.prompts_per_step=3", "rollout.samples_per_prompt=3")
    config = write_config(tmp_path, toy, *FORMS[form], *ARRIVAL, *replayed, algorithm, *options)
    steps = train(2, config, "training.prompts_per_minibatch=3")
    assert max(step["staleness/max"] for step in steps) >= 1


ALGORITHMS = {
    "dapo": ("algorithm=dapo", "dynamic_sampling.prompts_per_round=6"),
    "ppo": ("algorithm=ppo", "critic.optimizer.lr=1e-3", "objective.reward_kl.coef=0.1"),
    "turns": ("objective.advantage=turn-return", "rollout.on_stale=drop", "rollout.max_staleness=2"),
    "failures": (f"agents.environment={GAME}:Brittle", "agents.on_failure=shrink"),
    "refill": (f"agents.environment={GAME}:Brittle", "agents.on_failure=refill", "rollout.tp=2"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "turns")) for name in ALGORITHMS]
)
def test_algorithms_learn_from_carried_trajectories(toy, tmp_path, name):
    config = write_config(tmp_path, toy, *CARRIED, *ARRIVAL, "run.max_steps=4", *ALGORITHMS[name])
    steps = train(2, config)
    assert count(tmp_path / "run").is_exact
    assert sum(step["carry_over/groups"] for step in steps) > 0
    for step in steps:
        assert step["staleness/max"] <= 2
        if "Brittle" in ALGORITHMS[name][0]:  # games of one turn with one reward; most fail
            assert step["agents/failures/error"] > 0
        else:
            assert step["actor/grad_norm"] > 0
    assert steps[-1]["staleness/max"] >= 1 or "Brittle" in ALGORITHMS[name][0]
