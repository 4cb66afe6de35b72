"""Comparisons of log-probs with their own noise: what each names, how soon, and what healthy noise is."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.checks.batches import CheckFailed
from rl.checks.logprobs import LogprobMismatch, present_tokens
from rl.checks.noise import Direction, DrawnEntropy, Gaps
from rl.checks.rounding import ENDED, RoundingNoise
from rl.data.batch import Batch

SAMPLES, LENGTH, LIMIT = 64, 20, 0.2
VOCABULARY = 300
NOISE = 0.01
"""Standard deviation of the rounding of each side, below a tenth of the limit."""


def batch_of(
    rng: np.random.Generator, *, scale: float = 1.0, learned: float = 0.0, of_reference: float = NOISE
) -> Batch:
    """Return samples: the trainer is `learned` nats from the reference, the engine `scale` times as far.
    of_reference: standard deviation of the reference's rounding."""
    ids = [np.arange(LENGTH, dtype=np.int32)] * SAMPLES
    total = SAMPLES * LENGTH

    def noisy(values: np.ndarray, noise: float = NOISE) -> torch.Tensor:
        return torch.from_numpy(values + rng.normal(0, noise, total)).float()

    reference, step = -rng.exponential(2.0, total), learned * rng.normal(size=total)
    return Batch(
        prompt_ids=ids,
        response_ids=ids,
        groups=torch.arange(SAMPLES) // 2,
        truncated=torch.zeros(SAMPLES, dtype=torch.bool),
        rollout_logprobs=noisy(reference + scale * step),
        old_logprobs=noisy(reference + step),
        ref_logprobs=noisy(reference, of_reference),
        weight_versions=torch.zeros(total, dtype=torch.int32),
    )


def test_a_doubled_scale_is_named_before_the_bound_of_rounding():
    rng = np.random.default_rng(0)
    wrong = batch_of(rng, scale=2.0, learned=0.05)
    with pytest.raises(LogprobMismatch, match=r"differ by \+0.6\d times the policy's distance"):
        Direction().check(wrong, wrong.mask > 0, version=0)
    without = batch_of(rng, scale=0.0, learned=0.05)
    with pytest.raises(LogprobMismatch, match=r"\d times nearer to those of the reference"):
        Direction().check(without, without.mask > 0, version=0)
    for learned in (0.0, 0.001, 0.01, 0.05, 1.0):
        for number in range(20):
            healthy = batch_of(rng, learned=learned, of_reference=NOISE * (number % 2))
            Direction().check(healthy, healthy.mask > 0, version=0)


