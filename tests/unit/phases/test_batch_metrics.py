"""Metrics of a batch against hand numbers."""

import numpy as np
import torch

from rl.data.batch import Batch
from rl.phases.batch_metrics import engine_gap, equal_groups


def test_equal_groups_are_counted():
    rewards, groups = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.5]), torch.tensor([7, 2, 7, 2, 3])
    found = equal_groups(rewards, groups)  # the group of one sample does not count
    assert found == {"reward/frac_reward_zero_std": 0.5}
    assert equal_groups(rewards, torch.arange(5)) == {}


def test_the_engine_gap_of_long_contexts_is_apart():
    names = {}
    for longest in (1020, 1022):
        prompts = [np.zeros(n, np.int32) for n in (10, longest)]
        batch = Batch(prompts, [np.zeros(4, np.int32)] * 2, torch.arange(2), torch.zeros(2).bool())
        batch.rollout_logprobs = torch.tensor([-1.0] * 6 + [-2.0] * 2)
        gaps = engine_gap(batch, torch.full((8,), -1.25))
        names[longest] = {key.split("/")[-1]: gap for key, gap in gaps.items() if "logprob_gap" in key}
    assert names == {1020: {}, 1022: {"1k": 0.25, "4k": 0.75}}  # the contexts are 1,022 to 1,025 tokens
