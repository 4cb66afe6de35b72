"""The section of the configuration for environments and tools."""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from rl.config.agent_plan import AgentPlan, make_agent_plan
from rl.config.container import Container
from rl.config.ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE


@dataclass
class Agents:
    """Trajectories of many turns, with environments and tools (docs/agents.md)."""

    environment: str = ""
    """Class of the environment, as `package.module:Class` or `path/to/file.py:Class`, with `reset(row) ->
    messages or str`, `step(text) -> (text, reward, done)` and, if it scores at the end, `score() -> float`.
    Empty: no environment; the data set's prompts are used, and `tools` are offered."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    sources: dict[str, Any] = field(default_factory=dict)
    """Other environments by `data_source`, or by verl's `agent_name`. Each is a class, or {environment,
    kwargs, tools}; without `tools` it offers the tools of agents.tools."""
    tools: list[Any] = field(default_factory=list)
    """Functions offered as tools: `package.module:name` or `path/to/file.py:name`, or {function, kwargs} with
    values of its keyword-only parameters."""
    container: Container = field(default_factory=Container)
    """Container of each trajectory, for environments that have the parameter `container`. Without
    `agents.environment` an image names the environment of containers."""
    max_turns: Annotated[int, AT_LEAST_ONE] = 8
    """Maximum number of turns of the policy in a trajectory."""
    max_tokens_per_turn: Annotated[int, NOT_NEGATIVE] = 0
    """Maximum number of tokens that the policy samples in one turn. 0: what is left of
    `rollout.max_response_tokens`, which limits all turns together, including the tokens of tools and
    environments."""
    max_output_chars: Annotated[int, AT_LEAST_ONE] = 8192
    """Maximum number of characters of the output of a tool or of a step of the environment. A note replaces
    the rest."""
    timeout_s: Annotated[float, POSITIVE] = 30.0
    """Time limit of one call of an environment or tool, in seconds. A trajectory that exceeds it has failed
    (`on_failure`)."""
    memory_mib: Annotated[int, NOT_NEGATIVE] = 4096
    """Address space of a worker process and of each process that it starts, in MiB. 0: no limit."""
    workers: Annotated[int, NOT_NEGATIVE] = 0
    """Number of processes per replica of the engine that hold environments. 0: one per core of the rank."""
    interpreter: str = ""
    """Python interpreter of these processes, for environments with packages that conflict with the run's, for
    example another transformers. It needs pydantic. Empty: the interpreter of the run."""
    variables: list[str] = field(default_factory=list)
    """Names of environment variables that these processes inherit, for example an API key's. Paths, locale
    and the like (`rl.workers.process.VARIABLES`) need no name; keys of trackers are not inherited."""
    order: Literal["arrival", "waves"] = "arrival"
    """Order in which the results of environments are used. arrival: as they come; a log stores the order.
    waves: when all live trajectories have ended their turn. This is repeatable without a log, but the engine
    is idle until then."""
    structured_tool_calls: bool = False
    """Whether the engine samples only tool calls with a name and arguments that fit a schema. It then reports
    log-probs over the allowed tokens, which differ from the trainer's."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as {enable_thinking: false}."""
    on_rewrite: Literal["refuse", "new_row"] = "refuse"
    """Treatment of a chat template that changes earlier turns: refuse the run, or continue the trajectory in
    a new training row."""
    on_failure: Literal["zero", "refill", "shrink"] = "zero"
    """Treatment of a failed trajectory in training. refill: sample another one. shrink: leave it out of its
    group. zero: if an action of the policy exceeded `timeout_s` or `memory_mib`, learn from the trajectory
    with the score `reward.failure_score`; refill otherwise. zero is the default, because a policy does not
    learn to avoid the actions of trajectories that are left out. In validation failed trajectories count as
    wrong."""

    @property
    def plan(self) -> AgentPlan:
        """Return what the workers load. Raises ValueError for a malformed entry, naming its key."""
        return make_agent_plan(
            self.environment, self.kwargs, self.tools, self.sources, asdict(self.container)
        )

    @property
    def is_on(self) -> bool:
        """Return whether the section names an environment, a tool or an image."""
        return bool(self.environment or self.sources or self.tools or self.container.image)
