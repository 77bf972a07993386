"""Keys of `tools.*`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.rules import Needs, OnlyWith, Writes
from agentrl.config.section import Section


class ToolsConfig(Section):
    """`tools.*`: all tools of the run together; each tool's own keys are in its YAML."""

    max_concurrent: int | None = Field(None, gt=0)
    """Calls that run at once; null: only the limits of each tool."""
    max_rate: float | None = Field(None, gt=0)
    """Calls that begin in a second, on average."""
    client_id: str | None = None
    """The name by which servers know this run, to share their capacity fairly between runs; null:
    trainer.project_name/trainer.experiment_name."""
    cassette: Annotated[Literal["record", "replay"] | None, Needs("cassette_path", "the file of the answers")] = None
    """record: keep what tools and interactions answer; replay: give those answers again, and ask no server."""
    cassette_path: Annotated[str | None, OnlyWith("cassette=record or replay"), Writes()] = None
    """The file of a cassette."""
