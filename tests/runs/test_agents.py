"""Runs with environments, from the command line: a game of three turns (agent_game.py) on the toy model."""

import os
import random
import re
import time
from pathlib import Path

import pytest

from tests.checkpoints import save_qwen2, save_qwen2_classifier
from tests.records import comparable, records, rollouts
from tests.spawn import LOCKSTEP, ROOT, RanksFailed, run_ranks
from tests.toy import train, write_config

GAME = Path(__file__).with_name("agent_game.py")
BASE = (
    f"agents.environment={GAME}:Echo",
    "agents.max_tokens_per_turn=6",
    "agents.workers=1",
    "rollout.max_response_tokens=40",
    "checkpoint.every=1",
    "checkpoint.keep_last=0",
)
WAVES, ARRIVAL = "agents.order=waves", ("agents.order=arrival", "rollout.deterministic=false")


LONG = (f"agents.environment={GAME}:Long", "data.max_prompt_tokens=300")


@pytest.mark.slow
def test_a_cache_on_the_host_changes_no_metric(toy, tmp_path):
    config = write_config(tmp_path, toy, *BASE, WAVES, *LONG, "rollout.cpu_kv_cache_mib=1")
    plain = train(2, config, run=tmp_path / "plain")
    found = train(2, config, "rollout.kv_offload_gib=0.1", run=tmp_path / "offloading")
    loaded = [record.pop("perf/kv_loaded_tokens") for record in found]
    print(loaded)
    assert min(loaded) > 1000
    kept = [comparable(tmp_path / name) for name in ("plain", "offloading")]
    assert len(plain) == 2 and kept[0] == [
        {key: value for key, value in record.items() if key != "perf/kv_loaded_tokens"} for record in kept[1]
    ]


def processes_with(token: str) -> list[int]:
    """Return the processes, other than this one, that have the text in their environment."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            environ = (directory / "environ").read_bytes()
        except OSError:
            continue
        if token.encode() in environ and int(directory.name) != os.getpid():
            found.append(int(directory.name))
    return found


def test_a_run_with_a_game_and_the_replay_of_its_log(toy, tmp_path):
    config = write_config(tmp_path, toy, *BASE, *ARRIVAL, "rollout.tp=2", f"data.val=[{toy}/test.parquet]")
    train(2, config, "validation.every=2", "validation.max_prompts=4", "validation.before_training=false")
    last = records(tmp_path / "run")[-1]
    assert last["agents/turns"] == 3 and last["agents/rows"] == 1 and 0 < last["agents/occupancy"] <= 1
    assert last["response_length/max"] == 18 and last["agents/given_length/max"] == 8
    assert last["val-core/addition/acc/mean@1"] > 0
    sample = rollouts(tmp_path / "run")[0]
    roles = [message["role"] for message in sample["messages"]]
    assert roles == ["prompt", "assistant", "user", "assistant", "user", "assistant"]
    texts = [message["content"] for message in sample["messages"]]
    assert texts[-1].startswith(sample["response"]) and texts[2][0] == "+"
    out = run_ranks(2, LOCKSTEP, "samples", "replay", tmp_path / "run", 2, timeout=300)
    assert re.fullmatch(r"train.2_replica_0.events: 96 completions, \d+ tokens: identical\n", out[0])
    # Weights of another step give other log-probs.
    (tmp_path / "run" / "events" / "step_2").rename(tmp_path / "run" / "events" / "step_3")
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, LOCKSTEP, "samples", "replay", tmp_path / "run", 3, timeout=300)
    assert "tokens: DIFFERENT (" in failure.value.stdout[0]


@pytest.mark.slow
def test_stored_trajectories_of_turns_are_learned_from_again(toy, tmp_path):
    config = write_config(tmp_path, toy, *BASE, WAVES, "logging.rollouts=all")
    train(1, config)
    replay = ("run.mode=train_only", f"run.rollouts={tmp_path}/run")
    train(1, config, *replay, run=tmp_path / "again")
    first, again = (
        [{n: value for n, value in record.items() if n.startswith("actor/")} for record in records(run)]
        for run in (tmp_path / "run", tmp_path / "again")
    )
    assert len(first) == 2 and again == first


def test_validation_counts_failed_trajectories_as_wrong(toy, tmp_path):
    game = f"agents.environment={GAME}:Brittle"
    config = write_config(tmp_path, toy, *BASE, *ARRIVAL, game, f"data.val=[{toy}/test.parquet]")
    sampled = ("validation.greedy=false", "validation.samples_per_prompt=4", "validation.max_prompts=8")
    small = ("run.max_steps=1", "data.prompts_per_step=2", "training.prompts_per_minibatch=2")
    step = train(1, config, *sampled, *small, "validation.every=1")[0]
    wrong = step["val-core/addition/failed/mean@4"]
    assert 0 < wrong < 1 and step["val-core/addition/acc/mean@4"] == 1 - wrong
    assert step["val-aux/agents/failures/error"] == 32 * wrong


@pytest.mark.parametrize("num_kills, num_steps", [(1, 2), pytest.param(20, 4, marks=pytest.mark.slow)])
def test_a_killed_run_leaves_no_process_and_loses_no_prompt(toy, tmp_path, num_kills, num_steps):
    steps = (WAVES, f"run.max_steps={num_steps}")
    straight = tmp_path / "straight"
    straight.mkdir()
    train(2, write_config(straight, toy, *BASE, *steps))
    calls = 96 * num_steps
    numbers = random.Random(5).sample(range(1, calls + 1), num_kills)
    kwargs = f"agents.kwargs={{directory: {tmp_path}, kill_at: {numbers}}}"
    config = write_config(tmp_path, toy, *BASE, *steps, kwargs)
    kills = 0
    while True:
        try:
            run_ranks(
                2,
                ROOT / "train_rl.py",
                "--config",
                config,
                timeout=300,
                grace=60,
                env={"TOKEN": str(tmp_path)},
            )
            break
        except RanksFailed:
            killed = len(list(tmp_path.glob("killed_*")))
            assert killed > kills, "the run ended without a kill"  # both ranks may be killed at once
            kills = killed
            deadline = time.monotonic() + 60
            while left := processes_with(f"TOKEN={tmp_path}"):
                assert time.monotonic() < deadline, f"processes {left} are left"
                time.sleep(0.1)
    assert kills >= 1
    assert comparable(tmp_path / "run") == comparable(straight / "run")


@pytest.mark.slow
def test_reward_model_and_judge_read_the_conversation(toy, tmp_path):
    """The judge's limit admits the prompt with a turn, but no conversation of three turns."""
    judge = dict(
        path=save_qwen2(tmp_path / "judge", seed=4, max_position_embeddings=512),
        max_prompt_tokens=60,
        max_response_tokens=4,
        parser=f"{tmp_path}/parse.py:parse",
        template="'{prompt} {response}?'",
    )
    (tmp_path / "parse.py").write_text("def parse(text):\n    return 2.0\n")
    models = [f"reward.judge.{key}={value}" for key, value in judge.items()]
    models += [f"reward.model.path={save_qwen2_classifier(tmp_path / 'classifier', seed=3)}"]
    small = ("run.max_steps=1", "data.prompts_per_step=2", "training.prompts_per_minibatch=2")
    config = write_config(tmp_path, toy, *BASE, *ARRIVAL, *small, *models)
    step = train(1, config)[-1]
    assert step["reward/failures"] == 8 and step["reward/reward_model/mean"] != 0
