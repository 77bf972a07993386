"""`python -m agentrl.evaluate`: numbers counted by hand, with and without Ray, and input that cannot be scored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.config.sections.reward import CustomRewardConfig
from agentrl.errors import CodeError
from agentrl.evaluate import main
from agentrl.offline.scores import Responses, score_chunk
from agentrl.reward import NaiveRewardManager
from agentrl.system.targets import load_file
from agentrl.trajectory import Status
from agentrl.trajectory.parquet import SCHEMA, to_row
from agentrl.trajectory.sample import Sample
from tests.runs import refused
from tests.trajectory.written import tool_trajectory

fails = partial(refused, main)

GSM8K = "openai/gsm8k"


def row(*responses: str | None, truth: str = "72", source: str = GSM8K, **more: object) -> dict[str, object]:
    return {
        "prompt": [{"role": "user", "content": "What is 8 * 9?"}],
        "data_source": source,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "responses": list(responses),
        **more,
    }


def file(path: Path, rows: Sequence[Mapping[str, object]], schema: pa.Schema | None = None) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path)
    return path


def numbers(path: Path, tmp_path: Path, *more: str) -> dict[str, Any]:
    out = tmp_path / "scores.json"
    assert main([f"data.path={path}", f"data.output_path={out}", *more]) == 0
    written: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return written


ROWS = [
    row("#### 72", "#### 70", "no idea", None),  # 1, 0.1, 0 and a failure
    row("#### 7", "#### 72", "#### 72.0", "so #### 72"),  # 0.1, 1, 1, 1
]


def test_numbers_by_data_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = numbers(file(tmp_path / "out.parquet", ROWS), tmp_path)
    gsm8k = written["sources"][GSM8K]
    assert written["all"] == gsm8k
    assert (gsm8k["rows"], gsm8k["responses"], gsm8k["failures"]) == (2, 8, 1)
    assert gsm8k["mean"] == pytest.approx((1.1 / 3 + 3.1 / 4) / 2)
    assert gsm8k["best@4"] == 1.0
    assert gsm8k["pass@1"] == pytest.approx((1 / 3 + 3 / 4) / 2)
    assert gsm8k["pass@2"] == pytest.approx((2 / 3 + 1) / 2)
    assert gsm8k["pass@4"] == 1.0, "only the second row has four scores"
    assert gsm8k["causes"] == {"no response": 1}
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if line.startswith("data source"))
    assert head.split()[2:] == ["rows", "responses", "failures", "mean", "best@4", "pass@1", "pass@2", "pass@4"]
    assert lines[-1].split() == [GSM8K, "2", "8", "1", "0.5708", "1.0000", "0.5417", "0.8333", "1.0000"]


def test_keys_of_other_files(tmp_path: Path) -> None:
    rows = [
        {"answer": "#### 72", "source": GSM8K, "label": {"ground_truth": "72"}},
        {"answer": "#### 71", "source": GSM8K, "label": {"ground_truth": "72"}},
        {"answer": "#### 3", "source": "gsm8k", "label": {"ground_truth": "3"}},
    ]
    keys = ["data.response_key=answer", "data.data_source_key=source", "data.reward_model_key=label"]
    written = numbers(file(tmp_path / "out.parquet", rows), tmp_path, *keys)
    assert written["sources"][GSM8K]["mean"] == pytest.approx(0.55)
    assert written["sources"]["gsm8k"]["pass@1"] == 1.0
    assert written["all"]["mean"] == pytest.approx(2.1 / 3)


def test_a_function_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    function = tmp_path / "reward.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if solution_str == 'bad':\n"
        "        raise KeyError('which')\n"
        "    return {'score': len(solution_str), 'seed': extra_info['seed']}\n"
    )
    rows = [{"responses": ["a", "bad"], "extra_info": {"seed": 3}}, {"responses": ["abc"], "extra_info": {"seed": 5}}]
    path = file(tmp_path / "out.parquet", rows)
    own = f"custom_reward_function.path={function}"
    places = ("KeyError: 'which'", f"{function}:3", f"{path}, row 0 (the first is 0)", "data.on_code_error=count")
    fails([f"data.path={path}", own], capsys, *places)
    written = numbers(path, tmp_path, own, "data.on_code_error=count")["sources"]["unknown"]
    assert written["mean"] == 2.0
    assert written["extra"] == {"seed": 4.0}
    assert written["failures"] == 1
    ((cause, count),) = written["causes"].items()
    assert cause.startswith("scorer: CodeError: custom_reward_function: ") and f"({function}:3)" in cause
    assert count == 1


def test_records_reach_the_scorer(tmp_path: Path) -> None:
    function = tmp_path / "reward.py"
    function.write_text("def compute_score(trajectory):\n    return len(trajectory.tool_calls)\n")
    failed = tool_trajectory()
    failed.status, failed.failure = Status.FAILED, "scorer: it was down"
    trajectories = [tool_trajectory(), failed]
    table = pa.table(
        {
            "responses": pa.array([["It is 51.", "It is 51."]]),
            "trajectories": pa.array(
                [[to_row(one, 0, "x", 1.0) for one in trajectories]], pa.list_(pa.struct(list(SCHEMA)))
            ),
        }
    )
    pq.write_table(table, tmp_path / "out.parquet")
    written = numbers(tmp_path / "out.parquet", tmp_path, f"custom_reward_function.path={function}")["all"]
    assert (written["mean"], written["failures"]) == (1.0, 0)


def test_ray_comes_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes of a real Ray, several chunks, a function beside them that they find."""
    function = tmp_path / "reward.py"
    function.write_text(
        "import os\n"
        "def compute_score(solution_str, ground_truth):\n"
        "    if solution_str == 'bad':\n"
        "        raise KeyError('which')\n"
        "    return {'score': float(solution_str == ground_truth), 'pid': os.getpid()}\n"
    )
    rows = [row(str(i), str(i % 3), "bad", None, truth=str(i % 5), source=f"s{i % 2}") for i in range(600)]
    path = file(tmp_path / "out.parquet", rows)
    own, counted = f"custom_reward_function.path={function}", "data.on_code_error=count"
    fails([f"data.path={path}", own, "ray_init.num_cpus=2"], capsys, "KeyError: 'which'", f"{function}:4", "row ")
    here, there = numbers(path, tmp_path, own, counted), numbers(path, tmp_path, own, counted, "ray_init.num_cpus=2")
    for part in (*here["sources"].values(), here["all"], *there["sources"].values(), there["all"]):
        part["pid"] = part.pop("extra")["pid"]
    assert here["all"]["pid"] != there["all"].pop("pid")
    assert here["all"] | {"pid": 0} == there["all"] | {"pid": 0}
    assert here["all"]["failures"] == 1200
    assert {**here["sources"]["s1"], "pid": 0} == {**there["sources"]["s1"], "pid": 0}


