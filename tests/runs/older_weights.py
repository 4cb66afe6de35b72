"""GRPO that also checks the engine's log-prob of every token against the weights of the token's version.

It keeps the weights of all versions. Without older weights in a batch the check shows nothing, which the test
excludes by `staleness/max`.
"""

import torch

from rl.algorithms import grpo

NEEDS = ("samples", "reward", "groups")
DEFAULTS = {"objective.advantage": "grpo", "objective.loss": "ppo"}
TOLERANCE = 1e-4
"""Largest difference of two log-probs in float32; the engine adds in another order."""

weights: dict[int, list[torch.Tensor]] = {}
"""Weights of each version of the policy on this rank."""


def collect(phases):
    return grpo.collect(phases)


def learn(phases, batch):
    policy = phases.engines.policy
    phases.memory.to_training()
    # A shared prompt has the experts of one of its samples, but here each sample needs its own.
    is_shared, policy.shares_prompts = policy.shares_prompts, False
    parameters = [parameter.data for parameter in policy.model.parameters()]
    weights[policy.version] = [tensor.clone() for tensor in parameters]
    for version in batch.weight_versions[batch.mask > 0].unique().tolist():
        torch._foreach_copy_(parameters, weights[version])
        logprobs = phases.inference.present_logprobs(batch)
        own = (batch.mask > 0) & (batch.weight_versions == version)
        gap = float((logprobs - batch.rollout_logprobs)[own].abs().max())
        assert gap <= TOLERANCE, f"the log-probs of version {version} differ by {gap} at {policy.version}"
    torch._foreach_copy_(parameters, weights[policy.version])
    policy.shares_prompts = is_shared
    grpo.learn(phases, batch)
