"""Mini-batches: groups are divided evenly, planned once, and counted by the mask of the moment."""

import numpy as np
import pytest
import torch

from rl.config.schema import load_config
from rl.data.batch import Batch
from rl.phases.minibatches import MinibatchPlan, MinibatchPlanner
from rl.training.micro_batch_plans import Cost


def batch_of(group_sizes, unit=1):
    count = sum(group_sizes)
    return Batch(
        prompt_ids=[np.ones(2, np.int32)] * count,
        response_ids=[np.ones(1 + i % 3, np.int32) for i in range(count)],
        groups=torch.arange(len(group_sizes)).repeat_interleave(torch.tensor(group_sizes)),
        truncated=torch.zeros(count, dtype=torch.bool),
        samples_per_unit=unit,
    )


def planner_of(prompts_per_minibatch, dp=2):
    keys = ["model.path=toy", "data.train=toy.jsonl", "data.prompts_per_step=8"]
    keys += [f"training.prompts_per_minibatch={prompts_per_minibatch}", "training.micro_batch_tokens=8"]
    return MinibatchPlanner(load_config(None, keys), dp, Cost(), shares_prompts=True)


@pytest.mark.parametrize(
    "per_minibatch, num_groups, groups_of_each", [(0, 8, [8]), (4, 8, [4, 4]), (4, 5, [3, 2]), (8, 3, [3])]
)
def test_group_warm_up_stay_whole_and_are_divided_evenly(per_minibatch, num_groups, groups_of_each):
    batch = batch_of([2] * num_groups)
    plans = planner_of(per_minibatch).plans(batch)
    assert [len(batch.groups[plan.samples].unique()) for plan in plans] == groups_of_each
    assert sorted(i for plan in plans for i in plan.samples) == list(range(len(batch)))
    assert all(len(plan.micro_batches) == 2 for plan in plans)


def test_a_batch_is_planned_once_and_another_one_again():
    planner, batch = planner_of(4), batch_of([2] * 8)
    first = planner.plans(batch)
    assert planner.plans(batch) is first
    assert planner.plans(batch.select(list(range(8)))) is not first


def test_totals_follow_the_mask_and_are_at_least_one():
    batch, plan = batch_of([2, 2], unit=2), MinibatchPlan([[[0, 1]], [[2, 3]]])
    totals = plan.totals(batch)  # lengths 1, 2, 3, 1
    assert (totals.num_tokens, totals.num_samples, totals.num_units) == (7, 4, 2)
    part = MinibatchPlan([[[0]], [[1]]]).totals(batch)  # the other mini-batch does not count
    assert (part.num_tokens, part.num_samples, part.num_units) == (3, 2, 1)
    batch.mask[0] = 0  # the only token of sample 0
    totals = plan.totals(batch)
    assert (totals.num_tokens, totals.num_samples, totals.num_units) == (6, 3, 1)
    batch.mask[:] = 0
    totals = plan.totals(batch)
    assert (totals.num_tokens, totals.num_samples, totals.num_units) == (1, 1, 1)
