"""A row under verl's names."""

from __future__ import annotations

from agentrl.trajectory.sample import Sample


def sample_fields(sample: Sample) -> dict[str, object]:
    """Return the fields of a row of the data set, in containers of its own."""
    return {
        "raw_prompt": [dict(message) for message in sample.prompt],
        "data_source": sample.data_source,
        "ability": sample.ability,
        "reward_model": {"style": "rule", "ground_truth": sample.ground_truth},
        "extra_info": dict(sample.extra_info),
        "index": sample.extra_info.get("index", sample.index),
    }
