"""docs/config.md says what the schema says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Config, SFTConfig, config_to_dict, load_config
from agentrl.config.keys import flatten, leaf_keys
from agentrl.config.rules import shown
from agentrl.config.sections.offline import EvaluateConfig, GenerateConfig
from benchmarks.config_page import page

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "config.md"


def test_the_page_of_keys_is_the_schemas() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == page(), "run: python -m benchmarks.config_page > docs/config.md"
    assert "| `algorithm.lam` | number | `1.0` |" in page()
    assert "| `trainer.total_training_steps` | integer or null | null |" in page()


@pytest.mark.parametrize(
    ("name", "schema", "own"),
    [
        ("train", Config, ["data.train_files=a.parquet", "actor_rollout_ref.model.path=some/model"]),
        ("sft", SFTConfig, ["data.train_files=a.parquet", "model.path=some/model"]),
        (
            "generate",
            GenerateConfig,
            ["data.path=a.parquet", "data.output_path=b.parquet", "actor_rollout_ref.model.path=some/model"],
        ),
        ("evaluate", EvaluateConfig, ["data.path=a.parquet"]),
    ],
)
def test_documented_defaults_are_those_that_hold(name: str, schema: Any, own: list[str]) -> None:
    """What a command with data and a model of one's own resolves to is what the page says."""
    _, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(f"## `python -m agentrl.{name}`")
    cells = [line.split(" | ") for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    documented = {row[0].strip("| `"): row[2].strip("`") for row in cells}
    leaves = leaf_keys(schema)
    resolved = flatten(config_to_dict(load_config(own, name, schema)), leaves)
    given = {override.partition("=")[0] for override in own}
    differing = {
        key: (said, shown(resolved[key]))
        for key, said in documented.items()
        if key not in given and said != shown(resolved[key]) and "${" not in said
    }
    assert len(documented) > 7
    assert differing == {}


def told_defaults() -> list[tuple[str, str, str]]:
    """Page, key and default of each row of the pages' tables of `key | default | meaning`."""
    found = []
    for path in sorted(DOCUMENT.parent.glob("*.md")):
        inside = False
        for line in path.read_text(encoding="utf-8").splitlines():
            inside = line == "| key | default | meaning |" or (inside and line.startswith("|"))
            if inside and line.startswith("| `"):
                cells = line.split(" | ")
                keys, values = (re.findall(r"`([^`]+)`", cell) for cell in cells[:2])
                found += [(path.name, key, value) for key, value in zip(keys, values, strict=True)]
    return found


def test_the_defaults_in_tables_of_pages_are_the_schemas() -> None:
    known = flatten(
        config_to_dict(load_config(["data.train_files=a.parquet", "actor_rollout_ref.model.path=b"])), leaf_keys(Config)
    )
    told = told_defaults()
    wrong = [
        (page, key, default, sorted(there))
        for page, key, default in told
        if default not in (there := {shown(known[name]) for name in known if f".{name}".endswith(f".{key}")})
    ]
    assert len(told) > 8
    assert wrong == []
