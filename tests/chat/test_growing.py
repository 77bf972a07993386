"""A turn that is still being sampled: what is given of it is what its first tokens, and all of them, are read with."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from agentrl.chat import AssistantMessage, Chat
from agentrl.chat.codec import Codec
from agentrl.chat.decoding import Decoding, decodes_in_parts
from agentrl.chat.formats import growing
from agentrl.chat.formats.frame import Frame
from agentrl.chat.formats.growing import Ends, GrowingTurn
from agentrl.chat.formats.parsers import THINK, THINK_END, CallFormat, CallParser
from agentrl.config.registries import CALL_FORMATS
from agentrl.tool import ToolSchema
from tests.chat.conftest import TEMPLATES
from tests.chat.conversations import TOOLS
from tests.chat.vocabularies import FAMILY_TOKENS, TINY

FEW = settings(max_examples=40, deadline=None)
WORDS = (
    "a",
    " word",
    " ",
    "\n",
    "\n\n",
    "<",
    "</",
    "<t",
    "é",
    "中",
    "\U0001f600",
    "\\",
    "\t\x1c",
    "{",
    '"name"',
    "[f(",
    "x\n",
)
NO_TOOLS: tuple[ToolSchema, ...] = ()
Read = Callable[[Sequence[int]], AssistantMessage]


def formats() -> list[str]:
    return [name for name in CALL_FORMATS.names() if isinstance(CALL_FORMATS.get(name), CallFormat)]


def texts_of(markers: Sequence[str]) -> list[str]:
    return [*WORDS, *markers, *(marker[: len(marker) // 2] for marker in markers), *(marker[:-1] for marker in markers)]


def check(turn: GrowingTurn, read: Read, ids: Sequence[int], cut: Sequence[int] = ()) -> list[int]:
    """Add ids in pieces, and hold all that is given against readings of parts and of the whole."""
    reasoning = text = ""
    clean = []
    for begin, end in zip([0, *cut], [*cut, len(ids)], strict=True):
        if (grown := turn.add(ids[begin:end])) is None:
            continue
        assert grown.reasoning or grown.text
        assert not (grown.reasoning and text), "reasoning is given before text"
        reasoning, text = reasoning + grown.reasoning, text + grown.text
        part = turn.settled(ids[: grown.tokens], read(ids[: grown.tokens]))
        assert (part.reasoning or "", part.text) == (reasoning, text)
        clean.append(grown.tokens)
    whole = turn.settled(ids, read(ids))
    assert (whole.reasoning or "").startswith(reasoning)
    assert whole.text.startswith(text)
    if text:
        assert (whole.reasoning or "") == reasoning
    return clean


def ids_of(data: st.DataObject, codec: Codec, texts: Sequence[str]) -> list[int]:
    """Ids of texts, in which markers are tokens or only spelled, and characters may be cut."""
    ids = list[int]()
    for text in data.draw(st.lists(st.sampled_from(list(texts)), max_size=14)):
        piece = codec.encode(text) if data.draw(st.booleans()) else codec.encode(codec.guard(text))
        ids += piece[: data.draw(st.integers(1, 3))] if data.draw(st.integers(0, 5)) == 0 else piece
    return ids


def cuts(data: st.DataObject, ids: Sequence[int]) -> list[int]:
    if data.draw(st.booleans()):
        return list(range(1, len(ids)))
    return sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=4)))


def turn_of(
    codec: Codec, parser: CallParser, tools: Sequence[ToolSchema], frame: Frame | None = None, **more: Any
) -> tuple[GrowingTurn, Read]:
    def read(ids: Sequence[int], spoken: bool = False) -> AssistantMessage:
        message = parser.parse(ids, tools, spoken=spoken)
        return message if frame is None else frame.strip(message)

    assert parser.marking is not None
    turn = GrowingTurn(
        codec,
        parser.marking,
        Ends(frozenset()),
        partial(read, spoken=True),
        offers_tools=bool(tools),
        frame=frame,
        **{"prompt_opens_reasoning": False, **more},
    )
    return turn, read


@pytest.mark.slice(8, "matrix")
@pytest.mark.parametrize("name", [None, *formats()])
@given(data=st.data())
@FEW
def test_every_format_gives_what_it_reads_in_the_end(name: str | None, data: st.DataObject) -> None:
    format: Any = None if name is None else CALL_FORMATS.get(name)
    marks = (THINK, THINK_END) if format is None else (*format.markers, *format.reasoning, *format.tags)
    begins = () if format is None else format.begins or ()
    are_tokens, starts = data.draw(st.booleans()), data.draw(st.booleans())
    codec = TINY.codec(tuple(dict.fromkeys(marks)) if are_tokens else ("<|other|>",))
    parser = CallParser(codec, format, starts_in_reasoning=starts)
    if parser.marking is None:
        assert format is not None and format.messages is not None
        return
    turn, read = turn_of(
        codec, parser, data.draw(st.sampled_from([TOOLS, NO_TOOLS])), prompt_opens_reasoning=data.draw(st.booleans())
    )
    ids = ids_of(data, codec, [*texts_of(marks), *begins])
    check(turn, read, ids, cuts(data, ids))


@pytest.mark.slice(8, "matrix")
@pytest.mark.parametrize("name", [*FAMILY_TOKENS, *TEMPLATES])
@given(data=st.data())
@settings(FEW, max_examples=25)
def test_every_family_and_template_gives_what_it_reads_in_the_end(
    make_chat: Callable[..., Chat], name: str, data: st.DataObject
) -> None:
    chat = make_chat(name)
    tools = data.draw(st.sampled_from([TOOLS, None]))
    turn = chat.growing(data.draw(st.sampled_from([chat.encode("a"), chat.encode_markup("a<think>\n")])), tools)
    if turn is None:
        assert name in ("harmony", "inkling"), "turns made of messages are read when they have ended"
        return
    codec = chat._codec
    ids = ids_of(data, codec, texts_of([*codec.added, "<tool_call>", "</tool_call>", THINK, THINK_END]))
    ids += data.draw(st.sampled_from([[], [chat.stop_token_ids[0]], [*chat.format.tail, chat.stop_token_ids[-1]]]))
    check(turn, lambda some: chat.parse(some, tools), ids, cuts(data, ids))


@given(data=st.data())
@settings(FEW, max_examples=100)
def test_marks_around_a_turn_are_taken_off_as_they_come(data: st.DataObject) -> None:
    words = st.sampled_from(["", "=", "==", "A: ", "| ", " |", "end\n.", "thought", "x"])
    frame = Frame(data.draw(words).lstrip(), *(data.draw(words).strip() for _ in range(3)))
    codec = TINY.codec((THINK, THINK_END))
    format: Any = data.draw(st.sampled_from([None, CALL_FORMATS.get("hermes"), CALL_FORMATS.get("llama3_json")]))
    turn, read = turn_of(codec, CallParser(codec, format, starts_in_reasoning=False), TOOLS, frame)
    marks = [mark for mark in (frame.before, frame.after, frame.opens, frame.closes) if mark]
    ids = ids_of(data, codec, [*texts_of([*marks, THINK, THINK_END]), "\n"])
    check(turn, read, ids, cuts(data, ids))


@given(data=st.data())
@FEW
def test_a_text_is_given_up_to_a_stop_text(data: st.DataObject) -> None:
    stop = data.draw(st.lists(st.sampled_from(["ab", "b", "abc", "\n#", "STOP"]), min_size=1, max_size=3))
    codec = TINY.codec((THINK, THINK_END))
    turn, _ = turn_of(codec, CallParser(codec, None, starts_in_reasoning=False), (), stop=stop)
    text = "".join(data.draw(st.lists(st.sampled_from(["a", "b", "c", "\n", "#", "x", "STO", "P"]), max_size=20)))
    given_ = "".join(grown.text for id in codec.encode(text) if (grown := turn.add([id])) is not None)
    first = min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))
    assert text[:first].startswith(given_)
    if not any(char.isspace() or char in "abS#" for char in text[:first]):
        assert given_ == text[:first]


def given_of(chat: Chat, text: str, prompt: str = "", tools: Any = TOOLS) -> list[tuple[str, str]]:
    turn = chat.growing(chat.encode_markup(prompt), tools)
    assert turn is not None
    grown = (turn.add([id]) for id in chat.encode_markup(text))
    return [(one.reasoning, one.text) for one in grown if one is not None]


def test_words_are_given_as_they_come_and_calls_at_the_end(make_chat: Callable[..., Chat]) -> None:
    parts = given_of(
        make_chat("hermes"), '<think>\nHm, a.\n</think>\n\nThe city is\n\nnice <tool_call>{"name": 1}</tool_call>'
    )
    reasoning, text = ("".join(part) for part in zip(*parts, strict=True))
    assert (reasoning, text) == ("Hm, a.", "The city is\n\nnice")
    assert len(parts) > 6, "token by token"


def test_text_behind_a_prompt_that_opens_no_reasoning_is_not_held_for_a_marker_that_closes_some(
    make_chat: Callable[..., Chat],
) -> None:
    chat = make_chat("hermes")
    assert "".join(text for _, text in given_of(chat, "The city is nice")) == "The city is nice"
    # Behind a prompt that opens some, both are possible until a marker comes.
    assert given_of(chat, "The city is nice", "<|im_start|>assistant\n<think>\n") == []
    assert "".join(said for said, _ in given_of(chat, "The city</think>", "assistant\n<think>\n")) == "The city"
    turn = chat.growing(chat.encode("a"), TOOLS)
    ids = chat.encode_markup("The city</think>is")
    assert turn is not None and turn.add(ids[:3]) is not None
    turn.add(ids[3:])
    assert turn.settled(ids, chat.parse(ids, TOOLS)) == AssistantMessage("The city</think>is")


def test_half_a_character_is_held(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("hermes")
    ids = chat.encode("\U0001f600")
    assert len(ids) == 4
    turn = chat.growing([], None)
    assert turn is not None
    assert [turn.add([id]) for id in ids[:-1]] == [None] * 3
    assert turn.add(ids[-1:]) == (4, "", "\U0001f600")


class Counting:
    """A codec that counts the ids that it decodes."""

    def __init__(self, codec: Codec) -> None:
        self._codec, self.decoded = codec, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return self._codec.decode(ids)


def lines_of(call: Callable[[], object]) -> int:
    """Number of lines of the reader that a call runs."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if event == "call":
            return trace if frame.f_code.co_filename.endswith(("growing.py", "decoding.py")) else None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def longest_text(value: object) -> int:
    """Length of the longest text that the reader copies with each id; lists of texts only grow."""
    if isinstance(value, str):
        return len(value)
    slots = [*vars(value).values()] if type(value).__module__ == growing.__name__ and hasattr(value, "__dict__") else []
    return max(map(longest_text, slots), default=0)


