"""A session: a trajectory with the environment that answers it."""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl.agents.environment import Messages, Reply
from rl.agents.trajectory import Trajectory
from rl.rollout.source import Start

if TYPE_CHECKING:  # a web server, which only agents that run by themselves need
    from rl.agents.endpoint import EndpointRequest


@dataclass
class Session:
    """A trajectory with the environment that answers it."""

    start: Start
    trajectory: Trajectory
    messages: Messages = field(default_factory=list)
    """The conversation, as derived from the tokens."""
    tools: Messages = field(default_factory=list)
    drives: str = "tools"
    grammar: str | None = None
    """Grammar of the turns (`Request.grammar`)."""
    asked: float = 0.0
    """Monotonic time of the last request to the environment, or of the last answer to an agent."""
    is_asked: bool = False
    """Whether the policy is to give the next turn, or the rest of it; otherwise its environment answers."""
    running: str = ""
    """Name of its request in the engine."""
    reply: Reply | None = None
    """The environment's answer that has come between two calls."""
    inbox: "deque[EndpointRequest]" = field(default_factory=deque)
    """Requests of an agent for turns; the first one is being served."""
    values: dict[str, float] = field(default_factory=dict)
    """Numbers that an agent returned."""
    is_driving: bool = False
    """Whether it is an agent that runs by itself and has not returned."""
    is_spent: bool = False
    """Whether an agent was refused a turn because the trajectory's limits are used up."""
    is_repeated: bool = False
    """Whether it repeats a trajectory whose environment was lost with its process."""

    @property
    def name(self) -> str:
        """Name for people: that of the prompt in the call, and of the trajectory."""
        return f"{self.start.group}.{self.start.number}"

    @property
    def address(self) -> str:
        return address_of(self.start)


def address_of(start: Start) -> str:
    """Return the name of a sample's session in the pool and at the endpoint; no other open session has it."""
    draw = start.prompt.draw
    return f"{start.group}.{start.number}" if draw < 0 else f"draw {draw}.{start.number}"
