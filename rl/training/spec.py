"""Specification of a model of the training grid, apart from the features that take part in it."""

from dataclasses import dataclass

from rl.config.schema import Optimizer


@dataclass(frozen=True)
class ModelSpec:
    """One model of the training grid."""

    path: str
    """Hugging Face checkpoint directory."""
    hf: dict
    """Its config.json."""
    dtype: str
    """dtype of the weights; master weights and gradient sums are float32."""
    has_values: bool = False
    """Whether it is a value model (critic, reward model) instead of a language model."""
    optimizer: Optimizer | None = None
    """None for a frozen model."""
    temperature: float = 1.0
    """Temperature at which a language model computes log-probs."""
    keeps_reference: bool = False
    """Whether a copy of the initial weights is kept for `TrainingEngine.reference_weights`."""
