"""Rows whose assistant turns would teach what no rollout should do are refused, or counted and left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import Chat
from agentrl.config.sections.sft import PairDataConfig, SFTDataConfig
from agentrl.data.dataset import FileDataset
from agentrl.data.pairs import check_pairs, load_pairs
from agentrl.data.sft import check_transcripts, load_transcripts, parsed_tools
from agentrl.errors import DataError
from tests.chat.templates import HERMES
from tests.chat.vocabularies import QWEN, save_tokenizer

USER: dict[str, Any] = {"role": "user", "content": "Hi."}
REPLY: dict[str, Any] = {"role": "assistant", "content": "Hello."}
ANSWER: dict[str, Any] = {"role": "tool", "content": "5"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]


def calling(*calls: tuple[str, object], ids: str = "", text: str | None = "") -> dict[str, Any]:
    made: list[dict[str, Any]] = [{"function": {"name": name, "arguments": given}} for name, given in calls]
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [one | ({"id": ids[at]} if ids else {}) for at, one in enumerate(made)],
    }


ONE, OTHER = ("f", {"x": 1}), ("g", '{"x": 2}')
BAD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "arguments that were cut": (
        [USER, calling(ONE, ("g", '{"x": ')), ANSWER, ANSWER, REPLY],
        r"message 1, call 1: expected arguments in valid JSON, found '{\"x\": '",
    ),
    "arguments as Python writes them": (
        [USER, calling(("f", "{'x': 1}"))],
        r"message 1, call 0: expected arguments in valid JSON",
    ),
    "a tool that the row lacks": (
        [USER, REPLY, USER, calling(("h", {}))],
        r"message 3, call 0: expected a call of one of the row's tools \(f, g\), found .*'h'",
    ),
    "one answer to two calls": (
        [USER, calling(ONE, OTHER, ids="ab"), {**ANSWER, "tool_call_id": "b"}, REPLY],
        r"message 1: expected an answer to each of the 2 calls of the turn, or to none, found '1'",
    ),
    "one answer to two calls at the end": ([USER, calling(ONE, OTHER), ANSWER], r"message 1: expected an answer to ea"),
    "one id for two calls": (
        [USER, calling(ONE, OTHER, ids="aa"), *[{**ANSWER, "tool_call_id": "a"}] * 2, REPLY],
        r"message 1: expected another id for each call of a turn, found \['a', 'a'\]",
    ),
    "an empty turn": (
        [USER, {**REPLY, "content": " \n"}],
        r"message 1: expected an assistant turn with text or a call",
    ),
    "a turn of reasoning": (
        [USER, {**REPLY, "content": "", "reasoning_content": "Hm."}],
        r"message 1: .*with text or a call",
    ),
    "an empty turn between others": (
        [USER, {**REPLY, "content": [{"type": "text", "text": " "}]}, USER, REPLY],
        r"message 1: ",
    ),
}
GOOD: dict[str, list[dict[str, Any]]] = {
    "calls without an answer": [USER, calling(ONE, OTHER, ids="ab")],
    "a call and no text": [USER, calling(ONE, text=None), ANSWER, REPLY],
    "no arguments": [USER, calling(("f", ""), ("g", None)), ANSWER, ANSWER, REPLY],
    "an id that comes again later": [USER, *[calling(ONE, ids="a"), {**ANSWER, "tool_call_id": "a"}] * 2, REPLY],
    "what is not learnt": [
        *[USER, {**calling(("h", '{"x')), "weight": 0}, ANSWER],
        *[{**REPLY, "content": "", "train": False}, USER, REPLY],
    ],
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat.from_pretrained(str(save_tokenizer(tmp_path_factory.mktemp("chat"), QWEN, "<|im_end|>", HERMES)))


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": messages, "tools": TOOLS}


@pytest.mark.parametrize("name", BAD)
def test_supervised_rows(tmp_path: Path, chat: Chat, name: str) -> None:
    messages, said = BAD[name]
    file = write(tmp_path / "a.jsonl", row([USER, REPLY]), row(messages))
    config = SFTDataConfig(train_files=file)
    for read in (lambda: check_transcripts(file, config), lambda: load_transcripts(file, config, chat)):
        with pytest.raises(DataError, match=rf"a\.jsonl, row 1 .*column messages, {said}"):
            read()
    skipping = config.model_copy(update={"on_bad_row": "skip"})
    found = load_transcripts(file, skipping, chat)
    assert (len(found.samples), found.bad.count) == (1, 1)
    learnt = load_transcripts(file, config.model_copy(update={"on_bad_row": "learn"}), chat)
    assert (len(learnt.samples), learnt.bad.count) == (2, 0)
    # In a prompt it is a part of the history, which is not learnt.
    asked = write(tmp_path / "p.jsonl", {"prompt": [*messages, USER]})
    assert len(FileDataset(asked)) == 1


@pytest.mark.parametrize("name", GOOD)
def test_rows_that_teach_what_they_should(tmp_path: Path, chat: Chat, name: str) -> None:
    file = write(tmp_path / "a.jsonl", row(GOOD[name]))
    assert len(load_transcripts(file, SFTDataConfig(train_files=file), chat).samples) == 1


@pytest.mark.parametrize("name", BAD)
def test_the_chosen_side_of_pairs(tmp_path: Path, chat: Chat, name: str) -> None:
    """The other one may be rejected for just that."""
    messages, said = BAD[name]
    begun, answered = messages[:1], messages[1:]
    good = [calling(("f", {"y": 3})), ANSWER, REPLY]
    config = PairDataConfig(train_files="unused")
    sides = {"chosen": [*begun, *answered], "rejected": [*begun, *good]}
    file = write(tmp_path / "a.jsonl", {**sides, "tools": TOOLS})
    with pytest.raises(DataError, match=rf"a\.jsonl, row 0 .*column chosen, .*{said}"):
        check_pairs(file, config, lambda rows: None)
    turned = {"chosen": sides["rejected"], "rejected": sides["chosen"], "tools": TOOLS}
    assert len(load_pairs(write(tmp_path / "b.jsonl", turned), config, chat, lambda rows: None).samples) == 1
    in_text = {**REPLY, "content": '<tool_call>{"name": "f", "argum'}
    broken = {"chosen": [USER, REPLY], "rejected": [USER, in_text]}
    assert len(load_pairs(write(tmp_path / "d.jsonl", broken), config, chat, lambda rows: None).samples) == 1
    # Before the first difference it is shown, not learnt.
    later = {side: [*messages, USER, said] for side, said in (("chosen", REPLY), ("rejected", good[0]))}
    file = write(tmp_path / "c.jsonl", {**later, "tools": TOOLS})
    assert check_pairs(file, config, lambda rows: None) == 1


def test_the_tools_of_many_rows_are_not_all_kept(tmp_path: Path) -> None:
    """A row of xLAM's has tools of its own: kept, those of a million rows took 14 GB."""
    rows = [{"messages": [USER, REPLY], "tools": [{"name": f"f{number}"}]} for number in range(1200)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = str(tmp_path / "rows.jsonl")
    parsed_tools.cache_clear()
    assert check_transcripts(files, SFTDataConfig(train_files=files)) == len(rows)
    assert parsed_tools.cache_info().currsize < len(rows)
