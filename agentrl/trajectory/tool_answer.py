"""Answer to a call of a tool: one value from the tool's response to the trajectory's record."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from agentrl.trajectory.picture import Picture


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """Answer to one call. Nothing changes it: who cuts it, or knows more of it, puts another one in its place."""

    text: str = ""
    """Text of the answer, or the message of an error; after `ToolSet.shown` the text that the model is shown."""
    error: str | None = None
    """A `tool.ErrorKind` value, or None when the call succeeded."""
    reward: float | None = None
    seconds: float = field(default=0.0, compare=False)
    """Duration of the call itself, without waiting for its turn (metric `tool/<name>/queue_seconds`)."""
    truncated: bool = False
    """True where the model is shown a part only."""
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Path: base64, as in `tool.ToolResponse`."""
    images: tuple[Picture, ...] = ()
    """Images that the model is shown before the text."""
    pieces: str = ""
    """Part of an answer that came before the error, which `ToolSet.shown` puts behind the error's message."""

    def outline(self) -> ToolAnswer:
        """Return the answer without the parts that grow with its content."""
        return replace(self, text="", metrics={}, files={}, images=(), pieces="")
