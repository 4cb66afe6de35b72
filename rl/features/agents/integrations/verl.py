"""Tools and interactions written for verl (github.com/verl-project/verl), from verl's own files.

    agents:
      environment: rl.features.agents.integrations.verl:Tools
      kwargs: {tools: gsm8k_tool_config.yaml}     # multi_turn.tool_config_path
      interpreter: /path/to/bin/python            # an environment with verl

With a file of multi_turn.interaction_config_path the environment is `ToolAgent`. As in verl, a tool is
created for each call and released after it, the policy reads its errors, and only the reward function judges:
here the last answer, in verl the text of all turns.
"""

import functools
import importlib
import json
import logging
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from rl.features.agents.integrations.chat import LimitsUsedUp, complete, user_message

REGISTRIES = ("verl.{0}s.{0}_registry", "verl.{0}s.utils.{0}_registry")
"""Modules of verl that read the files, of August 2026 and of verl 0.7."""
AS_VERL = dict(exclude_unset=True, exclude_none=True)
"""Fields of a tool's schema that verl leaves out of prompts."""


@functools.cache  # trajectories share the objects, as in verl
def load(kind: str, config: str) -> Any:
    """Return what a file of verl declares; kind: tool or interaction. Raises RuntimeError without verl."""
    for name in (name.format(kind) for name in REGISTRIES):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "verl":
                raise  # of a package that verl needs
            continue
        return getattr(module, f"initialize_{kind}s_from_config")(config)
    raise RuntimeError(
        f"agents.kwargs.{kind}s={config} needs verl; set agents.interpreter to a Python that can import "
        f"verl.{kind}s."
    )


@functools.cache
def log_first(name: str, error: str) -> None:
    """Log the error that is being handled, once for each tool, because only the policy reads it."""
    logging.getLogger(__name__).warning(f"the first {error} of verl's tool {name}", exc_info=True)


class Tools:
    """A conversation with tools of verl.

    cut_to: maximum number of characters of an output. cut: side of it that stays, or middle for both.
    """

    @classmethod
    def prepare(cls, tools: str = "", interactions: str = "", **_: Any) -> None:
        """Load the files when a worker starts."""
        for kind, config in (("tool", tools), ("interaction", interactions)):
            if config:
                load(kind, config)

    def __init__(self, tools: str = "", cut_to: int = 256, cut: str = "middle") -> None:
        self._tools = self._all = {tool.name: tool for tool in (load("tool", tools) if tools else ())}
        self._cut_to, self._cut = cut_to, cut

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self._settings = row.get("tools_kwargs") or {}
        # What verl's AgentData has; only a ToolAgent knows the messages.
        self._data = SimpleNamespace(tools_kwargs=self._settings, request_id=uuid4().hex, extra_fields={})
        chosen = (row.get("extra_info") or {}).get("tool_selection") or self._all
        self._tools = {name: self._all[name] for name in chosen if name in self._all}
        return row["messages"]

    def list_tools(self) -> list[dict[str, Any]]:
        return [tool.tool_schema.model_dump(**AS_VERL) for tool in self._tools.values()]

    async def call_tool(self, name: str, arguments: dict[str, Any] | str) -> Any:
        try:
            parameters = json.loads(arguments) if isinstance(arguments, str) else arguments
            tool, own = self._tools[name], self._settings.get(name) or {}
            instance, _ = await tool.create(create_kwargs=own.get("create_kwargs") or {})
            try:
                response, _, _ = await tool.execute(instance, parameters, agent_data=self._data)
            finally:
                await tool.release(instance)
        except Exception as error:
            if name in self._tools:
                log_first(name, type(error).__name__)
            return f"Error when executing tool: {error}"
        if getattr(response, "video", None):
            raise ValueError(f"verl's tool {name} returned a video; it may return text and images")
        text = self._shortened(response.text or "")
        images = [image for image in response.image or [] if image is not None]
        return {"text": text, "image": images} if images else text

    def _shortened(self, text: str) -> str:
        size, half = self._cut_to, self._cut_to // 2
        if len(text) <= size:
            return text
        parts = {"left": f"{text[:size]}...(truncated)", "right": f"(truncated)...{text[-size:]}"}
        return parts.get(self._cut, f"{text[:half]}...(truncated)...{text[-half:]}")


class ToolAgent(Tools):
    """verl's agent for an interaction, which answers turns without a call of a tool.

    max_calls: calls of one turn that are made.
    """

    def __init__(self, interactions: str, max_calls: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._interactions, self._max_calls = load("interaction", interactions), max_calls

    async def run(self, base_url: str, api_key: str, row: dict[str, Any]) -> None:
        messages, kwargs, name = list(row["messages"]), row["interaction_kwargs"], str(uuid4())
        self._data.messages, self._data.request_id = messages, name
        interaction, tools = self._interactions[kwargs["name"]], self.list_tools()
        await interaction.start_interaction(name, **kwargs)
        is_over, options = False, dict[str, Any](tools=tools) if tools else {}
        while not is_over:
            try:
                messages.append(await complete(base_url, api_key, messages, **options))
            except LimitsUsedUp:
                return
            calls = messages[-1].get("tool_calls") or []
            for call in calls[: self._max_calls]:
                output = await self.call_tool(call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
            if not calls:
                heard = [as_text(message) for message in messages]
                is_over, text, *_ = await interaction.generate_response(name, heard, **kwargs)
                messages += user_message(text)


def as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a turn with its reasoning in its content, as verl decodes it."""
    if thought := message.get("reasoning_content"):
        return message | {"content": f"<think>\n{thought}\n</think>\n\n{message.get('content') or ''}"}
    return message
