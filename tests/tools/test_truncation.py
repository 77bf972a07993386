"""Whatever the text, tokenizer and limit: never longer than the limit, and marked."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agentrl.system.graphemes import Graphemes, beginning
from agentrl.tool.truncation import SHORT, Side, Truncation

MARKER = re.compile(r"\n\[\.\.\. (\d+) tokens cut \.\.\.\]\n")
TEXTS = st.text(alphabet=st.sampled_from("ab 1\n[.é語\U0001f600\ufffd"), max_size=300) | st.text(
    alphabet=st.characters(exclude_categories=["Cs"]), max_size=200
)


@pytest.fixture(scope="module")
def codec(tokenizer: Tokenizer) -> Tokenizer:
    return tokenizer


def cut(tokenizer: Tokenizer, text: str, limit: int, side: Side) -> tuple[str, bool]:
    return Truncation(lambda part: tokenizer.encode(part).ids, tokenizer.decode, None, side).text(text, limit)


def length(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text).ids)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, limit=st.integers(1, 80), side=st.sampled_from(["left", "right", "middle"]))
@example(text="😀" * 100, limit=31, side="middle")
def test_never_longer_than_the_limit_and_unchanged_when_it_fits(
    codec: Tokenizer, text: str, limit: int, side: Side
) -> None:
    shown, truncated = cut(codec, text, limit, side)
    assert length(codec, shown) <= limit
    assert truncated == (length(codec, text) > limit)
    if not truncated:
        assert shown == text
    else:
        assert any(one in shown for one in (".", *SHORT)), "always a marker"
        assert limit < 60 or MARKER.search(shown)


@pytest.mark.parametrize(
    ("side", "starts", "ends"), [("left", False, True), ("right", True, False), ("middle", True, True)]
)
def test_the_side_that_is_cut_away_and_the_count(tokenizer: Tokenizer, side: Side, starts: bool, ends: bool) -> None:
    text = " ".join(f"w{index}" for index in range(200))
    shown, truncated = cut(tokenizer, text, 120, side)
    assert truncated
    assert (shown.startswith("w0 w1 "), shown.endswith(" w198 w199")) == (starts, ends)
    match = MARKER.search(shown)
    assert match is not None
    before, after = shown[: match.start()], shown[match.end() :]
    assert text.startswith(before)
    assert text.endswith(after)
    kept = length(tokenizer, before) + length(tokenizer, after)
    assert int(match[1]) == length(tokenizer, text) - kept
    assert 120 - 3 <= length(tokenizer, shown) <= 120, "the limit is used"


def test_a_limit_too_small_for_the_number_still_has_a_marker(tokenizer: Tokenizer) -> None:
    shown, truncated = cut(tokenizer, "aaaa bbbb " * 50, 10, "right")
    assert truncated
    assert shown.startswith("aaaa") and shown.endswith("[...]") and length(tokenizer, shown) <= 10


def test_megabytes_are_not_encoded_whole(tokenizer: Tokenizer) -> None:
    text = "a1 b2 c3\n" * 500_000
    seen = 0

    def encode(part: str) -> list[int]:
        nonlocal seen
        seen += len(part)
        return tokenizer.encode(part).ids

    shown, truncated = Truncation(encode, tokenizer.decode, None, "middle").text(text, 100)
    assert truncated
    assert length(tokenizer, shown) <= 100
    assert seen < 50_000
    match = MARKER.search(shown)
    assert match is not None
    sample = text[:90_000]
    assert int(match[1]) == pytest.approx(length(tokenizer, sample) * len(text) / len(sample), rel=0.01)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_a_limit_may_count_characters(side: Side) -> None:
    cut = Truncation.by_characters(None, side)
    assert cut.text("é" * 100, 100) == ("é" * 100, False)
    text, truncated = cut.text("é" * 1000, 100)
    assert truncated
    assert len(text) <= 100
    assert "characters cut" in text


CLUSTERS = [
    "\U0001f469\u200d\U0001f4bb",  # a woman at a computer
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",  # a family
    "\U0001f1e9\U0001f1ea",  # a flag
    "\U0001f44d\U0001f3fd",  # a thumb with a colour
    "e\u0301",
    "\u0915\u093f",
    "\u1112\u1161\u11ab",  # a syllable of Korean, in its letters
    "\r\n",
    "語",
    "a",
    " ",
]
"""Characters that people see as one."""


@settings(max_examples=150, deadline=None)
@given(
    clusters=st.lists(st.sampled_from(CLUSTERS), min_size=1, max_size=80),
    limit=st.integers(1, 120),
    side=st.sampled_from(["left", "right", "middle"]),
    unit=st.sampled_from(["tokens", "characters"]),
)
def test_no_cut_lies_inside_a_character_that_people_see(
    codec: Tokenizer, clusters: list[str], limit: int, side: Side, unit: str
) -> None:
    text = "".join(clusters)
    by_characters = Truncation.by_characters(None, side)
    shown, truncated = by_characters.text(text, limit) if unit == "characters" else cut(codec, text, limit, side)
    if not truncated:
        assert shown == text
        return
    assert len(by_characters.encode(shown) if unit == "characters" else codec.encode(shown).ids) <= limit
    marker = re.search(r"\n\[\.\.\. \d+ \w+ cut \.\.\.\]\n|\[\.\.\.\]|\.+", shown)
    assert marker, "always a marker"
    before, after = shown[: marker.start()], shown[marker.end() :]
    assert text.startswith(before) and text.endswith(after)
    borders = {0, *itertools.accumulate(len(one) for one in clusters)}
    assert len(before) in borders and len(text) - len(after) in borders
    if unit == "characters" and (number := re.search(r"\d+", marker[0])):
        assert int(number[0]) == len(text) - len(before) - len(after)


def test_borders_are_found_in_linear_time() -> None:
    """`regex` alone takes minutes for these flags: it looks back over all of them at each."""
    flags = "\U0001f1e9\U0001f1ea" * 100_000 + "\U0001f1e9"
    borders = Graphemes(flags)
    assert (borders.before(7), borders.after(7), borders.before(len(flags))) == (6, 8, len(flags))
    assert beginning(flags, 7) == flags[:6] and beginning("e\u0301" * 2, 3) == "e\u0301"
    shown, truncated = Truncation.by_characters(None, "middle").text(flags, 1000)
    assert truncated and len(shown) <= 1000 and "characters cut" in shown
