"""The start-up check fails before the first step when tools, parser and template do not fit together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.chat import Chat
from agentrl.chat.check import start_up_check, training_check
from agentrl.errors import ConfigError
from agentrl.trajectory import Message
from tests.chat import templates
from tests.chat.conftest import TEMPLATES
from tests.chat.conversations import TOOLS
from tests.chat.test_injection import sentencepiece_like
from tests.chat.vocabularies import FAMILY_TOKENS, QWEN, save_tokenizer
from tests.naming import assert_names, naming

QUESTION: list[Message] = [{"role": "user", "content": "What is 2 + 3?"}]
NO_TOOLS = ("deepseek-v3", "deepseek-r1")
"""Their templates write no tools."""


@pytest.mark.parametrize("name", [*(name for name in FAMILY_TOKENS if name not in NO_TOOLS), *TEMPLATES])
def test_formats_that_fit(make_chat: Callable[..., Chat], name: str) -> None:
    text = start_up_check(make_chat(name), QUESTION, TOOLS)
    assert "What is 2 + 3?" in text
    assert "calculator" in text


@pytest.mark.parametrize("name", NO_TOOLS)
def test_families_without_tools(make_chat: Callable[..., Chat], name: str) -> None:
    with naming(ConfigError, "['calculator', 'now']"):
        start_up_check(make_chat(name), QUESTION, TOOLS)
    assert "What is 2 + 3?" in start_up_check(make_chat(name), QUESTION, None)


def chat_of(path: Path, template: str, format: str, eos: str | None = "<|im_end|>") -> Chat:
    return Chat.from_pretrained(save_tokenizer(path, QWEN, eos, template), format=format)


def test_template_that_ignores_tools(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, templates.IGNORES_TOOLS, "hermes")
    with naming(ConfigError, "['calculator', 'now']"):
        start_up_check(chat, QUESTION, TOOLS)
    assert start_up_check(chat, QUESTION, None) == "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"


def test_no_parser(tmp_path: Path) -> None:
    with naming(ConfigError, "template:hermes", "no tool"):
        start_up_check(chat_of(tmp_path, templates.HERMES, "template:none"), QUESTION, TOOLS)


def test_calls_that_no_format_reads(tmp_path: Path) -> None:
    """The message shows how the template writes a call, and names no format that would not fit either."""
    own = templates.HERMES.replace("<tool_call>", "<fn>").replace("</tool_call>", "</fn>")
    with pytest.raises(ConfigError, match=r"seems to write a call as '.*<fn>\\n{\"name\": \"calculator\",") as told:
        start_up_check(chat_of(tmp_path, own, "auto"), QUESTION, TOOLS)
    assert_names(told.value, "docs/models.md")
    assert "hermes" not in str(told.value)
    for without, said in (
        (templates.IGNORES_TOOLS, "no tool calls"),
        ("{%- if messages[-1].tool_calls %}{{- raise_exception('no') }}{%- endif %}" + own, "refuses"),
    ):
        with naming(ConfigError, said, "agent_name"):
            start_up_check(chat_of(tmp_path, without, "none"), QUESTION, TOOLS)


@pytest.mark.parametrize("format", ["qwen3_coder", "glm", "mistral", "llama3_json"])
def test_wrong_parser(tmp_path: Path, format: str) -> None:
    with naming(ConfigError, "multi_turn.format", "template:hermes"):
        start_up_check(chat_of(tmp_path, templates.HERMES, format), QUESTION, TOOLS)


def test_a_format_whose_signs_a_template_has_but_not_its_calls(tmp_path: Path) -> None:
    """`auto` chooses hermes by `<tool_call>`; no format reads what stands there, and the message names no other."""
    own = templates.HERMES.replace('{"name": "\'', "call \"'")
    with naming(ConfigError, "<tool_call>\\ncall") as told:
        start_up_check(chat_of(tmp_path, own, "auto"), QUESTION, TOOLS)
    assert_names(told.value, "docs/models.md")
    assert "Set multi_turn.format to" not in str(told.value)


USERS_FIRST = """\
{%- for message in messages if message.role != 'assistant' %}{{- '<|im_start|>' + message.content + '<|im_end|>' }}
{%- endfor %}
{%- for message in messages if message.role == 'assistant' %}{{- message.content + '<|im_end|>' }}{%- endfor %}
"""


def test_template_that_writes_users_elsewhere(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, USERS_FIRST, "none")
    with naming(ConfigError, "assistant", "user"):
        start_up_check(chat, QUESTION, None)
    with pytest.raises(ConfigError, match=r"loses text: message 2 .* role 'user'"):
        training_check(chat, None, calls=False)


def test_template_that_drops_tool_answers(tmp_path: Path) -> None:
    chat = chat_of(
        tmp_path, templates.HERMES.replace("message.role == 'tool'", "message.role == 'observation'"), "auto"
    )
    start_up_check(chat, QUESTION, None)
    training_check(chat, TOOLS, calls=False)
    with naming(ConfigError, "assistant", "tool"):
        start_up_check(chat, QUESTION, TOOLS)
    for tools in (TOOLS, None):
        with pytest.raises(ConfigError, match=r"loses text: message 2 .* role 'tool'"):
            training_check(chat, tools, calls=True)


def test_template_that_drops_calls_teaches_no_empty_turns(tmp_path: Path) -> None:
    """The turn would be its end alone, as of SmolLM2's own template. Conversations without calls are learnt."""
    plain = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    plain += "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    chat = chat_of(tmp_path, plain, "auto")
    training_check(chat, None, calls=False)
    for tools in (TOOLS, None):
        with pytest.raises(ConfigError, match=r"loses tool calls: .*model\.chat_template"):
            training_check(chat, tools, calls=True)


