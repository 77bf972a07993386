"""Names and commands of verl: its launch commands, and the names that files written for it import.

`python -m agentrl.verl.main_ppo` runs a command, `python -m agentrl.verl check` tells of it before. Files that import
these names run when their import lines are changed (docs/verl_classes.md).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import TypeVar

from agentrl.verl.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    DictConfigWrap,
    ServerManager,
    TokenOutput,
    register,
)
from agentrl.verl.dataset import RLHFDataset
from agentrl.verl.interactions import BaseInteraction
from agentrl.verl.reward import AbstractRewardManager, DataProto, RewardManagerBase
from agentrl.verl.tools import (
    AgentData,
    BaseTool,
    OpenAIFunctionCallSchema,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolCall,
    OpenAIFunctionToolSchema,
    ToolResponse,
)

Function = TypeVar("Function", bound=Callable[..., object])

AsyncLLMServerManager = LLMServerClient = ServerManager
"""verl's names for it, by version."""


def rollout_trace_op(function: Function) -> Function:
    """Return the function as it is: turns and calls are in the run's `trajectories/`."""
    return function


@contextlib.contextmanager
def simple_timer(name: str, timing_raw: MutableMapping[str, float]) -> Iterator[None]:
    """Context that adds its seconds to `timing_raw[name]`."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - begun


__all__ = [
    "AbstractRewardManager",
    "AgentData",
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AsyncLLMServerManager",
    "BaseInteraction",
    "BaseTool",
    "DataProto",
    "DictConfigWrap",
    "LLMServerClient",
    "OpenAIFunctionCallSchema",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionParsedSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolCall",
    "OpenAIFunctionToolSchema",
    "RLHFDataset",
    "RewardManagerBase",
    "TokenOutput",
    "ToolResponse",
    "register",
    "rollout_trace_op",
    "simple_timer",
]
