"""Messages of a file: what rows of RL and of SFT may hold, and what each fault is called."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.chat import Chat
from agentrl.config.sections.sft import SFTDataConfig
from agentrl.data.dataset import FileDataset
from agentrl.data.sft import load_transcripts
from agentrl.errors import DataError
from tests.chat.templates import HERMES
from tests.chat.vocabularies import FAMILY_TOKENS, QWEN, save_tokenizer
from tests.naming import naming

USER = {"role": "user", "content": "Hi."}
REPLY = {"role": "assistant", "content": "Hello."}
DEEP = 100_000
CALL_IN_TEXT = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def call(arguments: object = "{}", **keys: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}} | keys


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def answer(**keys: object) -> dict[str, Any]:
    return {"role": "tool", "content": "5", **keys}


BAD: dict[str, tuple[object, str]] = {
    "no list": ({"role": "user"}, ": expected a list of messages, found {'role': 'user'}"),
    "nothing": ([], r": expected a list of messages, found \[\]"),
    "no message": (["hi"], r", message 0: expected {role, content}, found 'hi'"),
    "unknown role": ([USER, {"role": "gpt", "content": "x"}], r", message 1: expected one of .*, tool as role, found"),
    "no content": ([USER, {"role": "assistant"}], r", message 1: expected text as content"),
    "content is a number": ([{"role": "user", "content": 3}], r", message 0: expected text as content"),
    "a part without text": ([{"role": "user", "content": [{"type": "text"}]}], r"message 0: expected text, or a list "),
    "a part of sound": ([{"role": "user", "content": [{"type": "audio"}]}], r"message 0: expected text, or a list of "),
    "calls are text": ([USER, {**REPLY, "tool_calls": "x"}], r"message 1: expected a list of .* as tool_calls, found"),
    "a call is a number": ([USER, {**REPLY, "tool_calls": [1]}], r"message 1, call 0: expected {function: .*, found 1"),
    "calls of a user": ([{**USER, "tool_calls": [call()]}], r"message 0: expected tool_calls in messages of the assis"),
    "a call without name": ([USER, calling({"function": {}})], r"message 1, call 0: expected {function: {name, argu"),
    "a name that is none": (
        [USER, calling(call(), {"function": {"name": 1}})],
        r"message 1, call 1: expected text as ",
    ),
    "arguments are a list": (
        [USER, calling(call([1]))],
        r"message 1, call 0: expected a JSON object as arguments, fou",
    ),
    "arguments are a list's text": (
        [USER, calling(call("[1]"))],
        r"call 0: expected a JSON object as arguments, found",
    ),
    "an answer to nothing": ([USER, answer(), REPLY], r"message 1: expected a tool's answer only behind an assistant"),
    "an answer to another call": (
        [USER, calling(call(id="a")), answer(tool_call_id="b")],
        r"message 2: expected the answer to a call of the assistant turn before, found",
    ),
    "two answers to a call": ([USER, calling(call()), answer(), answer()], r"message 3: expected the answer to a call"),
    "name is a number": ([USER, calling(call()), answer(name=1)], r"message 2: expected text as name, found 1"),
    "an image by its address": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, REPLY],
        r"message 0: expected {type: image} where an image stands, and images in a column \(data\.image_key; RL only\)",
    ),
    "nested": ([USER, calling(call(json.loads("[" * 900 + "]" * 900)))], r"expected .*, found"),
}
TEXTS = {
    "no JSON": (
        "What is 2 + 2?",
        r'\[{"role": "user", "content": "\.\.\."}\].* JSON text \(Expecting value.*What is 2 \+ 2\?',
    ),
    "nested deep": ("[" * DEEP + "]" * DEEP, r"JSON text \(nested too deeply\), found '\[\[\["),
    "deep in an answer": (
        json.dumps([USER, answer()]).replace('"5"', '{"a":' * DEEP + "1" + "}" * DEEP),
        r"JSON text \(nested too deeply\)",
    ),
    "half a surrogate": ('[{"role": "user\\ud800", "content": "x"}]', r"as role, found 'user\\ud800'"),
}
GOOD: dict[str, list[dict[str, Any]]] = {
    "plain": [USER, REPLY],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
    ],
    "calls": [USER, calling(call({"x": 1}), call('{"x": 2}')), answer(), answer(), REPLY],
    "answers out of order": [
        USER,
        calling(call(id="a"), call(id="b")),
        answer(tool_call_id="b"),
        answer(tool_call_id="a"),
        REPLY,
    ],
    "calls as text": [USER, {"role": "assistant", "content": CALL_IN_TEXT}, answer(), REPLY],
    "system": [{"role": "system", "content": "S"}, USER, REPLY],
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat.from_pretrained(str(save_tokenizer(tmp_path_factory.mktemp("chat"), QWEN, "<|im_end|>", HERMES)))


def rl(file: Path, chat: Chat) -> object:
    return [sample.prompt for sample in FileDataset(str(file), prompt_key="messages")]


def sft(file: Path, chat: Chat) -> object:
    return load_transcripts(str(file), SFTDataConfig(train_files="unused"), chat).samples


BOTH = pytest.mark.parametrize("read", [rl, sft])
Read = Callable[[Path, Chat], object]


def write(path: Path, messages: list[Any]) -> Path:
    pq.write_table(pa.table({"messages": messages}), path)
    return path


@BOTH
@pytest.mark.parametrize("name", [*BAD, *TEXTS])
def test_each_fault_names_file_row_and_column(tmp_path: Path, chat: Chat, read: Read, name: str) -> None:
    value, said = TEXTS[name] if name in TEXTS else BAD[name]
    text = value if isinstance(value, str) else json.dumps(value)
    file = write(tmp_path / "a.parquet", [json.dumps([USER, REPLY]), text])
    with pytest.raises(DataError, match=r"a\.parquet, row 1 \(the first is 0\), column messages.*" + said) as error:
        read(file, chat)
    assert len(str(error.value).encode()) < 1000


@BOTH
@pytest.mark.parametrize("name", ["calls are text", "a call is a number", "two answers to a call"])
def test_faults_of_columns_that_are_no_text(tmp_path: Path, chat: Chat, read: Read, name: str) -> None:
    value, said = BAD[name]
    file = write(tmp_path / "a.parquet", [value])
    with pytest.raises(DataError, match=r"a\.parquet, row 0 .*column messages.*" + said):
        read(file, chat)


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("name", GOOD)
def test_rl_and_sft_take_the_same(tmp_path: Path, chat: Chat, name: str, as_text: bool) -> None:
    messages = GOOD[name]
    if not as_text:
        messages = json.loads(json.dumps(messages).replace('{"x": 1}', '"{\\"x\\": 1}"'))  # one type a column
    file = write(tmp_path / "a.parquet", [json.dumps(messages) if as_text else messages])
    assert rl(file, chat) == [[{**message} for message in messages]]
    (sample,) = load_transcripts(str(file), SFTDataConfig(train_files="unused"), chat).samples
    assert (sample.ids.tolist(), sample.mask.tolist()) == chat.render_training(messages)  # type: ignore[arg-type]
    assert "Hi." in chat.decode(sample.ids.tolist())


def not_utf8(messages: list[Any]) -> pa.Array:
    """The column of `messages`, each HERE in it three bytes that are no UTF-8."""
    array = pa.array(messages)
    buffers = [
        buffer if buffer is None else pa.py_buffer(buffer.to_pybytes().replace(b"HERE", b"\xffERE"))
        for buffer in array.buffers()
    ]
    return _rebuilt(array.type, len(array), iter(buffers))


def _rebuilt(type: pa.DataType, length: int, buffers: Any) -> pa.Array:
    own = [next(buffers) for _ in range(type.num_buffers)]
    if type.num_fields == 0:
        return pa.Array.from_buffers(type, length, own)
    if pa.types.is_list(type):
        size = int.from_bytes(own[1].to_pybytes()[4 * length : 4 * length + 4], "little")
        return pa.Array.from_buffers(type, length, own, children=[_rebuilt(type.value_type, size, buffers)])
    children = [_rebuilt(type.field(index).type, length, buffers) for index in range(type.num_fields)]
    return pa.Array.from_buffers(type, length, own, children=children)


@BOTH
@pytest.mark.parametrize("as_text", [True, False])
def test_text_that_is_not_utf8(tmp_path: Path, chat: Chat, read: Read, as_text: bool) -> None:
    rows: list[Any] = [[USER, REPLY], [{"role": "user", "content": "HERE it is"}, REPLY]]
    column = not_utf8([json.dumps(row) for row in rows] if as_text else rows)
    pq.write_table(pa.table({"messages": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 1 .*, column messages: expected UTF-8 text, found b'.*ffERE"):
        read(tmp_path / "a.parquet", chat)


@BOTH
def test_columns_and_fields_that_are_there_twice(tmp_path: Path, chat: Chat, read: Read) -> None:
    plain = pa.array([[USER, REPLY]])
    table = pa.Table.from_arrays([plain, plain], names=["messages", "messages"])
    pq.write_table(table, tmp_path / "a.parquet")
    with naming(DataError, "a.parquet", "column messages", "several"):
        read(tmp_path / "a.parquet", chat)
    message = pa.StructArray.from_arrays(
        [pa.array(["user"]), pa.array(["x"]), pa.array(["y"])], ["role", *["content"] * 2]
    )
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays([0, 1], message)}), tmp_path / "b.parquet")
    with naming(DataError, "b.parquet", ".content", "several"):
        read(tmp_path / "b.parquet", chat)


def test_values_that_python_cannot_hold_are_told_or_skipped(tmp_path: Path) -> None:
    maps = pa.array([[("a", 1)], [("a", 1), ("a", 2)], None], pa.map_(pa.string(), pa.int64()))
    times = pa.array([0, 1, 10**15], pa.timestamp("s"))
    extra = pa.StructArray.from_arrays([maps, times], ["counts", "when"])
    table = pa.table({"prompt": [[USER]] * 3, "extra_info": extra})
    pq.write_table(table, tmp_path / "a.parquet")
    file = str(tmp_path / "a.parquet")
    with naming(DataError, "row 1", "column extra_info", "twice"):
        FileDataset(file)
    left = FileDataset(file, on_bad_row="skip")
    assert left.bad.count == 2
    assert [sample.extra_info["counts"] for sample in left] == [{"a": 1}]
    pq.write_table(table.slice(2), tmp_path / "b.parquet")
    with naming(DataError, "b.parquet", "row 0", "column extra_info", "Python"):
        FileDataset(str(tmp_path / "b.parquet"))


def test_bad_messages_are_skipped(tmp_path: Path) -> None:
    rows = [json.dumps([USER]), "no JSON", json.dumps([USER, answer()]), json.dumps([USER, REPLY, USER])]
    left = FileDataset(str(write(tmp_path / "a.parquet", rows)), prompt_key="messages", on_bad_row="skip")
    assert (left.bad.count, [sample.row for sample in left]) == (2, [0, 3])


def test_what_is_in_the_rows_and_not_learnt_is_counted(tmp_path: Path, chat: Chat) -> None:
    silent = HERMES.replace("{{- message.content }}", "{{- '' if message.tool_calls else message.content }}")
    silent = silent.replace("message.reasoning_content is defined", "false")
    silent = silent.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]")
    silent_chat = Chat.from_pretrained(str(save_tokenizer(tmp_path / "silent", QWEN, "<|im_end|>", silent)))
    beside = {**calling(call()), "content": "Let me see."}
    reasoned = {**REPLY, "reasoning_content": "A greeting."}
    twice = calling(call(), call())
    rows = [
        [USER, beside],
        [USER, beside, answer(), beside],
        [USER, reasoned],
        [USER, REPLY],
        GOOD["calls as text"],
    ]
    file = write(tmp_path / "a.parquet", [json.dumps(row) for row in rows])
    config = SFTDataConfig(train_files="unused")
    assert list(load_transcripts(str(file), config, chat).unlearnt.values()) == [1]  # the calls in text
    unlearnt = load_transcripts(str(file), config, silent_chat).unlearnt
    assert {what.split(",")[0].split(" behind")[0]: count for what, count in unlearnt.items()} == {
        "text beside tool calls": 2,
        "reasoning_content": 1,
        "a tool's answer": 1,
    }
    file = write(tmp_path / "b.parquet", [json.dumps([USER, twice, answer(), answer()])])
    load_transcripts(str(file), config, chat)
    with pytest.raises(DataError, match=r"message 1 .* reads 2 calls, .* read as 1 calls"):
        load_transcripts(str(file), config, silent_chat)


def test_text_that_a_template_writes_behind_its_calls_is_counted(tmp_path: Path, chat: Chat) -> None:
    gemma = Chat.from_pretrained(str(save_tokenizer(tmp_path / "gemma", *FAMILY_TOKENS["gemma4"])), format="gemma4")
    beside = {**calling(call()), "content": "Let me see."}
    rows = [[USER, beside, answer(), REPLY], [USER, calling(call()), answer(), REPLY], [USER, REPLY]]
    file = write(tmp_path / "a.parquet", [json.dumps(row) for row in rows])
    config = SFTDataConfig(train_files="unused")
    behind = "text beside tool calls, which the chat template writes behind the calls, and which is learnt there"
    assert load_transcripts(str(file), config, gemma).unlearnt == {behind: 1}
    assert load_transcripts(str(file), config, chat).unlearnt == {}


def test_no_rows(tmp_path: Path, chat: Chat) -> None:
    pq.write_table(pa.table({"messages": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with naming(DataError, "a.parquet", "no rows"):
        sft(tmp_path / "a.parquet", chat)
