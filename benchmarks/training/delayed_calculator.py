"""The calculator, answering after a while."""

from __future__ import annotations

import asyncio
from typing import Any

import pydantic

from agentrl.tool import Tool, ToolResponse
from tools.calculator import CalculatorTool, calculate


class DelayConfig(pydantic.BaseModel):
    """The tool's own keys."""

    model_config = pydantic.ConfigDict(extra="forbid", use_attribute_docstrings=True)

    seconds: float
    """Seconds that an answer takes."""


class DelayedCalculator(Tool):
    """`calculator(expression)` that does nothing for `seconds` first, as a tool behind a network does."""

    config_model = DelayConfig
    options: DelayConfig
    default_schema = CalculatorTool.default_schema

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        options = self.options
        await asyncio.sleep(options.seconds)
        return ToolResponse(calculate(str(arguments["expression"])))
