from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.agent_loop import ReactLoop, SearchR1Loop
from agentrl.chat.formats.parsers import CallFormat
from agentrl.config.registries import CALL_FORMATS
from agentrl.observe.excerpt import Piece, Reading, cut, headline, pieces
from agentrl.system.visible import visible
from agentrl.trajectory import Status, ToolAnswer, ToolCallRecord, Trajectory
from tests.trajectory.written import Writer, decode, tool_trajectory


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", "␛[2J␛]0;title␇"),
        ("a\rb\r\nc\td", "a␍b\nc   d"),
        ("\x7f\x9b31m", "␡\\x9b31m"),
        ("\u202eabc\u200b\ufeff", "\\u202eabc\\u200b\\ufeff"),
        ("\udc80 \U000e0041", "\\udc80 \\ue0041"),
        ("ünï 漢字 😀 a\u00a0b", "ünï 漢字 😀 a\u00a0b"),
    ],
)
def test_what_a_terminal_would_obey_is_spelled_out(raw: str, shown: str) -> None:
    assert visible(raw) == shown


@given(st.text(st.characters(codec=None)))
def test_no_control_character_is_left(text: str) -> None:
    left = {unicodedata.category(character) for character in visible(text) if character != "\n"}
    assert not left & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def shown_by(name: str) -> re.Pattern[str]:
    format = CALL_FORMATS.get(name)
    assert isinstance(format, CallFormat) and format.shown is not None
    return format.shown


def kinds(trajectory: Trajectory, calls: re.Pattern[str] | None = None) -> list[tuple[str, str]]:
    reading = Reading(decode, {trajectory.agent_name: calls or shown_by("hermes")})
    return [(piece.kind, piece.text) for piece in pieces(trajectory, 0, reading)]


def test_pieces_follow_mask_and_turns() -> None:
    assert kinds(tool_trajectory()) == [
        ("prompt", "What is 17*3?"),
        ("call", '<tool_call>{"name": "calculator"}</tool_call>'),
        ("tool", "51"),
        ("policy", "It is 51."),
    ]


def test_observed_tokens_are_told_apart_by_their_turn() -> None:
    writer = Writer("p").says("a").hears("b", "user").says("c")
    writer.transcript.append_observed([ord("!")])
    assert kinds(writer.ends(0.0)) == [
        ("prompt", "p"),
        ("policy", "a"),
        ("user", "b"),
        ("policy", "c"),
        ("template", "!"),
    ]


def test_a_tool_that_writes_like_the_policy_stays_a_tool() -> None:
    trajectory = Writer("p").says("a").hears("<tool_call>{}</tool_call>").ends(0.0)
    assert kinds(trajectory)[-1] == ("tool", "<tool_call>{}</tool_call>")


@pytest.mark.parametrize(
    ("calls", "call"),
    [
        (shown_by("hermes"), '<tool_call>\n{"name": "f"}\n</tool_call>'),
        (shown_by("glm"), "<tool_call>f, never closed"),
        (shown_by("qwen3_coder"), "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>"),
        (shown_by("minimax"), '<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>'),
        (shown_by("mistral"), '[TOOL_CALLS][{"name": "f"}]'),
        (
            shown_by("deepseek_v3"),
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (shown_by("kimi"), "<|tool_calls_section_begin|>f<|tool_calls_section_end|>"),
        (ReactLoop.calls, "Action: f[1 + 1]\n"),
        (SearchR1Loop().calls, "<search>a query</search>"),
    ],
)
def test_calls_are_found_as_formats_and_loops_write_them(calls: re.Pattern[str], call: str) -> None:
    trajectory = Writer("p").says(f"I think.\n{call}").ends(0.0)
    assert kinds(trajectory, calls)[1:] == [("policy", "I think.\n"), ("call", call)]


def test_a_call_in_an_unknown_format_is_found_by_the_tools_name() -> None:
    record = ToolCallRecord("lookup", {"x": 1}, ToolAnswer("y"))
    trajectory = Writer("p").says("So:\n@@lookup{x: 1}", record).says("nothing").ends(0.0)
    assert kinds(trajectory)[1:] == [
        ("policy", "So:\n"),
        ("call", "@@lookup{x: 1}"),
        ("policy", "nothing"),
    ]


def test_two_calls_in_one_message() -> None:
    trajectory = Writer("p").says("<tool_call>1</tool_call> and <tool_call>2</tool_call>.").ends(0.0)
    assert [kind for kind, _ in kinds(trajectory)[1:]] == ["call", "policy", "call", "policy"]


def test_pieces_are_whole_and_safe() -> None:
    trajectory = Writer("p\x1b[0m").says("a\x07").hears("\x1b[31m").ends(0.0)
    assert pieces(trajectory, 0, Reading(decode)) == [
        Piece("prompt", "p␛[0m"),
        Piece("policy", "a␇"),
        Piece("tool", "␛[31m"),
    ]


def test_headline_tells_how_it_ended() -> None:
    assert headline(tool_trajectory()) == (
        "quickstart/calculator · tool_agent · completed · score 1 · turn rewards 0.5 · turns 2 · calls 1 · "
        "54 tokens sampled"
    )
    failed = Writer("p").ends(None, Status.FAILED, "EngineError: \x1b[2Jgone\nfor good")
    assert "failed · EngineError: ␛[2Jgone for good · turns 0" in headline(failed)


def test_cut_keeps_both_ends_and_counts_the_rest() -> None:
    lines = [str(number) for number in range(10)]
    assert cut(lines, 10) == lines
    assert cut(lines, 5) == ["0", "1", "… 6 lines not shown …", "8", "9"]
    assert all(len(cut(lines, limit)) == limit for limit in range(1, 10))
