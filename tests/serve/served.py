"""A server of live clients in a process of its own, and clients with feedback that outlive its deaths."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from agentrl.serve.endpoint import HEADER
from tests.forked import ForkedPython

KEYS = {"CLIENT_KEY": "the-key-of-clients", "OPERATOR_KEY": "the-key-of-the-operator"}
SERVER = Path(__file__).with_name("killed.py")
AGAIN_SECONDS = 0.05
"""Seconds between two tries of a client whose server is away."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def arguments(policy: Path, run: Path, port: int, *more: str) -> list[str]:
    """Overrides of a small run."""
    return [
        "--learn",
        f"--port={port}",
        "--client-key-env=CLIENT_KEY",
        "--operator-key-env=OPERATOR_KEY",
        "--idle-seconds=0",
        f"actor_rollout_ref.model.path={policy}",
        f"trainer.default_local_dir={run}",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=192",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=8",
        *more,
    ]


@contextlib.contextmanager
def serving(words: list[str], point: str = "", number: int = 0) -> Iterator[ForkedPython]:
    """Serve until the process ends, at the latest with the context."""
    process = ForkedPython([SERVER, point, number, *words], environment=KEYS)
    try:
        yield process
    finally:
        process.process.kill()


@dataclass
class People:
    """Conversations and the feedback on them; each goes on until the server has acknowledged it."""

    port: int
    value: Callable[[str], float]
    seed: int = 0
    turns: int = 1
    is_over: Callable[[], bool] = lambda: False
    said: dict[str, list[str]] = field(default_factory=dict)
    """Acknowledged answers by session."""
    given: dict[str, float] = field(default_factory=dict)
    """Acknowledged feedback by session."""

    async def converse(self, name: str, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Have one conversation, and judge its last answer; return early when the server is gone for good."""
        talk: list[dict[str, str]] = []
        text = ""
        for turn in range(rng.randint(1, self.turns)):
            talk.append({"role": "user", "content": f"Say {turn} to {name}"})
            answer = await self.post(
                http, "chat/completions", "CLIENT_KEY", {"model": "policy", "messages": talk}, name
            )
            if answer is None:
                return
            message = answer.json()["choices"][0]["message"]
            text = message["content"] or ""
            assert answer.headers[HEADER] == name, "no part of it is trained on before its feedback"
            self.said.setdefault(name, []).append(text)
            if message.get("tool_calls"):  # which nobody answers
                break
            talk.append({"role": "assistant", "content": text})
        value = self.value(text)
        body = {"session": name, "value": value, "id": f"of {name}"}
        for _ in range(rng.choice([1, 1, 2])):  # some people press twice
            told = await self.post(http, "feedback", "OPERATOR_KEY", body)
            if told is None:
                return
            assert told.json()["status"] in ("taken", "already"), told.text
            self.given[name] = value

    async def post(
        self, http: httpx.AsyncClient, path: str, key: str, body: dict[str, Any], name: str | None = None
    ) -> httpx.Response | None:
        """Post until it is answered; None: nobody will."""
        headers = {"authorization": f"Bearer {KEYS[key]}"} | ({} if name is None else {HEADER: name})
        while True:
            with contextlib.suppress(httpx.TransportError):
                told = await http.post(f"http://127.0.0.1:{self.port}/v1/{path}", json=body, headers=headers)
                if told.status_code != 503:
                    assert told.status_code == 200, told.text
                    return told
            if self.is_over():
                return None
            await asyncio.sleep(AGAIN_SECONDS)

    async def come(self, number: int) -> None:
        """Come one after another, `number` at once, until the server is gone for good."""
        async with httpx.AsyncClient(timeout=120) as http:

            async def queue(place: int) -> None:
                rng = random.Random(f"{self.seed} {place}")
                visit = 0
                while not self.is_over():
                    await self.converse(f"s{self.seed}.{place}.{visit}", http, rng)
                    visit += 1

            await asyncio.gather(*(queue(place) for place in range(number)))
