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
        self._tools = {tool.name: tool for tool in (load("tool", tools) if tools else ())}
        self._cut_to, self._cut = cut_to, cut

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self._settings = row.get("tools_kwargs") or {}
        return row["messages"]

    def list_tools(self) -> list[dict[str, Any]]:
        return [tool.tool_schema.model_dump(**AS_VERL) for tool in self._tools.values()]

    async def call_tool(self, name: str, arguments: dict[str, Any] | str) -> Any:
        try:
            parameters = json.loads(arguments) if isinstance(arguments, str) else arguments
            tool, own = self._tools[name], self._settings.get(name) or {}
            instance, _ = await tool.create(create_kwargs=own.get("create_kwargs") or {})
            try:
                response, _, _ = await tool.execute(instance, parameters)
            finally:
                await tool.release(instance)
        except Exception as error:
            return f"Error when executing tool: {error}"
        text = self._shortened(response.text or "")
        return {"text": text, "image": response.image} if response.image else text

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
                is_over, text, *_ = await interaction.generate_response(name, messages, **kwargs)
                messages += user_message(text)
