"""Rows to samples, and what a file or row that cannot be used gets."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.data.dataset import FileDataset
from agentrl.errors import CodeError, DataError
from agentrl.trajectory.sample import Sample
from tests.naming import Names, assert_names, naming

Row = dict[str, Any]


def row(number: int, **changes: Any) -> Row:
    return {
        "prompt": [{"role": "system", "content": "Help."}, {"role": "user", "content": f"question {number}"}],
        "data_source": "made/up",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": number, "split": "train"},
    } | changes


def write(path: Path, rows: list[Row], **options: Any) -> str:
    names = dict.fromkeys(name for one in rows for name in one)  # from_pylist takes the first row's columns only
    pq.write_table(pa.Table.from_pylist([{name: one.get(name) for name in names} for one in rows]), path, **options)
    return str(path)


def refused(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(DataError) as error:
        FileDataset(*args, **kwargs)
    return str(error.value)


def questions(dataset: FileDataset) -> list[str]:
    return [str(sample.prompt[-1]["content"]).removeprefix("question ") for sample in dataset]


# --- what a row becomes


def test_every_field_of_a_row(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.parquet",
        [
            row(0),
            row(
                7,
                ability="math",
                agent_name="tool_agent",
                tools_kwargs={"calculator": {"create_kwargs": {"start": 3}}},
                interaction_kwargs={"name": "gsm8k", "query": "q"},
            ),
        ],
    )
    assert FileDataset(file)[1] == Sample(
        prompt=[{"role": "system", "content": "Help."}, {"role": "user", "content": "question 7"}],
        data_source="made/up",
        agent_name="tool_agent",
        ground_truth="7",
        ability="math",
        tools_kwargs={"calculator": {"create_kwargs": {"start": 3}}},
        interaction_kwargs={"name": "gsm8k", "query": "q"},
        extra_info={"index": 7, "split": "train"},
        index=1,
        file=file,
        row=1,
    )


def test_a_row_of_a_prompt_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [{"prompt": [{"role": "user", "content": "hi"}]}])
    sample = FileDataset(file, default_agent_loop="react")[0]
    assert (sample.agent_name, sample.data_source, sample.ground_truth) == ("react", "unknown", None)
    assert (sample.tools_kwargs, sample.interaction_kwargs, sample.extra_info) == ({}, {}, {})


def test_fields_inside_extra_info_and_the_top_level_before_them(tmp_path: Path) -> None:
    inside = {
        "agent_name": "react_agent",
        "tools_kwargs": {"search": {"create_kwargs": {"k": 1}}},
        "interaction_kwargs": {"name": "inside"},
    }
    file = write(
        tmp_path / "a.parquet",
        [
            row(0, extra_info=inside, agent_name=None, interaction_kwargs=None),
            row(1, extra_info=inside, agent_name="single_turn_agent", interaction_kwargs={"name": "outside"}),
        ],
    )
    first, second = FileDataset(file)
    assert (first.agent_name, first.interaction_kwargs) == ("react", {"name": "inside"})
    assert (second.agent_name, second.interaction_kwargs) == ("single_turn", {"name": "outside"})
    assert first.tools_kwargs == second.tools_kwargs == {"search": {"create_kwargs": {"k": 1}}}


def test_keys_that_parquet_filled_with_nulls_are_gone(tmp_path: Path) -> None:
    rows = [
        row(0, tools_kwargs={"calculator": {"create_kwargs": {"a": 1}}}, extra_info={"index": 0}),
        row(1, tools_kwargs={"search": {"create_kwargs": {"b": [1, None]}}}, extra_info={"split": "x"}),
    ]
    rows[1]["prompt"] = [{"role": "user", "content": "q", "name": "bob"}]
    first, second = FileDataset(write(tmp_path / "a.parquet", rows))
    assert first.tools_kwargs == {"calculator": {"create_kwargs": {"a": 1}}}
    assert second.tools_kwargs == {"search": {"create_kwargs": {"b": [1, None]}}}
    assert (first.extra_info, second.extra_info) == ({"index": 0}, {"split": "x"})
    assert first.prompt[0] == {"role": "system", "content": "Help."}
    assert second.prompt[0] == {"role": "user", "content": "q", "name": "bob"}


@pytest.mark.parametrize("truth", ["72", 72, 0.5, True, ["a", "b"], [[1, 2], [3]], {"target": ["x"]}, '{"json": 1}'])
def test_ground_truth_of_any_type(tmp_path: Path, truth: Any) -> None:
    file = write(tmp_path / "a.parquet", [row(0, reward_model={"style": "rule", "ground_truth": truth})])
    found = FileDataset(file)[0].ground_truth
    assert found == truth and type(found) is type(truth)


def test_columns_as_pandas_and_other_writers_lay_them_out(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row(0, agent_name="tool_agent"), row(1, agent_name=None)])
    table = table.set_column(1, "data_source", table.column("data_source").dictionary_encode())
    prompt = pa.large_list(pa.struct([("role", pa.large_string()), ("content", pa.large_string())]))
    table = table.set_column(0, "prompt", table.column("prompt").cast(prompt))
    table = table.set_column(4, "agent_name", table.column("agent_name").dictionary_encode())
    pq.write_table(table, tmp_path / "a.parquet")
    dataset = FileDataset(str(tmp_path / "a.parquet"))
    assert [(s.data_source, s.agent_name) for s in dataset] == [("made/up", "tool_agent"), ("made/up", "single_turn")]
    assert dataset.check(agent_names=["single_turn", "tool_agent"], tool_names=[], interaction_names=[]) == ["made/up"]


def test_another_prompt_column(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [{"messages": [{"role": "user", "content": "hi"}], "prompt": 3}])
    assert FileDataset(file, prompt_key="messages")[0].prompt == [{"role": "user", "content": "hi"}]


# --- many files


def test_files_and_patterns_in_order(tmp_path: Path) -> None:
    for name, start in (("b", 2), ("a", 0), ("c", 4)):
        write(tmp_path / f"{name}.parquet", [row(start), row(start + 1)])
    dataset = FileDataset([f"{tmp_path}/c.parquet", f"{tmp_path}/[ab].parquet"])
    assert questions(dataset) == ["4", "5", "0", "1", "2", "3"]
    assert [(Path(s.file).name, s.row, s.index) for s in dataset][2:4] == [("a.parquet", 0, 2), ("a.parquet", 1, 3)]


def test_files_may_differ_in_their_columns(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [row(0, tools_kwargs={"search": {"create_kwargs": {"k": 1}}})])
    write(tmp_path / "b.parquet", [row(1, reward_model={"style": "rule", "ground_truth": [1]})])
    first, second = FileDataset(f"{tmp_path}/*.parquet")
    assert (first.ground_truth, second.ground_truth, second.tools_kwargs) == ("0", [1], {})


def test_max_samples_counts_over_files_and_reads_no_further(tmp_path: Path) -> None:
    a = write(tmp_path / "a.parquet", [row(i) for i in range(3)])
    b = write(tmp_path / "b.parquet", [row(3), row(4), row(5, data_source=None)])
    assert questions(FileDataset([a, b], max_samples=5)) == ["0", "1", "2", "3", "4"]
    assert questions(FileDataset([a, b], max_samples=2)) == ["0", "1"]


def test_rows_over_many_batches_and_row_groups(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [row(i) for i in range(10_000)], row_group_size=3_000)
    dataset = FileDataset(file)
    assert len(dataset) == 10_000
    for index in (0, 2_999, 3_000, 4_095, 4_096, 8_192, 9_999):
        assert (dataset[index].ground_truth, dataset[index].row) == (str(index), index)
    with pytest.raises(IndexError):
        dataset[10_000]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """One row group of 150 MB of text, read in a random order: anonymous memory stays far below its size."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc to tell anonymous memory from mapped files")
    schema = pa.schema([("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))])
    contents = [os.urandom(512).hex() for _ in range(512)]
    rows = [[{"role": "user", "content": contents[i % 512] + str(i)}] for i in range(150_000)]
    pq.write_table(pa.table({"prompt": rows}, schema=schema), tmp_path / "a.parquet", use_dictionary=False)
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 1
    del rows
    pa.default_memory_pool().release_unused()

    def anonymous_mib() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split("RssAnon:")[1].split()[0]) // 1024

    before, peak, done = anonymous_mib(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], anonymous_mib())
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    dataset = FileDataset(str(tmp_path / "a.parquet"))
    for index in range(0, 150_000, 1_501):
        assert str(dataset[index].prompt[0]["content"]).endswith(str(index))
    done.set()
    watcher.join()
    assert peak[0] - before < 130


def test_the_working_copy_is_freed_with_the_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    dataset = FileDataset(write(tmp_path / "a.parquet", [row(0)]))
    assert list(temporary.iterdir()) == [], "the file must have no name, so that a killed run leaves nothing"
    assert dataset[0].ground_truth == "0"


# --- files that cannot be used


def test_missing_file(tmp_path: Path) -> None:
    assert_names(refused(f"{tmp_path}/no.parquet"), f"{tmp_path}/no.parquet")
    assert_names(refused(f"{tmp_path}/*.parquet"), "pattern")
    assert "holds no *.parquet" in refused(str(tmp_path))
    assert_names(refused([]), "no data file", "given")


def test_not_a_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text('{"prompt": []}\n')
    assert_names(refused(f"{tmp_path}/a.parquet"), f"{tmp_path}/a.parquet")


def test_a_file_cut_off_in_the_middle(tmp_path: Path) -> None:
    file = Path(write(tmp_path / "a.parquet", [row(i) for i in range(5000)]))
    file.write_bytes(file.read_bytes()[:-200])
    assert_names(refused(str(file)), file)


def test_a_damaged_page(tmp_path: Path) -> None:
    file = Path(write(tmp_path / "a.parquet", [row(i) for i in range(5000)], compression="zstd"))
    content = bytearray(file.read_bytes())
    content[40:400] = b"\xff" * 360
    file.write_bytes(content)
    assert_names(refused(str(file)), file, "row 0", "damaged")


def test_without_a_prompt_column(tmp_path: Path) -> None:
    message = refused(write(tmp_path / "a.parquet", [{"question": "hi", "answer": "x"}]))
    assert_names(message, "a.parquet", "column 'prompt'")
    assert "question, answer" in message and "data.prompt_key" in message


def test_an_empty_data_set(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row(0)]).slice(0, 0)
    pq.write_table(table, tmp_path / "a.parquet")
    assert_names(refused(f"{tmp_path}/a.parquet"), "empty", "the data")