@pytest.mark.slice(6, "hostile")
@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "\n",
        " ",
        "<",
        "<tool_call>",
        "</think>",
        "<think>",
        "\U0001f600",
        "<tool",
        "{",
        "x\n",
        "</think><tool_call>",
    ],
)
@pytest.mark.parametrize("spelled", [True, False])
def test_hostile_turns_are_read_in_linear_time(piece: str, spelled: bool) -> None:
    """Lines that run and ids that are decoded grow as the turn does, and no text that is copied at each id grows."""
    plain = TINY.codec(("<|other|>",) if spelled else (THINK, THINK_END, "<tool_call>", "</tool_call>"))
    for name in ("hermes", "llama3_json"):
        found = []
        for count in (100, 600):
            codec: Any = Counting(plain)
            format: Any = CALL_FORMATS.get(name)
            turn, _ = turn_of(codec, CallParser(codec, format, starts_in_reasoning=False), TOOLS)
            ids = [*codec.encode("a"), *codec.encode(piece)[:1] * count, *codec.encode(piece) * count]
            codec.decoded = 0
            lines = lines_of(partial(turn.add, ids))
            assert longest_text(turn) < 40
            found.append((codec.decoded + lines) / len(ids))
        assert found[1] < 1.1 * found[0] + 1, found


