"""How tool answers are cut: to a number of tokens, always with a marker where something is missing.

All shortening of the policy's input is here: texts, texts with images, and tokens that no budget is left for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.system.graphemes import Graphemes
from agentrl.trajectory import PlacedImage
from agentrl.trajectory.picture import Picture

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]
Side = Literal["left", "right", "middle"]
"""Part of a long text that is cut away."""
Unit = Literal["tokens", "characters"]
"""Unit in which the answers of tools are measured."""

NOT_SHOWN = "\n[{} images left out: only text can be shown]"
BUDGET_MARKER = "\n[cut: the token budget is used up]"
SHORT = ("[...]", "...")
"""Markers for limits that are too small for a number."""
_WINDOW = 32
"""Characters a kept token that are looked at, at either end: a text of megabytes is not encoded whole."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Cuts the answers of tools to a number of tokens, as `encode` counts them."""

    encode: Encode
    """Takes special-token text as plain text."""
    decode: Decode
    image_tokens: Callable[[Picture], int] | None
    """Number of tokens that stand for an image; None: the model takes no images."""
    side: Side
    unit: Unit = "tokens"

    @staticmethod
    def by_characters(image_tokens: Callable[[Picture], int] | None, side: Side) -> Truncation:
        """Make a truncation that measures in characters, and does not count images."""
        return Truncation(
            lambda text: list(map(ord, text)),
            lambda ids: "".join(map(chr, ids)),
            None if image_tokens is None else lambda _: 0,
            side,
            "characters",
        )

    def text(self, text: str, limit: int) -> tuple[str, bool]:
        """Truncate `text` to `limit` tokens, as text that any tokenizer takes: (text, was it cut).

        A cut text always has a marker, which counts towards the limit. It says how many are missing where that takes at
        most half of the limit; else it is the longest of SHORT that does, and in the smallest limits a part of it. For
        texts much longer than the limit the number is an estimate. No cut lies inside a grapheme cluster, as far as
        tokens decode to their own part of the text.
        """
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode()  # lone surrogates
        if text.isascii() and len(text) < limit:
            return text, False  # a token is at least one character; `<` leaves room for a tokenizer's dummy prefix
        window = _WINDOW * limit
        if len(text) <= 2 * window:
            head = tail = self.encode(text)
            total = len(head)
            if total <= limit:
                return text, False
        else:
            head, tail = self.encode(text[:window]), self.encode(text[-window:])
            total = round(len(text) / (2 * window) * (len(head) + len(tail)))
        beginning = self.decode(head)
        ending = beginning if tail is head else self.decode(tail)
        of_beginning = Graphemes(beginning)
        of_ending = of_beginning if tail is head else Graphemes(ending)

        def marker(missing: int) -> str:
            return f"\n[... {missing} {self.unit} cut ...]\n"

        def build(keep: int) -> str:
            first = {"left": 0, "right": keep, "middle": (keep + 1) // 2}[self.side]
            last = keep - first
            # A cut inside a character of several tokens decodes to replacement characters.
            start = shown = self.decode(head[:first]).rstrip("\ufffd")
            if beginning.startswith(start):
                start = start[: of_beginning.before(len(start))]
            end = kept = self.decode(tail[len(tail) - last :]).lstrip("\ufffd") if last else ""
            if ending.endswith(end):
                end = ending[of_ending.after(len(ending) - len(end)) :]
            if (start, end) != (shown, kept):
                keep = len(self.encode(start)) + len(self.encode(end))
            return start + (short or marker(total - keep)) + end

        short = ""
        if 2 * len(self.encode(marker(total))) > limit:
            lengths = {one: len(self.encode(one)) for one in SHORT}
            short = next((one for one in SHORT if 2 * lengths[one] <= limit), SHORT[-1])
            if lengths[short] > limit:
                return self.decode(self.encode(short)[:limit]), True
        keep = min(limit - len(self.encode(short or marker(total))), len(head), len(tail))
        while True:
            # Tokens may join or split differently next to the marker, so the length is measured, not computed.
            shown = build(keep)
            excess = len(self.encode(shown)) - limit
            if excess <= 0 or not keep:
                return shown, True
            keep = max(keep - excess, 0)

    def with_images(
        self, text: str, pictures: Sequence[Picture], limit: int, *, images: bool = True
    ) -> tuple[str, list[Picture], bool]:
        """Fit a tool answer into `limit` tokens, images first, then text: (text, kept images, was anything cut).

        A note says which images were left out; without `images` all are.
        """
        assert self.image_tokens is not None
        shown, used, notes = [], 0, ""
        if not images:
            pictures, notes = [], NOT_SHOWN.format(len(pictures))
        for number, picture in enumerate(pictures, 1):
            tokens = self.image_tokens(picture)
            if used + tokens <= limit:
                shown.append(picture)
                used += tokens
            else:
                notes += f"\n[image {number} left out: it has {tokens} tokens, and {limit - used} were left]"
        room = limit - used
        notes = self.text(notes, room)[0] if notes and room else ""
        room -= len(self.encode(notes))
        kept, truncated = self.text(text, room) if room > 0 else ("", bool(text))
        return kept + notes, shown, truncated or len(shown) < len(pictures) or bool(notes)


def fit_budget(
    ids: list[int], images: Sequence[PlacedImage], text: str, budget: int, encode: Encode
) -> tuple[list[int], Sequence[PlacedImage], str, bool]:
    """Fit observed tokens into the rest of a trajectory's budget: (ids, images, text, was anything cut).

    ids: at most `budget` of them are kept, the marker's included. images: placed in `ids`; an image that does not fit
    whole is left out with all that follows it. text: the text of `ids`, plus the marker when they are cut.
    """
    if len(ids) <= budget:
        return ids, images, text, False
    marker = encode(BUDGET_MARKER)[:budget]
    room = budget - len(marker)
    end = min([room, *(one.start for one in images if one.start + one.image.tokens > room)])
    # Kept in part: the policy sees that something is missing, and the record shows what it saw.
    return ids[:end] + marker, [one for one in images if one.start < end], text + BUDGET_MARKER, True
