from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from agentrl.errors import DataError
from agentrl.trajectory import Status, ToolAnswer, ToolCallRecord, Trajectory, Transcript, Turn, parquet
from agentrl.trajectory.parquet import read_trajectories, write_trajectories
from tests.naming import naming
from tests.trajectory.written import Writer, tool_trajectory


def full_trajectory() -> Trajectory:
    """Two context windows, every kind of message, a parse error, extras."""
    trajectory = tool_trajectory()
    second = Transcript(policy="second")
    second.append_prompt([5, 6])
    second.append_sampled([7, 8, 9], [-0.5, -1.5, 0.0], 4)
    second.trained_to, second.score = 4, 0.25
    trajectory.transcripts.append(second)
    parse_error = ToolCallRecord("", None, ToolAnswer("error: no JSON", error="parse", reward=-0.25, truncated=True))
    trajectory.turns.append(Turn("assistant", "…", 1, 2, 5, [parse_error], "length", seconds=0.5))
    trajectory.messages += [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "content": "ünï", "tool_call_id": "c1", "name": "f"},
        {"role": "user", "content": [{"type": "text", "text": "parts"}]},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]
    trajectory.score_extra = {"f1": 0.5}
    trajectory.metrics = {"retries": 1.0, "tool_seconds": 0.25}
    trajectory.ground_truth = {"target": ["Zürich", "2"]}
    return trajectory


def test_round_trip(tmp_path: Path) -> None:
    failed = Trajectory("u2", 7, status=Status.FAILED, failure="EngineError: gone", failure_cause="EngineError")
    path = write_trajectories(tmp_path, [full_trajectory(), failed], step=12, split="train", turn_reward_coef=1.0)
    assert path.name == "train_000012.parquet"
    back = read_trajectories(path)
    assert [dataclasses.asdict(one) for one in back] == [
        dataclasses.asdict(full_trajectory()),
        dataclasses.asdict(failed),
    ]
    assert back[1].status is Status.FAILED


def test_the_tests_of_a_program_are_not_recorded_with_each_of_its_trajectories(tmp_path: Path) -> None:
    long, short = tool_trajectory(), tool_trajectory()
    long.ground_truth, short.ground_truth = ["x" * parquet.LONGEST_TRUTH], "x" * (parquet.LONGEST_TRUTH - 2)
    path = write_trajectories(tmp_path, [long, short], step=1, split="train", turn_reward_coef=1.0)
    assert [one.ground_truth for one in read_trajectories(path)] == [None, short.ground_truth]


def test_row_groups_are_bounded_in_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_TOKENS", 3 * len(tool_trajectory().transcripts[0]))
    path = write_trajectories(tmp_path, [tool_trajectory()] * 8, step=1, split="train", turn_reward_coef=1.0)
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)] == [3, 3, 2]
    path = write_trajectories(tmp_path, [Trajectory("u", 0)], step=2, split="train", turn_reward_coef=1.0)
    assert len(read_trajectories(path)) == 1
    assert read_trajectories(write_trajectories(tmp_path, [], step=3, split="train", turn_reward_coef=1.0)) == []


def test_files_from_before_policies_had_names_are_read(tmp_path: Path) -> None:
    path = write_trajectories(tmp_path, [tool_trajectory()], step=1, split="train", turn_reward_coef=1.0)
    pq.write_table(pq.read_table(path).drop_columns(["policy"]), path)
    (back,) = read_trajectories(path)
    assert dataclasses.asdict(back) == dataclasses.asdict(tool_trajectory())


def test_a_step_that_another_number_of_workers_does_again_is_there_once(tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    for number in (1, 2):
        write_trajectories(tmp_path, [], step=5, split="train", share=(number, 2), turn_reward_coef=1.0)
    write_trajectories(tmp_path, [], step=5, split="val", part="_greedy", turn_reward_coef=1.0)
    assert names() == ["train_000005.1of2.parquet", "train_000005.2of2.parquet", "val_000005_greedy.parquet"]
    write_trajectories(tmp_path, [], step=5, split="train", turn_reward_coef=1.0)
    write_trajectories(tmp_path, [], step=5, split="val", part="_greedy_000096", turn_reward_coef=1.0)
    assert names() == ["train_000005.parquet", "val_000005_greedy.parquet", "val_000005_greedy_000096.parquet"]


def test_pandas_reads_it(tmp_path: Path) -> None:
    frame = pd.read_parquet(
        write_trajectories(tmp_path, [full_trajectory()], step=3, split="val", turn_reward_coef=1.0)
    )
    row = frame.iloc[0]
    assert (row["step"], row["split"], row["status"], row["num_turns"]) == (3, "val", "completed", 3)
    assert (row["score"], row["reward"]) == (1.0, 1.5)
    assert [call["name"] for call in row["calls"]] == ["calculator", ""]
    assert row["calls"][0]["arguments"] == '{"expression": "17*3"}'
    assert list(row["ids"][1]) == [5, 6, 7, 8, 9]
    assert list(row["mask"][1]) == [0, 0, 1, 1, 1]
    assert row["messages"][0]["content"] == "What is 17*3?"


def test_no_trajectories_is_a_table_without_rows(tmp_path: Path) -> None:
    assert read_trajectories(write_trajectories(tmp_path, [], step=0, split="val", turn_reward_coef=1.0)) == []


def test_text_that_is_not_unicode_is_made_so(tmp_path: Path) -> None:
    call = ToolCallRecord("t", {"x": "\udc80"}, ToolAnswer("\ud83d\ude00 and \ud83d alone"))
    trajectory = Writer("p").says("a", call).ends(0.0)
    trajectory.messages[0]["content"] = "\udfff"
    trajectory.metrics = {"\ud800": 1.0}
    (back,) = read_trajectories(write_trajectories(tmp_path, [trajectory], step=1, split="train", turn_reward_coef=1.0))
    assert back.tool_calls[0].response == "😀 and � alone"
    assert back.tool_calls[0].arguments == {"x": "�"}
    assert back.messages[0]["content"] == "�"
    assert back.metrics == {"�": 1.0}


def test_a_step_done_again_replaces_its_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_trajectories(tmp_path, [tool_trajectory()] * 5, step=1, split="train", turn_reward_coef=1.0)
    path = write_trajectories(tmp_path, [tool_trajectory()], step=1, split="train", turn_reward_coef=1.0)
    assert len(read_trajectories(path)) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_the_same_trajectories_make_the_same_bytes(tmp_path: Path) -> None:
    first = write_trajectories(
        tmp_path / "a", [full_trajectory()], step=1, split="train", turn_reward_coef=1.0
    ).read_bytes()
    assert (
        write_trajectories(
            tmp_path / "b", [full_trajectory()], step=1, split="train", turn_reward_coef=1.0
        ).read_bytes()
        == first
    )


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    torn = write_trajectories(tmp_path, [tool_trajectory()], step=1, split="train", turn_reward_coef=1.0)
    torn.write_bytes(torn.read_bytes()[:-50])
    with naming(DataError, "train_000001.parquet"):
        read_trajectories(torn)
    pd.DataFrame({"prompt": ["x"]}).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet.*columns step, split"):
        read_trajectories(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"none\.parquet"):
        read_trajectories(tmp_path / "none.parquet")
