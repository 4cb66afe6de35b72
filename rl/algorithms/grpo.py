"""GRPO: group relative policy optimization (DeepSeekMath, arXiv:2402.03300), and Dr.GRPO (arXiv:2503.20783).

For each prompt a group of G responses is sampled. The advantage of a response is its reward minus the group's mean, over
the group's standard deviation; there is no critic. The policy maximises PPO's clipped objective on every token of the
response, minus kl_coef times the KL divergence from the reference policy.

    J = E[ sum_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A) - kl_coef KL_t ],   r_t = pi(y_t) / pi_old(y_t)

Differences from the paper: tokens are averaged over the whole mini-batch (`objective.aggregation: token-mean`, as DAPO and
verl do), the paper's own is `seq-mean-token-mean`; KL is off unless `objective.kl_coef` says otherwise. Dr.GRPO is
`objective.normalize_by_std=false objective.aggregation=seq-mean-token-sum-norm`.
"""

from functools import partial

from rl.config import Config
from rl.objectives.advantages import grpo
from rl.objectives.aggregate import aggregate
from rl.objectives.kl import kl
from rl.objectives.policy_loss import ppo
from rl.objectives.segments import expand
from rl.phases import MicroBatch, Phases, Totals


def step(phases: Phases, config: Config) -> None:
    prompts = phases.draw_prompts()
    batch = phases.generate(prompts)
    phases.score(batch, prompts)
    batch.old_logprobs = phases.old_logprobs(batch)
    if config.objective.kl_coef:
        batch.ref_logprobs = phases.ref_logprobs(batch)
    with phases.timed("adv"):
        advantages = grpo(batch.rewards, batch.groups, normalize_by_std=config.objective.normalize_by_std)
        batch.advantages = expand(advantages, batch.lengths)
    phases.update(batch, partial(loss, config=config))


def loss(micro: MicroBatch, totals: Totals, *, config: Config):
    """The objective of one micro-batch and its metrics, both with the mini-batch's denominators."""
    goal = config.objective
    reduce = partial(
        aggregate, mask=micro.mask, lengths=micro.lengths, mode=goal.aggregation,
        num_tokens=totals.num_tokens, num_samples=totals.num_samples, norm=config.rollout.max_response_tokens,
    )  # fmt: skip
    token_loss, stats = ppo(
        micro.logprobs, micro.old_logprobs, micro.advantages, micro.mask,
        clip_low=goal.clip_low, clip_high=goal.clip_high, dual_clip=goal.dual_clip,
    )  # fmt: skip
    total = pg_loss = reduce(token_loss)
    metrics = {"actor/pg_loss": pg_loss} | {f"actor/{name}": value / totals.num_tokens for name, value in stats.items()}
    if goal.kl_coef:
        kl_loss = reduce(kl(micro.logprobs, micro.ref_logprobs, micro.mask, estimator=goal.kl_estimator))
        total = total + goal.kl_coef * kl_loss
        metrics["actor/kl_loss"] = kl_loss
    if goal.entropy_coef:
        total = total - goal.entropy_coef * reduce(micro.entropy)
    return total, metrics