def test_tokenizer_that_looks_beyond_a_part(tmp_path: Path) -> None:
    chat = Chat.from_pretrained(sentencepiece_like(tmp_path))
    start_up_check(chat, QUESTION, TOOLS)
    training_check(chat, TOOLS, calls=True)


def test_reasoning_that_only_the_policy_can_write(tmp_path: Path) -> None:
    never = templates.OPENS_REASONING.replace("message.reasoning_content is defined", "false")
    chat = chat_of(tmp_path, never, "hermes")
    start_up_check(chat, QUESTION, None)
    with pytest.raises(ConfigError, match="reasoning_content"):
        training_check(chat, None, calls=False)


@pytest.mark.parametrize("name", [*sorted(set(FAMILY_TOKENS) - {"deepseek-r1"}), *TEMPLATES])
def test_formats_that_fit_for_supervised_training(make_chat: Callable[..., Chat], name: str) -> None:
    if name == "history_without_reasoning":  # No message could show the reasoning that its generation prompt begins.
        with pytest.raises(ConfigError, match="reasoning_content"):
            training_check(make_chat(name), None, calls=False)
        return
    training_check(make_chat(name), None, calls=False)
    training_check(make_chat(name), TOOLS, calls=True)


def test_no_stop_token(tmp_path: Path) -> None:
    endless = templates.IGNORES_TOOLS.replace("<|im_end|>\\n", "").replace("<|im_start|>", "")
    chat = chat_of(tmp_path, endless, "none", eos=None)
    assert chat.stop_token_ids == ()
    with naming(ConfigError, "eos_token"):
        start_up_check(chat, QUESTION, None)


ROUNDS = templates.IGNORES_TOOLS.replace(
    "message.content +",
    "('[Round ' + (loop.index0 // 2 + 1) | string + '] ' if message.role == 'user' else '') + message.content +",
)
"""Numbers the questions, as ChatGLM's templates do."""


def test_a_template_that_numbers_turns_is_refused(tmp_path: Path) -> None:
    """A turn is written behind the one before, whatever stands before that."""
    chat = chat_of(tmp_path, ROUNDS, "none")
    for check in (lambda: start_up_check(chat, QUESTION, None), lambda: training_check(chat, None, calls=False)):
        with pytest.raises(ConfigError, match=r"would stand .*\[Round 2\] AgentrlLast.* a render .*\[Round 3\] Agen"):
            check()
