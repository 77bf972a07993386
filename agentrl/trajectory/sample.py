"""One row of a data set, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentrl.system.json_value import JSON
from agentrl.trajectory import Message

AGENT_ALIASES = {"single_turn_agent": "single_turn", "react_agent": "react"}
"""Names of verl's data sets for our loops."""


def row_place(file: str, row: object) -> str:
    """Name a row in messages."""
    return f"{file}, row {row} (the first is 0)"


@dataclass(frozen=True, slots=True)
class Sample:
    """One row. `row` and `file` say where it came from, for messages."""

    prompt: list[Message]
    data_source: str
    """NO_SOURCE: the row has none."""
    agent_name: str
    """The loop; an alias has been replaced."""
    ground_truth: Any = None
    """`reward_model.ground_truth` of the row."""
    ability: str | None = None
    tools_kwargs: dict[str, dict[str, JSON]] = field(default_factory=dict)
    """By tool name: {"create_kwargs": {...}, ...}. Every configured tool is offered, named here or not; a name that
    is not configured is an error."""
    interaction_kwargs: dict[str, Any] = field(default_factory=dict)
    extra_info: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    """Position in the data set, over all files."""
    file: str = ""
    row: int = 0

    @property
    def place(self) -> str:
        """Name of its row in messages."""
        return row_place(self.file, self.row)

    @property
    def interaction(self) -> str | None:
        """Name of its interaction; None where `interaction_kwargs` has no name."""
        return self.interaction_kwargs.get("name") or None
