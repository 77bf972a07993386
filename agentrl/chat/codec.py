"""Text to token ids and back, with control tokens kept apart from text that only spells them.

`guard` puts a noncharacter behind the first character of every added token's spelling in untrusted text. `encode`
never sees the spelling whole then: the pieces on both sides are encoded apart and the noncharacter is dropped, so the
ids are those of ordinary text, and decoding gives the text back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

GUARD = "\ufdd0"
"""A Unicode noncharacter, which text for interchange never contains."""
UNENCODABLE = re.compile(f"[\ud800-\udfff{GUARD}]")
REPLACEMENT = "\ufffd"
CACHED_LENGTH = 48
"""Longest text in characters whose ids are remembered: the text around every turn's contents is made of such."""


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
        spellings = "|".join(re.escape(text) for text in sorted(self.added, key=len, reverse=True)) or r"(?!)"
        self._starts = re.compile(f"(?=(?:{spellings}))(.)", re.DOTALL)
        self._spelled = re.compile(f"({spellings})")
        self._prefixes = tuple({text[:2] for text in self.added})
        self._encode_short = lru_cache(maxsize=8192)(self._encode_whole)
        self._normalizer = (
            getattr(self._backend, "normalizer", None) if any(t.normalized for t in added.values()) else None
        )
        self._anchor = (len(self._encode_whole("\n")), "\n")
        self.decode_one = lru_cache(maxsize=4096)(lambda id: self.decode([id]))
        """Decodes one token; parsers of the `renderers` package go token by token."""
        self._in_parts = self._may_encode_in_parts(added.values())

    def guard(self, text: str) -> str:
        """Break the spelling of every added token in `text`."""
        text = self.encodable(text)
        if any(prefix in text for prefix in self._prefixes):
            text = self._starts.sub(rf"\1{GUARD}", text)
        if self._normalizer is not None and self._spelled.search(normal := self._normalizer.normalize_str(text)):
            text = self._starts.sub(rf"\1{GUARD}", normal)
        return text

    def encodable(self, text: str) -> str:
        """Replace lone surrogates and the guard character by U+FFFD."""
        return text if text.isascii() else UNENCODABLE.sub(REPLACEMENT, text)

    def split(self, text: str) -> list[str]:
        """Split into text, control token, text, ..., text; the odd places are control tokens for `encode`."""
        return self._spelled.split(text)

    def encode(self, text: str) -> list[int]:
        """Encode rendered text: spellings of added tokens become those tokens, except where guarded."""
        if not self._in_parts:
            return self._encode_in_context(text)
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
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=False)
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode, and find each token's span of characters. Raises NotImplementedError for slow tokenizers."""
        if self._backend is None:
            raise NotImplementedError("a tokenizer without a backend has no character offsets")
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        start = 0
        for piece in text.split(GUARD):
            skip, before = self._anchor if start and not self._in_parts else (0, "")
            encoding = self._backend.encode(before + piece, add_special_tokens=False)
            ids += encoding.ids[skip:]
            shift = start - len(before)
            spans += [(shift + begin, shift + end) for begin, end in encoding.offsets[skip:]]
            start += len(piece) + len(GUARD)
        return ids, spans

    def _encode_plain(self, text: str) -> Sequence[int]:
        return self._encode_short(text) if len(text) <= CACHED_LENGTH else self._encode_whole(text)

    def _encode_whole(self, text: str) -> tuple[int, ...]:
        if self._backend is not None:
            return tuple(self._backend.encode(text, add_special_tokens=False).ids)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _encode_in_context(self, text: str) -> list[int]:
        """Encode with a tokenizer that looks beyond a part, e.g. puts a blank before the first word of a text."""
        if self._backend is not None:
            return self.offsets(text)[0]
        return [id for piece in text.split(GUARD) for id in self._encode_whole(piece)]

    def _may_encode_in_parts(self, added: Any) -> bool:
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


class RendererTokenizer:
    """Gives the `renderers` package the tokenizer that it expects, from a `Codec`."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.name_or_path: str = codec.tokenizer.name_or_path
        self.unk_token_id: int | None = codec.tokenizer.unk_token_id
        self.eos_token_id: int | None = codec.tokenizer.eos_token_id

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._codec.encode(text)

    def decode(self, ids: Any, *_: Any, **__: Any) -> str:
        return self._codec.decode(ids) if len(ids) != 1 else self._codec.decode_one(ids[0])

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._codec.tokenizer.convert_tokens_to_ids(tokens)


class OffsetTokenizer(RendererTokenizer):
    """A RendererTokenizer with character offsets, which only some renderers need and which make them slower."""

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        ids, spans = self._codec.offsets(text)
        return {"input_ids": ids, "offset_mapping": spans}
