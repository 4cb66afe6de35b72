"""The sections of the configuration for terms of the objective, and for preferences."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.config.ranges import AT_LEAST_ONE, BELOW_HALF, NOT_NEGATIVE, POSITIVE


@dataclass
class RewardKl:
    """KL divergence from the reference policy, subtracted from the reward of every token."""

    coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the divergence; the initial one if it is adaptive. 0: none, and no reference policy is kept
    for it."""
    estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Estimator of the divergence of a token."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: each step moves the weight so that the mean divergence of a token approaches `target`."""
    target: Annotated[float, POSITIVE] = 0.1
    """adaptive: target of `actor/reward_kl_penalty`, in nats per token; verl's default. The 6 nats per sample
    of arXiv:1909.08593 are 6 / (mean response length) here."""
    horizon: Annotated[int, AT_LEAST_ONE] = 10000
    """adaptive: samples over which the weight may change by about a fifth."""


@dataclass
class AdaptiveEntropy:
    """Adaptive weight of the entropy bonus (Skywork-OR1), which keeps the entropy above a target."""

    target: Annotated[float, NOT_NEGATIVE] = 0.0
    """The bonus acts in a step if the step's mean entropy per token (`actor/entropy`) is not above this, in
    nats. The paper: 0.2. 0: fixed `entropy_coef`."""
    delta: Annotated[float, POSITIVE] = 0.005
    """Increase of the weight in such a step, and decrease in any other step."""
    low: Annotated[float, NOT_NEGATIVE] = 0.0
    """Lower bound of the coefficient."""
    high: Annotated[float, NOT_NEGATIVE] = 1.0
    """Upper bound of the coefficient."""


@dataclass
class Preference:
    """dpo, spin, sppo, kto, orpo and simpo: learning from preferences between responses."""

    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """dpo and spin: DPO's logistic loss, SLiC's hinge, or IPO's square."""
    beta: Annotated[float, POSITIVE] = 0.1
    """Weight of the divergence from the reference policy. sppo: 1 / eta. orpo: weight of the odds ratio
    (lambda). simpo: scale of the reward."""
    label_smoothing: Annotated[float, BELOW_HALF] = 0.0
    """sigmoid and simpo: probability that a pair's preference is wrong (conservative DPO), below 0.5."""
    gamma: Annotated[float, NOT_NEGATIVE] = 0.0
    """simpo: required margin of the chosen response's reward over the rejected one's."""
    desirable_weight: Annotated[float, POSITIVE] = 1.0
    """kto: weight of the loss of responses with a true label."""
    undesirable_weight: Annotated[float, POSITIVE] = 1.0
    """kto: weight of the loss of responses with a false label."""
