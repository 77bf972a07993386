"""A tiny policy made from nothing: a byte-level tokenizer, a compact chat template and a small Qwen3-shaped model.

It is small enough to learn tool use on two CPU cores, and any text can be written with it, so tests use it too. Its
chat template shows each tool as one line, because the full JSON schemas cost hundreds of tokens at this vocabulary. It
is prefix-stable: rendered text never changes when messages are added.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKER_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHAT_TEMPLATE = """\
{%- set has_system = messages and messages[0]['role'] == 'system' %}
{%- if tools or has_system %}
    {{- '<|im_start|>system\\n' }}
    {%- if has_system %}{{- messages[0]['content'] + '\\n' }}{%- endif %}
    {%- for tool in tools or [] %}
        {%- set function = tool['function'] %}
        {{- function['name'] + '(' }}
        {%- for name, spec in function['parameters']['properties'] | items %}
            {{- (', ' if not loop.first else '') + name + ': ' + (spec['type'] or 'any') | string }}
        {%- endfor %}
        {{- ')' }}
        {%- if function['description'] %}{{- ' - ' + (function['description'] | replace('\\n', ' ')) }}{%- endif %}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set turn = namespace(last='') %}
{%- for message in messages %}
    {%- set role = message['role'] %}
    {%- if turn.last == 'tool' and role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- if role == 'tool' %}
        {{- ('' if turn.last == 'tool' else '<|im_start|>user')
            + '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
    {%- elif role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message['content'] or '') }}
        {%- for call in message['tool_calls'] or [] %}
            {%- set arguments = call['function']['arguments'] %}
            {{- ('\\n' if message['content'] or not loop.first else '')
                + '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": '
                + (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif role != 'system' or not loop.first %}
        {{- '<|im_start|>' + role + '\\n' + message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
    {%- set turn.last = role %}
{%- endfor %}
{%- if turn.last == 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Keys are looked up as `message['role']`, which costs a sandboxed template a fraction of what `message.role` does."""

PLAIN_ENGLISH = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did "
    "Natalia sell altogether in April and May?\nNatalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips "
    "altogether in April and May.\n#### 72",
    "What is the total of 12 apples and 30 oranges, if each one costs $3? Use the tools, then answer after ####.",
    "Error: the tool could not be called. Expected an argument of type string. Try again with a valid call.",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "48/2"}}\n</tool_call>',
    "system\nuser\nassistant\nYou are a helpful assistant.\nassistant\nuser\nsystem\nassistant\nuser\n",
    '<tool_call>\n{"name": "search", "arguments": {"query": "the name of the city"}}\n</tool_call>',
)
"""Text from which a tokenizer learns its merges when there is no other."""


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Sizes of a Qwen3 model; heads are 32 wide and embeddings are tied."""

    vocab: int = 512
    """The most that the tokenizer may have; the model has a row for each entry it does have."""
    hidden: int = 96
    layers: int = 2
    heads: int = 3
    kv_heads: int = 3
    intermediate: int = 288
    max_length: int = 4096


def make_tiny_policy(directory: str | Path, seed: int, *, shape: TinyShape | None = None) -> Path:
    """Write a random policy with its tokenizer to `directory` in Hugging Face format. Takes about a second."""
    shape = shape or TinyShape()
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(PLAIN_ENGLISH, shape.vocab)
    tokenizer.save_pretrained(directory)
    build_model(tokenizer, shape, seed).save_pretrained(directory)
    return directory


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE of at most `vocab_size` entries, chat and tool markers included.

    Every digit is a token, and so are all 256 bytes: any text can be encoded, and a number has the same tokens
    wherever it stands. Capitalised words never swallow the space before them, so that a name has the same tokens in
    a sentence and inside a quoted argument.
    """
    tokenizer = Tokenizer(BPE())
    words = Split(Regex(r"\d|[A-Z][a-z]*| ?[a-z]+| ?[^\s\w]+|\s+|\w"), behavior="isolated")
    tokenizer.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(MARKER_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        special_tokens=list(CONTROL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Ordinary added tokens, as in Qwen's vocabularies: one id each, but kept when special tokens are skipped.
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKER_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def build_model(tokenizer: PreTrainedTokenizerBase, shape: TinyShape, seed: int) -> PreTrainedModel:
    """Build a float32 Qwen3 model with weights drawn from `seed`; the global random state is left as it was."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=32,
        max_position_embeddings=shape.max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
