"""The policy gradient that a config selects, assembled from the pure functions in `rl.objectives`.

An algorithm's file calls `advantages(batch, config)` and `policy_loss(config)`. The keys
`objective.advantage`, `objective.loss` and `objective.aggregation` select the formulas.
`rl.config.objective_checks` has already refused invalid combinations.
"""

from functools import partial

import torch
from torch import Tensor

from rl.config.options import ConfigError
from rl.config.schema import Config, Objective
from rl.data.batch import Batch
from rl.objectives import advantages as per_sample
from rl.objectives import covariance, returns
from rl.objectives import policy_loss as per_token
from rl.objectives.aggregate import aggregate
from rl.objectives.kl import kl
from rl.objectives.segments import expand, segment_sum
from rl.objectives.sequence_loss import gmpo, gspo
from rl.phases.updates import TokenSelection
from rl.training.loss import Loss, Totals
from rl.training.packing import MicroBatch

NOT_REWARDS = ("acc", "failed", "judge", "reward_model", "score")
"""Entries of `Batch.score_details` that are not separate rewards."""


def advantages(batch: Batch, config: Config) -> Tensor:
    """Return the advantage of every token of the batch, float32 [T], by `objective.advantage`.

    Reads batch.rewards [N], batch.token_rewards [T] and, for remax, batch.baselines [N]. The files of ppo and
    prime call gae and prime themselves, because these need the outputs of a second model.
    """
    goal, groups, lengths, mask = config.objective, batch.groups, batch.lengths, batch.mask
    if goal.advantage == "reinforce++":
        return returns.reinforce_pp(batch.token_rewards, lengths, mask, gamma=goal.gamma)
    if goal.advantage == "reinforce++-baseline":
        return returns.reinforce_pp_baseline(batch.rewards, groups, lengths, mask)
    if goal.advantage == "optimal-token-baseline":
        return returns.optimal_token_baseline(
            batch.token_rewards,
            groups,
            lengths,
            mask,
            logprobs=batch.old_logprobs,
            sum_p_squared=batch.sum_p_squared,
            weights=batch.loss_weights,
        )
    return expand(_per_sample(batch, goal), lengths)


def _per_sample(batch: Batch, goal: Objective) -> Tensor:
    rewards, groups = batch.rewards, batch.groups
    if goal.advantage == "grpo":
        return per_sample.grpo(rewards, groups, normalize_by_std=goal.normalize_by_std)
    if goal.advantage == "grpo-passk":
        return per_sample.grpo_passk(rewards, groups, normalize_by_std=goal.normalize_by_std)
    if goal.advantage == "rloo":
        return per_sample.rloo(rewards, groups)
    if goal.advantage == "opo":
        return per_sample.opo(rewards, groups, segment_sum(batch.mask, batch.lengths).long())
    if goal.advantage == "gpg":
        return per_sample.gpg(rewards, groups)
    if goal.advantage == "gdpo":
        columns, weights = _reward_columns(batch, goal)
        return per_sample.gdpo(columns, groups, weights=weights)
    assert goal.advantage == "remax" and batch.baselines is not None, goal.advantage
    return per_sample.remax(rewards, batch.baselines)


def _reward_columns(batch: Batch, goal: Objective) -> tuple[Tensor, Tensor]:
    """Return the rewards that gdpo normalises separately, float32 [N, K], and their weights [K].

    A reward that a sample lacks is 0. Raises ConfigError if the reward function does not return one of them.
    """
    names = goal.reward_columns or [name for name in sorted(batch.score_details) if name not in NOT_REWARDS]
    missing = [name for name in names if name not in batch.score_details]
    if missing or not names:
        raise ConfigError(
            f"objective.reward_columns wants {', '.join(missing) or 'at least one number'} beside the score, "
            f"but the reward function gives {', '.join(sorted(batch.score_details)) or 'none'}."
        )
    columns = torch.stack([batch.score_details[name].nan_to_num(0.0) for name in names], dim=1)
    return columns, torch.tensor(goal.reward_weights or [1.0] * len(names))


