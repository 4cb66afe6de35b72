"""The section rollout.draft: a small model that proposes tokens to the engine."""

from dataclasses import dataclass
from typing import Annotated

from rl.config.ranges import AT_LEAST_ONE, NOT_NEGATIVE


@dataclass
class Draft:
    path: str = ""
    """Checkpoint directory of the draft model, with the policy's vocabulary. Its weights never change. Empty:
    no drafts."""
    tokens: Annotated[int, AT_LEAST_ONE] = 3
    """Number of tokens that the draft model proposes per engine step and sample."""
    min_tokens_per_step: Annotated[float, NOT_NEGATIVE] = 0.0
    """A generation goes on without drafts if its first 512 verifications yielded fewer tokens on average. 0:
    1 + tokens * (parameters of the draft model / those of the policy), where both take equal time if reading
    weights does. 1: never."""
