"""Loads the environments and tools that users write, and defines the messages to and from their worker
process.

docs/agents.md describes environments and tools. An environment whose tools are known only at run time (for
example, the tools of an MCP server) has the methods `list_tools() -> [schema]` and `call_tool(name,
arguments)`.

If a tool raises ValueError, ArithmeticError or LookupError, or receives an argument of the wrong type, the
policy reads the error's message as the output of the tool. For example, a tool that divides by 0 answers
"Error:
ZeroDivisionError: division by zero". Any other exception, an exceeded limit, or the end of the process is a
failure of the trajectory (`Failure`).
"""

import functools
import inspect
import json
import re
import types
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, NotRequired, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from rl.config.agent_plan import EnvironmentSpec
from rl.config.functions import load_function

Messages = list[dict[str, Any]]
RESERVED = ("reset", "step", "run", "score", "close", "list_tools", "call_tool", "done")
"""Public names of an environment's class that never become tools."""
CALLED_WITH = {
    "reset": "row",
    "step": "text",
    "run": "base_url, api_key, row",
    "call_tool": "name, arguments",
    "score": "messages",
}
"""Method of an environment -> the positional arguments of each call. `score` may have none."""
VERL_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
"""Keys of a tool's entry in verl's tools_kwargs; the values below each key are settings of the tool."""

# ---- actions and replies ----


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the policy."""

    id: str
    name: str
    arguments: dict[str, Any] | str
    """The arguments. A str if the policy wrote text that is not a JSON object."""


@dataclass(frozen=True)
class ToolCalls:
    """The tool calls of one turn. The worker makes them in order."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class GameTurn:
    """A turn of the policy, for an environment with the method `step`."""

    text: str
    """Text of the turn."""


@dataclass(frozen=True)
class AgentRun:
    """The whole trajectory of an agent that calls the engine itself.

    The pool sets no time limit for this call. Instead, `Trajectories` limits the time between the agent's
    requests.
    """

    base_url: str
    api_key: str


@dataclass(frozen=True)
class FinalScore:
    """A request for the score, at the end of a trajectory."""

    messages: Messages


Action = ToolCalls | GameTurn | AgentRun | FinalScore


class Failure(StrEnum):
    """Cause of a failed trajectory; `agents/failures/<cause>` counts them."""

    ERROR = "error"
    """The environment raised an exception, or returned something invalid."""
    TIME = "time"
    """A call exceeded agents.timeout_s."""
    MEMORY = "memory"
    """A call exceeded agents.memory_mib in a process that held no other trajectory."""
    LOST = "lost"
    """The environment's process ended while it held no other trajectory."""
    START = "start"
    """No worker process could be started."""
    PROMPT = "prompt"
    """The chat template rejects the environment's messages, or the messages leave no room for a turn."""
    REWRITE = "rewrite"
    """The chat template changed earlier tokens, and agents.on_rewrite is refuse."""
    IDLE = "idle"
    """An agent that calls the engine itself ended without a turn."""


OF_LIMITS = (Failure.TIME, Failure.MEMORY)
"""Failures in which a call exceeded a limit. An action of the policy may have caused such a failure."""


@dataclass(frozen=True)
class Reply:
    """The answer of an environment to one request."""

    session: str
    kind: str
    """reset, tools, step, run or score."""
    messages: Messages = field(default_factory=list)
    """reset: the prompt; without a chat template, one message {"role": "text", "content": str}. tools: one
    message {"role": "tool", "tool_call_id", "name", "content"} per call, in the order of the calls. step: one
    message of the user."""
    tools: Messages = field(default_factory=list)
    """reset: schemas of the tools in OpenAI's function format; [] if there are none."""
    drives: str = ""
    """reset: how the environment continues: "tools", "step" or "run"."""
    reward: float | None = None
    """step: reward of the turn."""
    done: bool = False
    values: dict[str, float] = field(default_factory=dict)
    """score, run: `score` and other numbers; {} if the environment has no score. tools: `calls`, `errors`."""
    failure: str = ""
    """Description of a failure. Its first line is the reason. Empty if there is no failure."""
    cause: Failure = Failure.ERROR
    """Cause of the failure, if there is one."""
    digest: int = -1
    """`answer_digest` by the worker that gave the answer; -1 if unknown."""
    task: int = -1
    """reset: `task_digest` of the row that the worker received; -1 if unknown."""
    reopen: str = ""
    """How to repeat the session if another session of its process may have caused the failure. alone: in a
    process of its own, because a request of this session was in progress. shared: in a process with other
    sessions. Empty: the session is not repeated, because it has failed."""


