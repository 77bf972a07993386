"""Dialogues of known lengths over SGLang servers: the work of the benchmarks of them.

A policy with random weights ends no turn by itself and calls no tool, so what the benchmarks measure is given: how many
turns a dialogue has, how many tokens each, and what is observed between them. All the rest is what training runs:
Scheduler, episode, chat template, parser, record, engine, router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl.agent_loop import AgentLoop, Episode, LoopContext, LoopLimits, Request, Scheduler
from agentrl.chat import Chat
from agentrl.engines.contract import SamplingParams
from agentrl.engines.servers.fleet import Timings
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync.tensor import TensorSender
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.sglang.engine import SGLangEngine
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.system.http import http_client
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Message, Status
from agentrl.trajectory.sample import Sample

MODEL_LENGTH = 2048
GROUP = 8
WORDS = " ".join(f"{number} apples and {number + 3} oranges," for number in range(10, 14))
OBSERVED: Message = {"role": "tool", "tool_call_id": "given", "content": "The shop has " + WORDS}
STARTUP = 900.0
"""Seconds that a server has to answer."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`dialogues` at once, each of `turns`; a turn has `fewest` to `most` new tokens, evenly spread over dialogues."""

    dialogues: int
    turns: int
    fewest: int
    most: int

    def length(self, dialogue: int, turn: int) -> int:
        """New tokens of that turn."""
        step = (dialogue * 37 + turn * 53) % 64
        return self.fewest + (self.most - self.fewest) * step // 63

    def requests(self, name: str) -> list[Request]:
        """The same dialogues, with the same seeds, under any name."""
        return [self._request(name, number) for number in range(self.dialogues)]

    def _request(self, name: str, number: int) -> Request:
        text = f"Row {number // GROUP}. What does the shop have, when it had {WORDS} and sold {number // GROUP}?"
        prompt: list[Message] = [{"role": "user", "content": text}]
        sample = Sample(prompt, "benchmark", "lengths", extra_info={"dialogue": number})
        return Request(f"{name}/{number // GROUP}/{number}", number // GROUP, sample, SamplingParams(1), seed=number)


class GivenLengths(AgentLoop):
    """Turns of the shape's lengths, with the same observation between them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    async def run(self, episode: Episode) -> None:
        await episode.start(episode.sample.prompt)
        for turn in range(self.shape.turns):
            if turn:
                await episode.observe([OBSERVED])
            await episode.generate(max_tokens=self.shape.length(episode.sample.extra_info["dialogue"], turn))
        episode.finish(Status.COMPLETED)


def policy(folder: Path) -> Chat:
    """Write a tiny policy there, none of whose tokens ends a turn."""
    make_tiny_policy(folder, seed=1)
    chat = Chat.from_pretrained(str(folder))
    chat.stop_token_ids = ()
    return chat


def engine_over(
    servers: Sequence[str | SGLangProcess],
    folder: Path,
    *,
    client: type[SGLangClient] = SGLangClient,
    deterministic: bool = True,
    timings: Timings | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> SGLangEngine:
    """Make an engine over servers of the policy in `folder`. It starts again and stops servers given as processes."""
    http = http_client()
    return SGLangEngine(
        [
            Server(client(server.url, http), server)
            if isinstance(server, SGLangProcess)
            else Server(client(server, http))
            for server in servers
        ],
        http,
        ModelFacts.from_path(str(folder)),
        TensorSender(torch.float32, 1 << 20),
        max_model_len=MODEL_LENGTH,
        deterministic=deterministic,
        timings=timings,
        notify=notify,
    )


def scheduler(engine: SGLangEngine, chat: Chat, shape: Shape) -> Scheduler:
    tools = ToolSet.from_tools([], timeout=30, max_response_tokens=1024, truncate_side="middle")
    most = 10**6
    limits = LoopLimits(most, MODEL_LENGTH, most, most, None, 1, 0, True, 30.0, most, "error")
    return Scheduler(
        context=LoopContext(engine, chat, tools, {}, limits),
        loops={"lengths": GivenLengths(shape)},
        reward=None,
        max_concurrent=shape.dialogues,
        trajectory_timeout=3600,
        max_retries=0,
    )
