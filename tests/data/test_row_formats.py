"""Row formats: every form becomes the transcript that it means, and none is guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.chat import Chat
from agentrl.config.sections.sft import PairDataConfig, SFTDataConfig
from agentrl.data.pairs import load_pairs, load_scored_pairs
from agentrl.data.sft import SFTSample, Transcripts, check_transcripts, load_transcripts
from agentrl.errors import DataError
from tests.chat.templates import HERMES
from tests.chat.vocabularies import QWEN, save_tokenizer
from tests.naming import Names, naming

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
END = "<|im_end|>"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat.from_pretrained(str(save_tokenizer(tmp_path_factory.mktemp("chat"), QWEN, END, HERMES)))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def learn(chat: Chat, file: str, **keys: Any) -> Transcripts[SFTSample]:
    config = SFTDataConfig(train_files="unused", **keys)
    found = load_transcripts(file, config, chat)
    assert check_transcripts(file, config) == found.rows
    return found


def ids(found: Transcripts[SFTSample]) -> list[tuple[list[int], list[bool]]]:
    return [(one.ids.tolist(), one.mask.tolist()) for one in found.samples]


def said(chat: Chat, found: Transcripts[SFTSample]) -> list[tuple[str, str]]:
    """What is shown, and what is learnt, by transcript."""
    return [
        (chat.decode(one.ids[~one.mask].tolist()), chat.decode(one.ids[one.mask].tolist())) for one in found.samples
    ]


CALLED = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 2}}}]}
TALK = [
    {"role": "system", "content": "Be brief."},
    user("Go."),
    {"role": "assistant", "content": "", **CALLED},
    {"role": "tool", "content": "7"},
    answer("It is 7."),
]
CALL_TEXT = json.dumps({"name": "f", "arguments": {"x": 2}})
SAME: dict[str, dict[str, Any]] = {
    "legacy function_call": {
        "messages": [
            *TALK[:2],
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 2}'}},
            {"role": "function", "name": "f", "content": "7"},
            TALK[4],
        ],
        "functions": [FUNCTION],
    },
    "sharegpt": {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "Go."},
            {"from": "function_call", "value": CALL_TEXT},
            {"from": "observation", "value": "7"},
            {"from": "gpt", "value": "It is 7."},
        ],
        "tools": json.dumps([FUNCTION]),
    },
    "sharegpt, tags": {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "user", "value": "Go."},
            {"from": "assistant", "value": f"<tool_call>\n{CALL_TEXT}\n</tool_call>"},
            {"from": "tool", "value": "<tool_response>\n7\n</tool_response>"},
            {"from": "assistant", "value": "It is 7."},
        ],
        "tools": json.dumps(TOOLS),
    },
    "sharegpt, tools that Hermes explains": {
        "system": "Be brief.",
        "conversations": [
            {
                "from": "system",
                "value": f"Signatures are within <tools> </tools> tags.\n<tools>{json.dumps(TOOLS)}</tools>",
            },
            {"from": "user", "value": "Go."},
            {"from": "assistant", "value": f"<tool_call>\n{CALL_TEXT}\n</tool_call>"},
            {"from": "tool", "value": "<tool_response>\n7\n</tool_response>"},
            {"from": "assistant", "value": "It is 7."},
        ],
    },
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_calls_in_other_words_are_the_same_transcript(chat: Chat, tmp_path: Path, name: str, suffix: str) -> None:
    row = {"messages": json.dumps(TALK), "tools": json.dumps(TOOLS)}
    expected = ids(learn(chat, write(tmp_path / "m.jsonl", [row])))
    assert ids(learn(chat, write(tmp_path / f"a.{suffix}", [SAME[name]]))) == expected


def test_alpacas_columns_are_a_conversation(chat: Chat, tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief.", "history": [["a", "b"]]}
    talk = [TALK[0], user("a"), answer("b"), user("Add.\n1 2"), answer("3")]
    plain: dict[str, Any] = {"instruction": "Add.", "input": "", "output": "3", "system": None, "history": []}
    rows = [{"messages": talk}, {"messages": [user("Add."), answer("3")]}]
    expected = ids(learn(chat, write(tmp_path / "m.jsonl", rows)))
    for suffix in ("jsonl", "parquet"):
        found = learn(chat, write(tmp_path / f"a.{suffix}", [{**row, "id": 1}, {**plain, "id": 2}]))
        assert ids(found) == expected
        note = "rows are read as alpaca (instruction, output); columns that are not read: id"
        assert list(found.notes.values()) == [note]


def test_only_the_completion_is_learnt(chat: Chat, tmp_path: Path) -> None:
    messages = {"prompt": [user("a"), answer("old"), user("b")], "completion": [answer("new")]}
    text = {"prompt": "The sky is", "completion": " blue <|im_start|>."}
    found = learn(chat, write(tmp_path / "a.jsonl", [messages, text]))
    conversation, plain = said(chat, found)
    assert conversation[1] == f"new{END}"
    assert plain == ("The sky is", f" blue <|im_start|>.{END}")
    assert chat.tokenizer.convert_tokens_to_ids("<|im_start|>") in found.samples[1].ids


def test_all_of_a_text_is_learnt_and_one_end_is_written(chat: Chat, tmp_path: Path) -> None:
    found = learn(chat, write(tmp_path / "a.jsonl", [{"text": "Once."}, {"text": f"Twice.{END}"}]))
    assert said(chat, found) == [("", f"Once.{END}"), ("", f"Twice.{END}")]


def test_no_letter_of_a_completion_is_lost_to_a_token_of_both(chat: Chat, tmp_path: Path) -> None:
    for cut in range(1, len("assistant")):
        row = {"prompt": f"the {'assistant'[:cut]}", "completion": "assistant"[cut:]}
        ((shown, learnt),) = said(chat, learn(chat, write(tmp_path / "a.jsonl", [row])))
        assert (shown + learnt, len(learnt) >= len(row["completion"] + END)) == (f"the assistant{END}", True)


def test_what_json_or_utf8_cannot_write_is_a_bad_row(chat: Chat, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": b"\x00"}}
    pq.write_table(pa.Table.from_pylist([{"messages": TALK[:2] + TALK[4:], "tools": [tool]}]), tmp_path / "a.parquet")
    with naming(DataError, "a.parquet", "row 0", "column tools"):
        learn(chat, str(tmp_path / "a.parquet"))
    with naming(DataError, "b.jsonl", "row 0", "\\ud83d"):
        learn(chat, write(tmp_path / "b.jsonl", [{"text": "x\ud83d"}]))


def test_a_format_of_ones_own_is_named(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from agentrl.data.row_formats.format import Conversation, RowFormat\n"
        "def read(row):\n"
        "    asked, said = row['question'], row['answer'].strip()\n"
        "    return Conversation([{'role': 'user', 'content': asked}, {'role': 'assistant', 'content': said}])\n"
        "FORMAT = RowFormat(('question', 'answer'), read)\n"
        "NONE = 3\n"
    )
    file = write(tmp_path / "a.jsonl", [{"question": "Add.", "answer": " 3 "}])
    ((_, learnt),) = said(chat, learn(chat, file, row_format=f"{tmp_path}/mine.py:FORMAT"))
    assert learnt == f"3{END}"


ALPACA = {"instruction": "a", "output": "b"}
BAD: list[tuple[dict[str, Any], dict[str, Any], Names]] = [
    ({**ALPACA, "text": "ab"}, {}, ("2 row formats", "data.row_format=alpaca", "data.row_format=text")),
    ({"messages": TALK, "conversations": TALK}, {}, ("data.row_format=messages", "data.row_format=sharegpt")),
    ({"prompt": "a", "completion": "b", "label": True}, {}, ("label", "agentrl.preferences", "loss=kto")),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, {}, ("prompt, chosen, rejected", "agentrl.preferences")),
    ({"question": "a"}, {}, ("found question", "data.messages_key")),
    (ALPACA, {"messages_key": "talk"}, "column 'talk'"),
    (ALPACA, {"row_format": "text"}, "column 'text'"),
    ({**ALPACA, "history": [["a"]]}, {}, ("row 1", "column history", "turn 0", "[instruction, output]")),
    ({"instruction": "a", "output": ""}, {}, ("row 1", "column output", "found ''")),
    ({"prompt": "a", "completion": [answer("b")]}, {}, ("row 1", "column prompt")),
    ({"prompt": [user("a")], "completion": [user("b")]}, {}, ("row 1", "no assistant turn")),
    ({"prompt": [user("a"), answer("b")], "completion": [user("c")]}, {}, ("row 1", "no assistant turn")),
    ({"conversations": [{"from": "oracle", "value": "a"}]}, {}, ("row 1", "turn 0", "`from`")),
    ({"conversations": [{"from": "gpt", "value": "<tool_call>{}"}]}, {}, ("row 1", "</tool_call>", "<tool_call>")),
    ({"conversations": [{"from": "function_call", "value": "f()"}]}, {}, ("row 1", "turn 0", "function_call", "JSON")),
]


@pytest.mark.parametrize(("row", "keys", "message"), BAD)
def test_what_fits_no_format_or_two_is_refused(
    chat: Chat, tmp_path: Path, row: dict[str, Any], keys: dict[str, Any], message: Names
) -> None:
    good: dict[str, dict[str, Any]] = {
        "history": {**ALPACA, "history": []},
        "output": ALPACA,
        "completion": {"prompt": "a", "completion": "b"},
        "conversations": {"conversations": [{"from": "user", "value": "a"}, {"from": "gpt", "value": "b"}]},
    }
    of_a_row = isinstance(message, tuple) and message[0] == "row 1"
    first = next((good[name] for name in good if name in row and of_a_row), row)
    with naming(DataError, message):
        learn(chat, write(tmp_path / "a.jsonl", [first, row]), **keys)


def pairs(chat: Chat, tmp_path: Path, row: dict[str, Any], **keys: Any) -> list[tuple[str, str]]:
    """What is shown and what is learnt of both."""
    config = PairDataConfig(train_files="unused", **keys)
    (pair,) = load_pairs(write(tmp_path / "a.jsonl", [row]), config, chat, lambda rows: None).samples
    sides = slice(None, pair.lengths[0]), slice(pair.lengths[0], None)
    parts = [(pair.ids[side], pair.mask[side]) for side in sides]
    return [(chat.decode(ids[~mask].tolist()), chat.decode(ids[mask].tolist())) for ids, mask in parts]


def test_pairs_of_text_are_learnt_after_the_prompt(chat: Chat, tmp_path: Path) -> None:
    given = {"prompt": "The sky is", "chosen": " blue", "rejected": " black"}
    assert pairs(chat, tmp_path, given) == [("The sky is", f" blue{END}"), ("The sky is", f" black{END}")]
    whole = {"chosen": "A? Yes.", "rejected": "A? No."}
    (shown, good), (other, bad) = pairs(chat, tmp_path, whole)
    assert shown == other and shown.startswith("A?")
    assert (shown + good, other + bad) == (f"A? Yes.{END}", f"A? No.{END}")


def test_a_prompt_of_messages_is_found_by_its_column(chat: Chat, tmp_path: Path) -> None:
    both = {"chosen": [answer("x")], "rejected": [answer("y")]}
    whole = {name: [user("q"), *said] for name, said in both.items()}
    expected = pairs(chat, tmp_path, whole)
    assert [learnt for _, learnt in expected] == [f"x{END}", f"y{END}"]
    for row in ({"prompt": [user("q")], **both}, {"prompt": [user("q")], **whole}, {"prompt": "q ", **whole}):
        assert pairs(chat, tmp_path, row) == expected
    assert pairs(chat, tmp_path, {"prompt": "other", **whole}, prompt_key=False) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "chosen": [answer("x")], "rejected": [answer("y")]}, ("column prompt", "the messages")),
        (
            {"prompt": "p", "chosen": [user("q"), answer("x")], "rejected": [user("q"), answer("y")]},
            ("column prompt", "found 'p'", "data.prompt_key=false"),
        ),
        ({"prompt": "p", "chosen": "x", "rejected": "x"}, "same text"),
        ({"prompt": "p", "chosen": "x", "rejected": None}, ("column rejected", "text", "found null")),
        (
            {"prompt": "p", "completion": "x", "label": True},
            ("column label", "loss=kto"),
        ),
    ],
)
def test_pairs_that_can_be_read_in_two_ways_are_refused(
    chat: Chat, tmp_path: Path, row: dict[str, Any], message: Names
) -> None:
    with naming(DataError, message):
        pairs(chat, tmp_path, row)


def test_a_reward_model_takes_no_pairs_of_text(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "p", "chosen": "x", "rejected": "y"}])
    with naming(DataError, "a.jsonl", "row 0", "as chosen"):
        load_scored_pairs(file, PairDataConfig(train_files="unused"), lambda messages: ([], False), lambda rows: None)