def answer_digest(request: str, answer: Mapping[str, Any]) -> int:
    """Return a 32-bit hash of a request's name and its answer.

    The hash is the same before and after the answer is transferred as JSON.
    """
    content = [request, *(answer.get(name) or None for name in ("messages", "reward", "values"))]
    text = json.dumps(content, ensure_ascii=False, default=str)
    return zlib.crc32(text.encode("utf-8", "replace"))


def task_digest(row: Mapping[str, Any]) -> int:
    """Return a 32-bit hash of a row without its images."""
    fields = {name: value for name, value in row.items() if name != "images"}
    return zlib.crc32(json.dumps(fields, default=str, skipkeys=True).encode())


# ---- tools ----


@dataclass(frozen=True)
class Tool:
    """A function or method that the policy may call."""

    function: Callable[..., Any]
    schema: dict[str, Any]
    """The schema of the tool in OpenAI's function format."""
    arguments: TypeAdapter[Any]
    """Adapter that converts and checks the arguments of a call."""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    def with_settings(self, settings: Mapping[str, Any]) -> "Tool":
        """Return the tool with those settings that are keyword-only parameters of its function.

        Settings below the keys VERL_KWARGS are read, too, because verl nests settings there.
        """
        flat = {key: value for key, value in settings.items() if key not in VERL_KWARGS}
        for key in VERL_KWARGS:
            flat |= settings.get(key) or {}
        parameters = inspect.signature(self.function).parameters.values()
        known = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} & set(flat)
        return replace(self, settings=self.settings | {key: flat[key] for key in known}) if known else self

    def bound_call(self, arguments: dict[str, Any] | str, instance: Any = None) -> Callable[[], Any]:
        """Return the call of the function, or of the method of `instance` if an instance is given.

        Raises ValueError for malformed arguments; the policy reads the message of this error.
        """
        if isinstance(arguments, str):
            raise ValueError(f"the arguments must be a JSON object, not {arguments:.200}")
        try:
            checked = self.arguments.validate_python(arguments)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False)
            raise ValueError(
                "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in found)
            ) from error
        function = self.function if instance is None else types.MethodType(self.function, instance)
        return functools.partial(function, **checked, **self.settings)


def make_tool(function: Callable[..., Any], *, key: str, is_method: bool = False) -> Tool:
    """Return a tool from the signature and the docstring of a function.

    The tool's description is the docstring before `Args:`. A parameter's description comes from the block
    `Args:` or from `Annotated[..., pydantic.Field(description=...)]`. Raises ValueError, with the config's
    `key`, for a function without docstring and for a parameter without type hint.
    """
    name = function.__name__
    doc = inspect.getdoc(function)
    if not doc:
        raise ValueError(f"{key}: the tool {name} needs a docstring, which the model reads.")
    hints = get_type_hints(function, include_extras=True)
    described = _descriptions(doc)
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[is_method:]:
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.name not in hints:
            raise ValueError(
                f"{key}: the parameter {parameter.name} of the tool {name} needs a type hint, and tools have "
                "no *args or **kwargs."
            )
        hint = hints[parameter.name]
        if text := described.get(parameter.name):
            hint = Annotated[hint, Field(description=text)]
        fields[parameter.name] = hint if parameter.default is parameter.empty else NotRequired[hint]
    typed = TypedDict(name, fields)  # type: ignore[misc]  # made at run time
    typed.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    try:
        arguments = TypeAdapter(typed)
        made = arguments.json_schema(schema_generator=_WithoutTitles)
    except PydanticUserError as error:
        raise ValueError(f"{key}: the type hints of the tool {name} have no JSON schema: {error}") from error
    text = re.split(r"\n\s*(?:Args|Returns|Raises):", doc)[0].strip()
    order = ("type", "properties", "required", "$defs")  # as transformers' get_json_schema
    parameters = {key: made[key] for key in order if key in made}
    schema = {"name": name, "description": text, "parameters": parameters}
    return Tool(function, {"type": "function", "function": schema}, arguments)


