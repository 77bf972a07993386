"""Texts of rows, models, tools and runs as they are safe to show on a terminal."""

from __future__ import annotations

import sys
import unicodedata

_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def visible(text: str) -> str:
    """`text` with every control, format, surrogate or unassigned character but newline and tab spelled out.

    ESC becomes U+241B and so on (the Unicode control pictures); others become `\\x9b` or `\\u202e`.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible_character, text.replace("\r\n", "\n"))).expandtabs(4)


def complain(error: object) -> int:
    """Print an error, which may quote a row or a run of somebody else's; return a command's exit status for it."""
    print(visible(f"error: {error}"), file=sys.stderr)
    return 2


def _visible_character(character: str) -> str:
    if character.isprintable() or character in "\n\t" or unicodedata.category(character) not in _INVISIBLE:
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
