"""Text to token ids and back, with control tokens kept apart from text that only spells them.

`guard` puts a noncharacter after the first character of every added token's spelling in untrusted text. Then `encode`
never sees the whole spelling: it encodes the pieces on both sides apart and drops the noncharacter. So the ids are
ordinary text, and decoding gives the text back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.errors import ConfigError
from agentrl.system.json_value import map_texts
from agentrl.system.threads import LONG_TEXT

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding, Tokenizer
    from tokenizers.normalizers import Normalizer

T = TypeVar("T")
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
GUARD = "\ufdd0"
"""A Unicode noncharacter, which text for interchange never contains."""
UNENCODABLE = re.compile(f"[\ud800-\udfff{GUARD}]")
REPLACEMENT = "\ufffd"
CACHED_LENGTH = 48
"""Longest text in characters whose ids are remembered: the text around every turn's contents is made of such."""
PIECE = 4096
"""Ids that are decoded at once, about 1 ms: the backend keeps the interpreter's lock so long."""
LOSSLESS = frozenset(("NFC", "NFKC", "NFD", "NFKD", "Lowercase", "Prepend", "Replace"))
"""Normalizers of text that drop no character but blanks (`Replace` is used for them)."""
MOST_COMPOSED = 4
"""Most characters that Unicode's canonical composition makes one of."""


def _any_of(spellings: Iterable[str]) -> str:
    return "|".join(re.escape(text) for text in sorted(spellings, key=len, reverse=True)) or r"(?!)"


def starts_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """Compile the pattern of the first character of every spelling, for `Codec.guard`."""
    return re.compile(f"(?=(?:{_any_of(spellings)}))(.)", re.DOTALL)


def without_guards(value: T) -> T:
    """Take the guards out of every text of a value: the inverse of `Codec.guard_values`."""
    return map_texts(value, lambda text: text.replace(GUARD, ""))


