"""Text of ids that arrive one by one, which is the text of all of them together."""

from __future__ import annotations

import json
from collections.abc import Mapping

from agentrl.chat.codec import REPLACEMENT, Codec
from agentrl.system.json_value import JSON, as_object

MOST_PIECES = 4
"""Ids that one character is split into at most."""
_PLAIN = frozenset(("ByteLevel", "ByteFallback", "Fuse", "Metaspace"))
"""Decoders that write each token's text by what stands around it at most."""


class Decoding:
    """Decodes ids as they come. Each is decoded a bounded number of times."""

    def __init__(self, codec: Codec) -> None:
        """Needs a codec for which `decodes_in_parts` is True."""
        self._codec = codec
        self._before: list[int] = []
        """The last ids whose text was given: some decoders write a text's first token in another way."""
        self._open: list[int] = []

    @property
    def held(self) -> bool:
        """True while ids have been added whose text was not given: the last ones may be a part of a character."""
        return bool(self._open)

    def add(self, id: int) -> str:
        """Add an id; return more of the text."""
        spelled = self._codec.decode_one(id)
        is_byte = self._codec.is_byte(id)
        text = "" if is_byte or spelled.startswith(REPLACEMENT) else self.end()
        self._open.append(id)
        if not is_byte and not (spelled.endswith(REPLACEMENT) and self._is_part()):
            text += self.end()
        return text

    def end(self) -> str:
        """Return the rest of the text, as if no id followed."""
        if not self._open:
            return ""
        before = self._codec.decode(self._before) if self._before else ""
        text = self._codec.decode([*self._before, *self._open])[len(before) :]
        self._before, self._open = self._open, []
        return text

    def _is_part(self) -> bool:
        """Say whether the open ids may end within a character."""
        return len(self._open) > MOST_PIECES or self._codec.decode(self._open).endswith(REPLACEMENT)


def decodes_in_parts(codec: Codec) -> bool:
    """Say whether later ids change no text of earlier ones, but for characters that are not whole yet."""
    backend = getattr(codec.tokenizer, "backend_tokenizer", None)
    if backend is None:
        return codec.in_parts
    return backend.decoder is not None and _is_plain(as_object(json.loads(backend.decoder.__getstate__())))


def _is_plain(decoder: Mapping[str, JSON]) -> bool:
    """Judge a decoder by its own description."""
    kind, parts = decoder["type"], decoder.get("decoders")
    if isinstance(parts, list):
        return all(_is_plain(as_object(part)) for part in parts)
    if kind == "Strip":
        return decoder["stop"] == 0
    if kind == "Replace":
        replaced = as_object(decoder["pattern"]).get("String")
        return isinstance(replaced, str) and len(replaced) == 1
    return kind in _PLAIN
