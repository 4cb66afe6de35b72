"""Defines a session: a trajectory together with the environment that answers it.

`chat.py` converts the messages of a session to tokens.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rl.data.prompts import Prompt
from rl.features.agents.chat import Chat
from rl.features.agents.environment import Messages, Reply, answer_digest, task_digest
from rl.features.agents.pool import to_row
from rl.features.agents.sight import Sight
from rl.features.agents.trajectory import Trajectory
from rl.rollout.source import StartedSample

if TYPE_CHECKING:  # a web server, which only agents that run by themselves need
    from rl.features.agents.endpoint import EndpointRequest


class WrongAnswer(RuntimeError):
    """Raised on a replica's leader if a trajectory has what its environment did not give."""


@dataclass
class Session:
    """A trajectory with the environment that answers it."""

    start: StartedSample
    trajectory: Trajectory
    sight: Sight
    messages: Messages = field(default_factory=list)
    """The conversation, as derived from the tokens."""
    tools: Messages = field(default_factory=list)
    drives: str = "tools"
    grammar: str | None = None
    """Grammar of the turns (`Request.grammar`)."""
    context: Messages = field(default_factory=list)
    """The messages whose tokens are in the context of the last turn."""
    num_requests: int = 1
    """Number of requests to the environment, including the reset."""
    asked: float = 0.0
    """Monotonic time of the last request to the environment, or of the last answer to an agent."""
    is_asked: bool = False
    """Whether the policy must give the next turn, or the rest of a turn. If false, the environment must
    answer."""
    running: str = ""
    """Name of the session's request in the engine."""
    reply: Reply | None = None
    """The environment's answer that arrived between two calls."""
    inbox: "deque[EndpointRequest]" = field(default_factory=deque)
    """Requests of an agent for turns; the first one is being served."""
    values: dict[str, float] = field(default_factory=dict)
    """Numbers that an agent returned."""
    answered: dict[str, float] = field(default_factory=dict)
    """Numbers of the last answer of the worker that had numbers."""
    is_driving: bool = False
    """Whether the environment is an agent that runs by itself and has not returned."""
    is_spent: bool = False
    """Whether an agent was refused a turn because the trajectory's limits are used up."""
    is_repeated: bool = False
    """Whether the session repeats a trajectory whose environment was lost because its process ended."""

    def continuation(self, asked: "EndpointRequest", chat: Chat) -> tuple[np.ndarray | None, str]:
        """Take the tools and the conversation of an agent's request.

        Returns (given, source). given: the token ids that the request adds after the last turn, int32 [n];
        None if the request does not continue the tokens so far. source: the role of the added tokens ("tool",
        "user" or "environment").
        """
        from rl.features.agents.endpoint import new_messages

        self.tools, given, source = asked.tools, None, "environment"
        if self.trajectory.turn is not None:
            context, turn = self.trajectory.turn
            if asked.messages is None:
                assert asked.token_ids is not None, "a request has messages or tokens"
                known = self.trajectory.token_ids
                if np.array_equal(asked.token_ids[: len(known)], known):
                    given = asked.token_ids[len(known) :]
            elif new := new_messages(self.messages, asked.messages):
                source = "tool" if new[0]["role"] == "tool" else "user"
                given = chat.extend(context, turn.token_ids, self.messages, new, self.tools)
        unread = [] if asked.token_ids is None else chat.as_messages(asked.token_ids)
        self.messages = list(asked.messages or unread)
        return given, source

    def check_answer(self, reply: Reply) -> None:
        """Raise WrongAnswer if a reply is not the answer to the last request, or of another row or seed."""
        name = f"{self.address} {self.num_requests}"
        if reply.digest != -1 and reply.digest != answer_digest(name, vars(reply)):
            raise WrongAnswer(
                f"the answer of an environment to request {self.num_requests} of trajectory {self.name} "
                f"({reply.kind}) is not the one that its worker gave: answers were exchanged or changed."
            )
        own = to_row(self.start.prompt) | {"seed": self.start.seed} if reply.task != -1 else {}
        if reply.task not in (-1, task_digest(own)):
            raise WrongAnswer(
                f"the environment of trajectory {self.name} began with another row or seed than its group's."
            )
        if reply.kind in ("score", "run") and reply.values:
            self.answered = dict(reply.values)

    def check_outcome(self, values: dict[str, float]) -> None:
        """Raise WrongAnswer unless a trajectory ends with its last numbers, or the sum of its rewards."""
        rewards = sum(s.reward for row in self.trajectory.rows for s in row.segments)
        expected = self.answered or ({"score": rewards} if self.trajectory.rewards else {})
        if not self.is_spent and values != expected:
            raise WrongAnswer(
                f"trajectory {self.name} ends with {values}, but its environment gave it {expected}."
            )

    def check_context(self, chat: Chat) -> None:
        """Raise WrongAnswer if the last row has tokens between turns that are not in its conversation."""
        rows = self.trajectory.rows
        given, texts, first = [], [], len(rows[-1].prompt_ids) if rows else 0
        for segment in rows[-1].segments if rows else ():
            if not segment.is_sampled:
                given.append(segment)
                texts.append(self.sight.rendered(segment.token_ids, first))
            first += len(segment.token_ids)
        if not self.context or any(segment.source == "environment" for segment in given):
            return  # an agent sent token ids, and may cut them anywhere
        if (turn := chat.find_strange(texts, self.context, self.tools)) is not None:
            raise WrongAnswer(
                f"the tokens before turn {given[turn].turn + 1} of trajectory {self.name} are not in the "
                "conversation as the chat template renders it, after the other turns."
            )

    @property
    def name(self) -> str:
        """Name for logs: number of the prompt in this call and number of the trajectory, for example 3.1."""
        return f"{self.start.group}.{self.start.number}"

    @property
    def address(self) -> str:
        return address_of(self.start)


def refuse_unoffered(prompt: Prompt, session: Session) -> None:
    """Raise ValueError if a row has tools that its environment does not offer.

    An agent that calls the engine itself names its tools in each request.
    """
    offered = {tool["function"]["name"] for tool in session.tools}
    named = [tool.get("function", tool)["name"] for tool in prompt.tools]
    lost = [name for name in named if name not in offered]
    if lost and session.drives != "run":
        raise ValueError(
            f"column 'tools' of {prompt.place} has {lost[0]!r}, which the environment does not offer; add it "
            "to agents.tools, or rename the column"
        )


def address_of(start: StartedSample) -> str:
    """Return the name of a sample's session in the pool and at the endpoint. It is unique among the open
    sessions.

    For example, "draw 17.2" is sample 2 of draw 17. A prompt without a draw uses its number in the call:
    "3.2".
    """
    draw = start.prompt.draw
    return f"{start.group}.{start.number}" if draw < 0 else f"draw {draw}.{start.number}"
