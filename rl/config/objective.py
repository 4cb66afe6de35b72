"""The section of the configuration for the policy gradient.

Keys of single advantage estimators and losses are declared in their files and added to the section.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from rl.config.declarations import Formula, formula_of, formulas, literal_dict
from rl.config.options import OWN_FUNCTION
from rl.config.ranges import FINITE, FRACTION, NOT_NEGATIVE, PROBABILITY
from rl.config.terms import AdaptiveEntropy, RewardKl

T = TypeVar("T")

ADVANTAGES, LOSSES = formulas("advantages"), formulas("losses")
"""Config name -> declarations of each advantage estimator, and of each loss."""

if TYPE_CHECKING:
    Advantage = str
    PolicyLoss = str
    Aggregation = str
    KlEstimator = str
else:
    Advantage = Literal[("none", *ADVANTAGES, OWN_FUNCTION)]
    PolicyLoss = Literal[("none", *LOSSES, OWN_FUNCTION)]
    Aggregation = Literal[tuple(literal_dict("aggregate", "MODES"))]
    KlEstimator = Literal[tuple(literal_dict("kl", "ESTIMATORS"))]


def with_declared_keys(cls: type[T]) -> type[T]:
    """Add the keys that the files of advantage estimators and losses declare as fields of the section
    `objective`."""
    for described in (ADVANTAGES, LOSSES):
        for formula in described.values():
            for option in formula.options:
                key, text = option.name, formula.docs[option.name]
                readers = ", ".join(name for name, other in described.items() if key in other.reads)
                assert key not in cls.__annotations__, f"objective.{key} is declared twice"
                cls.__annotations__[key] = option.type
                given: dict[str, Any] = {"default": option.default, "default_factory": option.default_factory}
                made = field(**given, metadata={"doc": f"{readers}: {text[0].lower()}{text[1:]}"})
                setattr(cls, key, made)
    return cls


@dataclass
@with_declared_keys
class Objective:
    """Policy gradient: advantage, loss and mean. docs/algorithms.md has the formulas."""

    advantage: Advantage = "none"
    """Advantage estimator. Each algorithm sets its own; none: the algorithm has no policy gradient. A
    function of your file, such as `f(rewards, groups, *, eps=1e-6)`, returns one number per sample, floating
    [N]; with the parameter `lengths` one per response token, [T]. Parameters before the * are columns of the
    batch."""
    loss: PolicyLoss = "none"
    """Policy loss per token. Each algorithm sets its own; none: as for `advantage`. A function of your file,
    such as `f(logprobs, old_logprobs, advantages, mask, *, eps=0.2)`, gets the response tokens of a
    micro-batch, float32 [R] each, and returns (loss of each token [R], {metric: sum over the tokens})."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of an advantage or a loss that is a function in your file (`advantage`, `loss`)."""
    aggregation: Aggregation = "token-mean"
    """Mean that reduces token losses to one number; denominators are global over the mini-batch."""
    clip_low: Annotated[float, FRACTION] = 0.2
    """The probability ratio is clipped from below at 1 - clip_low."""
    clip_high: Annotated[float, NOT_NEGATIVE] = 0.2
    """The probability ratio is clipped from above at 1 + clip_high."""
    kl_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the KL divergence from the reference policy in the loss. 0: no reference policy is kept for
    it."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of that divergence (Schulman, 'Approximating KL divergence'); with + the gradient is k2's.
    k3-weighted, DeepSeek-V3.2's, is unbiased also for samples of an older policy."""
    entropy_coef: Annotated[float, FINITE] = 0.0
    """Weight of the entropy bonus; the initial one if it is adaptive."""
    adaptive_entropy: AdaptiveEntropy = field(default_factory=AdaptiveEntropy)
    off_policy_mask: Annotated[float, NOT_NEGATIVE] = 0.0
    """Set the loss of tokens with a negative advantage to 0 in samples with a mean of log(p_sampling / p)
    above this, in nats. The mean is over a sample's tokens, p is under the current weights (DeepSeek-V3.2).
    0: off."""
    top_entropy: Annotated[float, PROBABILITY] = 1.0
    """Share of the mini-batch's tokens that have a policy loss. These are the tokens of the highest entropy.
    The loss of all other tokens is 0 (80/20 rule: 0.2). Below 1 each update needs another forward pass."""
    reward_kl: RewardKl = field(default_factory=RewardKl)

    if TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any:
            """Return the value of a key that the file of an estimator or loss declares."""

    def option(self, name: str) -> Any:
        """Return the value of a key of `kwargs` or of this section; None if there is none."""
        return self.kwargs.get(name, getattr(self, name, None))

    @property
    def chosen(self) -> tuple[Formula | None, Formula | None]:
        """Declarations of the advantage estimator and of the loss; None where the name is none."""
        return formula_of("advantages", self.advantage), formula_of("losses", self.loss)
