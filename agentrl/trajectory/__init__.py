"""The record of sampled text, and the data made of it."""

from agentrl.trajectory.message import Content, FunctionCall, Message, Part, ToolCall
from agentrl.trajectory.origin import Origin
from agentrl.trajectory.tool_answer import ToolAnswer
from agentrl.trajectory.trajectory import (
    COUNTED,
    FROZEN,
    OVERLONG,
    POLICY,
    ROLE,
    Cause,
    Image,
    Outline,
    PlacedImage,
    Status,
    ToolCallRecord,
    Trajectory,
    Transcript,
    Turn,
    VersionSpan,
    cause_of,
    exclusion,
)

__all__ = [
    "COUNTED",
    "FROZEN",
    "OVERLONG",
    "POLICY",
    "ROLE",
    "Cause",
    "Content",
    "FunctionCall",
    "Image",
    "Message",
    "Origin",
    "Outline",
    "Part",
    "PlacedImage",
    "Status",
    "ToolAnswer",
    "ToolCall",
    "ToolCallRecord",
    "Trajectory",
    "Transcript",
    "Turn",
    "VersionSpan",
    "cause_of",
    "exclusion",
]
