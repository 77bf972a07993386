"""Whatever the text, tokenizer and limit: never longer than the limit, and marked."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agentrl.tool.truncation import Side, Truncation

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
    elif limit >= 60:
        assert len(MARKER.findall(shown)) >= 1


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


def test_a_limit_too_small_for_the_marker_cuts_without_one(tokenizer: Tokenizer) -> None:
    shown, truncated = cut(tokenizer, "aaaa bbbb " * 50, 5, "right")
    assert truncated
    assert "cut" not in shown
    assert shown
    assert "aaaa bbbb ".startswith(shown[:9])


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
