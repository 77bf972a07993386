"""The example `examples/repairs`: its program in sessions with a scripted policy, and the repairs that it records."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agentrl.agents.agent import AgentOptions
from agentrl.trajectory import Status
from data_prep import repairs
from tests.conftest import PROJECT
from tests.harnesses.conftest import Harnessed

EXAMPLE = PROJECT / "examples" / "repairs"
HARNESS = AgentOptions(harness=f"{EXAMPLE / 'harness.py'}:Repair", check=[sys.executable, "-I", "-m", "unittest", "-q"])


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    assert repairs.main(["--out", str(tmp_path), "--train-rows", "80", "--test-rows", "4"]) == 0
    return pq.read_table(tmp_path / "train.parquet").to_pylist()


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLE)
    import record  # type: ignore[import-not-found]

    return record


def called(old: str, new: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'replace', 'arguments': {'old': old, 'new': new}})}\n</tool_call>"


def test_every_fault_is_repaired_by_the_call_that_is_recorded(
    rows: list[dict[str, Any]], record: Any, tmp_path: Path
) -> None:
    record.main(str(tmp_path / "train.parquet"), str(tmp_path / "sft.parquet"), "12")
    found = pq.read_table(tmp_path / "sft.parquet").to_pylist()
    assert len(found) == 12
    for row in found:
        first, said = json.loads(row["messages"])
        assert "Error" in first["content"] and said["tool_calls"][0]["function"]["name"] == "replace"
    for row in rows:
        faulty, right = row["extra_info"]["files"][0]["text"], row["reward_model"]["ground_truth"]
        old, new = record.replacement(faulty, right)
        assert faulty.count(old) == 1 and faulty.replace(old, new) == right


async def test_a_session_ends_when_the_tests_pass_and_after_three_calls(
    rows: list[dict[str, Any]], record: Any, harnessed: Callable[..., Harnessed]
) -> None:
    row = rows[0]
    old, new = record.replacement(row["extra_info"]["files"][0]["text"], row["reward_model"]["ground_truth"])
    right, wrong = called(old, new), called("no such text", "x")
    for turns, score in (([right, wrong], 1.0), ([wrong, right, wrong], 1.0), ([wrong] * 4, 0.0), (["No."], 0.0)):
        said = iter(turns)
        used = harnessed(HARNESS, lambda prompt, said=said: next(said))
        (found,) = await used.run(row["extra_info"], prompt=row["prompt"])
        assert (found.status, found.score) == (Status.COMPLETED, score), found.failure
        (transcript,) = found.transcripts
        sampled = [id for turns in used.bench.engine.said.values() for turn in turns for id in turn]
        assert [id for id, own in zip(transcript.ids, transcript.mask, strict=True) if own] == sampled
    prompts = used.prompts()
    assert len(prompts) == 1 and "Tests: self.assert" in prompts[0]
