"""Carry-over from the command line: exact resumption, prompts consumed once, algorithms, a stale token."""

import shutil

import pyarrow.parquet as pq
import pytest

from rl.checks.batches import StaleTokens
from tests.checkpoints import assert_same_checkpoint
from tests.records import comparable
from tests.spawn import RanksFailed
from tests.toy import train
from tools.consumed import count

CARRIED = (
    "rollout.carry_over=true",
    "rollout_correction.truncate_tokens=2",
    "rollout.max_response_tokens=24",
    f"rollout.stop_token_ids={list(range(10, 22))}",  # so that lengths differ
    "rollout.max_concurrent_samples=8",  # two groups at a time, so that some have not begun
    "rollout.oversample=1.5",
    "rollout.longest_first=true",
)
FREE = "rollout.deterministic=false"


def test_a_resumed_run_is_exact_and_consumes_each_prompt_once(config, tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    steps = ("run.max_steps=4", "checkpoint.every=2", "checkpoint.keep_last=0")
    train(2, config, *CARRIED, *steps, run=straight)
    shutil.copytree(straight, killed)
    shutil.rmtree(killed / "checkpoints" / "step_000004")
    train(2, config, *CARRIED, *steps, run=killed)
    records = comparable(straight)
    assert comparable(killed) == records
    assert_same_checkpoint(*(run / "checkpoints" / "step_000004" for run in (straight, killed)))
    files = [(run / "consumed.jsonl").read_text() for run in (straight, killed)]
    assert files[0] == files[1]
    assert records[0]["staleness/max"] == 0 and sum(r["carry_over/tokens"] for r in records) > 0
    assert records[-1]["staleness/max"] == 1 > records[-1]["staleness/mean"] > 0
    # Two more steps on one rank. Its engine draws from a shared queue.
    train(1, config, *CARRIED, FREE, "run.max_steps=6", "checkpoint.every=0", run=killed)
    found = count(killed)
    assert found.is_exact and found.steps == 6 and (found.consumed, found.dropped) == (48, 0)
    assert found.waiting == 4 and found.drawn == 52


def test_a_resume_with_other_prompts_is_refused(config, toy, tmp_path):
    rows = pq.read_table(toy / "train.parquet")
    data = tmp_path / "train.parquet"
    pq.write_table(rows, data)
    options = (*CARRIED, f"data.train=[{data}]", "checkpoint.every=1")
    train(1, config, *options, "run.max_steps=1")
    # Rows of the same number, but in another order.
    pq.write_table(rows.take(list(reversed(range(len(rows))))), data)
    with pytest.raises(RanksFailed, match=r"samples of prompts that have changed: prompts \[\d"):
        train(1, config, *options, "run.max_steps=2")


def test_a_resume_truncates_samples_at_a_shorter_limit(config):
    options = (*CARRIED, "checkpoint.every=1", "checkpoint.keep_last=0")
    assert train(1, config, *options, "run.max_steps=1")[-1]["carry_over/tokens"] > 0
    steps = train(1, config, *options, "run.max_steps=3", "rollout.max_response_tokens=2")
    assert [step["response_length/max"] for step in steps[1:]] == [2, 2]


ALGORITHMS = {
    "dapo": ("algorithm=dapo", "dynamic_sampling.prompts_per_round=6"),
    "ppo": ("algorithm=ppo", "critic.optimizer.lr=1e-3", "objective.reward_kl.coef=0.1"),
    "rloo": ("algorithm=rloo", "rollout.on_stale=drop", "rollout.max_staleness=2"),
    "reinforce_pp": ("algorithm=reinforce_pp", "rollout.carry_over_cache=keep", FREE),
    "prime": ("algorithm=prime", "implicit_reward.optimizer.lr=1e-3"),
}


@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=[pytest.mark.slow] * (name != "dapo")) for name in ALGORITHMS]
)
def test_algorithms_learn_from_carried_groups(config, algorithm):
    steps = train(1, config, *CARRIED, *ALGORITHMS[algorithm], "run.max_steps=4")
    assert count(config.parent / "run").is_exact
    for step in steps:
        assert step["actor/grad_norm"] > 0 and step["staleness/max"] <= 2
    assert steps[-1]["staleness/max"] >= 1 and sum(s["carry_over/tokens"] for s in steps) > 0
    if algorithm == "dapo":
        for step in steps:
            assert step["dapo/kept_groups"] == 8 <= step["dapo/drawn_groups"] == 6 * step["dapo/rounds"]


STALE = """
from rl.algorithms import grpo

NEEDS = ("samples", "reward", "groups")
DEFAULTS = {"objective.advantage": "grpo", "objective.loss": "ppo"}


def collect(phases):
    batch = grpo.collect(phases)
    if phases.step.number == 3:
        batch.weight_versions[5] = 0
    return batch


def learn(phases, batch):
    grpo.learn(phases, batch)
"""


@pytest.mark.slow  # tests/unit/phases/test_staleness.py has the check itself
def test_a_stale_token_ends_the_run_with_its_cause(config, tmp_path):
    (tmp_path / "stale.py").write_text(STALE)
    with pytest.raises(RanksFailed, match=rf"{StaleTokens.__name__}.*the first one 2 \(.*version 0 of 2"):
        train(1, config, *CARRIED, f"algorithm={tmp_path}/stale.py", "run.max_steps=4")
