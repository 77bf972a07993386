"""The endpoint over a scripted policy (real tokenizer and template) or the embedded engine, and OpenAI's own client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoModelForCausalLM

from agentrl.agent_loop import Episode, LoopContext, LoopLimits
from agentrl.chat import Chat
from agentrl.engines.contract import RolloutEngine, SamplingParams
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.observe.invariants import check_trajectory
from agentrl.openai_api import Endpoint, Session
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Trajectory
from tests.agent_loop.conftest import LIMITS, sample
from tests.agent_loop.scripted_engine import Script, ScriptedEngine

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture(scope="session")
def chat(tiny_dir: Path) -> Chat:
    return Chat.from_pretrained(str(tiny_dir))


@dataclass
class Open:
    """One session, seen from both sides."""

    client: openai.AsyncOpenAI
    base_url: str
    session: Session
    trajectory: Trajectory

    async def say(self, messages: list[Any], **more: Any) -> Any:
        return await self.client.chat.completions.create(model="any", messages=messages, **more)


@dataclass
class Service:
    """Sessions on one endpoint; every record is checked when its session ends."""

    chat: Chat
    engine: RolloutEngine
    limits: LoopLimits
    endpoint: Endpoint = field(default_factory=Endpoint)
    opened: int = 0

    @contextlib.asynccontextmanager
    async def session(self, **client: Any) -> AsyncIterator[Open]:
        self.opened += 1
        uid = f"s{self.opened}"
        context = LoopContext(self.engine, self.chat, ToolSet.from_tools([]), {}, self.limits)
        trajectory = Trajectory(uid, 0)
        episode = Episode(context, sample(), trajectory, SamplingParams(1), seed=self.opened, session=uid)
        async with (
            self.endpoint.session(episode) as (session, base_url),
            openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0, **client) as made,
        ):
            yield Open(made, base_url, session, trajectory)
        episode.finish(session.ending)
        if trajectory.num_sampled:
            assert check_trajectory(trajectory, self.chat.vocab_size) == []


@contextlib.asynccontextmanager
async def serve(chat: Chat, engine: RolloutEngine, *, strict: bool = False, **limits: Any) -> AsyncIterator[Service]:
    service = Service(chat, engine, replace(LIMITS, **limits), Endpoint(strict=strict))
    await service.endpoint.start()
    try:
        yield service
    finally:
        await service.endpoint.close()


@contextlib.asynccontextmanager
async def scripted(chat: Chat, script: Script | list[str], **limits: Any) -> AsyncIterator[tuple[Service, Any]]:
    """A service whose policy says given texts; a list: one after another, in all transcripts together.

    `limits` may have the endpoint's `strict`.
    """
    if isinstance(script, list):
        texts = iter(script)
        engine = ScriptedEngine(chat, lambda session, turn: next(texts))
    else:
        engine = ScriptedEngine(chat, script)
    async with serve(chat, engine, **limits) as service:
        yield service, engine


@contextlib.asynccontextmanager
async def embedded(chat: Chat, tiny_dir: Path, **limits: Any) -> AsyncIterator[Service]:
    """A service whose policy is a real, untrained model."""
    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    settings = replace(LIMITS, **limits)
    engine = EmbeddedEngine(model, max_num_seqs=64, max_model_len=settings.max_model_len, stop_decode=chat.decode)
    async with serve(chat, engine, **limits) as service:
        yield service
    await engine.close()
