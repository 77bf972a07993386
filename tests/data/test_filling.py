"""Null arguments of calls: those that are meant stay, those that Arrow filled in go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.config.sections.sft import PairDataConfig, SFTDataConfig
from agentrl.data.dataset import FileDataset
from agentrl.data.pairs import PairReader
from agentrl.data.sft import Plan, RowReader, read_files

USER = {"role": "user", "content": "Book it."}


def asking(name: str, arguments: dict[str, Any], form: str = "tool_calls") -> list[dict[str, Any]]:
    function = {"name": name, "arguments": arguments}
    calls = {"tool_calls": [{"type": "function", "function": function}], "flat": [function]}
    if form == "function_call":
        return [USER, {"role": "assistant", "content": "", "function_call": function}]
    return [USER, {"role": "assistant", "content": "", "tool_calls": calls[form]}]


GIVEN: list[tuple[str, dict[str, Any]]] = [
    ("book", {"room": "12", "until": "10:00", "guest": {"name": "Ada", "age": 36}, "beds": [{"wide": True}]}),
    ("book", {"room": "12", "until": None, "guest": {"name": "Bo", "age": None}, "beds": [{"wide": None}]}),
    ("cancel", {"number": 7}),
    ("cancel", {"number": 8}),
]


def arguments(messages: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = messages[1]["tool_calls"][0]["function"]["arguments"]
    return found


def rl(file: Path) -> list[Any]:
    data = FileDataset(str(file), prompt_key="messages")
    return [arguments(sample.prompt) for sample in data]


def sft(file: Path) -> list[Any]:
    config = SFTDataConfig(train_files="unused")
    reader = RowReader(config)
    read = lambda row: [arguments(reader.messages(row["messages"], ""))]  # noqa: E731
    plan = Plan(("messages",), ("tools",), "tools", read)
    return read_files(str(file), lambda name, columns: plan, lambda rows: None, config).samples


def pairs(file: Path) -> list[Any]:
    config = PairDataConfig(train_files="unused", chosen_key="messages", rejected_key="other")
    reader = PairReader(config)
    plan = lambda name, columns: reader.plan(name, columns, lambda row: [reader.read(row)])  # noqa: E731
    found = read_files(str(file), plan, lambda rows: None, config).samples
    return [arguments(chosen) for chosen, _, _ in found if isinstance(chosen, list)]


def write(path: Path, rows: list[Any], tools: Any = None) -> Path:
    other = json.dumps([USER, {"role": "assistant", "content": "No."}])
    columns: list[dict[str, Any]] = [{"messages": row, "other": other} for row in rows]
    if tools is not None:
        columns = [{**row, "tools": tools} for row in columns]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in columns))
    else:
        pq.write_table(pa.Table.from_pylist(columns), path)
    return path


@pytest.mark.parametrize("read", [rl, sft, pairs])
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
@pytest.mark.parametrize("form", ["tool_calls", "flat", "function_call"])
def test_a_null_that_is_meant_stays(tmp_path: Path, read: Any, name: str, form: str) -> None:
    file = write(tmp_path / name, [asking(name, given, form) for name, given in GIVEN])
    assert read(file) == [given for _, given in GIVEN]


def test_in_text_every_null_is_meant(tmp_path: Path) -> None:
    rows = [json.dumps(asking(name, given)) for name, given in GIVEN[1:]]
    assert rl(write(tmp_path / "a.parquet", rows)) == [given for _, given in GIVEN[1:]]
    assert sft(tmp_path / "a.parquet") == [given for _, given in GIVEN[1:]]


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        ({"type": ["string", "null"]}, True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, True),
        ({"type": "string", "nullable": True}, True),
        ({"description": "Of any type."}, True),
        ({"type": "string"}, False),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, False),
    ],
)
@pytest.mark.parametrize("as_text", [True, False])
def test_a_null_that_the_tool_does_not_take_was_filled_in(
    tmp_path: Path, schema: dict[str, Any], kept: bool, as_text: bool
) -> None:
    """An optional argument that one call gives and another leaves out."""
    parameters = {"type": "object", "properties": {"room": {"type": "string"}, "until": schema}}
    tools: Any = [{"type": "function", "function": {"name": "book", "parameters": parameters}}]
    rows = [asking("book", {"room": "12", "until": "10:00"}), asking("book", {"room": "12", "until": None})]
    file = write(tmp_path / "a.parquet", rows, json.dumps(tools) if as_text else tools)
    assert sft(file)[1] == ({"room": "12", "until": None} if kept else {"room": "12"})


def test_text_of_a_call_that_is_no_utf8_makes_a_bad_row(tmp_path: Path) -> None:
    """The members of calls are noted before rows are read, and met the text first."""
    file = write(tmp_path / "a.parquet", [asking("book", {"room": room}) for room in ("QQQQ", "12")])
    file.write_bytes(file.read_bytes().replace(b"QQQQ", b"Q\xff\xfeQ"))
    config = SFTDataConfig(train_files="unused", on_bad_row="skip")
    read = lambda row: [arguments(RowReader(config).messages(row["messages"], ""))]  # noqa: E731
    plan = Plan(("messages",), ("tools",), "tools", read)
    found = read_files(str(file), lambda name, columns: plan, lambda rows: None, config)
    assert found.samples == [{"room": "12"}]
    assert "row 0 (the first is 0), column messages: expected UTF-8 text" in found.bad.first