def policy_loss(config: Config) -> Loss:
    """Return `objective.loss` with its aggregation, KL term and entropy bonus, for `Phases.update`."""
    return partial(_policy_loss, config=config)


def _policy_loss(micro: MicroBatch, totals: Totals, *, config: Config) -> tuple[Tensor, dict[str, Tensor]]:
    goal = config.objective
    reduce = partial(
        aggregate,
        mask=micro.mask,
        lengths=micro.lengths,
        mode=goal.aggregation,
        num_tokens=totals.num_tokens,
        num_samples=totals.num_samples,
        norm=config.rollout.max_response_tokens,
    )
    token_loss, stats = _token_loss(micro, goal)
    if "loss_weights" in micro.columns:
        token_loss = token_loss * micro.loss_weights
    total = pg_loss = reduce(token_loss)
    metrics = {"actor/pg_loss": pg_loss} | {
        f"actor/{name}": value / totals.num_tokens for name, value in stats.items()
    }
    if goal.kl_coef:
        kl_loss = reduce(kl(micro.logprobs, micro.ref_logprobs, micro.mask, estimator=goal.kl_estimator))
        total = total + goal.kl_coef * kl_loss
        metrics["actor/kl_loss"] = kl_loss
    if goal.entropy_coef:
        total = total - goal.entropy_coef * reduce(micro.entropy)
    return total, metrics


def _token_loss(micro: MicroBatch, goal: Objective) -> tuple[Tensor, dict[str, Tensor]]:
    inputs = (micro.logprobs, micro.old_logprobs, micro.advantages, micro.mask)
    clip = dict(clip_low=goal.clip_low, clip_high=goal.clip_high)
    match goal.loss:
        case "ppo":
            return per_token.ppo(*inputs, **clip, dual_clip=goal.dual_clip)
        case "reinforce":
            return per_token.reinforce(*inputs)
        case "gpg":
            return per_token.gpg(*inputs)
        case "cispo":
            return per_token.cispo(*inputs, **clip)
        case "sapo":
            return per_token.sapo(*inputs, tau_pos=goal.sapo_tau_positive, tau_neg=goal.sapo_tau_negative)
        case "dro":
            return per_token.dro(*inputs, beta=goal.dro_beta)
        case "dppo-tv":
            return per_token.dppo_tv(*inputs, **clip, max_ratio=goal.dppo_max_ratio)
        case "dppo-kl":
            return per_token.dppo_kl(*inputs, **clip, max_ratio=goal.dppo_max_ratio)
        case "gspo":
            return gspo(*inputs, micro.lengths, **clip)
        case "gmpo":
            return gmpo(*inputs, micro.lengths, **clip)
        case "clip-cov":
            return covariance.clip_cov(*inputs, micro.selected_tokens, **clip)
        case "kl-cov":
            return covariance.kl_cov(*inputs, micro.selected_tokens, kl_cov_coef=goal.kl_cov_coef)
    raise AssertionError(goal.loss)


def token_selection(config: Config) -> TokenSelection | None:
    """Return the function that selects the tokens for clip-cov and kl-cov, or None for other losses.

    These losses treat some tokens differently, selected by statistics over the whole mini-batch.
    """
    goal = config.objective
    if goal.loss == "clip-cov":
        return lambda batch, logprobs, seed: covariance.clip_cov_tokens(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.mask,
            clip_low=goal.clip_low,
            clip_high=goal.clip_high,
            fraction=goal.cov_fraction,
            cov_low=goal.cov_low,
            cov_high=goal.cov_high,
            seed=seed,
        )
    if goal.loss == "kl-cov":
        return lambda batch, logprobs, seed: covariance.kl_cov_tokens(
            logprobs, batch.advantages, batch.mask, fraction=goal.cov_fraction
        )
    return None
