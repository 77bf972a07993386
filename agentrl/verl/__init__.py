"""Names and commands of verl: its launch commands, and the names that files written for it import.

`python -m agentrl.verl.main_ppo` runs a command; `python -m agentrl.verl check` describes its effect beforehand. Files
that import these names run when their import lines are changed (docs/verl_classes.md).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import NoReturn, TypeVar

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
from agentrl.verl.reward_score import default_compute_score, gsm8k, math_dapo, math_reward, search_r1_like_qa_em
from agentrl.verl.sampler import AbstractCurriculumSampler, AbstractSampler
from agentrl.verl.sandbox import SandboxFusionTool
from agentrl.verl.tool_agent_loop import AgentState, ToolAgentLoop
from agentrl.verl.tool_parser import ToolParser
from agentrl.verl.tools import (
    AgentData,
    BaseTool,
    FunctionCall,
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


SPECIFIED_TOKEN_LOGPROBS_KEY = "specified_token_logprobs"

REPLACED = {
    "initialize_tools_from_config": (
        "the run makes the tools: subclass ToolAgentLoop, which has them by name in self.tools, and their schemas in "
        "self.tool_schemas"
    ),
    "initialize_interactions_from_config": (
        "the run makes the interactions: subclass ToolAgentLoop, whose agent_data.interaction is the row's"
    ),
    "Message": "messages are dicts, {'role': ..., 'content': ...}",
    "initialize_system_prompt": "AgentLoopBase has its ids as self.system_prompt",
    "build_gpt_oss_tool_response_text": "ToolAgentLoop appends what tools answer by the run's chat format",
}
"""Names of verl's that are not here, with their replacements."""


def __getattr__(name: str) -> NoReturn:
    """Raise ImportError for a name of verl's that is not here: the message names the replacement."""
    if name in REPLACED:
        raise ImportError(f"agentrl.verl has no {name}: {REPLACED[name]} (docs/verl_classes.md)")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def finalize_specified_token_logprobs(*args: object, **kwargs: object) -> NoReturn:
    """Raise ValueError: the engine gives log-probs of its sampled tokens, and of no other tokens."""
    raise ValueError("finalize_specified_token_logprobs: the engine gives no log-probs but of what it sampled")


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
    "SPECIFIED_TOKEN_LOGPROBS_KEY",
    "AbstractCurriculumSampler",
    "AbstractRewardManager",
    "AbstractSampler",
    "AgentData",
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentState",
    "AsyncLLMServerManager",
    "BaseInteraction",
    "BaseTool",
    "DataProto",
    "DictConfigWrap",
    "FunctionCall",
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
    "SandboxFusionTool",
    "TokenOutput",
    "ToolAgentLoop",
    "ToolParser",
    "ToolResponse",
    "default_compute_score",
    "finalize_specified_token_logprobs",
    "gsm8k",
    "math_dapo",
    "math_reward",
    "register",
    "rollout_trace_op",
    "search_r1_like_qa_em",
    "simple_timer",
]
