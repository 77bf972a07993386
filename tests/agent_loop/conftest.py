"""A real tokenizer and chat template, and a way to run one scripted trajectory through the real loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent_loop import LoopContext, LoopLimits, Request, Scheduler
from agentrl.agent_loop.registry import agent_names, instantiate
from agentrl.chat import Chat
from agentrl.config.registries import AGENT_LOOPS
from agentrl.engines.contract import SamplingParams
from agentrl.interaction import Interaction
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.reward import NaiveRewardManager
from agentrl.tool import Tool
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Origin, Trajectory
from agentrl.trajectory.sample import Sample
from tests.agent_loop.scripted_engine import Script, ScriptedEngine

LIMITS = LoopLimits(
    max_response_tokens=600,
    max_model_len=1500,
    max_assistant_turns=6,
    max_user_turns=4,
    max_tokens_per_turn=None,
    max_parallel_calls=4,
    max_malformed=2,
    force_final_answer=True,
    call_timeout=5.0,
    max_prompt_tokens=900,
    truncation="error",
)


@pytest.fixture(autouse=True)
def no_loop_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it: other tests build runs with every registered loop."""
    monkeypatch.setattr(AGENT_LOOPS, "_registered", dict(AGENT_LOOPS._registered))


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_policy(path, seed=1)
    return path


@pytest.fixture(scope="session")
def chat(tiny_dir: Path) -> Chat:
    return Chat.from_pretrained(str(tiny_dir))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def sample(agent_name: str = "tool_agent", **changes: Any) -> Sample:
    base = Sample(
        prompt=[{"role": "user", "content": "What is 2 + 3?"}],
        data_source="quickstart/arithmetic",
        agent_name=agent_name,
        ground_truth="5",
        file="test.parquet",
    )
    return replace(base, **changes)


@dataclass
class Bench:
    """Runs scripted trajectories through scheduler, loop, tools and scorer, all real."""

    chat: Chat
    engine: ScriptedEngine
    scheduler: Scheduler

    def requests(self, row: Sample, n: int = 1) -> list[Request]:
        places = [Origin("train", 3, 0, k, file=row.file, row=row.row) for k in range(n)]
        return [Request(f"t/{k}", 0, row, SamplingParams(1), seed=k, origin=one) for k, one in enumerate(places)]

    async def run(self, row: Sample, n: int = 1) -> list[Trajectory]:
        return await self.scheduler.run(self.requests(row, n))


@pytest.fixture
def bench(chat: Chat) -> Callable[..., Bench]:
    def make(
        script: Script | list[str],
        tools: list[Tool | Callable[..., Any]] | ToolSet | None = None,
        *,
        interactions: dict[str, Interaction] | None = None,
        timeout: float = 5.0,
        trajectory_timeout: float = 20.0,
        max_concurrent: int = 100,
        max_retries: int = 2,
        tool_response_tokens: int = 200,
        **limits: Any,
    ) -> Bench:
        texts = script
        toolset = (
            tools
            if isinstance(tools, ToolSet)
            else ToolSet.from_tools(
                tools or [], timeout=timeout, max_response_tokens=tool_response_tokens, truncate_side="middle"
            )
        )
        toolset.bind(chat.encode, chat.decode)
        engine = ScriptedEngine(chat, texts if callable(texts) else lambda session, turn: texts[turn])
        context = LoopContext(engine, chat, toolset, interactions or {}, replace(LIMITS, **limits))
        scheduler = Scheduler(
            context=context,
            loops=instantiate(name for name in agent_names() if name != "openai_proxy"),
            reward=NaiveRewardManager(),
            max_concurrent=max_concurrent,
            trajectory_timeout=trajectory_timeout,
            max_retries=max_retries,
        )
        return Bench(chat, engine, scheduler)

    return make
