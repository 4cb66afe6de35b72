"""A trajectory: what the policy sampled and what its environment answered, as token ids.

A trajectory consists of rows. A row is a context (the prompt) followed by segments, and only grows at its
end. A conversation whose earlier tokens change continues in a new row, whose context is the whole changed
conversation.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from rl.rollout.samples import Completion, Request, Sample, Segment
from rl.rollout.sampling import seed_of


@dataclass(frozen=True)
class Limits:
    """Limits of a trajectory, in turns and in tokens."""

    turns: int
    turn_tokens: int
    """Maximum number of tokens of one turn of the policy; 0: no limit besides the others."""
    response_tokens: int
    """Maximum number of tokens of all rows without their contexts, those of tools included."""
    context_tokens: int
    """Maximum number of tokens of a row with its context, which is the engine's limit."""


@dataclass
class Row:
    """A context and the segments after it."""

    prompt_ids: np.ndarray
    """int32 [P]."""
    segments: list[Segment] = field(default_factory=list)

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [P + R]: all tokens of the row."""
        return np.concatenate([self.prompt_ids, *(segment.token_ids for segment in self.segments)])


class Trajectory:
    """One trajectory of a prompt.

    Args:
        prompt, number: index of the prompt in the call, and of the trajectory among those of the prompt.
        seed: seed of the first turn; that of a later turn follows from it and the turn's number.
    """

    def __init__(self, prompt: int, number: int, *, seed: int, limits: Limits):
        self.prompt, self.number, self.limits = prompt, number, limits
        self.seed = seed
        self.rows: list[Row] = []
        self.num_turns = 0
        self.num_asides = 0
        """Number of requests of `aside`."""
        self.rewards: list[float] = []
        """Rewards of single turns."""
        self.end = ""
        """End of the last turn, as in `Completion`."""
        self.is_cut = False
        """Whether a limit of tokens left no room for another turn."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32: the present row, which the next turn continues."""
        return self.rows[-1].token_ids

    @property
    def room(self) -> int:
        """Number of tokens that may still be added to the present row."""
        used = sum(len(segment.token_ids) for row in self.rows for segment in row.segments)
        return min(self.limits.response_tokens - used, self.limits.context_tokens - len(self.token_ids))

    def begin_row(self, token_ids: np.ndarray) -> None:
        """Begin a row with this context, int32 [P]."""
        self.rows.append(Row(token_ids))

    def give(self, token_ids: np.ndarray, source: str) -> bool:
        """Append tokens that the policy did not sample; return whether they leave room for another turn.

        If not, nothing is appended: no token that the policy samples would follow them.
        """
        if len(token_ids) >= self.room:
            self.is_cut = True
            return False
        if len(token_ids):
            version = int(self.rows[-1].segments[-1].weight_versions[-1])
            given = Segment.given(token_ids, version=version, turn=self.num_turns, source=source)
            self.rows[-1].segments.append(given)
        return True

    def request(self, max_tokens: int = 0) -> Request | None:
        """Return the request for the next turn, or None if there is no room for one.

        max_tokens: maximum tokens of this turn, if it is fewer than the limits allow; 0: the limits alone.
        """
        limits = [limit for limit in (self.room, self.limits.turn_tokens, max_tokens) if limit]
        if self.room <= 0:
            self.is_cut = True
            return None
        # A trajectory of one turn is sampled as a response without environment.
        seed = seed_of(self.seed, self.num_turns) if self.num_turns else self.seed
        name = f"{self.prompt}.{self.number}.{self.num_turns}"
        return Request(name, self.token_ids.astype(np.int32), seed, min(limits))

    def aside(self, token_ids: np.ndarray, max_tokens: int) -> Request | None:
        """Return a request that is no part of the trajectory, or None if its context leaves no room."""
        room = min(self.limits.response_tokens, self.limits.context_tokens - len(token_ids))
        if room <= 0:
            return None
        limits = [limit for limit in (room, self.limits.turn_tokens, max_tokens) if limit]
        self.num_asides += 1
        name = f"{self.prompt}.{self.number}.aside{self.num_asides}"
        return Request(name, token_ids, seed_of(self.seed, "aside", self.num_asides), min(limits))

    def take(self, completion: Completion) -> None:
        """Append the tokens that the policy sampled in its next turn."""
        self.is_cut = completion.end == "length" and len(completion.token_ids) >= self.room
        segments = self.rows[-1].segments
        segments.append(Segment.of(completion, self.num_turns, segments))
        self.num_turns, self.end = self.num_turns + 1, completion.end

    def reward_turn(self, reward: float) -> None:
        """Note the reward of the last turn."""
        self.rewards.append(reward)
        segments = self.rows[-1].segments
        segments[-1] = replace(segments[-1], reward=reward)

    def samples(self, outcome: dict[str, float] | None, prompt_ids: np.ndarray) -> list[Sample]:
        """Return one sample per row that has tokens of the policy, or one empty sample if no row has any.

        outcome: what the environment reports. prompt_ids: those of the prompt, int32 [P].
        """
        rows = [row for row in self.rows if row.segments] or [Row(prompt_ids)]
        return [
            Sample(
                self.prompt,
                self.number,
                tuple(row.segments),
                "length" if self.is_cut or self.end == "length" else "stop",
                row=index,
                prompt_ids=None if np.array_equal(row.prompt_ids, prompt_ids) else row.prompt_ids,
                outcome=outcome,
            )
            for index, row in enumerate(rows)
        ]
