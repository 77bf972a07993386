"""A scripted policy in place of an engine: says given texts, records what it said, and injects faults on purpose."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl.chat import Chat
from agentrl.engines.contract import EngineHealth, FinishReason, Generation, Listener, PauseMode, SamplingParams
from agentrl.engines.weights import SyncReport, Weights
from agentrl.trajectory import PlacedImage, VersionSpan

Script = Callable[[str, int], str | Exception]
"""(session, turn number from 0) -> what the policy says, or the fault that the engine has."""


@dataclass
class ScriptedEngine:
    """Each turn is the script's text, tokenised with its special tokens; max_new_tokens and stop strings are obeyed."""

    chat: Chat
    script: Script
    said: dict[str, list[list[int]]] = field(default_factory=dict)
    """By session: the ids of every turn."""
    prompts: dict[str, list[list[int]]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    delay: float = 0.0
    together: int = 1
    """The first turns end when so many of them run at once."""
    all_run: asyncio.Event = field(default_factory=asyncio.Event)
    beyond_stop: str = ""
    """What the token that completes a stop string spells beyond it."""
    held_behind: str = ""
    """Text behind which a turn waits for `go_on`, when it has been heard."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: set[str] = field(default_factory=set)
    pieces: random.Random | None = None
    """Cuts turns into pieces, between which time passes; None: all of a turn is heard at once."""
    most_between: float = 0.002
    """Seconds between two pieces, at most."""

    async def generate(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        session: str,
        images: Sequence[PlacedImage] = (),
        listener: Listener | None = None,
    ) -> Generation:
        turns = self.said.setdefault(session, [])
        self.prompts.setdefault(session, []).append(list(ids))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.running >= self.together:
            self.all_run.set()
        try:
            await self.all_run.wait()
            await asyncio.sleep(self.delay)
        finally:
            self.running -= 1
        text = self.script(session, len(turns))
        if isinstance(text, Exception):
            turns.append([])
            raise text
        finish = FinishReason("stop", self.chat.stop_token_ids[0])
        for stop in params.stop:
            if stop in text:
                text = text[: text.index(stop) + len(stop)] + self.beyond_stop
                finish = FinishReason("stop", stop)
        out = self.chat.tokenizer.encode(text, add_special_tokens=False)
        if not isinstance(finish.matched, str):
            out.append(self.chat.stop_token_ids[0])
        if len(out) > params.max_new_tokens:
            out, finish = out[: params.max_new_tokens], FinishReason("length")
        turns.append(out)
        if self.held_behind and self.held_behind in text:
            begin = text[: text.index(self.held_behind) + len(self.held_behind)]
            first = len(self.chat.tokenizer.encode(begin, add_special_tokens=False))
            if listener is not None:
                listener(out[:first])
            self.running += 1
            await self.go_on.wait()
            self.running -= 1
            if session in self.aborted:
                out, finish = out[:first], FinishReason("abort")
            elif listener is not None:
                listener(out[first:])
        elif self.pieces is not None:
            out, finish = await self._piece_by_piece(session, out, finish, listener, self.pieces)
        elif listener is not None:
            listener(out)
        return Generation(out, [-0.25] * len(out), finish, [VersionSpan(3, 0, len(out))])

    async def _piece_by_piece(
        self, session: str, out: list[int], finish: FinishReason, listener: Listener | None, pieces: random.Random
    ) -> tuple[list[int], FinishReason]:
        self.aborted.discard(session)
        self.running += 1
        try:
            at = 0
            while at < len(out):
                if session in self.aborted:
                    return out[:at], FinishReason("abort")
                end = at + pieces.choice((1, 1, 2, 3, 8, 64))
                if listener is not None:
                    listener(out[at:end])
                at = end
                await asyncio.sleep(pieces.random() * self.most_between)
        finally:
            self.running -= 1
        return out, finish

    async def release(self, session: str) -> None:
        self.released.append(session)

    async def abort(self, session: str | None = None) -> None:
        self.aborted |= {session} if session else self.said.keys()
        self.go_on.set()

    async def pause(self, mode: PauseMode = "abort") -> None: ...
    async def resume(self) -> None: ...
    async def update_weights(self, weights: Weights, version: int) -> SyncReport:
        return SyncReport(0, 0.0)

    async def flush_cache(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def close(self) -> None: ...

    async def health(self) -> EngineHealth:
        return EngineHealth(version=3, running=self.running, waiting=0, paused=False, asleep=False)
