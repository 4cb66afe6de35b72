"""Environments behind an OpenEnv server (github.com/meta-pytorch/OpenEnv).

    agents:
      environment: rl.features.agents.integrations.openenv:OpenEnv
      kwargs: {url: "http://127.0.0.1:8000", action: message, observation: echoed_message}

The policy's text becomes the field `action` of the server's action. For example, with the kwargs above the
text "hi" becomes {"message": "hi"}. If `action` is empty, the text must be the JSON object of the whole
action. The policy reads the field `observation` of an observation; if `observation` is empty, it reads the
JSON of all fields. `OpenEnvTools` (kwargs: url) is for environments with calls of MCP tools as actions. The
row's `extra_info.seed` and further kwargs go to the server's reset.

The integration speaks OpenEnv's WebSocket protocol itself. The server's package, openenv-core, requires
gradio and fastmcp, and versions of packages that vLLM does not accept.
"""

import json
from typing import Any

from rl.features.agents.integrations.chat import tool_schema, user_message
from rl.features.agents.integrations.imports import require
from rl.features.agents.integrations.rows import seed_of
from rl.features.agents.observations import text_of

websockets = require("websockets.asyncio.client", extra="openenv")


class InvalidAction(ValueError):
    """Raised if the server rejects an action; the message is for the policy."""


class _OpenEnvSession:
    """A session of an OpenEnv server, which lasts as long as its connection."""

    def __init__(self, url: str, observation: str = "", reset: dict[str, Any] | None = None) -> None:
        """Take the server; `reset` are arguments of its reset beside the row's seed."""
        self._address = url.replace("http", "ws", 1).rstrip("/") + "/ws"
        self._field, self._reset = observation, reset or {}
        self._socket: Any = None
        self._total = 0.0
        self.done = False

    async def _request(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Return the observation that answers a request; add up rewards.

        Raises InvalidAction, or RuntimeError for any other error of the server.
        """
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.recv())
        if answer["type"] == "error" and answer["data"]["code"] == "VALIDATION_ERROR":
            errors = answer["data"].get("errors", [])
            raise InvalidAction("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in errors))
        if answer["type"] == "error":
            raise RuntimeError(f"OpenEnv server {self._address}: {answer['data']}")
        self._reward = float(answer["data"].get("reward") or 0.0)
        self._total += self._reward
        self.done = bool(answer["data"].get("done"))
        return answer["data"]["observation"]

    async def _open(self, row: dict[str, Any]) -> dict[str, Any]:
        self._socket = await websockets.connect(self._address, max_size=None, proxy=None)
        return await self._request("reset", {"seed": seed_of(row), **self._reset})

    def _text(self, observation: dict[str, Any]) -> str:
        if not self._field:
            return text_of({key: value for key, value in observation.items() if key != "metadata"})
        if self._field not in observation:
            raise RuntimeError(
                f"agents.kwargs.observation={self._field} is not a field of the observation; use one of "
                f"{', '.join(observation)}."
            )
        return text_of(observation[self._field])

    def score(self) -> float:
        """Return the sum of the rewards."""
        return self._total

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.send(json.dumps({"type": "close"}))
            await self._socket.wait_closed()


class OpenEnv(_OpenEnvSession):
    """An environment with the policy's text as its action."""

    def __init__(self, url: str, action: str = "", observation: str = "", **reset: Any) -> None:
        super().__init__(url, observation, reset)
        self._action = action

    async def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        return user_message(self._text(await self._open(row)))

    async def step(self, text: str) -> tuple[str, float, bool]:
        try:
            action = {self._action: text} if self._action else json.loads(text)
            observation = await self._request("step", action)
        except InvalidAction as error:
            return f"The action is invalid: {error}", 0.0, False
        except ValueError as error:
            return f"The action must be a JSON object: {error}", 0.0, False
        return self._text(observation), self._reward, self.done


class OpenEnvTools(_OpenEnvSession):
    """An environment with calls of its MCP tools as actions. The prompt is the row's."""

    def __init__(self, url: str, **reset: Any) -> None:
        super().__init__(url, reset=reset)

    async def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        await self._open(row)
        return row["messages"]

    async def list_tools(self) -> list[dict[str, Any]]:
        found = await self._request("step", {"type": "list_tools"})
        return [
            tool_schema(tool["name"], tool["description"], tool["input_schema"]) for tool in found["tools"]
        ]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        call = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        observation = await self._request("step", call)
        if error := observation.get("error"):
            raise ValueError(text_of(error.get("message", error) if isinstance(error, dict) else error))
        result = observation["result"]
        # fastmcp's CallToolResult has the value beside the content, which may be images or an error.
        if isinstance(result, dict) and result.get("data") is not None and not result.get("is_error"):
            if all(block.get("type") == "text" for block in result.get("content") or []):
                return result["data"]
        return result
