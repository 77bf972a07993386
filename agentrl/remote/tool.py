"""Base class of tools whose calls a server answers."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pydantic

from agentrl.remote.client import RemoteClient, RemoteOptions
from agentrl.system.metrics import Metrics
from agentrl.tool import Tool, ToolSchema


class RemoteTool(Tool):
    """Tool that asks its server by `self.client`. Its `config_model` is RemoteOptions or a subclass.

    A server that gives no answer fails the trajectory, which is tried again: it never becomes a zero reward, unless the
    YAML says `on_error: tell`.
    """

    config_model: ClassVar[type[pydantic.BaseModel] | None] = RemoteOptions
    options: RemoteOptions
    default_on_error: ClassVar[Literal["tell", "fail"]] = "fail"

    def __init__(self, config: dict[str, Any] | None = None, schema: ToolSchema | None = None) -> None:
        super().__init__(config, schema)
        assert isinstance(self.options, RemoteOptions)  # of `config_model`
        self.client = RemoteClient(f"tool {self.name}", self.options)

    async def start(self, run: str) -> None:
        self.client.run = run

    def take_metrics(self) -> Metrics:
        return self.client.take_metrics()

    async def close(self) -> None:
        await self.client.close()
