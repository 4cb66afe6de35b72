"""The staleness of tokens is measured over sampled tokens, and a violation names the prompt."""

import numpy as np
import pytest
import torch

from rl.checks.batches import StaleTokens, check_staleness
from rl.data.batch import Batch


def batch_of(versions, mask):
    return Batch(
        prompt_ids=[np.ones(1, np.int32)] * 2,
        response_ids=[np.ones(2, np.int32), np.ones(len(versions) - 2, np.int32)],
        groups=torch.tensor([4, 5]),
        truncated=torch.zeros(2, dtype=torch.bool),
        mask=torch.tensor(mask, dtype=torch.float32),
        weight_versions=torch.tensor(versions, dtype=torch.int32),
    )


def test_staleness_counts_sampled_tokens():
    batch = batch_of([3, 3, 2, 0, 3], [1, 1, 1, 0, 1])  # the token of version 0 was given
    assert check_staleness(batch, 3, 1) == {"staleness/mean": 0.25, "staleness/max": 1.0}
    assert check_staleness(batch_of([0, 0, 0], [0, 0, 0]), 3, 1) == {}


@pytest.mark.parametrize("version, age", [(5, 3), (1, -1)])
def test_a_token_outside_the_limit_ends_the_run(version, age):
    with pytest.raises(StaleTokens, match=rf"1 of 3 .* the first one {age} \(token 0 of sample 1,"):
        check_staleness(batch_of([4, 4, 2] if age > 0 else [1, 1, 2], [1, 1, 1]), version, 2)
