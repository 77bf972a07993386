"""Interaction that records its answers on a cassette, or replays them; see `agentrl.system.cassette`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from agentrl.errors import CodeError, InfrastructureError
from agentrl.interaction import Interaction, InteractionResponse, ask
from agentrl.system.cassette import Cassette, MethodCall
from agentrl.system.deadline import seconds_left
from agentrl.trajectory import Message


class RecordedInteraction(Interaction):
    """Wrapper of `interaction` that records its answers. While a cassette is replayed, `interaction` is never asked."""

    def __init__(self, interaction: Interaction, cassette: Cassette) -> None:
        super().__init__({}, interaction.name)
        self.interaction, self.cassette = interaction, cassette
        self.on_resume = interaction.on_resume
        self._state_keys: dict[str, str] = {}
        """Key of each instance's `start_interaction` call, which distinguishes later calls."""

    @property
    def _replays(self) -> bool:
        return self.cassette.mode == "replay"

    def check_row(self, kwargs: dict[str, Any]) -> None:
        self.interaction.check_row(kwargs)

    async def start(self, run: str) -> None:
        if not self._replays:
            await self.interaction.start(run)

    def take_metrics(self) -> Mapping[str, float]:
        return self.interaction.take_metrics()

    async def close(self) -> None:
        await self.interaction.close()

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._state_keys[instance_id] = self._call("start_interaction", instance_id, kwargs).key
        start = partial(ask, self.interaction, self.interaction.start_interaction, instance_id, **kwargs)
        await self._recorded("start_interaction", instance_id, kwargs, start)

    async def open_dialogue(self, instance_id: str, messages: list[Message]) -> str | None:
        opening = partial(ask, self.interaction, self.interaction.open_dialogue, instance_id, messages)
        text: str | None = await self._recorded("open_dialogue", instance_id, {"messages": messages}, opening)
        return text

    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        async def answered() -> dict[str, Any]:
            return asdict(await ask(self.interaction, self.interaction.generate_response, instance_id, messages))

        arguments = {"messages": messages}
        return InteractionResponse(**await self._recorded("generate_response", instance_id, arguments, answered))

    async def calculate_score(self, instance_id: str) -> float | None:
        scoring = partial(ask, self.interaction, self.interaction.calculate_score, instance_id)
        score: float | None = await self._recorded("calculate_score", instance_id, {}, scoring)
        return score

    async def finalize_interaction(self, instance_id: str) -> None:
        self._state_keys.pop(instance_id, None)
        if not self._replays:
            await ask(self.interaction, self.interaction.finalize_interaction, instance_id)

    def _call(self, method: str, instance_id: str, arguments: dict[str, Any]) -> MethodCall:
        return MethodCall(
            f"interaction {self.name}", method, instance_id, arguments, self._state_keys.get(instance_id, "")
        )

    async def _recorded(
        self, method: str, instance_id: str, arguments: dict[str, Any], perform: Callable[[], Awaitable[Any]]
    ) -> Any:
        call = self._call(method, instance_id, arguments)
        if self._replays:
            outcome = self.cassette.replay(call)
            if outcome.get("is_code_error"):
                raise CodeError(outcome["value"])
            if outcome.get("is_fault"):
                raise InfrastructureError(outcome["value"])
            return outcome["value"]
        try:
            value = await perform()
        except asyncio.CancelledError:
            if seconds_left(1.0) < 0.01:  # the call's own deadline, which fails the try
                self.cassette.record(call, {"value": "TimeoutError: no answer in time", "is_fault": True})
            raise
        except CodeError as error:
            self.cassette.record(call, {"value": error.summary, "is_fault": True, "is_code_error": True})
            raise
        except Exception as error:
            self.cassette.record(call, {"value": f"{type(error).__name__}: {error}", "is_fault": True})
            raise
        self.cassette.record(call, {"value": value})
        return value
