"""An MCP server on stdio that kills itself in its first call, once: `python mcp_server.py FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations
from pydantic import Field

from labs.fault_matrix.mark import mark

FIRST = 1
server = MCPServer("search")
calls = 0


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def search(query: Annotated[str, Field(description="What to look for, in a few words.")]) -> str:
    """Search the documents."""
    global calls
    calls += 1
    if calls == FIRST and mark(Path(sys.argv[1])):
        os.kill(os.getpid(), signal.SIGKILL)
    return "a is 1"


server.run()