def sentencepiece() -> Codec:
    """A vocabulary as Llama 2's: words begin with a mark for their blank, and characters it lacks are bytes."""
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *("\u2581", "\u2581a", "b", "\u2581\u2581", "c\u2581d", "\n"),
    ]
    tokenizer = Tokenizer(BPE({word: id for id, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Codec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<unk>"))


@pytest.mark.parametrize("kind", ["bytes of characters", "marks for blanks"])
def test_text_of_ids_that_arrive_one_by_one_is_the_text_of_all(kind: str) -> None:
    codec = TINY.codec((THINK, THINK_END)) if kind == "bytes of characters" else sentencepiece()
    assert decodes_in_parts(codec)
    numbers = random.Random(1)
    size = len(codec.tokenizer)
    for _ in range(500):
        # Bytes of one character behind one another, among others.
        ids = [size - 1 - min(int(numbers.expovariate(0.02)), size - 1) for _ in range(numbers.randrange(1, 12))]
        ids += codec.encode(numbers.choice(["é", "中a", "\U0001f600 ", "a b"]))[: numbers.randrange(1, 5)]
        numbers.shuffle(ids) if numbers.random() < 0.5 else None
        decoding = Decoding(codec)
        said = "".join(map(decoding.add, ids))
        assert codec.decode(ids).startswith(said)
        assert said + decoding.end() == codec.decode(ids)
