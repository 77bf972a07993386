"""AReaL's names of asynchronous training are refused, each by name, and the table of ours can be written as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.verl.areal import OURS
from tests.naming import assert_names

PAGE = Path(__file__).resolve().parents[2] / "docs" / "async.md"


def rows() -> list[tuple[str, str]]:
    """The cells of the table."""
    _, _, text = PAGE.read_text(encoding="utf-8").partition("| AReaL | agentrl |\n|---|---|\n")
    lines = text.partition("\n\n")[0].splitlines()
    return [(cells[1].strip(), cells[2].strip()) for cells in (line.split("|") for line in lines)]


def written(cell: str) -> list[str]:
    """The keys in a cell, each with its value."""
    return cell.split("`")[1].split()


def test_every_key_is_refused_with_the_others_and_with_ours() -> None:
    with pytest.raises(ConfigError) as error:
        load_config([*(f"{key}=1" for key in OURS), "actor.use_decoupled_los=true"])
    said = str(error.value).splitlines()
    for key, ours in OURS.items():
        assert_names(said, f"{key}=1", "AReaL", ours, "docs/async.md", "From")
    assert any(line.startswith("unknown key actor.use_decoupled_los") for line in said)


def test_the_table_has_every_key_and_can_be_written() -> None:
    table = rows()
    assert {word.partition("=")[0] for theirs, _ in table for word in written(theirs)} == set(OURS)
    corrections = [
        load_config(["trainer.save_freq=1", *written(ours)]).algorithm.rollout_correction for _, ours in table
    ]
    found = [(own.proximal, own.rollout_is, own.rollout_is_threshold, own.rollout_is_outside) for own in corrections]
    assert ("rollout", None, 2.0, "truncate") in found and ("recomputed", "token", 1e9, "truncate") in found
    assert ("recomputed", "geometric", 5.0, "mask") in found and {"seq_mean_k3": 0.5} in [c.reject for c in corrections]
