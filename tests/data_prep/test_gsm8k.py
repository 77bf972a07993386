"""GSM8K rows, and what a broken source gets."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agentrl.errors import DataError
from data_prep.files import write_splits
from data_prep.gsm8k import main
from tests.naming import naming

LINES = [
    {"question": "Two and two?", "answer": "It is 2+2=<<2+2=4>>4.\n#### 4"},
    {"question": "A dozen hundreds?", "answer": "12*100=<<12*100=1200>>1200.\n#### 1,200"},
]


def source(directory: Path, train: list[Any] | None = None) -> Path:
    for split, lines in (("train", LINES if train is None else train), ("test", LINES[:1])):
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (directory / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return directory


def rows(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    assert main(["--source", str(source(tmp_path)), "--out", str(tmp_path / "out"), *options]) == 0
    assert pq.read_metadata(tmp_path / "out" / "test.parquet").num_rows > 0
    table: list[dict[str, Any]] = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    return table


def test_tool_agent_rows(tmp_path: Path) -> None:
    first, second = rows(tmp_path)
    assert first["agent_name"] == "tool_agent"
    assert first["data_source"] == "openai/gsm8k"
    assert first["ability"] == "math"
    assert second["reward_model"] == {"style": "rule", "ground_truth": "1200"}
    assert second["tools_kwargs"] == {"calculator": {"create_kwargs": {"ground_truth": "1200"}}}
    assert second["extra_info"] == {"split": "train", "index": 1, **LINES[1]}
    assert second["prompt"][-1]["content"].startswith("A dozen hundreds?")
    assert "interaction_kwargs" not in second


def test_single_turn_rows_have_no_tools(tmp_path: Path) -> None:
    (first, _) = rows(tmp_path, "--agent", "single_turn")
    assert first["agent_name"] == "single_turn"
    assert [message["role"] for message in first["prompt"]] == ["user"]
    assert "tools_kwargs" not in first


def test_both_agents_and_the_interaction(tmp_path: Path) -> None:
    table = rows(tmp_path, "--agent", "both", "--interaction")
    assert [row["agent_name"] for row in table] == ["tool_agent", "single_turn"] * 2
    assert [row["extra_info"]["index"] for row in table] == [0, 0, 1, 1]
    expected = {"name": "gsm8k", "query": "Two and two?", "ground_truth": "4"}
    assert [row["interaction_kwargs"] for row in table[:2]] == [expected, None]


def test_solutions_become_conversations_with_calculator_calls(tmp_path: Path) -> None:
    rows(tmp_path, "--sft")
    first, second = pq.read_table(tmp_path / "out" / "sft.parquet").to_pylist()
    calls = [message["tool_calls"] for message in second["messages"]]
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert second["messages"][2]["content"] == "12*100="
    assert json.loads(calls[2][0]["function"]["arguments"]) == {"expression": "12*100"}
    assert second["messages"][3]["content"] == "1200"
    assert second["messages"][4]["content"] == "1200.\n#### 1,200"
    assert [message["content"] for message in first["messages"]][2:] == ["It is 2+2=", "4", "4.\n#### 4"]
    assert json.loads(second["tools"])[0]["function"]["name"] == "calculator"


def test_long_problems_are_left_out_of_all_files(tmp_path: Path) -> None:
    long = {"question": "?", "answer": "<<1+1=2>>2, <<2+1=3>>3, <<3+1=4>>4\n#### 4"}
    source(tmp_path, [LINES[0], long, LINES[1]])
    (tmp_path / "test.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes())
    out = tmp_path / "out"
    assert main(["--source", str(tmp_path), "--out", str(out), "--sft", "--steps", "2"]) == 0
    for name in ("train.parquet", "test.parquet"):
        taken = pq.read_table(out / name).to_pylist()
        assert [row["extra_info"]["index"] for row in taken] == [0, 2]
    assert pq.read_metadata(out / "sft.parquet").num_rows == 2


def test_a_range_takes_training_problems_alone(tmp_path: Path) -> None:
    source(tmp_path, LINES)
    (tmp_path / "test.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes())
    out = tmp_path / "out"
    assert main(["--source", str(tmp_path), "--out", str(out), "--sft", "--problems", "1:"]) == 0
    read = {name: pq.read_table(out / f"{name}.parquet").to_pylist() for name in ("train", "test", "sft")}
    assert [row["extra_info"]["index"] for row in read["train"]] == [1]
    assert (len(read["test"]), len(read["sft"])) == (2, 1)


def test_a_file_that_cannot_be_used_leaves_none_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source(tmp_path, LINES)
    (tmp_path / "test.jsonl").write_text('{"question": "?", "answer": "no number"}\n')
    out = tmp_path / "out"
    assert main(["--source", str(tmp_path), "--out", str(out), "--sft"]) == 2
    assert "test.jsonl" in capsys.readouterr().err and not out.exists()


def test_splits_are_written_together(tmp_path: Path) -> None:
    """An older file stays where the last one has no rows, or cannot be written."""
    first = tmp_path / "train.parquet"
    write_splits({first: [{"a": 1}]})
    (tmp_path / "file").touch()
    for last in (tmp_path / "test.parquet", tmp_path / "file" / "test.parquet"):
        with naming(DataError, last):
            write_splits({first: [{"a": 2}], last: [{"a": 3}] if "file" in last.parts else []})
        assert pq.read_table(first).to_pylist() == [{"a": 1}]
        assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "train.parquet"]


@pytest.mark.parametrize("text", ["3", "a:b", "1:-2", "1:2:3"])
def test_what_is_no_range_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--source", "x", "--out", "y", "--problems", text])
    assert f"expected A:B, e.g. 0:2000 or 2000:, found {text}" in capsys.readouterr().err


def test_an_annotation_that_is_no_arithmetic_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source(tmp_path, [{"question": "?", "answer": "<<x+1=2>>2\n#### 2"}])
    assert main(["--source", str(tmp_path), "--out", str(tmp_path / "out"), "--sft"]) == 2
    assert "<<x+1=...>>" in capsys.readouterr().err


def test_an_interaction_needs_a_loop_with_turns(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--source", str(tmp_path), "--out", str(tmp_path), "--agent", "single_turn", "--interaction"])
    assert exit_.value.code == 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{not json", "JSON object"),
        ({"question": "?"}, "`answer`"),
        ({"question": 3, "answer": "#### 3"}, "`question`"),
        ([1], "`question`"),
        ({"question": "?", "answer": "no marker"}, "#### N"),
        ({"question": "?", "answer": "#### "}, "#### N"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: Any, expected: str) -> None:
    source(tmp_path, [*LINES, line])
    assert main(["--source", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert f"{tmp_path / 'train.jsonl'}:3" in message
    assert expected in message
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--source", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 2
    assert str(tmp_path / "nowhere" / "train.jsonl") in capsys.readouterr().err


def test_columns_are_those_of_all_rows(tmp_path: Path) -> None:
    write_splits({tmp_path / "rows.parquet": [{"a": 1}, {"a": 2, "b": 3}]})
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == [{"a": 1, "b": None}, {"a": 2, "b": 3}]
