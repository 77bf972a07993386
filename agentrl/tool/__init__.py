"""Tools: the contract that user code implements, and the tool set of a run."""

from agentrl.system.metrics import Metrics
from agentrl.tool.contract import (
    CALL_KEYS,
    MALFORMED,
    ErrorKind,
    FunctionTool,
    Tool,
    ToolArgumentsError,
    ToolError,
    ToolResponse,
    ToolSchema,
    ToolSource,
    as_response,
    own_config,
    tool,
)

__all__ = [
    "CALL_KEYS",
    "MALFORMED",
    "ErrorKind",
    "FunctionTool",
    "Metrics",
    "Tool",
    "ToolArgumentsError",
    "ToolError",
    "ToolResponse",
    "ToolSchema",
    "ToolSource",
    "as_response",
    "own_config",
    "tool",
]
