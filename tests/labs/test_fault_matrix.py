"""The matrix of faults: a cell, drawn by the slice's seed; and its verdict, of runs that were tampered with."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp.test_utils import TestClient, TestServer
from safetensors.torch import load_file, save_file

from agentrl.train import main
from agentrl.trajectory.parquet import SCHEMA
from labs.fault_matrix.assets import IN_SIDECARS, LOOPS, make_policy, make_rows
from labs.fault_matrix.cells import BOUNDS, RESULT, Result, cells, outcome, run
from labs.fault_matrix.engine_server import EngineServer
from labs.fault_matrix.faults import FAULTS
from labs.fault_matrix.page import document, table
from labs.fault_matrix.scene import TORN_SERVED, Scene
from labs.fault_matrix.verdict import judge

BOUND = 1
OF_EPISODES = ("sidecar killed", "driver killed: sampling")
"""Faults in mid-episode that take no Ray."""


def test_there_are_at_least_twenty_faults_each_met_by_a_loop() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20
    for fault in FAULTS:
        assert any(fault.does_not_apply(loop) is None for loop in LOOPS), fault.name
    assert len(cells()) == len(FAULTS) * len(LOOPS) * len(BOUNDS)


@pytest.mark.slice(0, "kill")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("loop", ["an environment", "a single turn"])
def test_a_cell(tmp_path: Path, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str], loop: str) -> None:
    """Loops whose policy takes no time to be made."""
    rng = random.Random(request.config.getoption("slice_seed"))
    if loop == "a single turn":
        drawn_from = [one for one in cells() if one.loop == "single_turn" and is_cheap(one.fault.name)]
    else:
        drawn_from = [one for one in cells() if one.loop in IN_SIDECARS and one.fault.name in OF_EPISODES]
    cell = rng.choice(drawn_from)
    run([cell], tmp_path, 1)
    found = outcome(cell, tmp_path)
    assert found.state == "passed", (found, capfd.readouterr().out)
    stamp = cell.folder(tmp_path).joinpath(RESULT).stat().st_mtime_ns
    run([cell], tmp_path, 1)
    assert cell.folder(tmp_path).joinpath(RESULT).stat().st_mtime_ns == stamp


@pytest.mark.slice(0, "cluster")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", BOUNDS)
@pytest.mark.parametrize("what", ["engine server: failed", "rollout worker: failed", "rollout worker: refused"])
def test_a_failed_update(tmp_path: Path, what: str, mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    """In one process, and in rollout workers under Ray."""
    (cell,) = (
        one for one in cells() if one.fault.name == f"{what} update" and (one.loop, one.mode) == ("single_turn", mode)
    )
    run([cell], tmp_path, 1)
    assert outcome(cell, tmp_path).state == "passed", capfd.readouterr().out


@pytest.mark.parametrize("asks", ["continue_generation", "generate"])
async def test_a_torn_engine_server_notes_who_asks_it(tmp_path: Path, asks: str) -> None:
    """Its weights are half of an update that failed; after a whole one it is as any."""
    policy = make_policy(tmp_path, "single_turn", "search")
    server = EngineServer(policy, tmp_path, "failed update")
    update = {"model_path": str(policy), "weight_version": "1"}
    body = {
        "input_ids": [1],
        "rid": "a",
        "sampling_params": {"max_new_tokens": 1, "temperature": 1, "top_p": 1, "top_k": 1},
    }
    async with TestClient(TestServer(server.app())) as client:
        assert [(await client.post("/update_weights_from_disk", json=update)).status for _ in range(2)] == [200, 500]
        assert not (tmp_path / TORN_SERVED).exists()
        await (await client.post(f"/{asks}", json=body)).read()
        assert (tmp_path / TORN_SERVED).exists()
        (tmp_path / TORN_SERVED).unlink()
        assert (await client.post("/update_weights_from_disk", json=update)).status == 200
        await (await client.post(f"/{asks}", json=body)).read()
        assert not (tmp_path / TORN_SERVED).exists()


def test_one_engine_server_meets_the_fault_whichever_is_asked(tmp_path: Path) -> None:
    policy = make_policy(tmp_path, "single_turn", "search")
    idle, busy = (EngineServer(policy, tmp_path, "slow") for _ in range(2))
    for server in (busy, idle):
        server.version = "1"
        for _ in range(3):
            server.begin_fault()
    assert (busy.met, idle.met) == (True, False)


def is_cheap(name: str) -> bool:
    return name.startswith(("engine: ", "scorer", "driver", "judge", "NaN", "clock", "checkpoint"))


def test_a_table_says_what_failed_and_what_was_not_run(tmp_path: Path) -> None:
    fault = next(one for one in FAULTS if one.name == "NaN gradient")
    for mode in BOUNDS:
        cell = replace(cells()[0], fault=fault, loop="react", mode=mode)
        cell.folder(tmp_path).mkdir(parents=True)
        state = "passed" if mode == "synchronous" else "failed"
        found = {"state": state, "why": "", "seconds": 3.0, "recovery": 1.25, "left_out": 2, "commit": "abc"}
        (cell.folder(tmp_path) / RESULT).write_text(json.dumps(found))
        assert outcome(cell, tmp_path) == Result(**found)  # type: ignore[arg-type]
    lines = table(tmp_path)
    assert "| NaN gradient | not run | not run | 1.2 / FAILED | not run | not run | not run | 4 |" in lines
    assert "| tool: flood | - | not run | not run | - | - | - |  |" in lines
    assert "1 passed, 1 failed" in lines[-1] and "`abc` (2)" in lines[-1]
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- fault matrix -->\nold\n<!-- end of fault matrix -->\nafter\n")
    document(tmp_path, page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text and lines[0] in text


@pytest.mark.parametrize(
    ("fault", "seen", "recovery"),
    [
        (10.0, [(1.0, 0), (9.0, 1), (10.01, 2), (17.0, 3), (18.0, 4)], 6.99),  # step 2 had all that it needed
        (10.0, [(1.0, 0), (9.0, 1), (14.0, 2), (15.0, 3), (16.0, 4)], 4.0),
        (10.0, [(9.0, 2), (12.0, 1), (13.0, 2), (15.0, 3), (16.0, 4)], 5.0),  # step 2 was made again
        (None, [(1.0, 0), (9.0, 1), (11.0, 2), (14.0, 3), (16.0, 4)], 3.0),
        (17.0, [(1.0, 0), (9.0, 1), (11.0, 2), (14.0, 3), (16.0, 4)], None),
    ],
)
def test_recovery_is_the_longest_wait_for_a_new_step(
    tmp_path: Path, fault: float | None, seen: list[tuple[float, int]], recovery: float | None
) -> None:
    if fault is not None:
        (tmp_path / "fault").write_text(repr(fault))
    scene = Scene("react", BOUND, tmp_path, tmp_path, seen=seen)
    assert scene.recovery() == (recovery if recovery is None else pytest.approx(recovery))


# The verdict


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A run of four steps that nothing has happened to, whose policy has learnt."""
    folder = tmp_path_factory.mktemp("finished")
    (assets := folder / "assets").mkdir()
    make_rows(assets)
    scene = Scene("single_turn", BOUND, folder, assets)
    assert main(scene.command()) == 0
    return scene


