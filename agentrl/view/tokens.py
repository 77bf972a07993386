"""Texts and bytes of token ids, by the tokenizer of a run's policy; only `tokenizer.json` is read, and no code run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from agentrl.errors import DataError
from agentrl.system.json_value import JSON
from agentrl.view.folder import Folder

FILE = "tokenizer.json"
MODEL_KEYS = ("actor_rollout_ref.model.path", "model.path")
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
TokenText: TypeAlias = tuple[str, str, bool]
"""Text of the token alone (of bytes that are no text: empty), its bytes as hex, and whether it is a special token."""


class TokenTexts:
    """The vocabulary of a run; without a tokenizer, the ids are shown."""

    def __init__(self, tokenizer: Tokenizer | None, origin: str) -> None:
        """origin: its source, or why there is no tokenizer."""
        self.origin, self._tokenizer = origin, tokenizer
        self._known: dict[int, TokenText] = {}
        self._added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self._is_bytes = tokenizer is not None and "ByteLevel" in str(tokenizer.decoder)

    @property
    def is_known(self) -> bool:
        """True with a tokenizer."""
        return self._tokenizer is not None

    def describe(self, ids: Iterable[int]) -> dict[str, TokenText]:
        """Describe each of the ids once."""
        if self._tokenizer is None:
            return {}
        return {str(id): self._describe(id) for id in set(ids)}

    def text(self, ids: Sequence[int]) -> str:
        """Join the bytes of the tokens to a text; without a tokenizer, write the ids."""
        if self._tokenizer is None:
            return " ".join(f"#{id}" for id in ids)
        return b"".join(bytes.fromhex(self._describe(id)[1]) for id in ids).decode("utf-8", "replace")

    def _describe(self, id: int) -> TokenText:
        if id not in self._known:
            data = self._bytes(id)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = ""
            self._known[id] = (text, data.hex(), id in self._added and bool(self._added[id].special))
        return self._known[id]

    def _bytes(self, id: int) -> bytes:
        assert self._tokenizer is not None
        if id in self._added:
            return str(self._added[id].content).encode("utf-8", "replace")
        token = self._tokenizer.id_to_token(id)
        if token is None:
            return b""
        if self._is_bytes and all(character in BYTES for character in token):
            return bytes(BYTES[character] for character in token)
        byte = BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode("utf-8", "replace")


def _byte_characters() -> dict[str, int]:
    """Return the bytes by the characters that byte-level vocabularies write for them.

    As in GPT-2, printable characters of Latin-1 stand for themselves, the others for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_characters()


def given_tokens(path: Path) -> TokenTexts:
    """Read the tokenizer of a model's folder. Raises DataError for a folder without a tokenizer."""
    if not (path / FILE).is_file():
        raise DataError(f"--tokenizer={path}: want a model's folder with a {FILE}")
    tokens = _load((path / FILE).read_bytes(), str(path / FILE))
    if not tokens.is_known:
        raise DataError(f"--tokenizer={path}: {tokens.origin}")
    return tokens


def find_tokens(folder: Folder, config: Mapping[str, JSON]) -> TokenTexts:
    """Find the tokenizer of the run in `folder`: of its exported policy, or of the model that its config names."""
    named = next((str(config[key]) for key in MODEL_KEYS if config.get(key)), None)
    text = folder.read(f"policy/{FILE}")
    if text is not None:
        return _load(text, f"{folder.url}/policy/{FILE}")
    if named is None:
        return TokenTexts(
            None, f"{folder.url} has no policy/{FILE}, and no config.yaml that names a model; give --tokenizer"
        )
    with suppress(OSError, RuntimeError, ValueError):  # a name too long for a path, or in nobody's home folder
        for path in _places(folder, named):
            if path.is_file():
                return _load(path.read_bytes(), str(path))
    return TokenTexts(None, f"there is no {FILE} of the model {named} on this machine; give --tokenizer")


def _places(folder: Folder, named: str) -> Iterator[Path]:
    """Yield where the tokenizer of a model may be: relative paths were written from the folder a run began in."""
    yield Path(named).expanduser() / FILE
    if folder.is_local and not Path(named).is_absolute():
        for above in Path(folder.path).absolute().parents:
            yield above / named / FILE
    if re.fullmatch(r"[\w.-]+(?:/[\w.-]+)?", named):
        cached = try_to_load_from_cache(named, FILE)
        if isinstance(cached, str):
            yield Path(cached)


def _load(text: bytes, origin: str) -> TokenTexts:
    try:
        return TokenTexts(Tokenizer.from_buffer(text), origin)
    except Exception as error:  # the library raises plain ones
        return TokenTexts(None, f"{origin} cannot be read: {error}")
