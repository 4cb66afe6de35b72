"""The section of the configuration for the difference between the probabilities of engine and trainer."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rl.config.options import ConfigError
from rl.config.ranges import FINITE_OR_LIST, NOT_NEGATIVE

REJECTIONS = ("token-k1", "token-k2", "token-k3", "sample-k1", "sample-k2", "sample-k3")
"""Names of the criteria of `rollout_correction.reject`."""


@dataclass(frozen=True)
class Rejection:
    """One criterion of `rollout_correction.reject`."""

    name: str
    """One of REJECTIONS."""
    low: float
    """Lower bound in nats."""
    high: float
    """Upper bound in nats."""

    @property
    def level(self) -> Literal["token", "sequence"]:
        return "token" if self.name.startswith("token") else "sequence"

    @property
    def statistic(self) -> str:
        return self.name.partition("-")[2]


@dataclass
class RolloutCorrection:
    """Correction for the difference between the probabilities of engine and trainer at the same weights."""

    truncate_tokens: Annotated[float, NOT_NEGATIVE] = 0.0
    """Upper bound of token weights: the loss of a token is multiplied by min(p_trainer / p_engine, bound).
    2.0 is usual. 0: off."""
    truncate_samples: Annotated[float, NOT_NEGATIVE] = 0.0
    """Upper bound of sample weights: the loss of a sample is multiplied by min(product of the ratios of its
    tokens, bound). 0: off."""
    icepop_low: Annotated[float, NOT_NEGATIVE] = 0.0
    """IcePop: a token's loss is multiplied by its ratio, and dropped if the ratio is below this (its authors:
    0.5)."""
    icepop_high: Annotated[float, NOT_NEGATIVE] = 0.0
    """IcePop: the loss of a token is dropped if the ratio is above this (its authors: 5). 0: off."""
    icepop_level: Literal["token", "prefix", "sample"] = "token"
    """Ratio that the icepop bounds apply to: of the token; the geometric mean of the ratios up to the token
    (OpenRLHF's reinforce_pro, 0.5 and 5); or the product over the sample, which is then the weight of the
    sample's loss (TRL's sequence_mask, 0 and 3)."""
    reject: str = "none"
    """Drop tokens or samples if their divergence by this estimator (for samples: its mean over tokens) leaves
    the bounds. One of token-k1, token-k2, token-k3, sample-k1, sample-k2, sample-k3, or several with commas
    between them: a token then has to pass each one."""
    reject_low: Annotated[Any, FINITE_OR_LIST] = 0.0
    """Lower bound in nats, 0 or less: k1 may be negative, k2 and k3 are not. With several criteria one number
    for all of them, or a list with one for each."""
    reject_high: Annotated[Any, FINITE_OR_LIST] = 0.0
    """Upper bound in nats, as reject_low."""
    bypass: bool = False
    """Use the engine's log-probs as the log-probs of the old policy. This saves a forward pass. Ratios are
    then taken against the distribution that was sampled from. The other keys must be off."""

    @property
    def corrects(self) -> bool:
        """Return whether the loss accounts for tokens of older weights, by a weight or by bypass."""
        return self.bypass or self.has_weights

    @property
    def has_weights(self) -> bool:
        """Return whether tokens or samples have weights in the loss."""
        return bool(self.truncate_tokens or self.truncate_samples or self.icepop_high)

    @property
    def weighs_tokens(self) -> bool:
        """Return whether tokens of a sample have weights of their own."""
        return bool(self.truncate_tokens or self.icepop_high) and not self.weighs_samples

    @property
    def weighs_samples(self) -> bool:
        """Return whether all tokens of a sample have the same weight."""
        return bool(self.truncate_samples or (self.icepop_high and self.icepop_level == "sample"))

    @property
    def rejections(self) -> list[Rejection]:
        """Return the criteria of `reject` with their bounds, in its order; [] for "none".

        Raises ConfigError for an unknown or repeated criterion, and for a list of bounds of another length.
        """
        names = [name.strip() for name in self.reject.split(",")]
        if names == ["none"]:
            return []
        unknown = [name for name in names if name not in REJECTIONS]
        if unknown:
            raise ConfigError(
                f"rollout_correction.reject={self.reject} holds '{unknown[0]}', but must be none, or one or "
                f"more of {', '.join(REJECTIONS)} with commas between them."
            )
        if len(set(names)) < len(names):
            raise ConfigError(f"rollout_correction.reject={self.reject} repeats a criterion; name each once.")
        bounds = {}
        for key in ("reject_low", "reject_high"):
            value = getattr(self, key)
            bounds[key] = value if isinstance(value, list) else [value] * len(names)
            if len(bounds[key]) != len(names):
                raise ConfigError(
                    f"rollout_correction.{key} has {len(value)} numbers for {len(names)} criteria in "
                    f"rollout_correction.reject={self.reject}; give one number, or one for each."
                )
        criteria = zip(names, bounds["reject_low"], bounds["reject_high"], strict=True)
        return [Rejection(*criterion) for criterion in criteria]