class Codec:
    """Encodes with a Hugging Face tokenizer, without its post-processing (no BOS or EOS is added).

    The tokenizer is Any: transformers declares unions of strings, ids and lists where each call here gives one of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        added = tokenizer.added_tokens_decoder
        # Runs of blanks are added tokens in some vocabularies, but no control tokens; one character cannot be split.
        self.added: dict[str, int] = {
            str(token): id for id, token in added.items() if len(str(token)) > 1 and not str(token).isspace()
        }
        self.added_ids = frozenset(self.added.values())
        self.special = frozenset(text for text, id in self.added.items() if added[id].special)
        """Added tokens that the tokenizer calls special."""
        spellings = _any_of(self.added)
        self._starts = starts_of(self.added)
        self._spelled = re.compile(f"({spellings})")
        prefixes = sorted({text[:2] for text in self.added})
        self._prefix = re.compile("|".join(map(re.escape, prefixes)) or r"(?!)")
        """Finds the beginning of a spelling, much faster than `_starts` finds the whole of one."""
        self._encode_short = lru_cache(maxsize=8192)(self._encode_whole)
        self._normalizer = (
            getattr(self._backend, "normalizer", None) if any(t.normalized for t in added.values()) else None
        )
        self._anchor = (len(self._encode_whole("\n")), "\n")
        self.decode_one = lru_cache(maxsize=4096)(lambda id: self.decode([id]))
        """Decodes one token; parsers of the `renderers` package go token by token."""
        self.in_parts = self._may_encode_in_parts(added.values())
        """True where the text between two added tokens has the same ids alone as in place."""
        self.is_byte = lru_cache(maxsize=4096)(lambda id: _BYTE.fullmatch(self._token(id)) is not None)
        """True for a token that stands for one byte of a character that the vocabulary lacks."""

    def _token(self, id: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(id))

    def guard(self, text: str, starts: re.Pattern[str] | None = None) -> str:
        """Break the spelling of every added token in `text`; with `starts`, of the tokens that it was made of."""
        starts = starts or self._starts
        if not text.isascii():
            text = self.encodable(text)
        if self._prefix.search(text):
            text = starts.sub(rf"\1{GUARD}", text)
        # Normalising may make a spelling of text that held no spelling, e.g. of full-width letters.
        if self._normalizer is not None and starts.search(normal := self._normalizer.normalize_str(text)):
            text = starts.sub(rf"\1{GUARD}", normal)
        return text

    def guard_values(self, value: T) -> T:
        """Break the spellings in every text of a message or of a list of tools, keys included."""
        return map_texts(value, self.guard)

    def encodable(self, text: str) -> str:
        """Replace lone surrogates and the guard character by U+FFFD."""
        return text if text.isascii() else UNENCODABLE.sub(REPLACEMENT, text)

    def split(self, text: str) -> list[str]:
        """Split into text, control token, text, ..., text; the odd places are control tokens for `encode`."""
        return self._spelled.split(text)

    def encode(self, text: str) -> list[int]:
        """Encode rendered text: spellings of added tokens become those tokens, except where guarded."""
        if not self.in_parts:  # The tokenizer looks beyond a part, e.g. puts a blank before the first word of a text.
            if self._backend is not None:
                return self.offsets(text)[0]
            return [id for piece in text.split(GUARD) for id in self._encode_whole(piece)]
        ids: list[int] = []
        for index, part in enumerate(self.split(text)):
            if index % 2:
                ids.append(self.added[part])
            elif GUARD in part:
                for piece in part.split(GUARD):
                    ids += self._encode_plain(piece)
            elif part:
                ids += self._encode_plain(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, control tokens included."""
        if self._backend is None:
            return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if len(ids) <= PIECE or not self.in_parts:
            return self._backend.decode(ids, skip_special_tokens=False)
        return "".join(self._decode_pieces(self._backend, ids))

    def _decode_pieces(self, backend: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
        """Decode about PIECE ids at a time, each piece cut before a token that begins with a whole character."""
        begin = 0
        while begin < len(ids):
            end = min(begin + PIECE, len(ids))
            while end < len(ids) and self.decode_one(ids[end]).startswith(REPLACEMENT):
                end += 1
            yield backend.decode(ids[begin:end], skip_special_tokens=False)
            begin = end

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text: those that the model's generation config names, and the tokenizer's EOS as the last.

        Servers and `generate` stop at each of them, whatever the chat template writes.
        """
        named, eos = _named_ends(self.tokenizer.name_or_path), self.tokenizer.eos_token_id
        return (*(id for id in named if id in self.added_ids and id != eos), *(() if eos is None else (eos,)))

    @cached_property
    def longest_token(self) -> int | None:
        """Number of characters, blanks left out, that one token stands for at most; None where text may be dropped."""
        if self._backend is None:
            return None
        from tokenizers.pre_tokenizers import ByteLevel

        model, normalizer, vocabulary = self._backend.model, self._backend.normalizer, self.tokenizer.get_vocab()
        if type(model).__name__ not in ("BPE", "Unigram") or not _is_lossless(normalizer):
            return None
        if not model.byte_fallback and not vocabulary.keys() >= set(ByteLevel.alphabet()):
            return None  # Characters that the vocabulary lacks are dropped, or one token for many of them.
        longest = max(map(len, vocabulary))
        return longest if normalizer is None else longest * MOST_COMPOSED

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode, and find each token's span of characters. Raises NotImplementedError for slow tokenizers."""
        if self._backend is None:
            raise NotImplementedError("a tokenizer without a backend has no character offsets")
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        start = 0
        for piece in text.split(GUARD):
            skip, before = self._anchor if start and not self.in_parts else (0, "")
            encoding = self._encoding(self._backend, before + piece)
            ids += encoding.ids[skip:]
            shift = start - len(before)
            spans += [(shift + begin, shift + end) for begin, end in encoding.offsets[skip:]]
            start += len(piece) + len(GUARD)
        return ids, spans

    def _encode_plain(self, text: str) -> Sequence[int]:
        return self._encode_short(text) if len(text) <= CACHED_LENGTH else self._encode_whole(text)

    def _encode_whole(self, text: str) -> tuple[int, ...]:
        if self._backend is not None:
            return tuple(self._encoding(self._backend, text).ids)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _encoding(self, backend: Tokenizer, text: str) -> Encoding:
        if len(text) < LONG_TEXT:  # A batch is encoded without the interpreter's lock.
            return backend.encode(text, add_special_tokens=False)
        return backend.encode_batch([text], add_special_tokens=False)[0]

    def _may_encode_in_parts(self, added: Iterable[AddedToken]) -> bool:
        """True when the text between two added tokens has the same ids alone as in place."""
        if any(token.lstrip or token.rstrip or token.single_word for token in added):
            return False
        if self._normalizer is not None:
            return False
        text, token = "user\nab c 1", next(iter(self.added), "")
        alone = self._encode_whole(text)
        whole = self._encode_whole(text + token + text + token + " " + text)
        ids = [self.added[token]] if token else []
        parts = [*alone, *ids, *alone, *ids, *self._encode_whole(" " + text)]
        return list(whole) == parts and self.decode([*alone, *alone]) == text + text


def _named_ends(path: str) -> list[int]:
    """Read the ends that the generation config of the model at `path` names; none where it has no such file.

    Raises ConfigError where the file cannot be read.
    """
    from transformers.utils.hub import cached_file

    absent = ("missing_entries", "gated_repo", "connection_errors")
    try:
        file = cached_file(
            path, "generation_config.json", **{f"_raise_exceptions_for_{kind}": False for kind in absent}
        )
    except OSError:  # The name is none of the hub's.
        return []
    if file is None:
        return []
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        # A file that was made of config.json may name the default of a class of models, whose vocabulary is another.
        ends = None if found.get("_from_model_config") else found.get("eos_token_id")
        return [int(id) for id in (ends if isinstance(ends, list) else [] if ends is None else [ends])]
    except (OSError, ValueError, TypeError, AttributeError) as fault:
        raise ConfigError(f"{file}: expected JSON whose eos_token_id is an id or a list of ids: {fault}") from fault


def _is_lossless(normalizer: Normalizer | None) -> bool:
    if type(normalizer).__name__ == "Sequence":
        parts: Any = normalizer
        return all(_is_lossless(parts[index]) for index in range(len(parts)))
    return normalizer is None or type(normalizer).__name__ in LOSSLESS


class RendererTokenizer:
    """Gives the `renderers` package the tokenizer that it expects, from a `Codec`."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.name_or_path: str = codec.tokenizer.name_or_path
        self.unk_token_id: int | None = codec.tokenizer.unk_token_id
        self.eos_token_id: int | None = codec.tokenizer.eos_token_id

    def encode(self, text: str, *_: object, **__: object) -> list[int]:
        return self._codec.encode(text)

    def decode(self, ids: Sequence[int], *_: object, **__: object) -> str:
        return self._codec.decode(ids) if len(ids) != 1 else self._codec.decode_one(ids[0])

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int]:
        ids: int | list[int] = self._codec.tokenizer.convert_tokens_to_ids(tokens)
        return ids


class OffsetTokenizer(RendererTokenizer):
    """A RendererTokenizer with character offsets, which only some renderers need and which make them slower."""

    def __call__(self, text: str, **_: object) -> dict[str, Sequence[object]]:
        ids, spans = self._codec.offsets(text)
        return {"input_ids": ids, "offset_mapping": spans}
