"""Environments and tools per data source, as plain data.

    agents:
      environment: my_game.py:Guess          # every data source that `sources` does not name
      kwargs: {high: 16}
      tools: [my_tools.py:search, {function: my_tools.py:look_up, kwargs: {index: /data/index}}]
      sources:
        openai/gsm8k: my_game.py:Gsm8k
        math: {tools: [my_tools.py:calculate]}

The environment pool sends an `AgentPlan` to its workers, which import what it names. This module imports only
the standard library, because a worker may run in another Python interpreter.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.config.functions import FORM

SOURCE_KEYS = ("environment", "kwargs", "tools")


@dataclass(frozen=True)
class ToolSpec:
    """A plain function that is a tool."""

    function: str
    """`package.module:name` or `path/to/file.py:name`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Values of its keyword-only parameters."""
    key: str = "agents.tools"
    """Key in the config, for error messages."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """The class of an environment with its arguments, and functions that are offered as further tools."""

    environment: str = ""
    """`package.module:Class` or `path/to/file.py:Class`. Empty: prompts come from the data set, with
    `tools`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[ToolSpec, ...] = ()
    container: Mapping[str, Any] = field(default_factory=dict)
    """Settings of containers, for a class that has the parameter `container`."""
    key: str = "agents"
    """Key in the config, for error messages: `agents` or `agents.sources.<source>`."""


@dataclass(frozen=True)
class AgentPlan:
    """The environment of every data source."""

    default: EnvironmentSpec
    sources: Mapping[str, EnvironmentSpec] = field(default_factory=dict)
    """Name -> the environment that replaces `default`."""

    def name_for(self, row: Mapping[str, Any]) -> str:
        """Return the name of the entry of `sources` for a row; "" stands for `default`.

        The first of these columns that names an entry decides: `data_source`, verl's `agent_name`, and `name`
        in verl's `interaction_kwargs`.
        """
        interaction = row.get("interaction_kwargs")
        names = [row.get("data_source"), row.get("agent_name")]
        names += [interaction.get("name")] if isinstance(interaction, Mapping) else []
        return next((name for name in names if isinstance(name, str) and name in self.sources), "")


def make_agent_plan(
    environment: str,
    kwargs: Mapping[str, Any],
    tools: Sequence[Any],
    sources: Mapping[str, Any],
    container: Mapping[str, Any] | None = None,
) -> AgentPlan:
    """Return the plan of agents.environment, .kwargs, .tools, .sources and .container. Imports none of them.

    Raises ValueError for a malformed entry, naming its key.
    """
    container = container or {}
    if container.get("image"):
        from rl.config.wing import path_of  # not at the top, because a worker has no schema

        environment = environment or path_of("containers", "environment", needed_by="agents.container.image")
    default = _to_spec("agents", {"environment": environment, "kwargs": kwargs, "tools": tools}, container)
    if kwargs and not environment:
        raise ValueError(
            f"agents.kwargs={dict(kwargs)!r:.80} needs agents.environment; name a class, or omit the kwargs."
        )
    found = {}
    for name, entry in sources.items():
        key = f"agents.sources.{name}"
        if isinstance(entry, str):
            entry = {"environment": entry}
        if not isinstance(entry, Mapping) or not entry:
            raise ValueError(f"{key}={entry!r:.80} must be package.module:Class, or a mapping.")
        for unknown in [k for k in entry if k not in SOURCE_KEYS]:
            raise ValueError(f"{key}.{unknown} is unknown; an entry has the keys {', '.join(SOURCE_KEYS)}.")
        found[name] = _to_spec(key, {"tools": tools, **entry}, container)
    return AgentPlan(default, found)


def _to_spec(key: str, entry: Mapping[str, Any], container: Mapping[str, Any]) -> EnvironmentSpec:
    environment, kwargs, tools = entry.get("environment", ""), entry.get("kwargs", {}), entry["tools"]
    if environment:
        _check_name(f"{key}.environment", environment)
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(f"{key}.tools={tools!r:.80} must be a list of functions.")
    checked = tuple(_to_tool(f"{key}.tools[{i}]", tool) for i, tool in enumerate(tools))
    return EnvironmentSpec(environment, _keywords(f"{key}.kwargs", kwargs), checked, container, key)


def _to_tool(key: str, entry: Any) -> ToolSpec:
    if isinstance(entry, str):
        entry = {"function": entry}
    if not isinstance(entry, Mapping) or not {"function"} <= set(entry) <= {"function", "kwargs"}:
        raise ValueError(f"{key}={entry!r:.80} must be path/to/file.py:name, or {{function, kwargs}}.")
    _check_name(f"{key}.function", entry["function"])
    return ToolSpec(entry["function"], _keywords(f"{key}.kwargs", entry.get("kwargs", {})), key)


def _check_name(key: str, name: Any) -> None:
    if not isinstance(name, str) or not re.fullmatch(FORM, name):
        raise ValueError(f"{key}={name!r:.80} must be package.module:name or path/to/file.py:name.")


def _keywords(key: str, kwargs: Any) -> dict[str, Any]:
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ValueError(f"{key}={kwargs!r:.80} must map keyword names to values.")
    return dict(kwargs)
