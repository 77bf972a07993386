"""Conversion of one row of a file to a `Sample`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.data.images import with_images
from agentrl.data.messages import Unfit, read_messages, without_nulls
from agentrl.errors import DataError
from agentrl.trajectory import Message
from agentrl.trajectory.sample import AGENT_ALIASES, Sample


def read_prompt(row: Mapping[str, object], prompt_key: str) -> list[Message]:
    """Read the messages of a row's prompt. Raises DataError, naming the column."""
    try:
        return read_messages(row[prompt_key])
    except Unfit as bad:
        place = f"column {prompt_key}, {bad.place}".removesuffix(", ")
        raise DataError(f"{place}: expected {bad.expected}, found {bad.found}") from None


def to_sample(
    row: Mapping[str, object],
    *,
    prompt: list[Message],
    image_key: str | None,
    default_agent_loop: str,
    index: int,
    file: str,
    number: int,
) -> Sample:
    """Make a Sample of a prompt and the rest of its `row`, which has passed the checks of `columns`.

    number: its row in the file. Raises DataError for images that cannot be read, or not put into the messages.
    """
    values: Any = without_nulls(row)
    extra = values.get("extra_info", {})
    agent = values.get("agent_name") or extra.get("agent_name") or default_agent_loop
    return Sample(
        prompt=with_images(prompt, (values.get(image_key) if image_key else None) or [], Path(file).parent),
        data_source=values.get("data_source", "unknown"),
        agent_name=AGENT_ALIASES.get(agent, agent),
        ground_truth=values.get("reward_model", {}).get("ground_truth"),
        ability=values.get("ability"),
        tools_kwargs=values.get("tools_kwargs") or extra.get("tools_kwargs", {}),
        interaction_kwargs=values.get("interaction_kwargs") or extra.get("interaction_kwargs", {}),
        extra_info=extra,
        index=index,
        file=file,
        row=number,
    )
