"""Folders, JSON lines and Hugging Face data sets as training data, and what is said where they cannot be used."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from agentrl.chat import Chat
from agentrl.config.sections.sft import SFTDataConfig
from agentrl.data import json_lines
from agentrl.data.dataset import FileDataset
from agentrl.data.sft import load_transcripts
from agentrl.data.sources import expand
from agentrl.errors import DataError, install_extra
from agentrl.offline.responses import InputRows
from tests.chat.templates import HERMES
from tests.chat.vocabularies import QWEN, save_tokenizer
from tests.naming import Names, naming

Row = dict[str, Any]


def row(number: int, **changes: Any) -> Row:
    return {
        "prompt": [{"role": "user", "content": f"question {number}"}],
        "data_source": "made/up",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": number},
    } | changes


def lines(path: Path, rows: list[Any]) -> str:
    text = "".join(json.dumps(one) + "\n" for one in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat.from_pretrained(str(save_tokenizer(tmp_path_factory.mktemp("chat"), QWEN, "<|im_end|>", HERMES)))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Caches are the test's own, and no hub is asked."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


# --- names


def test_a_folder_is_its_data_files(tmp_path: Path) -> None:
    for name in ("b.parquet", "a.parquet", "README.md", ".hidden.parquet"):
        (tmp_path / name).touch()
    assert expand(str(tmp_path)) == [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]
    (tmp_path / "c.jsonl").touch()
    with naming(DataError, "*.parquet", "*.json"):
        expand(str(tmp_path))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["README.md"], ("*.parquet", "holds no")),
        (
            ["train.parquet", "test.parquet"],
            ("test.parquet", "train.parquet"),
        ),
        (["train-00000-of-00001.parquet", "validation-00000-of-00001.parquet"], ("train", "test")),
        (["dataset_info.json", "data-0.arrow"], ("hf:/", "disk")),
    ],
)
def test_a_folder_that_says_too_little(tmp_path: Path, names: list[str], said: Names) -> None:
    for name in names:
        (tmp_path / name).touch()
    with naming(DataError, said):
        expand(str(tmp_path))


# --- files of another kind

TABLE = pa.table({"prompt": ['[{"role": "user", "content": "Hi."}]'], "data_source": ["x"]})


def as_csv(path: Path) -> None:
    csv.write_csv(TABLE, path)


def as_arrow(path: Path) -> None:
    with pa.ipc.new_file(path, TABLE.schema) as writer:
        writer.write_table(TABLE)


def as_stream(path: Path) -> None:
    with pa.ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE)


@pytest.mark.parametrize(
    ("name", "write", "found"),
    [
        ("a.csv", as_csv, "comma-separated values"),
        ("a.arrow", as_arrow, "an Arrow file"),
        ("data-00000-of-00001.arrow", as_stream, "an Arrow file"),
    ],
)
def test_tables_of_another_kind_are_named_with_the_command_that_converts_them(
    tmp_path: Path, name: str, write: Callable[[Path], None], found: str
) -> None:
    write(tmp_path / name)
    with naming(DataError, name, f"found {found}") as fault:
        FileDataset(str(tmp_path / name))
    command = shlex.split(str(fault.value).partition("python ")[2])
    subprocess.run([sys.executable, *command], check=True, timeout=100)
    (sample,) = FileDataset(str((tmp_path / name).with_suffix(".parquet")))
    assert sample.prompt == [{"role": "user", "content": "Hi."}]
    with pytest.raises(DataError, match=f"found {found}"):
        InputRows([str(tmp_path / name)], ())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'{"prompt": "x"}\n', "JSON lines"),
        (b'[{"prompt": "x"}]', "JSON"),
        (gzip.compress(b"x", mtime=0), "a gzip archive"),
        (b"version https://git-lfs.github.com/spec/v1\n", "the pointer"),
        (b"PAR1\x15\x04", "a parquet file"),
    ],
)
def test_files_by_another_name(tmp_path: Path, text: bytes, found: str) -> None:
    (tmp_path / "a.parquet").write_bytes(text)
    with naming(DataError, "a.parquet", f"found {found}"):
        FileDataset(str(tmp_path / "a.parquet"))


def test_responses_are_written_next_to_rows_of_parquet_alone(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", [row(0)])
    for name, found in ((file, "JSON"), ("hf:owner/name", "a data set of Hugging Face")):
        with naming(DataError, f"found {found}"):
            InputRows([name], ())


# --- JSON


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_json_lines_are_rows(tmp_path: Path, name: str) -> None:
    """Values of one key may be of several types, which no parquet column could hold, and no text becomes a date."""
    truth = [12345678901234567890, "2024-01-02 10:00:00"]
    rows = [row(0), row(1, reward_model={"ground_truth": truth}, agent_name="tool_agent", ability=None)]
    rows += [row(2, prompt=json.dumps(row(2)["prompt"]), tools_kwargs={"f": {"create_kwargs": {"x": 1}}})]
    data = FileDataset(file := lines(tmp_path / name, rows), default_agent_loop="react")
    first, second, third = data
    assert (first.prompt, first.ground_truth, first.agent_name) == (row(0)["prompt"], "0", "react")
    assert (second.ground_truth, second.agent_name, second.ability) == (truth, "tool_agent", None)
    assert (third.prompt, third.tools_kwargs) == (row(2)["prompt"], {"f": {"create_kwargs": {"x": 1}}})
    assert [(sample.file, sample.row, sample.index) for sample in data] == [
        (file, number, number) for number in range(3)
    ]
    known: dict[str, list[str]] = {"agent_names": ["react", "tool_agent"], "tool_names": ["f"], "interaction_names": []}
    assert data.check(**known) == ["made/up"]
    before = data.fingerprint
    moved = FileDataset(lines(tmp_path / f"moved-{name}", rows), default_agent_loop="react")
    assert moved.fingerprint == before, "the places of files may change"
    old = hashlib.sha256()
    for sample in data:
        old.update(repr(sample).encode())
    kept = hashlib.sha256(np.arange(3).tobytes()).hexdigest()
    earlier = hashlib.sha256(repr((old.hexdigest(), kept)).encode()).hexdigest()[:16]
    assert (data.is_of(earlier), moved.is_of(earlier)) == (True, False), "as October 2026 wrote it"
    lines(tmp_path / name, [*rows[:2], row(3)])
    assert FileDataset(file, default_agent_loop="react").fingerprint != before


def test_one_array_and_parquet_are_the_same_rows(tmp_path: Path) -> None:
    rows = [row(0), row(1)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    of_json, of_parquet = FileDataset(str(tmp_path / "a.json")), FileDataset(str(tmp_path / "a.parquet"))
    assert [(s.prompt, s.ground_truth, s.extra_info) for s in of_json] == [
        (s.prompt, s.ground_truth, s.extra_info) for s in of_parquet
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (json.dumps(row(0)).encode() + b'\n{"a"\n', ("row 1", "JSON", "Expecting")),
        (b'{"a": "\xc3"}', ("row 0", "UTF-8", "found b'")),
        (b'{"a":' * 100_000, ("row 0", "JSON", "nested")),
        (b"[1, 2", ("a.jsonl", "JSON", "expected JSON")),
        (b"", "empty"),
    ],
)
def test_text_that_is_no_json(tmp_path: Path, content: bytes, said: Names) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with naming(DataError, said):
        FileDataset(str(tmp_path / "a.jsonl"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}' * 1000)[:-20])
    with naming(DataError, "a.jsonl.gz"):
        FileDataset(str(tmp_path / "a.jsonl.gz"))
    with naming(DataError, "b.jsonl"):
        FileDataset(str(tmp_path / "b.jsonl"))
    pq.write_table(pa.Table.from_pylist([row(1)]), tmp_path / "b.parquet")
    both = FileDataset([lines(tmp_path / "a.jsonl", [row(0)]), str(tmp_path / "b.parquet")])
    assert [(sample.ground_truth, sample.row) for sample in both] == [("0", 0), ("1", 0)]


def test_overlong_json_rows_are_named(tmp_path: Path) -> None:
    data = FileDataset(lines(tmp_path / "a.jsonl", [row(0)]))
    with naming(DataError, "a.jsonl", "row 0", "9 tokens"):
        data.filter_overlong(lambda sample: 9, 5, refuse=True)


# --- Hugging Face


def test_a_data_set_saved_to_disk(tmp_path: Path) -> None:
    datasets.Dataset.from_list([row(0), row(1)]).save_to_disk(tmp_path / "one")
    name = f"hf:{tmp_path / 'one'}"
    assert [(s.ground_truth, s.file, s.row) for s in FileDataset(name)] == [("0", name, 0), ("1", name, 1)]
    splits = {"train": datasets.Dataset.from_list([row(0)]), "test": datasets.Dataset.from_list([row(5)])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "two")
    assert [s.ground_truth for s in FileDataset(f"hf:{tmp_path / 'two'}")] == ["0"]
    assert [s.ground_truth for s in FileDataset(f"hf:{tmp_path / 'two'}:test")] == ["5"]
    with naming(DataError, "two:dev"):
        FileDataset(f"hf:{tmp_path / 'two'}:dev")
    before = FileDataset(name).fingerprint
    assert FileDataset(f"hf:{tmp_path / 'two'}").fingerprint != before == FileDataset(name).fingerprint
    datasets.Dataset.from_list([row(0), row(2)]).save_to_disk(tmp_path / "other")
    assert FileDataset(f"hf:{tmp_path / 'other'}").fingerprint != before, "as many rows of the same size"


def test_a_folder_as_the_hub_has_it(tmp_path: Path) -> None:
    """What owner/name is downloaded as: files by split, and slices of splits."""
    (tmp_path / "set" / "data").mkdir(parents=True)
    for split, numbers in (("train", range(4)), ("test", range(7, 9))):
        table = pa.Table.from_pylist([row(number) for number in numbers])
        pq.write_table(table, tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet")
    truths = [
        [s.ground_truth for s in FileDataset(f"hf:{tmp_path / 'set'}{part}")] for part in ("", ":test", ":train[2:]")
    ]
    assert truths == [["0", "1", "2", "3"], ["7", "8"], ["2", "3"]]


def test_what_is_wrong_with_its_rows_is_named(tmp_path: Path) -> None:
    bad = row(1, prompt=[{"role": "nobody", "content": "x"}])
    datasets.Dataset.from_list([row(0), bad]).save_to_disk(tmp_path / "one")
    with naming(DataError, f"hf:{tmp_path / 'one'}", "row 1", "column prompt", "message 0"):
        FileDataset(f"hf:{tmp_path / 'one'}")
    assert FileDataset(f"hf:{tmp_path / 'one'}", on_bad_row="skip").bad.count == 1


def test_without_the_package_and_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with naming(DataError, "hf:nobody/nothing"):
        FileDataset("hf:nobody/nothing")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=f"hf:nobody/nothing: .*{re.escape(install_extra('hub'))}"):
        FileDataset("hf:nobody/nothing")


# --- supervised training


def test_supervised_training_reads_all_of_them(tmp_path: Path, chat: Chat) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    talk: Row = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}
    with_tools = talk | {"tools": tools}
    lines(tmp_path / "a.jsonl", [with_tools])
    lines(tmp_path / "b.json.gz", [talk | {"tools": json.dumps(tools)}])
    pq.write_table(pa.Table.from_pylist([talk | {"tools": json.dumps(tools)}]), tmp_path / "c.parquet")
    datasets.Dataset.from_list([talk | {"tools": json.dumps(tools)}]).save_to_disk(tmp_path / "d")
    names = [*(str(tmp_path / name) for name in ("a.jsonl", "b.json.gz", "c.parquet")), f"hf:{tmp_path / 'd'}"]
    found = load_transcripts(names, SFTDataConfig(train_files="unused"), chat)
    assert len({tuple(sample.ids.tolist()) for sample in found.samples}) == 1 and len(found.samples) == 4
    lines(tmp_path / "e.jsonl", [talk, {"messages": "x"}])
    with naming(DataError, "e.jsonl", "row 1", "column messages"):
        load_transcripts(str(tmp_path / "e.jsonl"), SFTDataConfig(train_files="unused"), chat)
    lines(tmp_path / "f.jsonl", [{"talk": 1}])
    with naming(DataError, "f.jsonl", "row format", "(messages)"):
        load_transcripts(str(tmp_path / "f.jsonl"), SFTDataConfig(train_files="unused"), chat)


def test_categorical_messages_of_several_row_groups_are_read(tmp_path: Path, chat: Chat) -> None:
    """As polars writes its Categorical: each row group has a dictionary of its own."""
    roles, texts = (pa.array(words * 3).dictionary_encode() for words in (["user", "assistant"], ["Hi.", "Hello."]))
    messages = pa.ListArray.from_arrays([0, 2, 4, 6], pa.StructArray.from_arrays([roles, texts], ["role", "content"]))
    pq.write_table(pa.table({"messages": messages}), tmp_path / "a.parquet", row_group_size=1)
    found = load_transcripts(str(tmp_path / "a.parquet"), SFTDataConfig(train_files="unused"), chat)
    assert len(found.samples) == 3
    assert "Hello." in chat.decode(found.samples[2].ids.tolist())
    data = FileDataset(str(tmp_path / "a.parquet"), prompt_key="messages")
    assert [sample.prompt[1]["content"] for sample in data] == ["Hello."] * 3


def test_a_small_file_that_unpacks_to_much_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is in memory: one line, or many."""
    monkeypatch.setattr(json_lines, "UNPACKED", 1 << 16)
    monkeypatch.setattr(json_lines, "MOST_TIMES", 2)
    file = tmp_path / "a.jsonl.gz"
    for text in (b'{"a": "' + b" " * (1 << 20) + b'"}', b'{"a": 1}\n' * (1 << 17), b"[" + b"1," * (1 << 19)):
        file.write_bytes(gzip.compress(text))
        taken, read = 0, gzip.GzipFile.readinto

        def counted(self: gzip.GzipFile, buffer: Any) -> int:
            nonlocal taken
            size = read(self, buffer)  # noqa: B023
            taken += size
            return size

        monkeypatch.setattr(gzip.GzipFile, "readinto", counted)
        with naming(DataError, "a.jsonl.gz"):
            list(json_lines.read_objects(str(file)))
        monkeypatch.setattr(gzip.GzipFile, "readinto", read)
        assert taken < 3 << 16
    file.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000))
    assert len(list(json_lines.read_objects(str(file)))) == 1000
