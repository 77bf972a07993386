"""Logs of calls, which real SDKs made, come back as the conversations that were played."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data_prep.traces.__main__ import main
from tests.data_prep.played import CLIENTS, Player, Server, plain, serving

NEEDS = {
    "chat": "openai",
    "messages": "anthropic",
    "responses": "openai",
    "kept": "openai",
    "spans": "opentelemetry.sdk",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


def written(folder: Path, name: str = "conversations") -> list[dict[str, Any]]:
    return list(pq.read_table(folder / f"{name}.parquet").to_pylist())


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return path


def played(server: Server, kind: str, seed: int, count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Play sessions: (the log, the rows)."""
    log: list[dict[str, Any]] = []
    rows = []
    for number in range(count):
        player = Player(random.Random(f"{kind} {seed} {number}"), server, log, kind, f"s{kind}{seed}n{number}")
        player.play()
        rows += player.rows
    return log, rows


@pytest.mark.slice(2, "matrix")
@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("seed", range(8))
def test_sessions_come_back_as_they_were_played(server: Server, tmp_path: Path, kind: str, seed: int) -> None:
    """25 sessions each, 1,000 in all."""
    pytest.importorskip(NEEDS[kind])
    log, rows = played(server, kind, seed, 25)
    write_lines(tmp_path / "log.jsonl", log)
    assert main(["--source", str(tmp_path / "log.jsonl"), "--out", str(tmp_path / "out")]) == 0
    found = written(tmp_path / "out")
    assert [plain(row) for row in found] == rows
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert sum(report["calls"].values()) == len(log) and report["sessions"] == 25 and not report["dropped"]


def test_sessions_of_all_kinds_that_ran_at_once_are_in_one_file(server: Server, tmp_path: Path) -> None:
    """Their calls are mixed, each session's in their order."""
    logs, rows = [], []
    for kind in CLIENTS:
        pytest.importorskip(NEEDS[kind])
        for seed in range(3):
            log, made = played(server, kind, seed, 1)
            logs.append(log)
            rows += made
    draw, mixed = random.Random(1), []
    while logs := [log for log in logs if log]:
        mixed.append(draw.choice(logs).pop(0))
    write_lines(tmp_path / "log.jsonl", mixed)
    assert main(["--source", str(tmp_path / "log.jsonl"), "--out", str(tmp_path / "out")]) == 0
    found = [json.dumps(plain(row)) for row in written(tmp_path / "out")]
    assert sorted(found) == sorted(map(json.dumps, rows))
    assert len({row["session"] for row in written(tmp_path / "out")}) == 3 * len(CLIENTS)
