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
    ToolFailed,
    ToolResponse,
    ToolSource,
    as_response,
    own_config,
    tool,
)
from agentrl.tool.schema import FunctionSchema, Schema, ToolSchema, parameters_of

__all__ = [
    "CALL_KEYS",
    "MALFORMED",
    "ErrorKind",
    "FunctionSchema",
    "FunctionTool",
    "Metrics",
    "Schema",
    "Tool",
    "ToolArgumentsError",
    "ToolError",
    "ToolFailed",
    "ToolResponse",
    "ToolSchema",
    "ToolSource",
    "as_response",
    "own_config",
    "parameters_of",
    "tool",
]
