"""Trajectories of several rows: what counts samples counts trajectories, and no token of a tool."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.data.batch import Batch, concatenate
from rl.objectives.aggregate import aggregate
from rl.objectives.segments import expand, segment_sum
from rl.phases.batch_metrics import length_metrics
from rl.phases.minibatches import MinibatchPlan
from rl.phases.policy_gradient import advantages
from rl.phases.reward_shaping import KlPenalty, overlong_penalty
from rl.phases.scorer import _joined
from tests.configs import config_with

# Two prompts. The first has trajectories of 2 rows (3 + 2 tokens) and of 1 row, the second one of 1 and 1.
LENGTHS = [3, 2, 2, 4, 1]
TURNS = torch.tensor([1, 0, 2, 3, 3, 1, 1, 1, 1, -1, 2, 1], dtype=torch.int32)


def example(**columns) -> Batch:
    batch = Batch(
        prompt_ids=[np.full(2, 7, np.int32)] * 5,
        response_ids=[np.arange(n, dtype=np.int32) + 10 * i for i, n in enumerate(LENGTHS)],
        groups=torch.tensor([0, 0, 0, 1, 1]),
        truncated=torch.zeros(5, dtype=torch.bool),
        trajectories=torch.tensor([0, 0, 1, 2, 3]),
        turns=TURNS,
        extra={"turn_rewards": torch.zeros(12)},
        mask=(TURNS > 0).float(),
    )
    batch.scores = batch.rewards = torch.tensor([1.0, 1.0, 0.0, 0.5, 0.25])
    return batch.with_columns(columns)


def test_a_merged_trajectory_has_the_tokens_of_its_rows():
    batch = example()
    merged = batch.merge_rows()
    assert merged.lengths.tolist() == [5, 2, 4, 1] and merged.groups.tolist() == [0, 0, 1, 1]
    assert merged.response_ids[0].tolist() == [0, 1, 2, 10, 11]
    assert merged.sampled_lengths.tolist() == [4, 2, 3, 1] and batch.sampled_lengths.tolist() == [
        2,
        2,
        2,
        3,
        1,
    ]
    assert merged.last_turn(0).tolist() == [10, 11] and merged.last_turn(2).tolist() == [33]
    assert batch.of_trajectories(torch.arange(4)).tolist() == [0, 0, 1, 2, 3]
    kept = concatenate([batch.keep_groups([1]), batch]).merge_rows()
    assert kept.lengths.tolist() == [4, 1, 5, 2, 4, 1]


@pytest.mark.parametrize("estimator", ["grpo", "turn-return", "turn-spread", "opo", "reinforce++"])
def test_advantages_compare_trajectories(estimator):
    config = config_with(f"objective.advantage={estimator}")
    batch = example(token_rewards=torch.linspace(0, 1, 12))
    merged = batch.merge_rows()
    assert torch.equal(advantages(batch, config), advantages(merged, config))


def test_the_reward_of_a_trajectory_is_on_its_last_token():
    config = config_with("objective.reward_kl.coef=0.5")
    columns = dict(old_logprobs=torch.full((12,), -1.0), ref_logprobs=torch.full((12,), -2.0))
    batch = example(**columns)
    KlPenalty(config).apply(batch, 1)
    # Each of the policy's tokens costs 0.5: four of them in the first trajectory.
    assert batch.rewards.tolist() == [-1.0, -1.0, -1.0, -1.0, -0.25]
    assert batch.token_rewards[:5].tolist() == [-0.5, 0, -0.5, -0.5, 0.5]


def test_length_penalties_and_metrics_count_the_tokens_of_the_policy():
    config = config_with("rollout.max_response_tokens=4", "reward.overlong_buffer_tokens=2")
    assert overlong_penalty(example(), config).tolist() == [-1.0, -1.0, 0.0, -0.5, 0.0]
    metrics = length_metrics(example(), max_prompt_tokens=8)
    assert metrics["response_length/mean"] == 10 / 4 and metrics["agents/given_length/max"] == 1


def test_denominators_count_trajectories():
    batch = example()
    totals = MinibatchPlan([[[0, 2], [1]], [[3, 4]]]).totals(batch)
    assert (totals.num_tokens, totals.num_samples) == (10, 4)
    no_tokens = replace(batch, mask=batch.mask * torch.tensor([0.0] * 5 + [1.0] * 7))
    assert MinibatchPlan([[[0, 1, 2]]]).totals(no_tokens).num_samples == 1


def test_means_of_samples_are_those_of_trajectories():
    batch, loss = example(), torch.linspace(1, 2, 12)
    counts = segment_sum(batch.mask, batch.trajectory_lengths)
    column = expand(batch.of_trajectories(counts), batch.lengths)
    options = dict(mode="seq-mean-token-mean", num_tokens=10, num_samples=4)
    merged = batch.merge_rows()
    whole = aggregate(loss, batch.mask, merged.lengths, **options)
    parts = [  # the rows of the first trajectory are in different micro-batches
        aggregate(loss[i], batch.mask[i], batch.lengths[rows], counts=column[i], **options)
        for rows in ([0, 2], [1, 3, 4])
        if (i := batch.tokens_of(rows)) is not None
    ]
    assert float(sum(parts)) == pytest.approx(float(whole))


def test_scores_of_environments_replace_those_of_the_reward_function():
    nan = float("nan")
    given = {"score": torch.tensor([1.0, nan]), "solved": torch.tensor([0.5, nan])}
    computed = {"score": torch.tensor([0.0, 2.0]), "failed": torch.tensor([0.0, 1.0])}
    joined = _joined(given, computed)
    assert joined["score"].tolist() == [1.0, 2.0] and joined["failed"].tolist() == [0.0, 1.0]
    assert joined["solved"][0] == 0.5 and joined["solved"][1].isnan()
