"""Truncation of texts to a number of tokens, with a marker where something is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]
Side = Literal["left", "right", "middle"]
"""Part of a long text that is cut away."""

_WINDOW = 32
"""Characters a kept token that are looked at, at either end: a text of megabytes is not encoded whole."""


def truncate(text: str, limit: int, side: Side, encode: Encode, decode: Decode) -> tuple[str, bool]:
    """Fit a text into `limit` tokens: (text, was it cut). The marker counts towards the limit and says how many are
    missing.

    A limit too small for the marker (it may take half) gives a cut text without one. For texts much longer than the
    limit the marker's count is an estimate.
    """
    if text.isascii() and len(text) < limit:
        return text, False  # a token is at least one character; `<` leaves room for a tokenizer's dummy prefix
    window = _WINDOW * limit
    if len(text) <= 2 * window:
        head = tail = encode(text)
        total = len(head)
        if total <= limit:
            return text, False
    else:
        head, tail = encode(text[:window]), encode(text[-window:])
        total = round(len(text) / (2 * window) * (len(head) + len(tail)))

    def build(keep: int, marked: bool) -> str:
        first = {"left": 0, "right": keep, "middle": (keep + 1) // 2}[side]
        last = keep - first
        marker = f"\n[... {total - keep} tokens cut ...]\n" if marked else ""
        # A cut inside a character of several tokens decodes to replacement characters.
        start = decode(head[:first]).rstrip("\ufffd")
        return start + marker + (decode(tail[len(tail) - last :]).lstrip("\ufffd") if last else "")

    marker_length = len(encode(build(0, True)))
    marked = 2 * marker_length <= limit
    keep = min(limit - marker_length if marked else limit, len(head), len(tail))
    while keep > 0:
        # Tokens may join or split differently beside the marker, so the length is measured, not computed.
        shown = build(keep, marked)
        excess = len(encode(shown)) - limit
        if excess <= 0:
            return shown, True
        keep -= excess
    return "", True