@pytest.mark.parametrize(
    ("change", "column", "found"),
    [
        ({"prompt": 3}, "prompt", "3"),
        ({"prompt": ["text"]}, "prompt, message 0", "text"),
        ({"prompt": [{"content": "x"}]}, "prompt, message 0", "'content'"),
        ({"prompt": [{"role": "user", "content": [["x"]]}]}, "prompt, message 0", "['x']"),
        ({"data_source": 3}, "data_source", "3"),
        ({"agent_name": ["a"]}, "agent_name", "['a']"),
        ({"reward_model": "x"}, "reward_model", "'x'"),
        ({"tools_kwargs": '{"calculator": {}}'}, "tools_kwargs", "calculator"),
        ({"tools_kwargs": {"calculator": "x"}}, "tools_kwargs.calculator", "'x'"),
        ({"extra_info": {"interaction_kwargs": "gsm8k"}}, "extra_info.interaction_kwargs", "gsm8k"),
    ],
)
def test_a_column_of_a_wrong_type(tmp_path: Path, change: Row, column: str, found: str) -> None:
    message = refused(write(tmp_path / "a.parquet", [row(0, **change)]))
    assert_names(message, f"{tmp_path}/a.parquet", "row 0", f"column {column}")
    assert found in message.partition("found")[2]


