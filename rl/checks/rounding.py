"""Measures the rounding noise of a policy in bfloat16, the unit for the difference of engine and trainer.

Log-probs are compared with those of a second pass, which rounds the hidden states once more. An error of the
logits moves the log-prob of a token in proportion to 1 - p, so the noise grows with the mean of 1 - p.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rl.checks.few_samples import compared_tokens, first_samples, only
from rl.data.batch import Batch
from rl.training.engine import TrainingEngine
from rl.training.micro_batch_plans import MicroBatchPlan

WARNED, ENDED = 4.0, 8.0
"""Multiples of the noise above which the verdict of run.mode=check is wrong, and the run ends."""
EVERY = 50
"""Number of batches after which the noise is measured again."""
MIN_TOKENS = 64
"""Minimum number of tokens of a measurement. For n < MIN_TOKENS tokens, the limit grows by
sqrt(MIN_TOKENS / n), because the mean over few tokens depends on the largest difference."""


@contextmanager
def rounded_again(model: TrainingEngine) -> Iterator[None]:
    """In the `with` block, change the hidden states after each layer by a random rounding error.

    A state h becomes h (1 + eps u), rounded, with u uniform in [-1/2, 1/2], equal on tensor parallel ranks.
    """
    generator = torch.Generator(model.device.torch).manual_seed(0)

    def perturb(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        is_alone = isinstance(output, Tensor)  # from a layer of transformers
        hidden, *rest = (output,) if is_alone else output
        u = torch.rand(hidden.shape, generator=generator, device=hidden.device) - 0.5
        rounded = (hidden.float() * (1 + torch.finfo(hidden.dtype).eps * u)).to(hidden.dtype)
        return rounded if is_alone else (rounded, *rest)

    layers = [layer for chunk in model.chunks for layer in chunk.layers]
    handles = [layer.register_forward_hook(perturb) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class RoundingNoise:
    """The mean difference of log-probs that one more rounding per layer causes, measured every EVERY batches.

    multiple: `Grid.micro_batch_multiple`. factor: `agreement.logprob_slack`, times FP8_FACTOR in FP8.
    """

    def __init__(self, multiple: int, factor: float):
        self._multiple, self._factor, self._age = multiple, factor, 0
        self._noise: float | None = None
        self._measured = self._present = 0.0
        """Mean of 1 - p over the tokens of the last measurement, and over the tokens of the present batch."""
        self._few = 1.0

    def plan(self, first: MicroBatchPlan, batch: Batch, counted: Tensor) -> MicroBatchPlan | None:
        """Return, for each batch, the samples to measure with; None if none is due or tokens are too few.

        first: plan of the first mini-batch. counted: bool [T], the tokens that the present weights sampled.
        """
        self._present = _mean_doubt(batch, counted)
        self._few = math.sqrt(max(1.0, MIN_TOKENS / max(1, int(counted.sum()))))
        self._age += 1
        if self._noise is not None and self._age < EVERY:
            return None
        bounds = batch.offsets.tolist()
        few = first_samples(first, lambda i: int(counted[bounds[i] : bounds[i + 1]].sum()), enough=MIN_TOKENS)
        plan = only(first, few, multiple=self._multiple)
        return plan if compared_tokens(plan, batch, counted).sum() >= MIN_TOKENS else None

    def measure(self, plan: MicroBatchPlan, batch: Batch, counted: Tensor, passes: list[Tensor]) -> None:
        """Store the mean difference of the log-probs of two passes, float32 [T] each, over the plan."""
        (first, second), tokens = passes, compared_tokens(plan, batch, counted)
        self._noise, self._age = float((first - second)[tokens].abs().double().mean()), 0
        self._measured = _mean_doubt(batch, tokens)

    @property
    def noise(self) -> float | None:
        """Noise of the present batch, at least the measured noise; None before the first measurement."""
        more = self._present / self._measured if self._measured else 1.0
        return None if self._noise is None else self._noise * max(1.0, more) * self._few

    def limit(self, multiple: float = ENDED) -> float:
        """Maximum mean difference in nats; infinite before the first measurement."""
        return multiple * self._factor * self.noise if self.noise is not None else math.inf


def _mean_doubt(batch: Batch, tokens: Tensor) -> float:
    """Return the mean of 1 - p over some tokens, with the engine's p; 0 without tokens. tokens: bool [T]."""
    assert batch.rollout_logprobs is not None
    doubts = -torch.expm1(batch.rollout_logprobs[tokens].double())
    return float(doubts.mean()) if len(doubts) else 0.0
