"""Families of `renderers`, each against its own full render, and what tokenizers' own templates have in common."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.chat import Chat, Drift
from agentrl.chat.formats.family import FamilyFormat
from agentrl.chat.message import with_named_ids
from agentrl.config.formats import families
from agentrl.errors import ConfigError
from agentrl.trajectory import Message
from tests.chat.conftest import TEMPLATES
from tests.chat.conversations import GO_ON, TOOLS, answers, assistant, call, conversation, roll_out, sampled_turns
from tests.chat.vocabularies import FAMILY_TOKENS, save_tokenizer

MUST_BE_TOLD = (
    *("qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
    *("glm-4.5", "glm-5", "glm-5.1"),
)
"""Families that think unless told not to: without reasoning in the messages, they must be told."""
PLAIN = [family for family in FAMILY_TOKENS if family not in ("minimax-m2", "deepseek-r1")]
"""All but two that cannot answer without reasoning."""
THINKING = (
    *("qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "nemotron-3", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "minimax-m2"),
    "inkling",
)
ONE_CALL = ("llama-3", "llama", "harmony")
OWN = [name for name in TEMPLATES if name not in ("opens_reasoning", "history_without_reasoning")]
"""Tokenizers' own templates that a turn without reasoning can be written by."""


def plain_chat(make_chat: Callable[..., Chat], family: str) -> Chat:
    return make_chat(family, chat_template_kwargs={"enable_thinking": False} if family in MUST_BE_TOLD else None)


def test_all_families_are_covered() -> None:
    assert set(families()) == set(FAMILY_TOKENS)


@pytest.mark.parametrize("family", [*PLAIN, *(name for name in OWN if not name.startswith(("mistral", "harmony")))])
@pytest.mark.parametrize("calls", [1, 2])
def test_rolled_out_transcript_equals_the_full_render(make_chat: Callable[..., Chat], family: str, calls: int) -> None:
    chat = plain_chat(make_chat, family)
    if calls > 1 and family in ONE_CALL:
        with pytest.raises(ConfigError, match=r"single tool call|one call a message"):
            chat.render_training(conversation(assistant("", calls)), TOOLS)
        return
    messages = conversation(assistant("", calls), assistant("", 1), assistant("So 5."), assistant("Bye."))
    messages = with_named_ids(messages) if family.startswith("kimi") else messages
    ids, mask = chat.render_training(messages, TOOLS)
    turns = sampled_turns(ids, mask)
    assert len(turns) == 4
    assert roll_out(chat, messages, turns) == ids
    assert chat.drift(ids, messages, TOOLS) is Drift.CLEAN
    # The next prompt too is what a full render writes.
    ids += chat.bridge(ids, [GO_ON], TOOLS)
    assert chat.drift(ids, [*messages, GO_ON], TOOLS) is Drift.CLEAN


@pytest.mark.parametrize("family", [*PLAIN, *OWN])
def test_sampled_turns_are_read_back(make_chat: Callable[..., Chat], family: str) -> None:
    chat = plain_chat(make_chat, family)
    messages = conversation(assistant("", 1 if family in ONE_CALL else 2), assistant("So 5."))
    messages = messages[1:] if family in ("mistral", "mistral_args") else messages  # They have no system message.
    first, last = sampled_turns(*chat.render_training(messages, TOOLS))
    parsed, answer = chat.parse(first, TOOLS), chat.parse(last, TOOLS)
    wanted = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert [{"name": call.name, "arguments": call.arguments} for call in parsed.calls] == wanted
    assert parsed.text == ""
    assert (answer.text.lstrip() if family in OWN else answer.text, answer.calls) == ("So 5.", ())
    assert first[-1] in chat.stop_token_ids
    assert last[-1] in chat.stop_token_ids


@pytest.mark.parametrize("family", THINKING)
def test_reasoning_is_read_back_and_kept_within_a_tool_cycle(make_chat: Callable[..., Chat], family: str) -> None:
    chat = make_chat(family)
    messages = conversation(assistant("", 1, "Let me add."), assistant("So 5.", 0, "Now say it."))
    ids, mask = chat.render_training(messages, TOOLS)
    turns = sampled_turns(ids, mask)
    parsed = [chat.parse(turn, TOOLS) for turn in turns]
    assert [message.reasoning for message in parsed] == ["Let me add.", "Now say it."]
    assert [message.text for message in parsed] == ["", "So 5."]
    assert len(parsed[0].calls) == 1
    assert roll_out(chat, messages, turns) == ids
    assert chat.drift(ids, messages, TOOLS) is Drift.CLEAN


