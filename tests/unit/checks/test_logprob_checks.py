"""Log-probs of engine and trainer may differ by rounding, and by no more."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl.checks.batches import CheckFailed
from rl.checks.checks import Checks
from rl.checks.logprobs import (
    LogprobMismatch,
    check_engine,
    check_reference,
    check_repeats,
    present_tokens,
    rounding_limit,
)
from rl.config.schema import load_config
from rl.data.batch import Batch

QWEN_7B = {"hidden_size": 3584, "num_hidden_layers": 28}
SAMPLES, LENGTH = 4, 10


@pytest.fixture
def batch() -> Batch:
    """Return a batch with the engine's log-prob -2 for every token, and version 3 of the weights."""
    ids = [np.arange(LENGTH, dtype=np.int32)] * SAMPLES
    tokens = torch.ones(SAMPLES * LENGTH)
    return Batch(
        prompt_ids=ids,
        response_ids=ids,
        groups=torch.zeros(SAMPLES, dtype=torch.int64),
        truncated=torch.zeros(SAMPLES, dtype=torch.bool),
        mask=tokens.clone(),
        rollout_logprobs=-2 * tokens,
        weight_versions=torch.full((len(tokens),), 3, dtype=torch.int32),
    )


def gap(batch: Batch, logprobs: torch.Tensor, **options) -> dict[str, float]:
    given = dict(limit=1e-4, routes=False, whole=False, ranks=[[0, 1], [2, 3]]) | options
    counted = present_tokens(batch, 3, whole=given.pop("whole"))
    return check_engine(batch, logprobs, counted, **given)


def test_the_limit_follows_from_dtype_and_size():
    single, half = (rounding_limit(QWEN_7B, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert single == pytest.approx(4 * (169 * 3584) ** 0.5 * 2.0**-24)
    assert half == pytest.approx(4 * 13 * 2.0**-8)


def test_weights_in_fp8_widen_the_limit_for_the_engine_only():
    weights = SimpleNamespace(hf=QWEN_7B | {"vocab_size": 8}, dtype=torch.bfloat16)
    config = load_config(None, ["model.path=m", "data.train=[d]", "rollout.quantization=fp8"])
    checks = Checks(
        config, SimpleNamespace(weight_map=weights, grid=SimpleNamespace(micro_batch_multiple=1)), frozenset()
    )
    assert (checks._engine_limit, checks._limit) == (16 * 13 * 2.0**-8, 4 * 13 * 2.0**-8)


def test_a_difference_beyond_rounding_names_rank_sample_and_token(batch):
    logprobs = batch.rollout_logprobs.clone()
    logprobs[25] -= 0.5
    with pytest.raises(LogprobMismatch, match=r"rank 0 0, rank 1 0.025; largest at token 5 of sample 2"):
        gap(batch, logprobs)
    assert gap(batch, batch.rollout_logprobs + 1e-5)["training/logprob_gap"] == pytest.approx(1e-5, rel=0.1)


def test_tokens_that_others_decided_are_left_out(batch):
    logprobs = batch.rollout_logprobs.clone()
    logprobs[:3] -= 9
    batch.mask[0], batch.weight_versions[1:3] = 0, 2
    assert gap(batch, logprobs)["training/logprob_gap"] == 0
    batch.mask[:] = 0
    assert gap(batch, logprobs) == {}


def test_one_sample_of_experts_may_be_routed_otherwise(batch):
    logprobs = batch.rollout_logprobs.clone()
    logprobs[12:20] -= 1
    assert gap(batch, logprobs, routes=True)["training/logprob_gap"] == 0
    logprobs[30] -= 1
    with pytest.raises(LogprobMismatch):
        gap(batch, logprobs, routes=True)


def test_the_reference_equals_a_policy_that_has_not_learned(batch):
    batch.old_logprobs = batch.rollout_logprobs
    check_reference(batch, limit=1e-4)
    batch.ref_logprobs = batch.old_logprobs + 1e-5
    check_reference(batch, limit=1e-4)
    batch.ref_logprobs = batch.old_logprobs + 1e-2
    with pytest.raises(LogprobMismatch, match="before the first update"):
        check_reference(batch, limit=1e-4)


def test_a_kept_cache_leaves_out_samples_with_older_tokens(batch):
    batch.weight_versions[0] = 2  # the first token of the first sample
    logprobs = batch.rollout_logprobs.clone()
    logprobs[1:LENGTH] -= 0.5  # what a cache of the older weights does to later tokens
    with pytest.raises(LogprobMismatch):
        gap(batch, logprobs)
    assert gap(batch, logprobs, whole=True)["training/logprob_gap"] == 0.0


def test_samples_that_are_equal_by_chance_pass_and_copies_do_not():
    rng, ends = np.random.default_rng(0), torch.zeros(64, dtype=torch.bool)
    tokens = [rng.integers(0, 2, 3).astype(np.int32) for _ in range(64)]  # each with a probability of 1/8
    prompts, groups = [np.array([1], np.int32)] * 64, torch.arange(64) // 8
    batch = Batch(prompts, tokens, groups, ends, rollout_logprobs=torch.full((192,), -math.log(2)))
    check_repeats(batch)
    tokens = [np.arange(i, i + 12, dtype=np.int32) for i in range(64)]
    batch = Batch(prompts, tokens, groups, ends, rollout_logprobs=torch.full((768,), -4.0))
    check_repeats(batch)
    for i in (9, 12, 13):
        tokens[i] = tokens[10]
    with pytest.raises(CheckFailed, match=r"check: sample 10 is an .* \(and 2 further samples of 64"):
        check_repeats(batch)
    tokens = [np.arange(100, dtype=np.int32) for _ in range(64)]
    for i in range(64):
        tokens[i][1] = i  # one token differs
    batch = Batch(prompts, tokens, groups, ends, rollout_logprobs=torch.full((6400,), -4.0))
    check_repeats(batch)
    tokens[63][1] = 56
    with pytest.raises(CheckFailed, match=r"check: sample 63 is an .* \(and 0 further samples of 64"):
        check_repeats(batch)
