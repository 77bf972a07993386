"""What a trajectory was answered is given again to the one that asks the same, and to no other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import pytest

from agentrl.system.answers import AfterKill, Answers, Codec, Diverged, Entry, Kind, answered, as_json

TEXTS: Codec[str] = Codec(as_json, json.loads)


class World:
    """What is asked; it counts, and is killed when `dies` is reached."""

    def __init__(self, entries: list[Entry], dies: int = 99, **after_kill: AfterKill) -> None:
        self.entries, self.asked, self.dies, self.why = entries, list[str](), dies, list[str]()
        self.after_kill = after_kill

    def answers(self) -> Answers:
        recorded = live(self.entries)
        return Answers("t", self.entries.append, recorded, self.after_kill, self.why.append)

    def perform(self, what: str) -> Callable[[], Awaitable[str]]:
        async def work() -> str:
            self.asked.append(what)
            if len(self.asked) > self.dies:
                raise KeyboardInterrupt
            await asyncio.sleep(0)
            return f"{what}!"

        return work

    async def tool(self, answers: Answers, what: str, who: str = "tool", says: str = "") -> str:
        return await answered(answers, who, "execute", {"what": what}, self.perform(says or what), TEXTS)

    async def turn(self, answers: Answers, what: str) -> str:
        return await answers.of("engine", what, self.perform(what), TEXTS, strict=True)


def live(entries: Iterable[Entry]) -> list[Entry]:
    """As the journal keeps them: an answer takes its call's place, and what was forgotten is gone."""
    found: dict[tuple[str, int], Entry] = {}
    for one in entries:
        if one.kind is Kind.ANEW:
            found.clear()
        else:
            if one.kind is Kind.FAILED:
                found = {call: its for call, its in found.items() if its.kind is Kind.FAILED}
            found[one.key, one.nth] = one
    return list(found.values())


async def two_turns(world: World, answers: Answers) -> list[str]:
    said = [await world.turn(answers, "one")]
    said += await asyncio.gather(world.tool(answers, "a"), world.tool(answers, "a"), world.tool(answers, "b"))
    return [*said, await world.turn(answers, "two")]


@pytest.mark.parametrize("dies", range(6))
def test_killed_anywhere_only_what_was_not_answered_is_asked_again(dies: int) -> None:
    entries: list[Entry] = []
    first = World(entries, dies)
    with suppress(KeyboardInterrupt):
        asyncio.run(two_turns(first, first.answers()))
    done = sum(one.kind is Kind.ANSWERED for one in entries)
    second = World(entries)
    assert asyncio.run(two_turns(second, second.answers())) == ["one!", "a!", "a!", "b!", "two!"]
    assert len(second.asked) == 5 - done and not second.why
    third = World(entries)
    assert asyncio.run(two_turns(third, third.answers()))[0] == "one!" and not third.asked


def test_what_is_asked_otherwise_is_a_mismatch_as_long_as_answers_are_left() -> None:
    entries: list[Entry] = []
    world = World(entries)

    async def turns(answers: Answers, *whats: str) -> None:
        for what in whats:
            await world.turn(answers, what)

    asyncio.run(turns(world.answers(), "one", "two"))
    answers = world.answers()
    with pytest.raises(Diverged, match="engine is asked otherwise"):
        asyncio.run(turns(answers, "one", "three"))
    with pytest.raises(Diverged):  # also where a loop caught it
        asyncio.run(world.tool(answers, "a"))
    answers.begin_anew(answers.mismatch or "")
    asyncio.run(turns(answers, "one"))
    assert world.asked == ["one", "two", "one"], "it begins anew"
    asyncio.run(turns(world.answers(), "one", "three"))
    assert world.asked[3:] == ["three"], "what was written before it began anew counts no more"


@pytest.mark.parametrize(
    "after_kill, is_answered, why",
    [("none", True, "tool keeps a state"), ("none", False, "tool keeps"), ("calls", False, "made and not answered")],
)
def test_sessions_that_cannot_come_back_begin_anew(after_kill: AfterKill, is_answered: bool, why: str) -> None:
    entries: list[Entry] = []
    first = World(entries, 2 if is_answered else 1, tool=after_kill)

    async def both(world: World, answers: Answers) -> None:
        await world.turn(answers, "one")
        await world.tool(answers, "a")

    try:
        asyncio.run(both(first, first.answers()))
    except KeyboardInterrupt:
        assert not is_answered
    second = World(entries, tool=after_kill)
    asyncio.run(both(second, second.answers()))
    assert second.asked == ["one", "a"]
    (said,) = second.why
    assert why in said


@pytest.mark.parametrize("says", ["a", "other"])
def test_calls_are_made_again_and_must_be_answered_the_same(says: str) -> None:
    entries: list[Entry] = []
    first = World(entries, tool="calls")
    asyncio.run(first.tool(first.answers(), "a"))
    second = World(entries, tool="calls")
    answers = second.answers()
    if says == "a":
        assert asyncio.run(second.tool(answers, "a")) == "a!" and answers.mismatch is None
    else:
        with pytest.raises(Diverged, match="tool answers otherwise"):
            asyncio.run(second.tool(answers, "a", says=says))
    assert second.asked == [says]


def test_a_call_that_was_not_made_before_is_a_mismatch_where_calls_are_made_again() -> None:
    entries: list[Entry] = []
    first = World(entries, tool="calls")
    asyncio.run(first.tool(first.answers(), "a"))
    for word in ("calls", "answers"):
        after_kill: AfterKill = "calls" if word == "calls" else "answers"
        second = World(list(entries), tool=after_kill)
        answers = second.answers()
        if word == "answers":
            assert asyncio.run(second.tool(answers, "b")) == "b!"
        else:
            with pytest.raises(Diverged):
                asyncio.run(second.tool(answers, "b"))


def test_tries_that_failed_are_not_made_again() -> None:
    entries: list[Entry] = []
    world = World(entries)
    answers = world.answers()
    asyncio.run(world.turn(answers, "one"))
    answers.stop()
    asyncio.run(world.tool(answers, "closing"))
    answers.failed("EngineError")
    asyncio.run(world.turn(answers, "of the second try"))
    again = world.answers()
    assert again.causes == ["EngineError"]
    before = len(world.asked)
    asyncio.run(world.turn(again, "of the second try"))
    assert len(world.asked) == before
    assert not any(one.key and one.kind is Kind.BEGUN for one in entries), "its end is not taken down"


def test_an_answer_without_a_form_begins_anew() -> None:
    entries: list[Entry] = []
    world = World(entries)
    answers = world.answers()
    asyncio.run(world.turn(answers, "one"))
    odd: Codec[object] = Codec(as_json, json.loads)

    async def perform() -> object:
        return object()

    asyncio.run(answered(answers, "tool", "execute", {(1, 2): {3}}, perform, odd))
    asyncio.run(world.turn(answers, "two"))
    assert live(entries) == []
