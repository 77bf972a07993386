"""What a trajectory was answered is given again to the one that asks the same, and to no other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import pytest

from agentrl.system.call_journal import CallJournal, Codec, Diverged, Entry, Kind, OnResume, answered, as_json
from tests.naming import naming

TEXTS: Codec[str] = Codec(as_json, json.loads)


class World:
    """What is asked; it counts, and is killed when `dies` is reached."""

    def __init__(self, entries: list[Entry], dies: int = 99, **on_resume: OnResume) -> None:
        self.entries, self.asked, self.dies, self.why = entries, list[str](), dies, list[str]()
        self.on_resume = on_resume

    def journal(self) -> CallJournal:
        recorded = live(self.entries)
        return CallJournal("t", self.entries.append, recorded, self.on_resume, self.why.append)

    def perform(self, what: str) -> Callable[[], Awaitable[str]]:
        async def work() -> str:
            self.asked.append(what)
            if len(self.asked) > self.dies:
                raise KeyboardInterrupt
            await asyncio.sleep(0)
            return f"{what}!"

        return work

    async def tool(self, journal: CallJournal, what: str, who: str = "tool", says: str = "") -> str:
        return await answered(journal, who, "execute", {"what": what}, self.perform(says or what), TEXTS)

    async def turn(self, journal: CallJournal, what: str) -> str:
        return await journal.call("engine", what, self.perform(what), TEXTS, strict=True)


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


async def two_turns(world: World, journal: CallJournal) -> list[str]:
    said = [await world.turn(journal, "one")]
    said += await asyncio.gather(world.tool(journal, "a"), world.tool(journal, "a"), world.tool(journal, "b"))
    return [*said, await world.turn(journal, "two")]


@pytest.mark.parametrize("dies", range(6))
def test_killed_anywhere_only_what_was_not_answered_is_asked_again(dies: int) -> None:
    entries: list[Entry] = []
    first = World(entries, dies)
    with suppress(KeyboardInterrupt):
        asyncio.run(two_turns(first, first.journal()))
    done = sum(one.kind is Kind.ANSWERED for one in entries)
    second = World(entries)
    assert asyncio.run(two_turns(second, second.journal())) == ["one!", "a!", "a!", "b!", "two!"]
    assert len(second.asked) == 5 - done and not second.why
    third = World(entries)
    assert asyncio.run(two_turns(third, third.journal()))[0] == "one!" and not third.asked


def test_what_is_asked_otherwise_is_a_mismatch_as_long_as_answers_are_left() -> None:
    entries: list[Entry] = []
    world = World(entries)

    async def turns(journal: CallJournal, *whats: str) -> None:
        for what in whats:
            await world.turn(journal, what)

    asyncio.run(turns(world.journal(), "one", "two"))
    journal = world.journal()
    with naming(Diverged, "asked otherwise"):
        asyncio.run(turns(journal, "one", "three"))
    with pytest.raises(Diverged):  # also where a loop caught it
        asyncio.run(world.tool(journal, "a"))
    journal.restart(journal.mismatch or "")
    asyncio.run(turns(journal, "one"))
    assert world.asked == ["one", "two", "one"], "it begins anew"
    asyncio.run(turns(world.journal(), "one", "three"))
    assert world.asked[3:] == ["three"], "what was written before it began anew counts no more"


@pytest.mark.parametrize(
    "on_resume, is_answered, why",
    [("none", True, "tool keeps a state"), ("none", False, "tool keeps"), ("calls", False, "made and not answered")],
)
def test_sessions_that_cannot_come_back_restart(on_resume: OnResume, is_answered: bool, why: str) -> None:
    entries: list[Entry] = []
    first = World(entries, 2 if is_answered else 1, tool=on_resume)

    async def both(world: World, journal: CallJournal) -> None:
        await world.turn(journal, "one")
        await world.tool(journal, "a")

    try:
        asyncio.run(both(first, first.journal()))
    except KeyboardInterrupt:
        assert not is_answered
    second = World(entries, tool=on_resume)
    asyncio.run(both(second, second.journal()))
    assert second.asked == ["one", "a"]
    (said,) = second.why
    assert why in said


@pytest.mark.parametrize("says", ["a", "other"])
def test_calls_are_made_again_and_must_be_answered_the_same(says: str) -> None:
    entries: list[Entry] = []
    first = World(entries, tool="calls")
    asyncio.run(first.tool(first.journal(), "a"))
    second = World(entries, tool="calls")
    journal = second.journal()
    if says == "a":
        assert asyncio.run(second.tool(journal, "a")) == "a!" and journal.mismatch is None
    else:
        with naming(Diverged, "answers otherwise"):
            asyncio.run(second.tool(journal, "a", says=says))
    assert second.asked == [says]


def test_a_call_that_was_not_made_before_is_a_mismatch_where_calls_are_made_again() -> None:
    entries: list[Entry] = []
    first = World(entries, tool="calls")
    asyncio.run(first.tool(first.journal(), "a"))
    for word in ("calls", "answers"):
        on_resume: OnResume = "calls" if word == "calls" else "answers"
        second = World(list(entries), tool=on_resume)
        journal = second.journal()
        if word == "answers":
            assert asyncio.run(second.tool(journal, "b")) == "b!"
        else:
            with pytest.raises(Diverged):
                asyncio.run(second.tool(journal, "b"))


def test_tries_that_failed_are_not_made_again() -> None:
    entries: list[Entry] = []
    world = World(entries)
    journal = world.journal()
    asyncio.run(world.turn(journal, "one"))
    journal.stop()
    asyncio.run(world.tool(journal, "closing"))
    journal.failed("EngineError")
    asyncio.run(world.turn(journal, "of the second try"))
    again = world.journal()
    assert again.causes == ["EngineError"]
    before = len(world.asked)
    asyncio.run(world.turn(again, "of the second try"))
    assert len(world.asked) == before
    assert not any(one.key and one.kind is Kind.BEGUN for one in entries), "its end is not taken down"


def test_an_answer_without_a_form_begins_anew() -> None:
    entries: list[Entry] = []
    world = World(entries)
    journal = world.journal()
    asyncio.run(world.turn(journal, "one"))
    odd: Codec[object] = Codec(as_json, json.loads)

    async def perform() -> object:
        return object()

    asyncio.run(answered(journal, "tool", "execute", {(1, 2): {3}}, perform, odd))
    asyncio.run(world.turn(journal, "two"))
    assert live(entries) == []


class NoNumber:
    """Value such as a tensor of two elements."""

    def __float__(self) -> float:
        raise RuntimeError("a tensor with 2 elements is no scalar")


def test_a_value_that_is_no_number_has_no_form() -> None:
    with pytest.raises(TypeError, match="no form in JSON"):
        as_json({"value": NoNumber()})
