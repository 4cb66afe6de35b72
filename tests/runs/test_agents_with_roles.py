"""Runs with environments on the ranks that generate, while others train."""

from pathlib import Path

import pytest

from tests.checkpoints import save_tiny
from tests.records import comparable, records
from tests.runs.test_agents import ARRIVAL, BASE, WAVES
from tests.runs.test_roles import FAULTY, assert_each_prompt_once, without_staleness
from tests.spawn import LOCKSTEP, RanksFailed, run_ranks
from tests.toy import train, write_config

CORRECT = "rollout_correction.truncate_tokens=2"
ROLES = ("roles.train=0-0", "roles.rollout=1-1", CORRECT)
VALIDATE = ("validation.every=2", "validation.max_prompts=4", "validation.before_training=false")
IN_FLIGHT = ("roles.granularity=turn", "roles.refit_after_steps=4", "run.max_steps=4")


@pytest.fixture(scope="module")
def agent_config(toy, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("agents_with_roles")
    return write_config(directory, toy, *BASE, f"data.val=[{toy}/test.parquet]", *VALIDATE)


@pytest.mark.covers("agents", "roles, lag 0")
def test_lag_0_equals_the_run_without_roles(agent_config, tmp_path):
    train(1, agent_config, WAVES, CORRECT, run=tmp_path / "alone")
    train(2, agent_config, WAVES, *ROLES, "roles.lag=0", run=tmp_path / "split")
    assert without_staleness(tmp_path / "split") == comparable(tmp_path / "alone")
    assert_each_prompt_once(tmp_path / "split", consumed=16)


@pytest.mark.covers("agents by arrival", "roles, turn")
def test_turns_in_flight_are_of_one_version(agent_config, tmp_path):
    train(2, agent_config, *ARRIVAL, *ROLES, *IN_FLIGHT, run=tmp_path / "run")
    last = records(tmp_path / "run")[-1]
    assert last["agents/turns"] == 3 and last["staleness/max"] == 1
    assert_each_prompt_once(tmp_path / "run", consumed=32)


def test_what_each_version_sampled_in_flight_is_replayed(agent_config, tmp_path):
    """Generation takes longer than learning, so that turns begin under one version and end under the next."""
    run = tmp_path / "run"
    long = ("rollout.max_concurrent_samples=4", "agents.max_tokens_per_turn=12")
    train(2, agent_config, *ARRIVAL, *ROLES, *IN_FLIGHT, "roles.granularity=sample", *long, run=run)
    for step in (1, 3):
        lines = run_ranks(1, LOCKSTEP, "samples", "replay", run, step, timeout=300)[0].splitlines()
        assert lines and all(line.endswith("tokens: identical") for line in lines), lines


EVERYTHING = (
    "roles.granularity=group",
    "training.router_replay=engine",
    "training.ep=2",
    "rollout.top_p=0.98",
    "rollout.top_k=20",
    "adapter.kind=lora",
)
"""As in configs/agents/lab.yaml, with a mixture of experts."""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["batch", "turn", "sample", "everything"])
@pytest.mark.covers("agents", "roles")
def test_kills_of_either_role_change_nothing(agent_config, tmp_path, form):
    """Two trainers and two replicas. Trajectories of a killed run that no checkpoint holds begin again."""
    ranks = ("roles.train=0-1", "roles.rollout=2-3", CORRECT)
    own = (f"roles.granularity={form}", *("roles.refit_after_steps=64",) * (form == "batch"))
    if form == "everything":
        own = (*EVERYTHING, f"model.path={save_tiny('Qwen3MoeForCausalLM', tmp_path / 'moe', seed=1)}")
    overrides = (WAVES, *ranks, *IN_FLIGHT, *own, "watchdog.lost_s=60")
    train(4, agent_config, *overrides, run=tmp_path / "whole")
    killed = tmp_path / "killed"
    for place, rank, call in (("update", 0, 4), ("receive_weights", 3, 2)):
        fault = ("kill_this_rank", place, rank, call)
        with pytest.raises(RanksFailed):
            run_ranks(4, FAULTY, *fault, "--config", agent_config, *overrides, f"run.dir={killed}", grace=30)
    train(4, agent_config, *overrides, run=killed)
    assert comparable(killed) == comparable(tmp_path / "whole")
    assert_each_prompt_once(killed, consumed=32)


@pytest.mark.covers("agents", "roles", "replay of the engine's experts")
def test_the_gradient_of_replayed_turns_is_that_of_fixed_routers(agent_config, tmp_path):
    """The algorithm compares them; one generator sends trajectories with experts, some of older weights."""
    model = save_tiny("Qwen3MoeForCausalLM", tmp_path / "moe", seed=1)
    algorithm = Path(__file__).with_name("replayed_gradients.py")
    ranks = (
        "roles.train=0-1",
        "roles.rollout=2-2",
        CORRECT,
        "training.ep=2",
        "training.router_replay=engine",
    )
    overrides = (WAVES, *ranks, *IN_FLIGHT, f"model.path={model}", f"algorithm={algorithm}")
    steps = train(3, agent_config, *overrides, run=tmp_path / "run")
    assert len(steps) == 4 and steps[-1]["agents/turns"] == 3 and steps[-1]["staleness/max"] == 1