def test_prompts_of_small_steps_are_compared_together():
    rng, check = np.random.default_rng(8), Direction()
    for version in range(2):
        wrong = batch_of(rng, scale=2.0, learned=0.05)
        wrong = replace(wrong, groups=torch.arange(SAMPLES) // 8)
        if version:
            with pytest.raises(LogprobMismatch, match=r"times the policy's distance from the reference"):
                check.check(wrong, wrong.mask > 0, version=version)
        else:
            check.check(wrong, wrong.mask > 0, version=version)


def test_equal_log_probs_have_no_direction():
    batch = batch_of(np.random.default_rng(4))
    batch.old_logprobs = batch.ref_logprobs = batch.rollout_logprobs
    Direction().check(batch, batch.mask > 0, version=0)


def compare(gaps: Gaps, batch: Batch, ranks: torch.Tensor) -> None:
    gaps.check(batch, present_tokens(batch, 0, whole=False), {"generated": ranks}, limit=LIMIT)


def test_the_rank_with_larger_gaps_is_named():
    rng, ranks = np.random.default_rng(1), torch.arange(SAMPLES) % 2
    gaps = Gaps()
    for _ in range(200):
        compare(gaps, batch_of(rng), ranks)
    odd = batch_of(rng)
    of_rank = ranks.repeat_interleave(LENGTH) == 1
    odd.rollout_logprobs[of_rank] += 0.05 * torch.randn(int(of_rank.sum()), generator=torch.manual_seed(0))
    with pytest.raises(LogprobMismatch, match=r"in samples that rank 1 generated as in those of other ranks"):
        for _ in range(10):
            compare(gaps, odd, ranks)


def test_equal_samples_of_a_prompt_count_once():
    """A policy that is nearly sure samples one answer again and again: its gaps are no new evidence."""
    rng, gaps, ranks = np.random.default_rng(7), Gaps(), torch.arange(SAMPLES) // 32
    prompts, size = torch.arange(SAMPLES) // 8, 8 * LENGTH
    for _ in range(300):
        batch = replace(batch_of(rng), groups=prompts)
        answers = torch.arange(SAMPLES * LENGTH) // size * size + torch.arange(SAMPLES * LENGTH) % LENGTH
        sure = torch.from_numpy(rng.random(SAMPLES * LENGTH) < 0.9)
        for name in ("rollout_logprobs", "old_logprobs"):
            column = torch.where(sure, -1e-6, batch.column(name))
            setattr(batch, name, column[answers])
        compare(gaps, batch, ranks)
        gaps.check_positions(batch, batch.mask > 0, limit=LIMIT)


def test_the_positions_with_larger_gaps_are_named():
    rng, gaps = np.random.default_rng(5), Gaps()
    for _ in range(200):
        gaps.check_positions(batch := batch_of(rng), batch.mask > 0, limit=LIMIT)
    late = torch.arange(LENGTH).repeat(SAMPLES) + LENGTH >= 31  # the prompt has LENGTH tokens too
    batch.rollout_logprobs[late] += 0.12 * torch.randn(int(late.sum()), generator=torch.manual_seed(0))
    with pytest.raises(LogprobMismatch, match=r"tokens at positions from 2 \*\* 5 up to its double"):
        gaps.check_positions(batch, batch.mask > 0, limit=LIMIT)


def test_tokens_without_alternatives_are_no_other_positions():
    """A trained policy is certain of all late tokens, or samples them from sets of a single token."""
    rng, gaps = np.random.default_rng(6), Gaps()
    late = torch.arange(LENGTH).repeat(SAMPLES) + LENGTH >= 31
    for certain in (0.0, 1e-7, 1e-3):
        batch = batch_of(rng)
        batch.rollout_logprobs[late], batch.old_logprobs[late] = -certain, -certain * 1.1
        gaps.check_positions(batch, batch.mask > 0, limit=LIMIT)


def test_a_jump_of_the_gap_is_a_warning():
    gaps = Gaps()
    assert not any(gaps.jump(0.01 + 0.005 * (step % 3)) for step in range(30))
    assert "3.3 times as much as in the last 20 steps" in gaps.jump(0.05)


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
def test_steps_that_draw_no_rare_token_are_healthy(rare):
    rng, total = np.random.default_rng(3), SAMPLES * LENGTH
    batch, check = batch_of(rng), DrawnEntropy(VOCABULARY)
    entropy = torch.full((total,), -rare * np.log(rare) - (1 - rare) * np.log(1 - rare))
    for _ in range(300):
        is_rare = torch.from_numpy(rng.random(total) < rare)
        given(batch, (torch.where(is_rare, np.log(rare), np.log(1 - rare)), entropy), check)


def test_the_noise_grows_with_the_doubt_of_the_policy():
    certain = batch_of(np.random.default_rng(6))
    certain.rollout_logprobs = torch.full_like(certain.old_logprobs, -0.01)
    noise, counted, plan = RoundingNoise(1, 1.0), certain.mask > 0, [[[0, 1, 2, 3]]]
    assert noise.plan(plan, certain, counted) is not None
    noise.measure(plan, certain, counted, [certain.old_logprobs, certain.old_logprobs + 1e-3])
    assert noise.limit == pytest.approx(ENDED * 1e-3, rel=0.01)
    doubtful = batch_of(np.random.default_rng(7))
    doubtful.rollout_logprobs = torch.full_like(doubtful.old_logprobs, -1.0)
    noise.plan(plan, doubtful, counted)
    assert noise.limit == pytest.approx(ENDED * 1e-3 * 63.5, rel=0.01)
    noise.plan(plan, certain, counted)
    assert noise.limit == pytest.approx(ENDED * 1e-3, rel=0.01)


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