def _descriptions(doc: str) -> dict[str, str]:
    """Return parameter -> description from the block `Args:` of a docstring in Google's format."""
    block = re.search(r"\n\s*Args:\s*\n(.*?)(?:\n\s*(?:Returns|Raises):|\Z)", doc, re.DOTALL)
    if block is None:
        return {}
    name = r"^\s*(\w+)(?: *\([^)\n]*\))?: "  # possibly with the type in parentheses
    parts = re.split(name, block[1], flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2])}


class _WithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


# ---- environments ----


@dataclass(frozen=True)
class LoadedEnvironment:
    """The imported class and functions of an `EnvironmentSpec`."""

    cls: type | None
    """The class. None if the spec names only tools."""
    kwargs: Mapping[str, Any]
    functions: dict[str, Tool]
    """Plain functions by name."""
    methods: dict[str, Tool]
    """Methods that are tools, by name; `bound_call` needs the instance."""

    @property
    def drives(self) -> str:
        """Return how a trajectory continues: "run", "step" or "tools"."""
        return next((name for name in ("run", "step") if hasattr(self.cls, name)), "tools")

    def tools_for(self, row: Mapping[str, Any]) -> dict[str, Tool]:
        """Return name -> tool, with its settings, for the tools that the environment offers for a row of the
        data."""
        tools = self.functions | self.methods
        entries = {key: value for key, value in (row.get("tools_kwargs") or {}).items() if value is not None}
        if chosen := [name for name in tools if name in entries]:
            tools = {name: tools[name] for name in chosen}
        return {name: tool.with_settings(entries.get(name) or {}) for name, tool in tools.items()}


def _check_methods(cls: type, key: str) -> None:
    """Raise ValueError if a method of the class does not accept the arguments of its calls."""
    for name, wanted in CALLED_WITH.items():
        method = inspect.getattr_static(cls, name, None)
        if inspect.isfunction(method):
            signature = inspect.signature(method)
            given = [] if name == "score" and len(signature.parameters) == 1 else wanted.split(", ")
            try:
                signature.bind("self", *given)
            except TypeError as error:
                raise ValueError(
                    f"{key}: {name}({wanted}) cannot be called ({error}); write def {name}(self, {wanted})."
                ) from error


def load_environment(spec: EnvironmentSpec) -> LoadedEnvironment:
    """Import the class and the functions of a spec.

    Raises ValueError, with the config's key, if a class or function is missing or cannot be used.
    """
    cls: type | None = None
    methods, kwargs = {}, dict(spec.kwargs)
    if spec.environment:
        key = f"{spec.key}.environment={spec.environment!r}"
        found = load_function(spec.environment, key=f"{spec.key}.environment")
        if not isinstance(found, type):
            raise ValueError(
                f"{key} must name a class, not a {type(found).__name__}; name tools in agents.tools."
            )
        cls = found
        try:
            if "container" in inspect.signature(cls).parameters:
                kwargs = {"container": spec.container, **kwargs}
            inspect.signature(cls).bind(**kwargs)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{key} does not accept {spec.key}.kwargs={dict(spec.kwargs)}: {error}."
            ) from error
        _check_methods(cls, key)
        if hasattr(cls, "prepare"):
            cls.prepare(**kwargs)
        has_tools = not hasattr(cls, "step") and not hasattr(cls, "run")
        methods = {
            name: make_tool(method, key=key, is_method=True)
            for name, method in inspect.getmembers(cls, inspect.isfunction)
            if has_tools and not name.startswith("_") and name not in RESERVED
        }
    functions = {}
    for tool in spec.tools:
        function = load_function(tool.function, key=tool.key)
        made = make_tool(function, key=f"{tool.key}={tool.function!r}")
        configured = made.with_settings(tool.kwargs)
        if unknown := set(tool.kwargs) - set(configured.settings):
            raise ValueError(
                f"{tool.key}.kwargs.{min(unknown)} is no keyword-only parameter of {tool.function}; write it "
                "after a `*` in the signature."
            )
        if made.name in functions or made.name in methods:
            raise ValueError(
                f"{tool.key}={tool.function!r}: a second tool has the name {made.name}; rename it."
            )
        functions[made.name] = configured
    return LoadedEnvironment(cls, kwargs, functions, methods)