# --- rows that cannot be used

BAD = [
    ({"prompt": None}, "prompt: expected a list of messages, found null"),
    ({"prompt": []}, "prompt: expected a list of messages, found []"),
    ({"prompt": [{"role": "human", "content": "x"}]}, "prompt, message 0: expected one of system"),
    (
        {"prompt": [{"role": "user", "content": "x"}, {"role": "user", "content": None}]},
        "prompt, message 1: expected text as content",
    ),
    ({"prompt": [{"role": "user", "content": "x"}, None]}, "prompt, message 1: expected {role, content}"),
    ({"data_source": None}, "data_source: expected text, found null"),
]


@pytest.mark.parametrize(("change", "says"), BAD)
def test_a_bad_row_is_named_or_skipped(tmp_path: Path, change: Row, says: str) -> None:
    good = {"interaction_kwargs": {"name": "gsm8k", "query": "q"}, "extra_info": {"interaction_kwargs": None}}
    rows = [row(i, **good) for i in range(4500)]
    rows[4200] = row(4200, **{**good, **change})
    other = write(tmp_path / "0.parquet", [row(-1)])
    file = write(tmp_path / "1.parquet", rows)
    message = refused([other, file])
    assert_names(message, file, "row 4200", f"column {says}")
    assert "data.on_bad_row=skip" in message
    dataset = FileDataset([other, file], on_bad_row="skip")
    assert (len(dataset), dataset.bad.count) == (4500, 1)
    assert (dataset[4200].row, dataset[4201].row, dataset[4201].ground_truth) == (4199, 4201, "4201")


