"""The record of sampled text, and the data made of it."""

from agentrl.trajectory.message import Content, FunctionCall, Message, Part, ToolCall
from agentrl.trajectory.trajectory import (
    COUNTED,
    OVERLONG,
    POLICY,
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
    "OVERLONG",
    "POLICY",
    "Cause",
    "Content",
    "FunctionCall",
    "Image",
    "Message",
    "Outline",
    "Part",
    "PlacedImage",
    "Status",
    "ToolCall",
    "ToolCallRecord",
    "Trajectory",
    "Transcript",
    "Turn",
    "VersionSpan",
    "cause_of",
    "exclusion",
]
