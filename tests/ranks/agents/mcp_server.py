"""An MCP server with state: `python mcp_server.py` on stdio, `python mcp_server.py PORT` on HTTP."""

import sys

from mcp.server import MCPServer

server = MCPServer("ledger")
entries: list[int] = []


@server.tool()
def add(amount: int) -> int:
    """Add an amount to the ledger and return the sum."""
    if amount < 0:
        raise ValueError("amounts are not negative")
    entries.append(amount)
    return sum(entries)


if len(sys.argv) == 1:
    server.run("stdio")
else:
    server.run("streamable-http", port=int(sys.argv[1]))
