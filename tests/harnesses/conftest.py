"""Sessions of harnesses: a scripted policy, the real endpoint, real programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentrl.agents.agent import AgentOptions
from agentrl.chat import Chat
from agentrl.openai_api.agent_loop import OpenAIProxyLoop
from agentrl.openai_api.endpoint import Endpoint
from agentrl.openai_api.session import Session
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.trajectory import Trajectory
from tests.agent_loop.conftest import Bench, bench, sample
from tests.harnesses.network import Network

__all__ = ["bench"]
Say = Callable[[str], str]
"""(the prompt as text) -> what the policy says."""

TASK = "Write the sum of 2 and 3 into answer.txt."
IS_RIGHT = ["python3", "-c", "assert open('answer.txt').read().strip() == '5'"]


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat.from_pretrained(str(make_tiny_policy(tmp_path_factory.mktemp("tiny"), seed=1)))


@dataclass
class Harnessed:
    """Runs rows through one harness."""

    bench: Bench
    loop: OpenAIProxyLoop

    async def run(self, extra: dict[str, Any] | None = None, n: int = 1, **changes: Any) -> list[Trajectory]:
        changes = {"prompt": [{"role": "user", "content": TASK}], "data_source": "agent/files", **changes}
        row = sample("openai_proxy", extra_info=extra or {}, **changes)
        try:
            return await self.bench.run(row, n)
        finally:
            await self.loop.close()

    def prompts(self) -> list[str]:
        """Every prompt of the policy, as text."""
        made = self.bench.engine.prompts.values()
        return [self.bench.chat.decode(ids) for prompts in made for ids in prompts]


@pytest.fixture
def harnessed(bench: Callable[..., Bench], chat: Chat, tmp_path: Path) -> Callable[..., Harnessed]:
    def make(options: AgentOptions, say: Say, **limits: Any) -> Harnessed:
        def script(session: str, turn: int) -> str:
            return say(chat.decode(made.engine.prompts[session][-1]))

        room: dict[str, Any] = {
            "max_response_tokens": 200_000,
            "max_model_len": 1_000_000,
            "max_prompt_tokens": 800_000,
        }
        room |= {"trajectory_timeout": 150.0, "max_retries": 0, "max_assistant_turns": 40}
        made = bench(script, **{**room, **limits})
        loop = OpenAIProxyLoop(options)
        made.scheduler.loops = {"openai_proxy": loop}
        return Harnessed(made, loop)

    return make


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The path and the body of each request that asks for an answer, in their order."""
    asked: list[dict[str, Any]] = []
    begin = Session.begin

    async def spied(self: Session, body: bytes, dialect: Any, *more: Any) -> Any:
        asked.append({"path": dialect.path, "body": json.loads(body)})
        return await begin(self, body, dialect, *more)

    monkeypatch.setattr(Session, "begin", spied)
    return asked


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """The way of all requests to the endpoint."""
    network, start = Network(b"<no place>"), Endpoint.start

    async def started(self: Endpoint) -> None:
        await start(self)
        self.url = await network.before(self.url)

    monkeypatch.setattr(Endpoint, "start", started)
    yield network
    network.close()