def test_nothing_is_found_in_a_sound_run(finished: Scene) -> None:
    assert judge(finished.run, finished.policy, BOUND, judged=False).problems == []


def rows_changed(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Callable[[Path], None]:
    """Change the second step's trajectories."""

    def tamper(run: Path) -> None:
        path = run / "trajectories" / "train_000002.parquet"
        rows = change(pq.read_table(path).to_pylist(maps_as_pydicts="strict"))
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)

    return tamper


def first_is(**values: object) -> Callable[[Path], None]:
    return rows_changed(lambda rows: [rows[0] | values, *rows[1:]])


def other_ids(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Have the first trajectory's last token be another one."""
    rows[0]["ids"][0][-1] = (rows[0]["ids"][0][-1] + 1) % 200
    return rows


def other_weights(run: Path) -> None:
    """Have one matrix of the exported policy miss a tenth of what it is."""
    path = run / "policy" / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if "mlp" in name)
    save_file(weights | {name: weights[name] * 1.01}, path)


def other_update(column: str) -> Callable[[Path], None]:
    """Have a column of the update's record be another one."""

    def tamper(run: Path) -> None:
        path = run / "updates" / "train_000002.parquet"
        rows = pq.read_table(path).to_pylist()
        for row in rows:
            row[column] = [[None if one is None else one + 0.1 for one in tokens] for tokens in row[column]]
        pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(path)), path)

    return tamper


def ledger_without_a_prompt(run: Path) -> None:
    path = run / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["trained"] = [[first, first + 1] for first, _ in lines[2]["trained"]][:1]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def metrics_twice(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[-1] + "\n")


TAMPERED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a trajectory is lost": (rows_changed(lambda rows: rows[1:]), "expected 2 prompts, 4 trajectories each"),
    "a trajectory is there twice": (rows_changed(lambda rows: [*rows[:-1], rows[0]]), "two trajectories of one name"),
    "a zero": (first_is(score=0.0), "which no scorer gives"),
    "a failure that is scored": (first_is(status="failed"), "is failed and has the score"),
    "a failure that is trained on": (first_is(status="failed", score=None), "trained on: True"),
    "another score": (first_is(score=0.6875), "advantages is not what its record gives"),
    "another token": (rows_changed(other_ids), "trainer_logprobs is not what its record gives"),
    "what a faulty tool said": (
        rows_changed(lambda rows: [rows[0] | {"turns": [{**rows[0]["turns"][0], "text": "POISON"}]}, *rows[1:]]),
        "was told what a faulty server says",
    ),
    "other advantages": (other_update("advantages"), "advantages is not what its record gives"),
    "other weights of stale tokens": (other_update("weights"), "weights is not what its record gives"),
    "another policy": (other_weights, "from the one that the records give"),
    "a prompt without a fate": (ledger_without_a_prompt, "expected one for each of 8 prompts"),
    "a step that is logged twice": (metrics_twice, "metrics.jsonl has the steps"),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_what_was_tampered_with_is_told(finished: Scene, tmp_path: Path, what: str) -> None:
    tamper, told = TAMPERED[what]
    run_dir = tmp_path / "run"
    shutil.copytree(finished.run, run_dir, ignore=shutil.ignore_patterns("checkpoints"))
    tamper(run_dir)
    problems = judge(run_dir, finished.policy, BOUND, judged=False).problems
    assert any(told in one for one in problems), problems


def test_stale_tokens_are_told(finished: Scene) -> None:
    """The run is asynchronous: by the rule of a synchronous one it trained on tokens that are too old."""
    problems = judge(finished.run, finished.policy, 0, judged=False).problems
    assert any("has tokens of version" in one for one in problems), problems
