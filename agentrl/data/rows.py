"""Conversion of one row of a file to a `Sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.data.images import with_images
from agentrl.trajectory.sample import AGENT_ALIASES, Sample


def to_sample(
    row: dict[str, Any],
    *,
    prompt_key: str,
    image_key: str | None,
    default_agent_loop: str,
    index: int,
    file: str,
    number: int,
) -> Sample:
    """Make a Sample of `row`, which has passed the checks of `columns`; `number` is its row in the file.

    Raises DataError for images that cannot be read, or not put into the messages.
    """
    row = without_nulls(row)
    extra = row.get("extra_info", {})
    agent = row.get("agent_name") or extra.get("agent_name") or default_agent_loop
    return Sample(
        prompt=with_images(row[prompt_key], (row.get(image_key) if image_key else None) or [], Path(file).parent),
        data_source=row.get("data_source", "unknown"),
        agent_name=AGENT_ALIASES.get(agent, agent),
        ground_truth=row.get("reward_model", {}).get("ground_truth"),
        ability=row.get("ability"),
        tools_kwargs=row.get("tools_kwargs") or extra.get("tools_kwargs", {}),
        interaction_kwargs=row.get("interaction_kwargs") or extra.get("interaction_kwargs", {}),
        extra_info=extra,
        index=index,
        file=file,
        row=number,
    )


def without_nulls(value: Any) -> Any:
    """Drop the null fields of mappings: a parquet struct has every key that any row has, null where it had none."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
