"""What an interaction answered is answered again, without it."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import CodeError
from agentrl.interaction import Interaction, InteractionResponse
from agentrl.interaction.recorded import RecordedInteraction
from agentrl.system.cassette import Cassette, Mode, NotOnCassette
from agentrl.system.deadline import within
from agentrl.trajectory import Message
from tests.naming import naming

HELLO: list[Message] = [{"role": "user", "content": "hello"}]


class Moody(Interaction):
    """Never says the same twice."""

    def __init__(self) -> None:
        super().__init__({}, "moody")
        self.words = itertools.count()
        self.open: set[str] = set()

    async def start(self, run: str) -> None:
        self.words = itertools.count(100)

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.open.add(instance_id)

    async def open_dialogue(self, instance_id: str, messages: list[Message]) -> str:
        return f"well {next(self.words)}"

    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        if messages[-1]["content"] == "hang":
            await asyncio.sleep(60)
        if messages[-1]["content"] == "die":
            raise ConnectionError("gone")
        if messages[-1]["content"] == "break":
            raise TypeError("broken")
        history: list[Message] = [*messages, {"role": "user", "content": "again"}]
        return InteractionResponse(False, f"hm {next(self.words)}", 0.5, {"mood": 0.1}, history)

    async def calculate_score(self, instance_id: str) -> float:
        return float(next(self.words))

    async def finalize_interaction(self, instance_id: str) -> None:
        self.open.remove(instance_id)


async def talk(interaction: Interaction, instance: str = "a.0", goal: str = "tea") -> list[Any]:
    await interaction.start("run")
    await interaction.start_interaction(instance, goal=goal)
    said = [
        await interaction.open_dialogue(instance, HELLO),
        await interaction.generate_response(instance, HELLO),
        await interaction.generate_response(instance, HELLO),
        await interaction.calculate_score(instance),
    ]
    await interaction.finalize_interaction(instance)
    return said


@pytest.fixture
def on(tmp_path: Path) -> Any:
    return lambda mode, inner: RecordedInteraction(inner, Cassette(tmp_path / "answers.jsonl", mode))


async def test_answers_openings_and_scores_come_back_as_they_were(on: Any) -> None:
    recorded = await talk(on("record", Moody()))
    untouched = Moody()
    replayed = on("replay", untouched)
    assert await talk(replayed) == recorded
    assert next(untouched.words) == 0 and not untouched.open
    with pytest.raises(NotOnCassette, match="interaction moody"):
        await talk(replayed, goal="coffee")  # another row


@pytest.mark.parametrize("mode", ["record", "replay"])
async def test_a_fault_comes_again(on: Any, mode: Mode) -> None:
    for each in dict.fromkeys(["record", mode]):
        interaction = on(each, Moody())
        await interaction.start_interaction("a.0")
        with pytest.raises((ConnectionError, RuntimeError), match="gone"):
            await interaction.generate_response("a.0", [{"role": "user", "content": "die"}])


async def test_an_error_of_its_code_comes_again_as_one(on: Any) -> None:
    broken: list[Message] = [{"role": "user", "content": "break"}]
    for mode in ("record", "replay"):
        interaction = on(mode, Moody())
        await interaction.start_interaction("a.0")
        with pytest.raises(CodeError, match=r"interaction moody \(.*Moody\.generate_response\): TypeError: broken"):
            await interaction.generate_response("a.0", broken)


async def test_a_deadline_that_was_missed_is_a_fault_when_replayed_too(on: Any) -> None:
    hangs: list[Message] = [{"role": "user", "content": "hang"}]
    interaction = on("record", Moody())
    await interaction.start_interaction("a.0")
    with pytest.raises(TimeoutError):
        async with within(0.05):
            await interaction.generate_response("a.0", hangs)
    interaction = on("replay", Moody())
    await interaction.start_interaction("a.0")
    with naming(RuntimeError, "no answer"):
        await interaction.generate_response("a.0", hangs)
