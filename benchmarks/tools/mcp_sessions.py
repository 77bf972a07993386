"""Cost of a call to an MCP server in the session that all trajectories share, and in one of each trajectory.

    python -m benchmarks.tools.mcp_sessions

The server is written with the official SDK and adds two numbers. Shared: 64 and 512 calls at once through the tools as
a run has them, against the SDK's own client around the same server. A session each: every trajectory starts (stdio) or
connects to (HTTP) its server, asks once, and leaves it.

Prints calls/s and the client's CPU milliseconds a call.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters

from agentrl.tool.session import gathered
from benchmarks.no_options import no_options
from tools.mcp import MCPTools

SERVER = """
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers", log_level="ERROR")

@server.tool()
async def add(a: int, b: int) -> str:
    "Add two numbers."
    return str(a + b)

server.run("streamable-http", port=int(sys.argv[1])) if len(sys.argv) > 1 else server.run()
"""


async def measure(name: str, call: Callable[[int], Awaitable[object]], calls: int, at_once: int) -> None:
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with places:
            await call(number)

    begun, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(one, range(calls)))
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    print(f"{name:28} {at_once:4} at once: {calls / seconds:6.0f} calls/s, {1000 * cpu / calls:5.2f} ms CPU a call")


async def compare(transport: str, place: dict[str, Any], direct: Any, sessions: int) -> None:
    (shared,) = await asyncio.to_thread(MCPTools(place).tools)
    await shared.start("benchmark")
    async with Client(direct) as client:
        for at_once in (64, 512):
            await measure(
                f"{transport}, shared", lambda n: gathered(shared.execute("one", {"a": n, "b": 1}), []), 1000, at_once
            )
            await measure(
                f"{transport}, the SDK's client", lambda n: client.call_tool("add", {"a": n, "b": 1}), 1000, at_once
            )
    await shared.close()
    (tool,) = await asyncio.to_thread(MCPTools({**place, "session": "trajectory"}).tools)

    async def trajectory(number: int) -> None:
        await tool.create(str(number))
        await gathered(tool.execute(str(number), {"a": number, "b": 1}), [])
        await tool.release(str(number))

    await measure(f"{transport}, a session each", trajectory, sessions, 4 if transport == "stdio" else 64)
    await tool.close()


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "server.py"
        program.write_text(SERVER)
        command = [sys.executable, str(program)]
        parameters = StdioServerParameters(command=command[0], args=command[1:])
        await compare("stdio", {"command": command}, parameters, 16)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        server = await asyncio.create_subprocess_exec(*command, str(port), stderr=asyncio.subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}/mcp"
        try:
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                except OSError:
                    await asyncio.sleep(0.1)
            await compare("HTTP", {"url": url}, url, 200)
        finally:
            server.kill()
            await server.wait()


if __name__ == "__main__":
    no_options(__doc__)
    asyncio.run(main())
