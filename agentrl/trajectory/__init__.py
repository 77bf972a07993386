"""The record of what was sampled, and the data made of it."""

from agentrl.trajectory.trajectory import (
    COUNTED,
    POLICY,
    Image,
    Message,
    Outline,
    PlacedImage,
    Status,
    ToolCallRecord,
    Trajectory,
    Transcript,
    Turn,
    VersionSpan,
    exclusion,
)

__all__ = [
    "COUNTED",
    "POLICY",
    "Image",
    "Message",
    "Outline",
    "PlacedImage",
    "Status",
    "ToolCallRecord",
    "Trajectory",
    "Transcript",
    "Turn",
    "VersionSpan",
    "exclusion",
]