@pytest.mark.parametrize("inside", [False, True])
def test_interaction_kwargs_without_a_name_ask_for_none_where_none_is_configured(tmp_path: Path, inside: bool) -> None:
    """verl's rows for its GSM8K tool have such."""
    kwargs: Row = {"interaction_kwargs": {"query": "q"}}
    rows = [row(i, **({"extra_info": kwargs} if inside else kwargs)) for i in range(2)]
    known: dict[str, list[str]] = {"agent_names": ["single_turn"], "tool_names": []}
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(one) + "\n" for one in rows))
    for dataset in map(FileDataset, (write(tmp_path / "a.parquet", rows), str(lines))):
        dataset.check(**known, interaction_names=[])
        assert [sample.interaction for sample in dataset] == [None, None]
        with naming(DataError, "row 0", "interaction_kwargs.name"):
            dataset.check(**known, interaction_names=["it"])


def test_max_samples_counts_good_rows(tmp_path: Path) -> None:
    rows = [row(i, data_source=None if i % 2 else "s") for i in range(10)]
    dataset = FileDataset(write(tmp_path / "a.parquet", rows), on_bad_row="skip", max_samples=3)
    assert (questions(dataset), dataset.bad.count) == (["0", "2", "4"], 2)


def test_nothing_but_bad_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [row(0), row(1, data_source=None)])
    assert len(FileDataset(file, on_bad_row="skip")) == 1
    file = write(tmp_path / "b.parquet", [row(0, prompt=[]), row(1, data_source=None)])
    pq.write_table(pq.read_table(file).slice(1), file)
    assert_names(refused(file, on_bad_row="skip"), "empty", "the data")


def test_an_assistant_message_with_calls_needs_no_content(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    prompt = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
    ]
    sample = FileDataset(write(tmp_path / "a.parquet", [row(0, prompt=prompt)]))[0]
    assert sample.prompt[1] == {"role": "assistant", "tool_calls": [call]}


# --- names


def named(tmp_path: Path) -> str:
    rows: list[Row] = [row(i, agent_name="tool_agent", data_source="a") for i in range(5000)]
    rows[17] = row(17, agent_name=None, data_source="b")
    rows[4500] = row(4500, agent_name="react_agent", tools_kwargs={"calculator": {"create_kwargs": {"x": 1}}})
    rows[4600] = row(4600, extra_info={"interaction_kwargs": {"name": "gsm8k"}, "agent_name": "tool_agent"})
    for one in rows[:4500]:
        one["data_source"] = one["data_source"] if one["data_source"] == "b" else "a"
    return write(tmp_path / "a.parquet", rows)


NAMES: dict[str, list[str]] = {
    "agent_names": ["single_turn", "tool_agent", "react"],
    "tool_names": ["calculator"],
    "interaction_names": ["gsm8k"],
}


def test_check_gives_the_data_sources(tmp_path: Path) -> None:
    assert FileDataset(named(tmp_path)).check(**NAMES) == ["a", "b", "made/up"]