def test_qwen3_drops_old_reasoning_which_is_a_fork_and_the_transcript_keeps_it(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("qwen3")
    messages = conversation(assistant("Five.", 0, "Two and three."), assistant("Bye.", 0, "Leave."))
    ids, _ = chat.render_training(messages, TOOLS)
    assert chat.decode(ids).count("Two and three.") == 1
    assert chat.drift(ids, messages, TOOLS) is Drift.FORK


@pytest.mark.parametrize("family", ["qwen3.5", "glm-5", "nemotron-3", "minimax-m2"])
def test_no_reasoning_where_the_prompt_begins_some_is_an_error(make_chat: Callable[..., Chat], family: str) -> None:
    chat = make_chat(family)
    messages = conversation(assistant("Five."))
    if family == "qwen3.5":  # Writes an empty block, which goes on from the prompt.
        turn = sampled_turns(*chat.render_training(messages, TOOLS))[0]
        assert chat.decode(turn) == "\n</think>\n\nFive.<|im_end|>"
        return
    with pytest.raises(ConfigError, match="reasoning_content"):
        chat.render_training(messages, TOOLS)


@pytest.mark.parametrize("family", [*PLAIN, "hermes", "coder", "llama", "hermes_in_text"])
def test_a_cut_turn_is_closed_by_the_bridge(make_chat: Callable[..., Chat], family: str) -> None:
    chat = plain_chat(make_chat, family)
    messages = conversation(assistant("So 5."))
    ids, _ = chat.render_training(messages, TOOLS)
    whole = ids + chat.bridge(ids, [GO_ON], TOOLS)
    cut = ids[:-1]
    bridged = chat.bridge(cut, [GO_ON], TOOLS)
    if family.startswith("glm"):  # The next header ends a turn; a cut one is closed with <|endoftext|>.
        assert chat.decode([*cut, *bridged]) == chat.decode(whole).replace(
            "So 5.<|user|>", "So 5.<|endoftext|><|user|>"
        )
    else:
        assert [*cut, *bridged] == whole


def test_an_eos_that_the_family_does_not_know_needs_no_close(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path, [*FAMILY_TOKENS["kimi-k2"][0], "[EOS]"], "[EOS]")
    chat = Chat.from_pretrained(path, format="kimi-k2")
    assert [chat.decode([id]) for id in chat.stop_token_ids] == ["<|im_end|>", "[EOS]"]
    ids = [*chat.render([GO_ON]), *chat.encode("Yes."), chat.stop_token_ids[1]]
    assert chat.decode(chat.bridge(ids, [GO_ON])).startswith("<|im_user|>user<|im_middle|>Go on.<|im_end|>")


def test_a_turn_cut_in_its_reasoning_gets_its_reasoning_closed(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("qwen3")
    ids = [*chat.render([GO_ON], TOOLS), *chat._codec.encode("<think>\nLet me")]
    assert chat.decode(chat.bridge(ids, [GO_ON], TOOLS)).startswith(
        "</think><|im_end|>\n<|im_start|>user\nGo on.<|im_end|>"
    )


def test_glm_header_that_the_policy_sampled_is_not_written_twice(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("glm-4.5")
    ids, _ = chat.render_training(conversation(assistant("", 1)), TOOLS)
    assert chat.decode(ids[-1:]) == "<|observation|>"
    assert "<|observation|>" not in chat.decode(chat.bridge(ids, answers(1), TOOLS))


def test_kimi_call_ids_name_the_function(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("kimi-k2")
    messages = conversation(assistant("", 2), assistant("", 1), assistant("Bye."))
    ids, mask = chat.render_training(messages, TOOLS)
    found = [call.id for turn in sampled_turns(ids, mask) for call in chat.parse(turn, TOOLS).calls]
    assert found == [f"functions.calculator:{n}" for n in range(3)]
    assert chat.decode(ids).count("## Return of functions.calculator:") == 3


def test_a_bridge_does_not_depend_on_the_transcript_before_the_last_turn(make_chat: Callable[..., Chat]) -> None:
    for family in FAMILY_TOKENS:
        chat = make_chat(family)
        stop = chat.format._close  # type: ignore[attr-defined]
        short = [*chat.render([GO_ON]), *chat.encode("a"), stop]
        long = [*chat.render([GO_ON]), *chat.encode("a long answer" * 50), stop]
        assert chat.bridge(short, answers(1), TOOLS) == chat.bridge(long, answers(1), TOOLS), family


@pytest.mark.parametrize("family", FAMILY_TOKENS)
@pytest.mark.parametrize("content", [" padded\n", "\n\nlines\n\n", 'quote " and \\ and é', "[1]", "  ", "word " * 50])
def test_learnt_shapes_write_what_the_renderer_writes(
    make_chat: Callable[..., Chat], family: str, content: str
) -> None:
    format = make_chat(family).format
    assert isinstance(format, FamilyFormat)
    answered: list[list[Message]] = [[{**answer, "content": content} for answer in answers(count)] for count in (1, 2)]
    asked: Message = {**GO_ON, "content": content}
    for messages in (*answered, [asked]):
        for stop in format.stop_token_ids:
            for _ in range(3):  # Written, learnt, filled in.
                assert format._bridge_closed(stop, messages, None) == format._bridge_rendered(stop, messages, None)


def test_calls_that_kimis_first_template_counts_by_turn(tmp_path: Path) -> None:
    """An answer names the call as the template has written it, whatever the ids of the row are."""
    template = """\
{%- for message in messages %}{{- '<|im_user|>' + message.role + '<|im_middle|>' }}
{%- for call in message.tool_calls or [] %}{{- '<|tool_calls_section_begin|><|tool_call_begin|>functions.' +
call.function.name + ':' + loop.index0 | string + '<|tool_call_argument_begin|>' + call.function.arguments | tojson +
'<|tool_call_end|><|tool_calls_section_end|>' }}{%- endfor %}
{{- ('## Return of ' + message.tool_call_id + ' ' if message.role == 'tool' else '') + message.content + '<|im_end|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_user|>assistant<|im_middle|>' }}{%- endif %}"""
    chat = Chat.from_pretrained(save_tokenizer(tmp_path, *FAMILY_TOKENS["kimi-k2"], template), format="kimi")
    for ids in (("call_a", "call_b"), ("functions.now:0", "functions.now:1")):
        messages: list[Message] = [{"role": "user", "content": "Q"}]
        for id in ids:
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call(id, "now")]},
                {"role": "tool", "content": "A", "tool_call_id": id},
            ]
        messages.append({"role": "assistant", "content": "Done."})
        text = chat.decode(chat.render_training(messages)[0])
        assert re.findall(r"functions\.now:\d", text) == ["functions.now:0"] * 4
