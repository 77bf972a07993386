"""What a run has opened is closed, whatever else goes wrong."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from agentrl.config.sections.reward import RewardConfig, SandboxFusionConfig
from agentrl.errors import ConfigError
from agentrl.interaction import Interaction, InteractionResponse
from agentrl.reward import NaiveRewardManager
from agentrl.reward.code import CodeJudge
from agentrl.rollouts.context import RunContext
from agentrl.tool import Tool, ToolResponse
from agentrl.tool.toolset import ToolSet
from tests.naming import assert_names


class Careless(Interaction):
    """Cannot be closed."""

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None: ...

    async def generate_response(self, instance_id: str, messages: list[Any]) -> InteractionResponse:
        raise NotImplementedError

    async def close(self) -> None:
        raise OSError("it does not end")


class Closing(Tool):
    closed = False

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        raise NotImplementedError

    async def close(self) -> None:
        self.closed = True


async def test_everything_is_closed_after_a_start_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    nowhere = SandboxFusionConfig(url="http://127.0.0.1:1")
    reward = NaiveRewardManager(RewardConfig(sandbox_fusion=nowhere))
    tool = Closing(schema={"type": "function", "function": {"name": "x", "description": "", "parameters": {}}})
    parts = RunContext({}, ToolSet.from_tools([tool]), {"careless": Careless({}, "careless")}, reward)
    judge = reward._judges["code"]
    assert isinstance(judge, CodeJudge)
    judge._client.options.attempts = 1
    with pytest.raises(ConfigError, match="no connection"):
        await parts.start("run")
    connections = judge._client._connections
    with caplog.at_level(logging.WARNING):
        await parts.close()
    assert_names(caplog.text, "close:", "OSError")
    assert tool.closed
    assert connections is not None and connections.closed
