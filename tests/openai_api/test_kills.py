"""Clients that are killed at any moment of their streams: nothing is lost, doubled, or recorded without a sample."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import Chat
from tests.openai_api.conftest import scripted
from tests.waiting import until

CLIENT = """
import json, os, socket, sys
host, port, path, key = sys.argv[1:]
talk = [{"role": "user", "content": "Hi"}]
def text_in(event):
    if "choices" in event:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if event["type"] == "response.output_text.delta":
        return event["delta"]
    return event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""
for turn in range(4):
    most = "max_tokens" if key == "messages" else "max_output_tokens"
    body = json.dumps({key: talk, "stream": True, most: 500}).encode()
    with socket.create_connection((host, int(port))) as link:
        head = ["POST %s HTTP/1.1" % path, "Host: x", "Content-Length: %d" % len(body), "", ""]
        link.sendall("\\r\\n".join(head).encode() + body)
        seen, at, said = b"", 0, ""
        while b"\\r\\n0\\r\\n\\r\\n" not in seen:
            piece = link.recv(1 << 20)
            assert piece, seen
            seen += piece
            while (end := seen.find(b"\\n\\n", at)) >= 0:
                _, _, data = seen[at:end].partition(b"data: ")
                at = end + 2
                more = text_in(json.loads(data)) if data.startswith(b"{") else ""
                said += more
                os.write(1, json.dumps([turn, more]).encode() + b"\\n")
    talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
"""
PATHS = {"chat/completions": "messages", "responses": "input", "messages": "messages"}
WORDS = ["sum", " of", "\n\n", " two", "é", "\U0001f600", " and", "three", ".", "  ", "一"]
MOST = 12
"""Pieces of a client's answers before which it is killed. A client that has fewer ends by itself."""
LIMITS = {"max_model_len": 4000, "max_response_tokens": 3000}


async def killed(chat: Chat, client: Path, rng: random.Random) -> str:
    """Kill one client; say how far it came."""
    path = rng.choice(list(PATHS))
    texts = ["".join(rng.choices(WORDS, k=rng.randrange(1, 80))).strip() or "One" for _ in range(4)]
    answers = iter(texts)
    sent, pieces, last, reached = {0}, 0, rng.randrange(1, MOST), asyncio.Event()
    async with scripted(chat, lambda session, turn: next(answers), **LIMITS) as (service, engine):
        engine.pieces, engine.most_between = random.Random(rng.random()), 0.02
        async with service.session() as open:
            begin = open.session.begin

            async def begun(body: bytes, dialect: Any, delivery: Any, read: Any = None) -> Any:
                note = delivery.sent

                def noted(size: int, tokens: int) -> None:
                    nonlocal pieces
                    sent.add(tokens)
                    note(size, tokens)
                    pieces += 1
                    if pieces == last:
                        reached.set()

                delivery.sent = noted
                return await begin(body, dialect, delivery, read)

            open.session.begin = begun  # type: ignore[method-assign]
            _, _, address, place = open.base_url.split("/", 3)
            arguments = [*address.split(":"), f"/{place}/{path}", PATHS[path]]
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-S", "-E", str(client), *arguments), stdout=pipe, stderr=pipe
            )
            reading = asyncio.create_task(process.communicate())
            waiting = asyncio.create_task(reached.wait())
            await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not reading.done():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)  # `process.kill()` may take the status of one that ends now.
            out, errors = await reading
            assert process.returncode in (0, -9), errors.decode()
            await until(lambda: not open.session._tasks)
            was_sent = bool(open.session._answered)
    shown: dict[int, str] = {}
    for line in out.decode().splitlines():
        turn, more = json.loads(line)
        shown[turn] = shown.get(turn, "") + more
    trajectory = open.trajectory
    (sampled,) = engine.said.values()
    turns = [one for one in trajectory.turns if one.role == "assistant"]
    assert len(trajectory.transcripts) <= 1 and len(turns) <= len(sampled)
    kept = 0
    for number, turn in enumerate(turns):
        ids = trajectory.transcripts[0].ids[turn.start : turn.end]
        assert ids == sampled[number][: len(ids)], "what was sampled, once and in order"
        assert texts[number].startswith(turn.text)
        is_last, shows = number == len(turns) - 1, shown.get(number, "")
        # What remains at the end of an answer is recorded only where all of it was taken.
        is_remainder = is_last and was_sent and texts[number].startswith(shows)
        assert turn.text.startswith(shows) or is_remainder, "what the client was given is recorded"
        assert ids == sampled[number] or (is_last and len(ids) in sent), "a cut is where a piece of the stream ended"
        kept += len(ids)
    assert all(not said for number, said in shown.items() if number >= len(turns))
    assert trajectory.num_sampled == kept
    whole = process.returncode == 0
    assert not whole or [turn.text for turn in turns] == texts
    metrics: dict[str, Any] = trajectory.metrics
    assert not whole or not metrics.get("openai_undelivered_tokens")
    if whole:
        return "ended"
    return "between" if turns and turns[-1].finish_reason != "abort" else "within"


@pytest.mark.slice(1, "kill")
@pytest.mark.parametrize("seed", range(20))
async def test_of_a_client_that_is_killed_what_it_was_given_is_recorded(chat: Chat, tmp_path: Path, seed: int) -> None:
    """Ten clients at once, each of one session; together the seeds kill 200."""
    client = tmp_path / "client.py"
    client.write_text(CLIENT)
    rng = random.Random(seed)
    ends = await asyncio.gather(*[killed(chat, client, random.Random(rng.random())) for _ in range(10)])
    assert "within" in ends
