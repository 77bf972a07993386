"""Readers of weights that go together, without Ray."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from agentrl.runtime.ray.reading import AHEAD, HELD_FOR, JOIN_WITHIN, LostTurn, Parts, Readers, Turn
from tests.naming import naming

RANKS = 3


class Hands:
    """What one rank hands over: (reading, part), and how often that was gathered."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.begun = 0
        self.made: list[tuple[int, int]] = []
        self.parts = Parts[tuple[int, int]]()

    def gather(self) -> Iterator[tuple[int, int]]:
        self.begun += 1
        reading = self.begun
        for number in range(self.length):
            self.made.append((reading, number))
            yield reading, number

    def part(self, turn: Turn, number: int) -> tuple[int, int] | None:
        return self.parts.part(turn, number, self.gather)


@pytest.mark.parametrize("seed", range(30))
def test_each_part_is_gathered_once_for_all_who_begin_together(seed: int) -> None:
    """Ranks are asked in any order, by readers of any speed; one of the readers dies."""
    rng, now = random.Random(seed), 0.0
    length, names = rng.randrange(1, 9), [f"node/{number}/" for number in range(rng.randrange(2, 6))]
    readers, ranks = Readers(lambda: now), [Hands(length) for _ in range(RANKS)]
    dies = {names[0]: rng.randrange(length + 1)} if rng.random() < 0.5 else {}
    numbers = dict.fromkeys(names, 0)
    to_ask: dict[str, tuple[Turn, list[int]]] = {}
    given: dict[str, list[list[tuple[int, int] | None]]] = {name: [] for name in names}
    while numbers:
        now += 0.001
        name = rng.choice(sorted(numbers))
        if name not in to_ask:
            if dies.get(name) == numbers[name]:
                readers.leave(name)
                del numbers[name]
            elif (turn := readers.turn(name, "policy", numbers[name], len(names))) is not None:
                to_ask[name] = turn, rng.sample(range(RANKS), RANKS)
                given[name].append([])
                assert numbers[name] - min(numbers.values()) <= AHEAD
            continue
        turn, left = to_ask[name]
        given[name][-1].append(ranks[left.pop()].part(turn, numbers[name]))
        if not left:
            del to_ask[name]
            numbers[name] += 1
            if given[name][-1][0] is None:
                readers.leave(name)
                del numbers[name]
    whole = [*[[(1, number)] * RANKS for number in range(length)], [None] * RANKS]
    assert all(given[name] == whole[: dies.get(name, length + 1)] for name in names)
    for rank in ranks:
        assert rank.made == [(1, number) for number in range(length)]
        assert dies or {*rank.parts._kept} == {length}, "nothing is kept that all have taken"


def test_whom_a_reader_waits_for() -> None:
    now = 100.0
    readers = Readers(lambda: now)
    assert readers.turn("a", "policy", 0, 2) is None, "another one is expected"
    now += JOIN_WITHIN / 2
    assert readers.turn("b", "critic", 0, 1) is None, "it reads something else"
    assert readers.turn("b", "policy", 0, 2) == readers.turn("a", "policy", 0, 2) == Turn(1, 0)
    assert readers.turn("a", "policy", AHEAD, 2) == Turn(1, 0)
    assert readers.turn("late", "policy", 0, 1) == Turn(1, 0), "nothing is dropped yet"
    readers.leave("late")
    assert readers.turn("a", "policy", AHEAD + 1, 2) is None, "it is too far ahead"
    now += HELD_FOR / 2
    assert readers.turn("a", "policy", AHEAD + 1, 2) is None
    now += HELD_FOR / 2 + 1
    assert readers.turn("a", "policy", AHEAD + 1, 2) == Turn(1, AHEAD + 1), "b hangs"
    with naming(LostTurn, "330 s"):
        readers.turn("b", "policy", 1, 2)
    assert readers.turn("late", "policy", 0, 1) is None, "what it would begin with is dropped"
    readers.leave("x")
    readers.leave("a")
    assert readers.turn("late", "policy", 0, 2) is None
    now += JOIN_WITHIN
    assert readers.turn("late", "policy", 0, 2) == Turn(2, 0), "who is expected need not come"
    readers.leave()
    with pytest.raises(LostTurn):
        readers.turn("late", "policy", 1, 2)


def test_a_slow_reader_for_whom_nobody_waits_stays() -> None:
    now = 100.0
    readers = Readers(lambda: now)
    assert readers.turn("a", "policy", 0, 1) == Turn(1, 0)
    now += 2 * HELD_FOR
    assert readers.turn("a", "policy", 1, 1) == Turn(1, 1)


def test_a_reader_of_an_older_reading_gets_nothing_of_a_newer_one() -> None:
    rank = Hands(2)
    assert rank.part(Turn(1, 0), 0) == (1, 0)
    assert rank.part(Turn(2, 0), 0) == (2, 0)
    for turn, number in ((Turn(1, 0), 1), (Turn(2, 0), 2)):
        with pytest.raises(LostTurn):
            rank.part(turn, number)
    assert rank.part(Turn(2, 0), 1) == (2, 1)


def test_all_readers_are_told_what_failed() -> None:
    def gather() -> Iterator[int]:
        yield 0
        raise ValueError("a shard is missing")

    parts = Parts[int]()
    for number in (0, 0):
        assert parts.part(Turn(1, 0), number, gather) == 0
    for _ in range(2):
        with pytest.raises(ValueError, match="a shard is missing"):
            parts.part(Turn(1, 0), 1, gather)
