"""The tiny policy: any text, numbers told digit by digit, a template that never changes what it has rendered."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from agentrl.quickstart.tiny_policy import MARKER_TOKENS, TinyShape, make_tiny_policy

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Look up a fact.\nMore about it.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "k": {"type": "integer"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "search", "arguments": {"query": "age of Žofie"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How old is Žofie?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "41"},
    {"role": "assistant", "content": "#### 41"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    return loaded


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    assert isinstance(text, str)
    return text


def test_weights_depend_on_the_seed_only(directory: Path, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    again, other = make_tiny_policy(tmp_path / "again", seed=1), make_tiny_policy(tmp_path / "other", seed=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = "model.safetensors"
    assert (again / weights).read_bytes() == (directory / weights).read_bytes()
    assert (other / weights).read_bytes() != (directory / weights).read_bytes()


def test_model_loads_with_a_row_for_every_token(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.model_type == "qwen3"
    assert model.get_input_embeddings().weight.shape == (len(tokenizer), 96)
    assert len(tokenizer) <= TinyShape().vocab
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000
    assert model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


@given(st.text(max_size=60))
def test_any_text_can_be_written(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text, split_special_tokens=True).input_ids) == text


@pytest.mark.parametrize("text", ["expression 1776+42", "(1776)", '"1776"', "#### 1776"])
def test_a_number_has_the_same_tokens_wherever_it_stands(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    tokens = [str(tokenizer.decode([token])) for token in tokenizer(text).input_ids]
    start = tokens.index("1")
    assert tokens[start : start + 4] == ["1", "7", "7", "6"]


def test_a_name_has_the_same_tokens_in_a_sentence_and_in_quotes(tokenizer: PreTrainedTokenizerBase) -> None:
    name = tokenizer("Zorvex").input_ids
    for text in ("the age of Zorvex", '"Zorvex'):
        assert tokenizer(text).input_ids[-len(name) :] == name


@pytest.mark.parametrize("marker", [*MARKER_TOKENS, "<|im_start|>", "<|im_end|>"])
def test_markers_are_single_tokens(tokenizer: PreTrainedTokenizerBase, marker: str) -> None:
    assert len(tokenizer(marker).input_ids) == 1


def test_tools_are_one_line_each(tokenizer: PreTrainedTokenizerBase) -> None:
    text = rendered(tokenizer, TALK[:2], tools=TOOLS, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.\nsearch(query: string, k: integer) - Look up a fact. More about it.\n"
        "<|im_end|>\n<|im_start|>user\nHow old is Žofie?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_calls_and_answers_are_written_as_hermes_does(tokenizer: PreTrainedTokenizerBase) -> None:
    as_text = {"type": "function", "function": {"name": "search", "arguments": json.dumps({"query": "x"})}}
    messages = [{"role": "assistant", "content": "So:", "tool_calls": [CALL, as_text]}, *[TALK[3]] * 2]
    assert rendered(tokenizer, messages) == (
        '<|im_start|>assistant\nSo:\n<tool_call>\n{"name": "search", "arguments": {"query": "age of Žofie"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n41\n</tool_response>\n<tool_response>\n41\n</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_adding_messages_never_changes_what_was_rendered(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None
) -> None:
    for count in range(2, len(TALK)):
        short = rendered(tokenizer, TALK[:count], tools=tools)
        assert rendered(tokenizer, TALK, tools=tools).startswith(short)
        if TALK[count]["role"] == "assistant":
            prompt = rendered(tokenizer, TALK[:count], tools=tools, add_generation_prompt=True)
            assert rendered(tokenizer, TALK, tools=tools).startswith(prompt)
