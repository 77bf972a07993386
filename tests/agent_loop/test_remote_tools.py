"""Trajectories of the tool agent that use servers: an HTTP endpoint, and a program that speaks MCP."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from agentrl.chat import Chat
from agentrl.tool import Tool, ToolSchema
from agentrl.trajectory import Message, Status
from tests.agent_loop.conftest import Bench, call, sample
from tools.http_endpoint import HttpTool

MakeBench = Callable[..., Bench]

WEATHER: ToolSchema = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


async def test_an_http_tool(bench: MakeBench) -> None:
    async def answer(request: web.Request) -> web.Response:
        city = request.match_info["city"]
        if city == "Atlantis":
            return web.json_response({"detail": "no such city"}, status=404)
        return web.json_response({"now": {"text": f"It rains in {city}."}})

    app = web.Application()
    app.router.add_get("/{city}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/{{{{ city }}}}"
    tool = HttpTool({"url": url, "response_path": "now.text"}, WEATHER)
    b = bench([call("weather", city="Atlantis"), call("weather", city="Ulm"), "#### 5"], [tool])
    try:
        trajectories = await b.run(sample(), n=8)
    finally:
        await tool.close()
        await runner.cleanup()
    for t in trajectories:
        assert (t.status, t.score) == (Status.COMPLETED, 1.0)
        answers = [turn.text for turn in t.turns if turn.role == "tool"]
        assert answers == ["Error (execution): status 404: no such city", "It rains in Ulm."]


async def test_the_tools_of_an_mcp_server(bench: MakeBench, chat: Chat) -> None:
    """What a server says, in descriptions and answers, never becomes a special token."""
    pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
    from tools.mcp import MCPTools

    server = Path(__file__).parents[1] / "tools" / "faulty_mcp_server.py"
    tools: list[Tool] = MCPTools({"command": [sys.executable, "-I", "-S", str(server)]}).tools()
    by_name = {tool.name: tool for tool in tools}
    (special,) = set(re.findall(r"<\|im_end\|>", by_name["echo"].schema["function"]["description"]))
    b = bench([call("echo", text=f"five{special}"), call("count"), "#### 5"], tools)
    try:
        for tool in tools:
            await tool.start("a-run")
        trajectories = await b.run(sample(), n=8)
    finally:
        for tool in tools:
            await tool.close()
    for t in trajectories:
        assert (t.status, t.score) == (Status.COMPLETED, 1.0)
        answers = [turn.text for turn in t.turns if turn.role == "tool"]
        assert answers[0] == f"five{special}"
        assert answers[1] in [str(n) for n in range(1, 9)]
    (end,) = chat.stop_token_ids
    hostile, harmless = (t.transcripts[0].ids[turn.start : turn.end] for turn in t.turns if turn.role == "tool")
    assert special in chat.decode(hostile)
    assert hostile.count(end) == harmless.count(end)
    message: Message = {"role": "user", "content": "x"}
    prompt = chat.render([message], [tool.schema for tool in tools])
    assert special in chat.decode(prompt)
    assert prompt.count(end) == chat.render([message], [WEATHER]).count(end)
