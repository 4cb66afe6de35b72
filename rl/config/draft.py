"""The section rollout.draft: a small model, or the policy's own head, that proposes tokens to the engine."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.config.ranges import AT_LEAST_ONE, NOT_NEGATIVE


@dataclass
class Draft:
    method: Literal["model", "mtp"] = "model"
    """model: the draft model in `path`. mtp: the head for multi-token prediction of the policy's checkpoint,
    which the refit writes; it proposes further tokens from its own states."""
    path: str = ""
    """Checkpoint directory of the draft model, with the policy's vocabulary. Its weights never change. Empty:
    no drafts, unless by mtp."""
    tokens: Annotated[int, AT_LEAST_ONE] = 3
    """Number of tokens that are proposed per engine step and sample."""
    min_tokens_per_step: Annotated[float, NOT_NEGATIVE] = 0.0
    """A generation goes on without drafts if its first 512 verifications yielded fewer tokens on average. 1:
    never stop the drafts. 0: use 1 + tokens * (parameters of the draft model or head / parameters of the
    policy). If reading weights takes most of the time, this is the point at which drafts save nothing."""

    @property
    def is_on(self) -> bool:
        return bool(self.path) or self.method == "mtp"

    @property
    def setting(self) -> str:
        """The key that enables drafts, with its value."""
        return f"rollout.draft.path={self.path}" if self.path else f"rollout.draft.method={self.method}"
