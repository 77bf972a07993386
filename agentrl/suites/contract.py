"""Contract of a benchmark suite. `agentrl.config.registries.SUITES` has the ready ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON
from agentrl.system.plugin import nearest


@dataclass(frozen=True, slots=True)
class Row:
    """A task of a suite."""

    part: str
    id: str
    """Name of the task, unique in its part."""
    question: str | Sequence[Mapping[str, str]]
    """Text of the user, or messages."""
    ground_truth: str
    """Text that the scorer of its data source reads."""
    data_source: str
    agent_name: str = "single_turn"
    tools: str | None = None
    """JSON text of OpenAI schemas, for the loop `single_turn_calls`."""


@dataclass(frozen=True, slots=True)
class Request:
    """Options of the command line that tasks depend on."""

    parts: tuple[str, ...] = ()
    """Empty: the suite's own choice."""
    limit: int | None = None
    """First tasks of each part; None: all."""
    source: Path | None = None
    """A file or folder of the user's, in place of what the suite fetches."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks of a suite, and the version of their data and their scorer."""

    rows: Sequence[Row]
    version: str


@dataclass(frozen=True, slots=True)
class Group:
    """A number over several parts, or over groups before it."""

    members: Sequence[str]
    by_rows: bool = False
    """The mean over the rows of all members, which are parts; False: the mean over the members."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A benchmark."""

    tasks: Callable[[Request], Tasks]
    """Makes the same tasks each time. Raises UserError where the data cannot be had, or a part is unknown."""
    settings: Mapping[str, JSON] = field(default_factory=dict)
    """Keys of `agentrl.generate` that hold unless the command line sets them; they replace `SETTINGS`."""
    measure: Literal["score", "success"] = "success"
    """The number of a part: the mean score, or the share of responses with a score of at least 1."""
    groups: Mapping[str, Group] = field(default_factory=dict)
    """Groups in the order of the table; a group without all of its members is left out."""


SETTINGS: Mapping[str, JSON] = {
    "actor_rollout_ref.rollout.do_sample": False,
    "actor_rollout_ref.rollout.n": 1,
    "trainer.seed": 1,
    "data.filter_overlong_prompts": False,
    "data.max_prompt_length": 4096,
    "data.max_response_length": 2048,
}
"""Greedy decoding, a fixed seed, and an error for a prompt that does not fit."""


def chosen(parts: Sequence[str], known: Sequence[str], default: Sequence[str]) -> Sequence[str]:
    """Return the parts that are asked for. Raises ConfigError for an unknown one."""
    for part in parts:
        if part not in known:
            raise ConfigError(f"--parts: unknown part {part!r}{nearest(part, known)}; known are {', '.join(known)}")
    return parts or default
