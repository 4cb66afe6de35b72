"""Tools of an MCP server (modelcontextprotocol.io), which a worker reaches as a client.

    agents:
      environment: rl.features.agents.integrations.mcp:Mcp
      kwargs: {command: [python, my_server.py]}        # stdio: one server process per trajectory
      kwargs: {url: "http://127.0.0.1:8000/mcp"}       # streamable HTTP: one session per trajectory

The prompt is the row's, and the reward function judges the last answer. A result that the server marks as an
error is given to the policy.
"""

import asyncio
from typing import Any

from rl.features.agents.integrations.chat import tool_schema
from rl.features.agents.integrations.imports import require

mcp = require("mcp", extra="mcp")


class Mcp:
    """An environment with the tools of an MCP server, in one session."""

    def __init__(
        self, command: list[str] | None = None, url: str = "", env: dict[str, str] | None = None
    ) -> None:
        """Take the server; `env` are environment variables for a server that `command` starts."""
        if bool(command) == bool(url):
            raise ValueError(f"agents.kwargs.command={command}, url={url!r}; set exactly one of the two.")
        self._server: Any = url
        if command:
            self._server = mcp.StdioServerParameters(command=command[0], args=command[1:], env=env)

    async def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self._closing = asyncio.Event()
        connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(connected))
        self._client = await connected
        return row["messages"]

    async def _hold(self, connected: "asyncio.Future[Any]") -> None:
        """Hold the connection until `close`. The same task must enter and leave the client's context."""
        try:
            async with mcp.Client(self._server) as client:
                connected.set_result(client)
                await self._closing.wait()
        except BaseException as error:
            if connected.done():
                raise
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            connected.set_exception(RuntimeError(f"the MCP server {self._server} did not answer: {error}"))

    async def list_tools(self) -> list[dict[str, Any]]:
        tools, cursor = [], None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        return [tool_schema(tool.name, tool.description, tool.input_schema) for tool in tools]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return the server's result; `rl.features.agents.observations` reads its blocks."""
        return await self._client.call_tool(name, arguments)

    async def close(self) -> None:
        self._closing.set()
        await self._holder
