"""One chat for each family and template, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import Chat
from tests.chat import templates
from tests.chat.vocabularies import FAMILY_TOKENS, GLM, HARMONY, LLAMA, QWEN, save_tokenizer

MISTRAL_TOKENS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
TEMPLATES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "hermes": (templates.HERMES, QWEN, "<|im_end|>"),
    "hermes_in_text": (templates.HERMES, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|endoftext|>"),
    "coder": (templates.CODER, QWEN, "<|im_end|>"),
    "strips_reasoning": (templates.STRIPS_REASONING, QWEN, "<|im_end|>"),
    "opens_reasoning": (templates.OPENS_REASONING, QWEN, "<|im_end|>"),
    "llama": (templates.LLAMA, LLAMA, "<|end_of_text|>"),
    "mistral": (templates.MISTRAL, MISTRAL_TOKENS, "</s>"),
    "mistral_args": (templates.MISTRAL_ARGS, (*MISTRAL_TOKENS, "[ARGS]", "[CALL_ID]"), "</s>"),
    "always_lists_tools": (templates.ALWAYS_LISTS_TOOLS, QWEN, "<|im_end|>"),
    "history_without_reasoning": (templates.HISTORY_WITHOUT_REASONING, QWEN, "<|im_end|>"),
    "harmony": (templates.HARMONY, HARMONY, "<|return|>"),
    "header_ends_turn": (templates.HEADER_ENDS_TURN, GLM, "<|endoftext|>"),
}


@pytest.fixture(scope="session")
def make_chat(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Chat]:
    """A chat by family or by the name of one of TEMPLATES, with keyword arguments of `Chat.from_pretrained`."""
    made: dict[str, Chat] = {}

    def directory(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        if name in TEMPLATES:
            template, tokens, eos = TEMPLATES[name]
            save_tokenizer(path, tokens, eos, template)
        else:
            save_tokenizer(path, *FAMILY_TOKENS[name])
        return path

    def make(name: str, **options: Any) -> Chat:
        key = f"{name} {sorted(options.items(), key=str)}"
        if key not in made:
            made[key] = Chat.from_pretrained(
                str(directory(name)), **{"format": "auto" if name in TEMPLATES else name, **options}
            )
        return made[key]

    return make