def test_bad_input_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = file(tmp_path / "good.parquet", ROWS[:1])
    nulls = file(tmp_path / "nulls.parquet", [row("#### 1"), row("#### 1") | {"data_source": None}])
    stranger = file(tmp_path / "stranger.parquet", [row("x"), row("x", source="nobody/knows")])
    truthless = file(tmp_path / "truthless.parquet", [row("x"), row("x") | {"reward_model": {"ground_truth": None}}])
    number = file(tmp_path / "number.parquet", [row("x") | {"responses": [1.5]}])
    bare = file(tmp_path / "bare.parquet", [{"responses": ["x"], "data_source": GSM8K}])
    nothing = file(tmp_path / "nothing.parquet", [row(None)], pa.Table.from_pylist(ROWS[:1]).schema)
    text = tmp_path / "text.parquet"
    text.write_text("no parquet")
    before = set(tmp_path.rglob("*"))
    out = f"data.output_path={tmp_path}/scores.json"
    fails([out], capsys, "data.path must be given")
    fails([f"data.path={tmp_path}/nope.parquet", out], capsys, "nope.parquet")
    fails([f"data.path={text}", out], capsys, "text.parquet", "expected a parquet file")
    fails(
        [f"data.path={good}", out, "data.response_key=answers"], capsys, "'answers'", "responses", "data.response_key"
    )
    fails([f"data.path={nulls}", out], capsys, "nulls.parquet, row 1", "column data_source", "null")
    fails([f"data.path={stranger}", out], capsys, "stranger.parquet, row 1", "nobody/knows", "custom_reward_function")
    fails([f"data.path={truthless}", out], capsys, "truthless.parquet, row 1", "no reward_model.ground_truth", "gsm8k")
    fails([f"data.path={number}", out], capsys, "number.parquet, row 0", "column responses", "list of texts", "1.5")
    fails([f"data.path={bare}", out], capsys, "bare.parquet", "'reward_model'", "data.reward_model_key")
    fails([f"data.path={nothing}", out], capsys, "no response could be scored", "no response")
    fails([f"data.path={good}", f"data.output_path={text}/scores.json"], capsys, "data.output_path", "text.parquet")
    fails([f"data.path={good}", "custom_reward_function.path=none.py"], capsys, "none.py")
    fails(
        [f"data.path={good}", "ray_init.num_cpus=2", "ray_init.address=auto"], capsys, "ray_init.num_cpus=2 conflicts"
    )
    fails([f"data.path={good}", "custom_reward_function.name=f"], capsys, "custom_reward_function.path")
    assert set(tmp_path.rglob("*")) == before


async def test_an_error_ends_the_scorers_beside_it_before_what_they_use_is_closed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import asyncio\n"
        "running = []\n"
        "async def compute_score(solution_str):\n"
        "    if solution_str == 'bad':\n"
        "        raise KeyError('which')\n"
        "    running.append(solution_str)\n"
        "    try:\n"
        "        await asyncio.Event().wait()\n"
        "    finally:\n"
        "        running.remove(solution_str)\n"
    )
    reward = NaiveRewardManager(custom=CustomRewardConfig(path=str(tmp_path / "mine.py")))
    row = Sample([], "x", "single_turn")
    chunk = [Responses(row, ["a", "b"], None), Responses(row, ["c", "bad"], None)]
    with pytest.raises(CodeError, match="KeyError"):
        await score_chunk(chunk, reward, count=False)
    assert load_file(str(tmp_path / "mine.py")).running == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("column", [[{"a": 1}], ["x"], [{"uid": "x"}]], ids=["struct", "text", "part"])
def test_records_that_are_something_else_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], column: list[object]
) -> None:
    rows = file(tmp_path / "rows.parquet", [row("#### 72", trajectories=column)])
    fails([f"data.path={rows}"], capsys, "rows.parquet, row 0", "agentrl.")


def test_an_error_shows_no_control_character_of_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"evil\x1b]0;owned\x07": 1}) + "\n")
    assert main([f"data.path={tmp_path}/a.jsonl"]) == 2
    told = capsys.readouterr().err
    assert "evil\N{SYMBOL FOR ESCAPE}]0;owned" in told and "\x1b" not in told
