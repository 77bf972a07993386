"""Environments as interactions: of gymnasium and plain classes, through the real loop, each in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentrl.errors import CodeError, ConfigError, DataError
from agentrl.interaction import Interaction
from agentrl.observe.invariants import check_trajectory
from agentrl.system.threads import AbandonedThreads
from agentrl.trajectory import Status
from interactions import environment
from interactions.environment import EnvironmentInteraction
from tests.agent_loop.conftest import Bench, sample
from tests.naming import Names, assert_names, naming

MakeBench = Callable[..., Bench]
LAKE = {
    "gymnasium_id": "FrozenLake-v1",
    "kwargs": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
    "render": f"{__name__}.place",
}


def place(observation: int, lake: Any) -> str:
    return f"row {observation // 4}, column {observation % 4} of {lake.unwrapped.desc.shape[0]}"


class Guess:
    """Guess a number. Tells which threads called it and how often it was closed."""

    made: list[Guess] = []

    def __init__(self, highest: int = 9) -> None:
        self.highest = highest
        self.threads = [threading.current_thread()]
        self.closed = 0
        self.blocked = threading.Event()
        self.made.append(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.threads.append(threading.current_thread())
        self.number = int(np.random.default_rng(seed).integers(self.highest)) + (options or {}).get("more", 0)
        return f"Guess from 0 to {self.highest}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.threads.append(threading.current_thread())
        if action == "hang":
            self.blocked.wait(60)
        if action == "raise":
            raise ZeroDivisionError("in step")
        right = action == str(self.number)
        return f"It is not {action}.", 1.0 if right else -0.1, right, False, {}

    def close(self) -> None:
        self.threads.append(threading.current_thread())
        self.closed += 1


def shout(text: str, guess: Guess) -> str:
    if not text.endswith("!"):
        raise ValueError(f"shout at {type(guess).__name__}")
    return text.removesuffix("!")


class Silent:
    """No close, no action space, and numbers for observations."""

    def reset(self, **_: Any) -> tuple[int, dict[str, Any]]:
        return 7, {}

    def step(self, action: str) -> tuple[int, int, bool, bool, dict[str, Any]]:
        return 8, 0, False, True, {}


@pytest.fixture(autouse=True)
def made() -> list[Guess]:
    Guess.made.clear()
    return Guess.made


def interaction(**config: Any) -> EnvironmentInteraction:
    return EnvironmentInteraction(config, "world")


def guess(**config: Any) -> EnvironmentInteraction:
    return interaction(factory=f"{__name__}.Guess", **config)


def row(**kwargs: Any) -> Any:
    system = [{"role": "system", "content": "Play."}]
    return sample(prompt=system, data_source="interaction/world", interaction_kwargs={"name": "world", **kwargs})


async def test_a_lake_is_crossed(bench: MakeBench) -> None:
    world = interaction(**LAKE)
    await world.start("run")
    script = ["I go DOWN", "Not right yet.\nSo: down.", "**right**", "1", "1", "then right\n\n", "2"]
    b = bench(script, interactions={"world": world}, max_assistant_turns=9, max_user_turns=9)
    (t,) = await b.run(row())
    assert t.status is Status.COMPLETED
    assert check_trajectory(t, b.chat.vocab_size) == []
    said = [turn.text for turn in t.turns if turn.role == "user"]
    assert t.messages[1] == {"role": "user", "content": "row 0, column 0 of 4"}
    assert [text[:15] for text in said] == [
        f"row {r}, column {c}" for r, c in ((1, 0), (2, 0), (2, 1), (3, 1), (3, 1), (3, 2))
    ]
    assert t.turn_rewards == [0.0] * 6 + [1.0]
    assert t.score == t.score_extra["interaction_score"] == 1.0
    assert (t.score_extra["environment_steps"], t.score_extra["environment_terminated"]) == (7.0, 1.0)


async def test_what_is_no_action_is_told_and_not_stepped(bench: MakeBench) -> None:
    b = bench(
        ["jump", "4", "leftover", "", "right", "down"], interactions={"world": interaction(**LAKE)}, max_user_turns=9
    )
    (t,) = await b.run(row())
    said = [turn.text for turn in t.turns if turn.role == "user"]
    assert said[0] == (
        "This is not a valid action: the last line names none. End your answer with one of left, down, right, up"
    )
    assert "4 is none." in said[1]
    assert "names none" in said[2]
    assert "names none" in said[3]
    assert t.status is Status.COMPLETED
    assert t.score == 0.0, "it fell into a hole"
    assert t.score_extra["environment_steps"] == 2.0


async def test_a_seed_makes_the_same_game_and_numbers_are_its_actions() -> None:
    world = interaction(gymnasium_id="Blackjack-v1")
    await world.start("run")
    openings = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        await world.start_interaction(name, seed=seed)
        openings.append(await world.open_dialogue(name, []))
    assert openings[0] == openings[1] != openings[2]
    said = await world.generate_response("a", [{"role": "assistant", "content": "left"}])
    assert said.text.endswith("End your answer with a number from 0 to 1")
    assert (await world.generate_response("a", [{"role": "assistant", "content": "I stick: 0"}])).should_end
    for name in "abc":
        await world.finalize_interaction(name)


async def test_a_plain_class_in_a_thread_of_its_own_is_closed_once(bench: MakeBench, made: list[Guess]) -> None:
    b = bench(lambda session, turn: str(turn + 100), interactions={"world": guess(kwargs={"highest": 5}, max_steps=3)})
    await b.scheduler.context.interactions["world"].start("run")
    trajectories = await b.run(row(seed=1, options={"more": 101}), n=8)
    assert [t.status for t in trajectories] == [Status.COMPLETED] * 8
    tried, *games = made
    assert (tried.closed, len(games)) == (1, 8)
    for game in games:
        assert game.highest == 5
        assert len(set(game.threads)) == 1
        assert game.closed == 1
        game.threads[0].join(5)
    assert len({game.threads[0] for game in games}) == 8
    number = games[0].number
    expected = [-0.1] * (number - 100) + [1.0] if number <= 102 else [-0.1] * 3
    assert trajectories[0].turn_rewards == expected
    assert trajectories[0].score == pytest.approx(sum(expected))


async def test_a_parser_of_ones_own() -> None:
    world = guess(parse=f"{__name__}.shout")
    await world.start_interaction("a", seed=1)
    told = await world.generate_response("a", [{"role": "assistant", "content": "3"}])
    assert told.text == "This is not a valid action: shout at Guess"
    told = await world.generate_response("a", [{"role": "assistant", "content": "30!"}])
    assert told.text == "It is not 30."
    await world.finalize_interaction("a")


async def test_an_environment_without_close_or_texts() -> None:
    world = interaction(factory=f"{__name__}.Silent")
    await world.start("run")
    await world.start_interaction("a")
    assert await world.open_dialogue("a", []) == "7"
    answer = await world.generate_response("a", [{"role": "assistant", "content": None}])
    assert (answer.should_end, answer.extra["environment_terminated"]) == (True, False)
    await world.finalize_interaction("a")


async def test_a_hanging_step_is_given_up_and_delays_nobody(bench: MakeBench, made: list[Guess]) -> None:
    script = lambda session, turn: "hang" if session.startswith("t/0.") else f"{turn}"  # noqa: E731
    b = bench(script, interactions={"world": guess(max_steps=2)}, call_timeout=0.5, max_retries=1)
    hung, other = await b.run(row(), n=2)
    assert other.status is Status.COMPLETED
    assert hung.status is Status.FAILED
    assert hung.score is None
    assert hung.failure == "TimeoutError: no answer in time from interaction world"
    stuck = [game for game in made if not game.closed]
    assert len(stuck) == 2, "the retry hung, too"
    for game in stuck:
        game.blocked.set()
        game.threads[0].join(5)
        assert game.closed == 1


async def test_too_many_hanging_environments_refuse_new_ones(
    made: list[Guess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "MAX_HANGING", 1)
    world = guess()
    await world.start_interaction("a")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await world.generate_response("a", [{"role": "assistant", "content": "hang"}])
    await world.finalize_interaction("a")
    with naming(AbandonedThreads, "1 environments"):
        await world.start_interaction("b")
    made[0].blocked.set()
    made[0].threads[0].join(5)
    await world.start_interaction("b")
    await world.finalize_interaction("b")
    assert [game.closed for game in made] == [1, 1]


async def test_what_an_environment_raises_is_told_with_its_place_and_it_is_closed(
    bench: MakeBench, made: list[Guess]
) -> None:
    b = bench(["raise"], interactions={"world": guess()})
    with pytest.raises(CodeError, match=r"interaction world .*: ZeroDivisionError: in step") as told:
        await b.run(row())
    assert f"{__file__}:" in str(told.value)
    with pytest.raises(CodeError, match="TypeError"):  # in reset
        await b.run(row(options={"more": "text"}))
    assert [game.closed for game in made] == [1, 1]


class Wrong(Silent):
    """Gives what a test says in place of what it must."""

    gives: dict[str, Any] = {}

    def reset(self, **_: Any) -> Any:
        return self.gives.get("reset", ("7", {}))

    def step(self, action: Any) -> Any:
        return self.gives.get("step", ("7", 0.0, True, False, {}))


@pytest.mark.parametrize(
    ("gives", "says"),
    [
        ({"reset": "7"}, ("Wrong.reset", "found '7'")),
        ({"step": ("7", 0.0, True, {})}, "Wrong.step"),
        ({"step": None}, ("Wrong.step", "found None")),
        ({"step": ("7", "much", True, False, {})}, ("Wrong.step", "found 'much'")),
    ],
)
async def test_what_an_environment_must_not_give_is_told(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, gives: dict[str, Any], says: Names
) -> None:
    monkeypatch.setattr(Wrong, "gives", gives)
    with naming(CodeError, says):
        await bench(["x"], interactions={"world": interaction(factory=f"{__name__}.Wrong")}).run(row())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"gymnasium_id": "NoSuchWorld-v0"}, "NameNotFound"),
        ({"factory": f"{__name__}.Guess", "kwargs": {"lowest": 1}}, "argument 'lowest'"),
        ({"gymnasium_id": "FrozenLake-v1", "actions": ["left"]}, ("`actions`", "Discrete(4)")),
        ({"factory": f"{__name__}.Guess", "actions": ["left"]}, ("`actions`", "None")),
        ({"gymnasium_id": "Pendulum-v1"}, "`parse`"),
    ],
)
async def test_what_cannot_be_played_is_said_before_the_first_step(config: dict[str, Any], says: Names) -> None:
    with pytest.raises(ConfigError) as raised:
        await interaction(**config).start("run")
    assert_names(raised.value, says)


def test_a_row_is_checked() -> None:
    world: Interaction = guess()
    world.check_row({"seed": 3, "options": {"more": 1}})
    with naming(DataError, "interaction_kwargs", "key 'sead'", "'seed'", "unknown"):
        world.check_row({"sead": 3})
