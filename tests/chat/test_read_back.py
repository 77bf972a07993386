"""Turns that supervised training learns are read back by a rollout's parser as what the conversation says."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import Chat
from agentrl.chat.message import with_named_ids
from agentrl.chat.read_back import check_read_back, letters, turns_of
from agentrl.config.sections.sft import SFTDataConfig
from agentrl.data.sft import load_transcripts
from agentrl.errors import DataError, UserError
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message
from tests.chat import templates
from tests.chat.conversations import TOOLS, assistant, call, conversation
from tests.chat.test_families import MUST_BE_TOLD, OWN, PLAIN
from tests.chat.vocabularies import LLAMA, QWEN, save_tokenizer
from tests.naming import Names, naming

SPEAKS_FIRST = templates.HERMES.replace(
    "{{- message.content }}",
    "{{- message.content }}{%- if message.content and message.tool_calls %}"
    "{{- '<|im_end|>\\n<|im_start|>assistant\\n' }}{%- endif %}",
)
"""As Nemotron Nano 2: text beside calls is a turn of its own, behind the end of which a policy writes nothing."""
SPEAKS_INSIDE = templates.PYTHONIC.replace("{{- '[' }}", "{{- message.content + '[' }}")
"""As axolotl's for Llama 4: text before calls that have to be the whole message."""
FIRST_ONLY = templates.PYTHONIC.replace("in message.tool_calls %}", "in message.tool_calls[:1] %}")
BESIDE = assistant("Let me see.", 1)
CUTS_REASONING = templates.HERMES.replace("{{- message.content }}", "{{- message.content.split('</think>')[-1] }}")
"""As DeepSeek R1's: what a text has before the mark is left out."""
ANY_TEXT = ("two words", ' "quoted" \n', "</tool_call> <tool_call>", "{'a': [1]}", "3", "null", "é", "<parameter=x>")
ANY_VALUE = (3, -2, 0)


def learn(chat: Chat, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = TOOLS) -> list[list[int]]:
    """The turns that are learnt. Raises UserError where the conversation cannot be."""
    ids, mask = chat.render_training(messages, tools)
    turns = turns_of(ids, mask)
    check_read_back(chat, messages, turns, tools)
    return turns


def drawn(source: random.Random, *, reasons: bool) -> list[Message]:
    """A conversation with calls, text, reasoning, or some of them in a turn."""
    turns = []
    for _ in range(source.randint(1, 3)):
        calls, said = source.randint(0, 2), source.choice(("", "Let me see.", "It's 5.\n\nYes?"))
        turn = assistant(said if said or calls else "Yes.", calls, "I think so." if reasons else None)
        for number, one in enumerate(turn.get("tool_calls", ())):
            digits = source.choice(ANY_VALUE)
            one.update(call(f"call{number:05d}", expression=source.choice(ANY_TEXT), digits=digits))
        turns.append(turn)
    return conversation(*turns)


@pytest.mark.slice(8, "matrix")
@pytest.mark.parametrize("name", [*PLAIN, "minimax-m2", *OWN])
def test_whatever_is_not_refused_is_read_as_it_was_said(make_chat: Callable[..., Chat], name: str) -> None:
    source, accepted = random.Random(name), 0
    for number in range(60):
        reasons = bool(number % 2)
        chat = make_chat(name, chat_template_kwargs={"enable_thinking": reasons} if name in MUST_BE_TOLD else None)
        messages = drawn(source, reasons=reasons)
        messages = with_named_ids(messages) if name.startswith("kimi") else messages
        messages = messages[1:] if name.startswith("mistral") else messages  # which has no system messages
        try:
            turns = learn(chat, messages)
        except UserError:
            continue
        accepted += 1
        for turn, message in zip(turns, (one for one in messages if one["role"] == "assistant"), strict=True):
            assert [at for at, id in enumerate(turn) if id in chat.stop_token_ids] == [len(turn) - 1]
            parsed = chat.parse(turn, TOOLS)
            calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
            assert [(one.name, one.arguments) for one in parsed.calls] == calls
            said = letters(str(message["content"]))
            left_out = said and said not in letters(chat.decode(turn))
            assert letters(parsed.text) == ("" if left_out else said) or letters(parsed.reasoning or "") == said
    assert accepted > 5


@pytest.mark.parametrize(
    ("template", "tokens", "eos", "turn", "found"),
    [
        (SPEAKS_FIRST, QWEN, "<|im_end|>", BESIDE, ("stop token", "found '<|im_end|>'", "39")),
        (SPEAKS_INSIDE, LLAMA, "<|eot_id|>", BESIDE, ("1 calls", "'Let me see.[", "0 calls")),
        (FIRST_ONLY, LLAMA, "<|eot_id|>", assistant("", 2), ("2 calls", "1 calls")),
    ],
)
def test_turns_with_calls_that_no_rollout_could_write(
    tmp_path: Path, template: str, tokens: tuple[str, ...], eos: str, turn: Message, found: Names
) -> None:
    chat = Chat.from_pretrained(str(save_tokenizer(tmp_path, tokens, eos, template)))
    learn(chat, conversation(assistant("", 1), assistant("So 5.")))
    messages = conversation(assistant("", 1), turn, assistant("So 5."))
    with naming(DataError, "message 4", found):
        learn(chat, messages)
    shown: Any = [{**one, "weight": 0} if one is turn else one for one in messages]
    check_read_back(chat, shown, turns_of(*chat.render_training(messages, TOOLS)), TOOLS)


def test_a_text_that_spells_the_end_of_a_turn_ends_none(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("hermes")
    (turn,) = learn(chat, conversation(assistant("Done.<|im_end|>\n<|im_start|>user\nGo on.")))
    assert [at for at, id in enumerate(turn) if id in chat.stop_token_ids] == [len(turn) - 1]


def test_a_broken_call_in_a_text(make_chat: Callable[..., Chat]) -> None:
    broken = conversation(assistant('Look: <tool_call>\n{"name": "f", "argum'))
    with naming(DataError, "message 2"):
        learn(make_chat("hermes"), broken)


def test_calls_in_a_text_are_learnt_where_they_are_whole(make_chat: Callable[..., Chat]) -> None:
    text = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2"}}\n</tool_call>'
    (turn,) = learn(make_chat("hermes"), conversation(assistant(text)))
    assert len(make_chat("hermes").parse(turn, TOOLS).calls) == 1


@pytest.mark.parametrize("value", ["3", "true", "[1, 2]", "null", " two words ", 1.0])
def test_values_whose_type_the_text_does_not_show(make_chat: Callable[..., Chat], value: Any) -> None:
    """Without a schema, or against it, the tokens are the same for either type."""
    turn = assistant()
    turn["tool_calls"] = [call("call00000", expression="1", other=value)]
    assert learn(make_chat("coder"), conversation(turn)) == learn(make_chat("coder"), conversation(turn), None)


def test_reasoning_in_a_text(tmp_path: Path, make_chat: Callable[..., Chat]) -> None:
    said = assistant("<think>\nI add.\n</think>\n\nSo 5.")
    for name in ("hermes", "coder"):
        (turn,) = learn(make_chat(name), conversation(said))
        parsed = make_chat(name).parse(turn)
        assert (parsed.reasoning, parsed.text) == ("I add.", "So 5.")
    chat = Chat.from_pretrained(str(save_tokenizer(tmp_path, QWEN, "<|im_end|>", CUTS_REASONING)))
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": conversation(said)}) + "\n")
    found = load_transcripts(str(file), SFTDataConfig(train_files="unused"), chat)
    assert found.unlearnt == {"text of which the chat template writes only a part": 1}
