"""An interaction whose answers go to a cassette, or come from one; see `agentrl.system.cassette`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from agentrl.errors import CodeError, InfrastructureError
from agentrl.interaction import Interaction, InteractionResponse, ask
from agentrl.system.cassette import Asked, Cassette
from agentrl.system.deadline import seconds_left
from agentrl.trajectory import Message


class OnCassette(Interaction):
    """Stands for `interaction`. While a cassette is replayed, that one is never asked."""

    def __init__(self, interaction: Interaction, cassette: Cassette) -> None:
        super().__init__({}, interaction.name)
        self.interaction, self.cassette = interaction, cassette
        self._told: dict[str, str] = {}
        """By instance: what it was started with."""

    @property
    def _replays(self) -> bool:
        return self.cassette.mode == "replay"

    def check_row(self, kwargs: dict[str, Any]) -> None:
        self.interaction.check_row(kwargs)

    async def start(self, run: str) -> None:
        if not self._replays:
            await self.interaction.start(run)

    def take_metrics(self) -> dict[str, float]:
        return self.interaction.take_metrics()

    async def close(self) -> None:
        await self.interaction.close()

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._told[instance_id] = self._asked("start_interaction", instance_id, kwargs).key

        async def started() -> None:
            await ask(self.interaction, "start_interaction", instance_id, **kwargs)

        await self._through("start_interaction", instance_id, kwargs, started)

    async def open_dialogue(self, instance_id: str, messages: list[Message]) -> str | None:
        async def opened() -> str | None:
            text: str | None = await ask(self.interaction, "open_dialogue", instance_id, messages)
            return text

        text: str | None = await self._through("open_dialogue", instance_id, {"messages": messages}, opened)
        return text

    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        async def answered() -> dict[str, Any]:
            return asdict(await ask(self.interaction, "generate_response", instance_id, messages))

        told = {"messages": messages}
        return InteractionResponse(**await self._through("generate_response", instance_id, told, answered))

    async def calculate_score(self, instance_id: str) -> float | None:
        async def scored() -> float | None:
            score: float | None = await ask(self.interaction, "calculate_score", instance_id)
            return score

        score: float | None = await self._through("calculate_score", instance_id, {}, scored)
        return score

    async def finalize_interaction(self, instance_id: str) -> None:
        self._told.pop(instance_id, None)
        if not self._replays:
            await ask(self.interaction, "finalize_interaction", instance_id)

    def _asked(self, method: str, instance_id: str, arguments: dict[str, Any]) -> Asked:
        return Asked(f"interaction {self.name}", method, instance_id, arguments, self._told.get(instance_id, ""))

    async def _through(
        self, method: str, instance_id: str, arguments: dict[str, Any], perform: Callable[[], Awaitable[Any]]
    ) -> Any:
        asked = self._asked(method, instance_id, arguments)
        if self._replays:
            outcome = self.cassette.replay(asked)
            if outcome.get("is_code_error"):
                raise CodeError(outcome["value"])
            if outcome.get("is_fault"):
                raise InfrastructureError(outcome["value"])
            return outcome["value"]
        try:
            value = await perform()
        except asyncio.CancelledError:
            if seconds_left(1.0) < 0.01:  # the call's own deadline, which fails the try
                self.cassette.record(asked, {"value": "TimeoutError: no answer in time", "is_fault": True})
            raise
        except CodeError as error:
            self.cassette.record(asked, {"value": error.summary, "is_fault": True, "is_code_error": True})
            raise
        except Exception as error:
            self.cassette.record(asked, {"value": f"{type(error).__name__}: {error}", "is_fault": True})
            raise
        self.cassette.record(asked, {"value": value})
        return value
