"""Holds a trajectory as token ids: the tokens that the policy sampled and the tokens of its environment's
answers.

A trajectory consists of rows. A row is a context (the prompt) followed by segments, and it grows only at its
end. If earlier tokens change, the trajectory continues in a new row, whose context is the whole changed
conversation. For example, a template that drops the thinking of earlier turns may cause a new row at each
turn.

If the environment of a trajectory is lost, the trajectory is executed again from its log. The log is the rows
so far. The repeated execution takes the policy's turns from the log instead of the engine, and compares
everything else with the log (`Diverged`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rl.rollout.samples import COLUMNS, Completion, Request, Sample, Segment
from rl.rollout.sampling import seed_of


@dataclass(frozen=True)
class TrajectoryLimits:
    """Limits of a trajectory, in turns and in tokens."""

    turns: int
    turn_tokens: int
    """Maximum number of tokens of one turn of the policy. 0: only the other limits apply."""
    response_tokens: int
    """Maximum number of tokens of all rows together, without their contexts but with the tokens of tools."""
    context_tokens: int
    """Maximum number of tokens of a row including its context. This is the limit of the engine."""


class Diverged(Exception):
    """Raised if an environment's answer differs from the log. The message says where."""


@dataclass
class TrajectoryRow:
    """A context and the segments after it."""

    prompt_ids: np.ndarray
    """int32 [P]: token ids of the context."""
    segments: list[Segment] = field(default_factory=list)

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [P + R]: all tokens of the row."""
        return np.concatenate([self.prompt_ids, *(segment.token_ids for segment in self.segments)])


class Trajectory:
    """One trajectory of a prompt.

    Args:
        prompt, number: index of the prompt in the call, and index of the trajectory in its group.
        seed: seed of the first turn. The seed of a later turn follows from it and from the number of the
        turn.
        log: rows of an earlier execution, which this execution repeats.
        execution: number of earlier executions in this call. It is part of the names of requests: for
            example, 3.1.again1.0 is a request of the second execution.
    """

    def __init__(
        self,
        prompt: int,
        number: int,
        *,
        seed: int,
        limits: TrajectoryLimits,
        log: Sequence[TrajectoryRow] = (),
        execution: int = 0,
    ):
        self.prompt, self.number, self.limits = prompt, number, limits
        self.seed, self.execution = seed, execution
        self.rows: list[TrajectoryRow] = []
        self.num_turns = 0
        """Number of complete turns."""
        self.num_asides = 0
        """Number of requests of `aside`."""
        self.rewards: list[float] = []
        """Rewards of single turns."""
        self.end = ""
        """End of the last turn, as in `Completion`."""
        self.is_cut = False
        """Whether a token limit left no room for another turn."""
        self._log = log

    @property
    def token_ids(self) -> np.ndarray:
        """int32: the present row, which the next turn continues."""
        return self.rows[-1].token_ids

    @property
    def turn(self) -> tuple[np.ndarray, Completion] | None:
        """The last complete turn of the present row: its context, int32 [C], and its completion.

        None if the row has no complete turn.
        """
        segments = self.rows[-1].segments if self.rows else []
        of_turn = [i for i, s in enumerate(segments) if s.is_sampled and s.turn == self.num_turns - 1]
        if not of_turn:
            return None
        first, last = of_turn[0], of_turn[-1] + 1
        columns = {name: np.concatenate([getattr(s, name) for s in segments[first:last]]) for name in COLUMNS}
        context = np.concatenate([self.rows[-1].prompt_ids, *(s.token_ids for s in segments[:first])])
        return context, Completion(**columns, end=segments[last - 1].end)

    @property
    def room(self) -> int:
        """Number of tokens that may still be added to the present row."""
        used = sum(len(segment.token_ids) for row in self.rows for segment in row.segments)
        return min(self.limits.response_tokens - used, self.limits.context_tokens - len(self.token_ids))

    def begin_row(self, token_ids: np.ndarray) -> None:
        """Begin a row with this context, int32 [P]. Raises Diverged if the log continues differently."""
        if self._next_logged is not None:
            raise Diverged(f"it changed the conversation after turn {self.num_turns}")
        if len(self.rows) < len(self._log):
            self._compare(np.array_equal(self._log[len(self.rows)].prompt_ids, token_ids))
        self.rows.append(TrajectoryRow(token_ids))

    def give(self, token_ids: np.ndarray, source: str) -> bool:
        """Append tokens that the policy did not sample; return whether they leave room for another turn.

        If they leave no room, nothing is appended, because no sampled token would follow. Raises Diverged if
        the log has other tokens.
        """
        if len(token_ids) >= self.room:
            self.is_cut = True
            return False
        if len(token_ids):
            version = int(self.rows[-1].segments[-1].weight_versions[-1])
            given = Segment.given(token_ids, version=version, turn=self.num_turns, source=source)
            if self.is_logged:
                known = self._next_logged
                self._compare(known is not None and known.digest == given.digest)
            self.rows[-1].segments.append(given)
        return True

    def request(self, max_tokens: int = 0) -> Request | None:
        """Return the request for the next turn, or for the rest of a turn that was aborted; None without
        room.

        max_tokens: maximum number of tokens of this turn, in addition to the limits. 0: only the limits
        apply. Raises Diverged if the log has more tokens of the turn.
        """
        if self.room <= 0:
            self.is_cut = True
            return None
        begun = self._begun
        of_turn = [limit - begun for limit in (self.limits.turn_tokens, max_tokens) if limit]
        # The first turn has the seed of a response without an environment.
        seed = seed_of(self.seed, self.num_turns) if self.num_turns else self.seed
        sampled = [segment for segment in self.rows[-1].segments if segment.is_sampled]
        left = min([self.room, *of_turn])
        if left <= 0:
            raise Diverged(f"turn {self.num_turns + 1} has more tokens than its present limit")
        return Request(
            self._name(str(self.num_turns)),
            self.token_ids.astype(np.int32),
            seed,
            left,
            num_begun=begun,
            first_version=int(sampled[0].weight_versions[0]) if sampled else None,
        )

    def aside(self, token_ids: np.ndarray, max_tokens: int) -> Request | None:
        """Return a request that does not belong to the trajectory; None if its context leaves no room."""
        room = min(self.limits.response_tokens, self.limits.context_tokens - len(token_ids))
        if room <= 0:
            return None
        limits = [limit for limit in (room, self.limits.turn_tokens, max_tokens) if limit]
        self.num_asides += 1
        name = self._name(f"aside{self.num_asides}")
        return Request(name, token_ids, seed_of(self.seed, "aside", self.num_asides), min(limits))

    def _name(self, request: str) -> str:
        """Return the name of a request, unique among the executions of the trajectory."""
        again = f"again{self.execution}." if self.execution else ""
        return f"{self.prompt}.{self.number}.{again}{request}"

    def take(self, completion: Completion) -> None:
        """Append the tokens that the policy sampled in its next turn.

        If the request was aborted, these are only the first tokens of the turn.
        """
        self.is_cut = completion.end == "length" and len(completion.token_ids) >= self.room
        if len(completion.token_ids) or completion.end != "abort":
            self._append(Segment.of(completion, self.num_turns, self.rows[-1].segments))

    def _append(self, segment: Segment) -> None:
        self.rows[-1].segments.append(segment)
        self.end = segment.end
        self.num_turns += segment.end != "abort"

    def reward_turn(self, reward: float) -> None:
        """Note the reward of the last turn."""
        self.rewards.append(reward)
        segments = self.rows[-1].segments
        segments[-1] = replace(segments[-1], reward=reward)

    # The log ----------------------------------------------------------------------------------------------

    @property
    def log(self) -> Sequence[TrajectoryRow]:
        """The rows from which the trajectory can be executed again."""
        return self._log if self.is_logged else self.rows

    @property
    def is_logged(self) -> bool:
        """Whether the log has more tokens than were executed so far."""
        return self._next_logged is not None or len(self.rows) < len(self._log)

    @property
    def _next_logged(self) -> Segment | None:
        """The segment of the log that follows in the present row; None if there is none."""
        row = len(self.rows) - 1
        if not 0 <= row < len(self._log):
            return None
        return next(iter(self._log[row].segments[len(self.rows[row].segments) :]), None)

    @property
    def _begun(self) -> int:
        """Number of tokens of a turn that was aborted."""
        segments = self.rows[-1].segments
        return sum(len(s.token_ids) for s in segments if s.is_sampled and s.turn == self.num_turns)

    def replay_turn(self) -> bool:
        """Append the next turn from the log, as far as the log has it; return whether the turn is complete.

        Raises Diverged if the log does not continue with a turn.
        """
        turn = self.num_turns
        while self.is_logged and self.num_turns == turn:
            segment = self._next_logged
            self._compare(segment is not None and segment.is_sampled and len(segment.token_ids) <= self.room)
            assert segment is not None
            self.is_cut = segment.end == "length" and len(segment.token_ids) >= self.room
            self._append(segment)
        return self.num_turns > turn

    def _compare(self, is_equal: bool) -> None:
        if not is_equal:
            raise Diverged(f"its answer after turn {self.num_turns} differs from the one in the log")

    def samples(
        self, outcome: dict[str, float] | None, prompt_ids: np.ndarray, *, is_unfinished: bool = False
    ) -> list[Sample]:
        """Return one sample per row that has tokens of the policy, or one empty sample if no row has any.

        outcome: numbers that the environment reports. prompt_ids: token ids of the prompt, int32 [P].
        """
        end = "length" if self.is_cut or self.end == "length" else "stop"
        rows = self.log if is_unfinished else [row for row in self.rows if row.segments]
        return [
            Sample(
                self.prompt,
                self.number,
                tuple(row.segments),
                "abort" if is_unfinished else end,
                row=index,
                prompt_ids=None if np.array_equal(row.prompt_ids, prompt_ids) else row.prompt_ids,
                outcome=outcome,
            )
            for index, row in enumerate(rows or [TrajectoryRow(prompt_ids)])
        ]


def log_of(samples: Sequence[Sample], prompt_ids: np.ndarray) -> list[TrajectoryRow]:
    """Return the rows of an unfinished trajectory from its samples (`Trajectory.samples`).

    prompt_ids: token ids of the prompt.
    """
    begun = [sample for sample in samples if sample.segments or sample.prompt_ids is not None]
    contexts = [prompt_ids if sample.prompt_ids is None else sample.prompt_ids for sample in begun]
    return [TrajectoryRow(context, list(sample.segments)) for context, sample in zip(contexts, begun)]
