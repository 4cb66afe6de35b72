"""A log-prob of the trainer that is not bitwise the engine's ends the run and is named."""

import numpy as np
import pytest
import torch

from rl.checks.logprobs import NumericsDiffer, check_equal
from rl.data.batch import Batch

PLANS = [[[[0], [2]], [[1]]]]
"""One mini-batch on two data parallel ranks: samples 0 and 2 on rank 0, sample 1 on rank 1."""


def sampled() -> Batch:
    return Batch(
        prompt_ids=[np.ones(1, np.int32)] * 3,
        response_ids=[np.ones(length, np.int32) for length in (2, 3, 1)],
        groups=torch.arange(3),
        truncated=torch.zeros(3, dtype=torch.bool),
        mask=torch.tensor([1.0, 1, 1, 1, 1, 0]),
        rollout_logprobs=torch.tensor([-1.0, -2, -3, -4, -5, 0]),
        weight_versions=torch.tensor([7, 7, 7, 7, 6, 7], dtype=torch.int32),
    )


def test_equal_log_probs_pass():
    batch = sampled()
    found = batch.rollout_logprobs.clone()
    found[5] = -6.0  # a token that the policy did not sample
    batch.old_logprobs = found
    check_equal(batch, 7, PLANS)


@pytest.mark.parametrize("value", [np.nextafter(np.float32(-5), np.float32(0)), np.nan])
def test_a_differing_bit_names_token_rank_and_versions(value):
    batch = sampled()
    found = batch.rollout_logprobs.clone()
    found[4] = float(value)
    batch.old_logprobs = found
    words = (
        r"1 of 5 sampled tokens .* token 2 of sample 1: .* in the trainer \(data parallel rank 1, weights of "
        r"version 7\), -5.0 in the engine \(version 6\)"
    )
    with pytest.raises(NumericsDiffer, match=words):
        check_equal(batch, 7, PLANS)
