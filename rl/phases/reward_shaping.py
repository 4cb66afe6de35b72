"""Terms that the algorithm adds to a sample's score: the overlong penalty and the KL penalty."""

import torch
from torch import Tensor

from rl.checks.batches import CheckFailed
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.objectives.kl import kl
from rl.objectives.kl_controller import AdaptiveKL, FixedKL
from rl.objectives.returns import place_at_end
from rl.objectives.segments import segment_sum
from rl.phases.batch_metrics import sample_means, spread
from rl.rewards.length import overlong_penalties


def overlong_penalty(batch: Batch, config: Config) -> Tensor:
    """Return the length penalty of each sample, float32 [N], 0 or negative.

    The penalty is DAPO's (`reward.overlong_*`). A trajectory's length is the number of tokens that the policy
    sampled in all of its rows. For example, with a limit of 1,000 tokens, a buffer of 200 and a penalty of 1,
    a response of 900 tokens gets -0.5.
    """
    penalties = overlong_penalties(
        batch.merge_rows().sampled_lengths.numpy(),
        max_tokens=config.rollout.max_response_tokens,
        buffer_tokens=config.reward.overlong_buffer_tokens,
        penalty=config.reward.overlong_penalty,
    )
    return batch.of_trajectories(torch.from_numpy(penalties).float())


class KlPenalty:
    """The KL penalty of `objective.reward_kl`: subtracts the KL divergence from the rewards."""

    def __init__(self, config: Config):
        self._penalty, self._critic_warmup = config.objective.reward_kl, config.critic.warmup_steps
        adaptive = self._penalty.controller == "adaptive" and self._penalty.coef
        self.controller = (
            AdaptiveKL(self._penalty.coef, self._penalty.target, self._penalty.horizon)
            if adaptive
            else FixedKL(self._penalty.coef)
        )

    def apply(self, batch: Batch, step: int) -> dict[str, float]:
        """Fill `token_rewards` and subtract the penalty from `rewards`; return the metrics.

        A token's reward is -(coefficient * KL divergence at this token). The last token also gets the
        sample's reward. Afterwards `rewards` holds each sample's sum over its tokens. An adaptive coefficient
        is updated for the next step. A trajectory of several rows is one sample.
        """
        if batch.token_rewards is not None:
            raise CheckFailed(
                "KL penalty check: the penalty was already subtracted from this batch's rewards."
            )
        if batch.trajectories is not None:
            merged = batch.merge_rows()
            metrics = self.apply(merged, step)
            batch.token_rewards = merged.token_rewards
            batch.rewards = batch.of_trajectories(merged.column("rewards"))
            return metrics
        rewards = batch.column("rewards")
        batch.token_rewards = place_at_end(rewards, batch.lengths, batch.mask)
        metrics = {}
        if self._penalty.coef:
            coef = self.controller.coef
            pair = batch.column("old_logprobs"), batch.column("ref_logprobs")
            divergence = kl(*pair, batch.mask, estimator=self._penalty.estimator)
            per_token = sample_means(divergence, batch.mask, batch.lengths)
            mean_kl = float(per_token.mean()) if len(per_token) else 0.0
            metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": coef}
            batch.token_rewards = batch.token_rewards - coef * divergence
            batch.rewards = rewards = rewards - coef * segment_sum(divergence, batch.lengths)
            if step > self._critic_warmup:  # during the warm-up the policy does not change
                self.controller.update(mean_kl, len(per_token))
        return metrics | spread("critic/rewards", rewards)
