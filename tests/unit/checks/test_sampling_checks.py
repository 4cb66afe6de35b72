"""The parameters that the engine sampled with, against the config."""

import numpy as np
import pytest
import torch

from rl.checks.batches import CheckFailed, check_sampling, expected_parameters
from rl.config.schema import load_config
from rl.data.batch import Batch
from rl.rollout.sampling import parameters_code

KEYS = ["model.path=x", "data.train=[x]", "run.dir=x", "rollout.top_p=0.9", "rollout.temperature=0.8"]
KEYS += ["validation.temperature=0.6", "rollout.biased_truncation=true"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, ""),
        ({"top_p": 1.0}, "with top_p=1.0"),
        ({"temperature": 0.6}, "with the parameters of validation"),
    ],
)
def test_parameters_that_did_not_reach_the_engine_are_named(change, named):
    config = load_config(None, KEYS)
    ids = [np.array([n], np.int32) for n in range(3)]
    batch = Batch(ids, ids, torch.arange(3), torch.zeros(3, dtype=torch.bool))
    own = expected_parameters(config, "training")
    codes = [parameters_code(own), -1, parameters_code(own | change)]
    batch.sampled_with = torch.tensor(codes)
    if not change:
        return check_sampling(batch, config, "training")
    with pytest.raises(CheckFailed, match=f"sampled sample 2 {named} .and 0 further samples of 3"):
        check_sampling(batch, config, "training")
    return None
