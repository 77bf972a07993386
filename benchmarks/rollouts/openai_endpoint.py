"""CPU time that one call through the OpenAI-compatible endpoint costs, HTTP and the client's side included.

`python -m benchmarks.rollouts.openai_endpoint`: an engine without latency, a tool conversation of 4 turns and one of
100, 200 conversations at once, and for comparison a request that is answered without any work (an unknown session).
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from agentrl.agent_loop import Episode, LoopContext, LoopLimits
from agentrl.chat import Chat
from agentrl.engines.contract import FinishReason, Generation, SamplingParams
from agentrl.openai_api import Endpoint
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.system.garbage import frozen
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import PlacedImage, Trajectory, VersionSpan
from agentrl.trajectory.sample import Sample
from benchmarks.no_options import no_options

REPLY = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]


class ZeroLatencyEngine:
    """Says the same call at once."""

    def __init__(self, chat: Chat) -> None:
        self.ids = [*chat.tokenizer.encode(REPLY), chat.stop_token_ids[0]]
        self.stop = chat.stop_token_ids[0]

    async def generate(
        self, ids: Sequence[int], params: SamplingParams, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        count = len(self.ids)
        return Generation(list(self.ids), [-0.5] * count, FinishReason("stop", self.stop), [VersionSpan(0, 0, count)])

    async def release(self, session: str) -> None: ...


async def converse(endpoint: Endpoint, context: LoopContext, http: aiohttp.ClientSession, turns: int) -> None:
    trajectory = Trajectory("t", 0)
    episode = Episode(context, Sample([], "", ""), trajectory, SamplingParams(1), seed=1, session="t")
    talk: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 + 3?"}]
    async with endpoint.session(episode) as (_, base_url):
        for _ in range(turns):
            body = json.dumps({"model": "policy", "messages": talk, "tools": TOOLS})
            async with http.post(f"{base_url}/chat/completions", data=body) as answer:
                message = (await answer.json())["choices"][0]["message"]
            talk += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"}]
    assert len(trajectory.transcripts) == 1


async def measure(name: str, calls: int, work: Callable[[], Awaitable[Any]]) -> None:
    await work()
    begun, cpu = time.perf_counter(), time.process_time()
    await work()
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    print(f"{name:28} {cpu / calls * 1e3:7.2f} ms CPU a call {seconds / calls * 1e3:7.2f} ms")


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        chat = Chat.from_pretrained(str(make_tiny_policy(Path(folder) / "policy", seed=1)))
    most = 10**6
    limits = LoopLimits(most, most, most, most, None, 1, 0, True, 5.0, most, "error")
    engine: Any = ZeroLatencyEngine(chat)
    context = LoopContext(engine, chat, ToolSet.from_tools([]), {}, limits)
    endpoint = Endpoint()
    await endpoint.start()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def one_by_one(sessions: int, turns: int) -> None:
            for _ in range(sessions):
                await converse(endpoint, context, http, turns)

        async def nothing() -> None:
            for _ in range(400):
                async with http.post(f"{endpoint.url}/x/v1/chat/completions", data="{}") as answer:
                    await answer.read()

        await measure("unknown session", 400, nothing)
        await measure("conversations of 4 turns", 400, lambda: one_by_one(100, 4))
        await measure("a conversation of 100 turns", 100, lambda: one_by_one(1, 100))
        await measure(
            "200 conversations at once",
            800,
            lambda: asyncio.gather(*[converse(endpoint, context, http, 4) for _ in range(200)]),
        )
    await endpoint.close()


if __name__ == "__main__":
    no_options(__doc__)
    with frozen():  # as in a run
        asyncio.run(main())