@pytest.mark.parametrize(
    ("kind", "known", "place", "says"),
    [
        ("agent_names", ["single_turn", "tool_agents", "react"], "row 0 ", ("'tool_agent'", "'tool_agents'")),
        ("agent_names", ["tool_agent", "react"], "row 17 ", "'single_turn'"),
        ("agent_names", ["single_turn", "tool_agent"], "row 4500 ", "'react_agent'"),
        ("tool_names", ["calculate"], "row 4500 ", ("'calculator'", "'calculate'")),
        ("tool_names", [], "row 4500 ", "known: none"),
        ("interaction_names", ["gsm9k"], "row 4600 ", ("'gsm8k'", "'gsm9k'")),
    ],
)
def test_an_unknown_name_is_named_or_skipped(
    tmp_path: Path, kind: str, known: list[str], place: str, says: Names
) -> None:
    file = named(tmp_path)
    with pytest.raises(DataError) as error:
        FileDataset(file).check(**{**NAMES, kind: known})
    assert str(error.value).startswith(f"{file}, {place}")
    assert_names(error.value, says)
    dataset = FileDataset(file, on_bad_row="skip")
    if place == "row 0 ":
        assert dataset.check(**{**NAMES, kind: known})
        assert [sample.row for sample in dataset] == [17, 4500]
        assert dataset.bad.count == 4998
    else:
        dataset.check(**{**NAMES, kind: known})
        gone = int(place.split()[1])
        assert dataset.bad.count == 1
        assert gone not in [sample.row for sample in dataset] and len(dataset) == 4999


def test_skipping_every_row_is_an_error(tmp_path: Path) -> None:
    dataset = FileDataset(write(tmp_path / "a.parquet", [row(0)]), on_bad_row="skip")
    with naming(DataError, "row 0", "'single_turn'", "unknown"):
        dataset.check(agent_names=["react"], tool_names=[], interaction_names=[])


# --- overlong prompts


def tokens(sample: Sample) -> int:
    return int(sample.ground_truth)


def test_overlong_prompts_are_left_out(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [row(i) for i in (5, 3, 9, 4, 7, 4)])
    dataset = FileDataset(file)
    seen: list[int] = []
    assert dataset.filter_overlong(tokens, 4, progress=seen.append) == 3
    assert questions(dataset) == ["3", "4", "4"]
    assert [sample.index for sample in dataset] == [1, 3, 5]
    assert sum(seen) == 6
    assert dataset.filter_overlong(tokens, 3) == 2
    assert questions(dataset) == ["3"]


def test_overlong_prompts_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [row(i) for i in (1, 3, 9, 4, 7)])
    dataset = FileDataset(file)
    with pytest.raises(DataError) as error:
        dataset.filter_overlong(tokens, 4, refuse=True)
    assert_names(error.value, file, "row 2", "9 tokens")
    assert "data.max_prompt_length is 4" in str(error.value)
    assert dataset.filter_overlong(tokens, 9, refuse=True) == 0


def test_only_overlong_prompts(tmp_path: Path) -> None:
    dataset = FileDataset(write(tmp_path / "a.parquet", [row(5), row(6)]))
    with naming(DataError, "nothing is left"):
        dataset.filter_overlong(tokens, 4)


def test_a_prompt_that_cannot_be_rendered(tmp_path: Path) -> None:
    def length(sample: Sample) -> int:
        if sample.ground_truth == "2":
            raise ValueError("roles must alternate")
        return 1

    file = write(tmp_path / "a.parquet", [row(i) for i in range(4)])
    with naming(DataError, "row 2", "roles"):
        FileDataset(file).filter_overlong(length, 4)
    dataset = FileDataset(file, on_bad_row="skip")
    assert dataset.filter_overlong(length, 4) == 0
    assert (questions(dataset), dataset.bad.count) == (["0", "1", "3"], 1)


def test_an_error_of_a_users_code_is_no_fault_of_the_row(tmp_path: Path) -> None:
    def length(sample: Sample) -> int:
        raise CodeError("agent loop mine: TypeError: x", "mine.py:7")

    file = write(tmp_path / "a.parquet", [row(0)])
    with naming(CodeError, "TypeError", "a.parquet", "row 0") as told:
        FileDataset(file, on_bad_row="skip").filter_overlong(length, 100)
    assert told.value.place == "mine.py:7"
