"""Comparisons of log-probs with their own noise: what each names, how soon, and what healthy noise is."""

import numpy as np
import pytest
import torch

from rl.checks.batches import CheckFailed
from rl.checks.logprobs import DrawnEntropy
from rl.checks.rounding import ENDED, RoundingNoise
from rl.data.batch import Batch

SAMPLES, LENGTH = 64, 20
VOCABULARY = 300
NOISE = 0.01
"""Standard deviation of the rounding of each side, below a tenth of the limit."""


def batch_of(rng: np.random.Generator) -> Batch:
    """Return samples whose log-probs by trainer and engine differ by their rounding."""
    ids = [np.arange(LENGTH, dtype=np.int32)] * SAMPLES
    total = SAMPLES * LENGTH
    logprobs = -rng.exponential(2.0, total)
    engine, trainer = (torch.from_numpy(logprobs + rng.normal(0, NOISE, total)).float() for _ in range(2))
    return Batch(
        prompt_ids=ids,
        response_ids=ids,
        groups=torch.arange(SAMPLES) // 2,
        truncated=torch.zeros(SAMPLES, dtype=torch.bool),
        rollout_logprobs=engine,
        old_logprobs=trainer,
        weight_versions=torch.zeros(total, dtype=torch.int32),
    )


def draws(rng: np.random.Generator, sharpness: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs of drawn tokens under q and the entropies of q; they are drawn from q ** sharpness."""
    log_q = torch.from_numpy(rng.normal(size=(SAMPLES * LENGTH, VOCABULARY))).log_softmax(-1)
    weights = (sharpness * log_q).softmax(-1)
    tokens = torch.multinomial(weights, 1, generator=torch.manual_seed(int(rng.integers(2**31))))
    return log_q.gather(1, tokens)[:, 0], -(log_q.exp() * log_q).sum(-1)


def given(batch: Batch, found: tuple[torch.Tensor, torch.Tensor], check: DrawnEntropy) -> None:
    batch.rollout_logprobs = found[0].float()
    check.check(batch, found[1].float(), batch.mask > 0, slack=1e-4)


def test_tokens_of_another_distribution_are_named_within_a_step():
    rng = np.random.default_rng(2)
    batch, check = batch_of(rng), DrawnEntropy(VOCABULARY)
    for _ in range(200):
        given(batch, draws(rng, 1.0), check)
    with pytest.raises(CheckFailed, match="drawn from another distribution"):
        given(batch, draws(rng, 6.0), check)


@pytest.mark.parametrize("rare", [1e-2, 1e-3, 1e-4])
def test_only_a_step_of_rare_tokens_alone_is_named(rare):
    rng, total = np.random.default_rng(3), SAMPLES * LENGTH
    batch, check = batch_of(rng), DrawnEntropy(VOCABULARY)
    entropy = torch.full((total,), -rare * np.log(rare) - (1 - rare) * np.log(1 - rare))
    for _ in range(300):
        is_rare = torch.from_numpy(rng.random(total) < rare)
        given(batch, (torch.where(is_rare, np.log(rare), np.log(1 - rare)), entropy), check)
    with pytest.raises(CheckFailed, match="drawn from another distribution"):
        given(batch, (torch.full((total,), np.log(rare)), entropy), check)


def test_the_noise_grows_with_the_doubt_of_the_policy():
    certain = batch_of(np.random.default_rng(6))
    certain.rollout_logprobs = torch.full_like(certain.old_logprobs, -0.01)
    noise, counted, plan = RoundingNoise(1, 1.0), certain.mask > 0, [[[0, 1, 2, 3]]]
    assert noise.plan(plan, certain, counted) is not None
    noise.measure(plan, certain, counted, [certain.old_logprobs, certain.old_logprobs + 1e-3])
    assert noise.limit() == pytest.approx(ENDED * 1e-3, rel=0.01)
    doubtful = batch_of(np.random.default_rng(7))
    doubtful.rollout_logprobs = torch.full_like(doubtful.old_logprobs, -1.0)
    noise.plan(plan, doubtful, counted)
    assert noise.limit() == pytest.approx(ENDED * 1e-3 * 63.5, rel=0.01)
    noise.plan(plan, certain, counted)
    assert noise.limit() == pytest.approx(ENDED * 1e-3, rel=0.01)


def test_few_tokens_measure_no_noise_and_have_more_of_it():
    batch, plan = batch_of(np.random.default_rng(8)), [[[*range(SAMPLES)]]]
    batch.rollout_logprobs = torch.full_like(batch.old_logprobs, -1.0)
    noise, counted = RoundingNoise(1, 1.0), batch.mask > 0
    few = counted & (counted.cumsum(0) <= 4)
    assert noise.plan(plan, batch, few) is None and noise.noise is None
    enough = [[[0, 1, 2, 3]]]  # 80 tokens
    assert noise.plan(plan, batch, counted) == enough
    noise.measure(enough, batch, counted, [batch.old_logprobs, batch.old_logprobs + 1e-3])
    assert noise.noise == pytest.approx(1e-3, rel=0.01)
    noise.plan(plan, batch, few)
    assert noise.noise == pytest.approx(4e-3, rel=0.01)
