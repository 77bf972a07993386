"""Marks that no call format knows do not reach scorers: the template shows where they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.chat import Chat
from agentrl.chat.check import marks_left
from agentrl.chat.formats.template import TemplateFormat
from tests.chat import templates
from tests.chat.vocabularies import QWEN, save_tokenizer

TURN = "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}"
MARKED = {
    "tokens": ("<r>", "</r>\n", "", "", ""),
    "tokens around text, too": ("<r>", "</r><s>", "<s>", "</s>", ""),
    "begun by the prompt": ("<r>", "</r><s>", "", "</s>", "<r>"),
    "words": ("self\n", "\nall\n", "all\n", "", ""),
}
"""What is written before reasoning, between it and the text, before a text without it, behind it, and by the prompt."""


def chat_of(path: Path, marks: tuple[str, str, str, str, str]) -> Chat:
    opens, closes, before, after, begun = map(repr, marks)
    template = templates.HERMES.replace(
        TURN, f"{{{{- {opens} + message.reasoning_content + {closes} }}}}{{%- else %}}{{{{- {before} }}}}"
    )
    template = template.replace("{{- message.content }}", f"{{{{- message.content + {after} }}}}")
    template = template.replace(
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n'",
        f"{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' + {begun}",
    )
    return Chat.from_pretrained(save_tokenizer(path, (*QWEN, "<r>", "</r>", "<s>", "</s>"), "<|im_end|>", template))


@pytest.mark.parametrize("name", MARKED)
def test_marks_are_taken_off(tmp_path: Path, name: str) -> None:
    opens, closes, before, after, begun = MARKED[name]
    chat = chat_of(tmp_path, MARKED[name])
    assert marks_left(chat) is None

    def read(text: str) -> tuple[str, str | None]:
        message = chat.parse(chat.encode_markup(f"{text}<|im_end|>"))
        return message.text, message.reasoning

    told = "Two words,\nall of them.\n<b>1</b> "
    assert read((opens + "Hm.\nSo." + closes).removeprefix(begun) + told + after) == (
        told,
        "Hm.\nSo.",
    )
    if not begun:
        assert read(before + told + after) == (told, None)
    assert read("Without marks.") == ("Without marks.", None)
    assert read("allowed") == ("allowed", None)


def test_marks_behind_a_prompt_that_closes_reasoning_are_taken_off(tmp_path: Path) -> None:
    """No conversation has what the prompt ends with, so that the text's marks are those of conversations."""
    chat = chat_of(tmp_path, ("<r>", "</r><s>", "<s>", "</s>", "<r></r>"))
    message = chat.parse(chat.encode_markup("<s>Two words.</s><|im_end|>"))
    assert (message.text, message.reasoning) == ("Two words.", None)
    assert chat.parse(chat.encode_markup("Without marks.<|im_end|>")).text == "Without marks."


def test_what_is_known_or_absent_has_no_frame(tmp_path: Path) -> None:
    for template in (templates.HERMES, templates.OPENS_REASONING, templates.STRIPS_REASONING, templates.IGNORES_TOOLS):
        chat = Chat.from_pretrained(save_tokenizer(tmp_path, QWEN, "<|im_end|>", template))
        assert isinstance(chat.format, TemplateFormat) and not any(chat.format._frames.values())
        assert marks_left(chat) is None


def test_marks_that_stay_are_told(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, MARKED["tokens around text, too"])
    assert isinstance(chat.format, TemplateFormat)
    chat.format._frames = dict.fromkeys((False, True))  # As in a format of a user's own.
    told = marks_left(chat)
    assert told is not None and "'<s>AgentrlReply': the marks stay in the text" in told
    assert "docs/models.md" in told
