"""Costs of agents that live on: their starts, and a thousand of their sessions at once.

`python -m benchmarks.rollouts.agents start`: CPU time of the starts of agents with OpenAI's client, for each of 8
trajectories a process, and for 256 trajectories a pool of 2 processes.

`python -m benchmarks.rollouts.agents sessions [--sessions N] [--rounds N]`: a pool of 2 processes has N sessions at
once, of 3 calls each over the three APIs in turn. Half of them stream; of ten sessions one leaves its second stream
after the first text and goes on from there, one ends while a stream that it never reads is sampled, and one is silent
for some seconds. An embedded engine samples from a tiny policy on the CPU. It prints memory, descriptors, CPU time,
the longest time that the event loop was kept from other work, and the records that are wrong: each token that was
sampled is in its record once, or is counted as not delivered, and each text is the one that its own agent was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from agentrl.agent_loop import LoopContext, LoopLimits, Request, Scheduler
from agentrl.chat import Chat
from agentrl.engines.contract import Generation, SamplingParams
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.openai_api.agent_loop import OpenAIProxyLoop
from agentrl.openai_api.agents import AgentOptions
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.system.http import allow_many_files
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Trajectory
from agentrl.trajectory.sample import Sample

TOKENS = 8
"""Tokens of an answer."""

LONG = 40
"""Tokens of an answer that is left, or not read."""
SILENT = 5
"""Seconds in which a silent session does nothing."""

MANY = f"""
import asyncio, json, os, traceback, zlib
import aiohttp

BODIES = (
    ("chat/completions", lambda talk, most: {{"messages": talk, "max_tokens": most}}),
    ("responses", lambda talk, most: {{"input": talk, "max_output_tokens": most}}),
    ("messages", lambda talk, most: {{"messages": talk, "max_tokens": most}}),
)

UNREAD = []

def text_of(reply):
    if "choices" in reply:
        return reply["choices"][0]["message"]["content"] or ""
    if "content" in reply:
        items = reply["content"]
    else:
        items = [part for item in reply["output"] for part in item.get("content") or ()]
    return "".join(item["text"] for item in items if "text" in item)

def text_in(event):
    if "choices" in event:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if event["type"] == "response.output_text.delta":
        return event["delta"]
    return event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""

async def streamed(answer, leaves):
    text = ""
    async for line in answer.content:
        if line.startswith(b"data: {{"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += text_in(event)
            if leaves and text:
                answer.close()
                return text
    return text

async def act(http, session):
    try:
        result = await solve(http, session)
    except Exception:
        result = {{"error": traceback.format_exc()}}
    async with http.post(session["report_url"] + "/result", json=result) as answer:
        await answer.read()

async def solve(http, session):
    number = session["sample"]["index"]
    talk, check, kind, streams = list(session["sample"]["prompt"]), 0, number // 6 % 10, number % 2
    path, body = BODIES[number % 3]
    for turn in range(3):
        if kind == 9 and turn == 1:
            await asyncio.sleep({SILENT})
        special = streams and (kind == 7 and turn == 1 or kind == 8 and turn == 2)
        asked = {{"model": "m", "stream": bool(streams), **body(talk, {LONG} if special else {TOKENS})}}
        if special and kind == 8:
            reader, writer = await asyncio.open_connection(*session["base_url"].split("/")[2].split(":"))
            content, place = json.dumps(asked).encode(), "/" + session["base_url"].split("/", 3)[3] + "/" + path
            head = [f"POST {{place}} HTTP/1.1", "Host: x", f"Content-Length: {{len(content)}}", "", ""]
            writer.write("\\r\\n".join(head).encode() + content)
            UNREAD.append((reader, writer))
            await asyncio.sleep(1)
            break
        async with http.post(session["base_url"] + "/" + path, json=asked) as answer:
            if streams:
                text = await streamed(answer, special)
            else:
                reply = await answer.json()
                assert answer.status == 200, reply
                text = text_of(reply)
        check = zlib.crc32((text if not special else "").encode(), check)
        talk.append({{"role": "assistant", "content": text or "-"}})
        talk.append({{"role": "user", "content": f"and {{number}}?"}})
    return {{"check": check, "number": number}}

async def main():
    headers = {{"Authorization": "Bearer " + os.environ.pop("AGENTRL_TOKEN")}}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as http:
        tasks = set()
        async with http.get(os.environ["AGENTRL_URL"] + "/v1/sessions", headers=headers) as answer:
            async for line in answer.content:
                if line.strip():
                    tasks.add(task := asyncio.create_task(act(http, json.loads(line))))
                    task.add_done_callback(tasks.discard)

asyncio.run(main())
"""

ONE = f"""
import json, os, sys
import openai
sample = json.load(sys.stdin)
openai.OpenAI().chat.completions.create(model="m", messages=sample["prompt"], max_tokens={TOKENS})
"""

POOL = f"""
import json, os, threading
import httpx, openai
client = openai.OpenAI(base_url="http://unused", api_key="unused")
def act(session):
    one = client.with_options(base_url=session["base_url"])
    one.chat.completions.create(model="m", messages=session["sample"]["prompt"], max_tokens={TOKENS})
    httpx.post(session["report_url"] + "/result", json={{}})
headers = {{"Authorization": "Bearer " + os.environ.pop("AGENTRL_TOKEN")}}
with httpx.stream("GET", os.environ["AGENTRL_URL"] + "/v1/sessions", headers=headers, timeout=None) as answer:
    for line in filter(None, answer.iter_lines()):
        threading.Thread(target=act, args=(json.loads(line),)).start()
"""


class Delay:
    """Watch of the event loop: the longest time, and CPU time of its thread, between two looks 5 ms apart."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            wall, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.005)
            self.wall = max(self.wall, time.perf_counter() - wall - 0.005)
            self.cpu = max(self.cpu, time.thread_time() - cpu)


@contextmanager
def made(
    folder: Path, program: str, max_concurrent: int, options: AgentOptions
) -> Iterator[tuple[Scheduler, Chat, EmbeddedEngine]]:
    """Make a scheduler whose agents run `program` against a tiny policy."""
    path = make_tiny_policy(folder / "policy", seed=1)
    chat = Chat.from_pretrained(str(path))
    engine = EmbeddedEngine(
        AutoModelForCausalLM.from_pretrained(path), max_num_seqs=64, max_model_len=400, stop_decode=chat.decode
    )
    (folder / "program.py").write_text(program)
    loop = OpenAIProxyLoop(options.model_copy(update={"command": [sys.executable, str(folder / "program.py")]}))
    limits = LoopLimits(300, 400, 6, 6, None, 1, 0, True, 5.0, 300, "error")
    context = LoopContext(engine, chat, ToolSet.from_tools([]), {}, limits)
    yield Scheduler(context, {"openai_proxy": loop}, None, max_concurrent, 3600.0, 0), chat, engine


def requests(count: int) -> list[Request]:
    """Make requests whose prompts all differ."""
    rows = [
        Sample([{"role": "user", "content": f"What is {k} + 2?"}], "benchmark", "openai_proxy", index=k)
        for k in range(count)
    ]
    return [Request(f"t/{k}", k, row, SamplingParams(1), seed=k) for k, row in enumerate(rows)]


class Sampled:
    """Everything that an engine samples, by trajectory."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.answers: dict[str, list[list[int]]] = {}
        self._generate = engine.generate
        engine.generate = self._heard  # type: ignore[method-assign, assignment]

    async def _heard(self, ids: Sequence[int], params: SamplingParams, session: str, **more: Any) -> Generation:
        found = await self._generate(ids, params, session, **more)
        self.answers.setdefault(session.split(".")[0], []).append(found.ids)
        return found


def is_wrong(number: int, trajectory: Trajectory, chat: Chat, answers: Sequence[Sequence[int]]) -> str | None:
    """Say in which way a record is not what was sampled, or not what its own agent sent and was sent.

    A conversation whose agent cannot send back what the policy said has several transcripts. `answers`: the engine's.
    """
    turns, left, check = [turn for turn in trajectory.turns if turn.role == "assistant"], list(answers), 0
    for turn in turns:
        ids = trajectory.transcripts[turn.transcript].ids[turn.start : turn.end]
        whole = next((one for one in left if list(one[: len(ids)]) == ids), None)
        if whole is None:
            return f"a turn has other ids than any answer of the engine: {ids}"
        left.remove(whole)
    recorded, sampled = trajectory.num_sampled, sum(map(len, answers))
    undelivered = trajectory.metrics.get("openai_undelivered_tokens", 0)
    if recorded + undelivered != sampled:
        return f"{sampled} tokens were sampled, {recorded} are recorded, and {undelivered:.0f} were not delivered"
    kind = number // 6 % 10 if number % 2 else 0
    taken = [
        turn for place, turn in enumerate(turns) if not (kind == 7 and place == 1) and not (kind == 8 and place == 2)
    ]
    for turn in taken:
        check = zlib.crc32(turn.text.encode(), check)
    report = trajectory.score_extra
    texts = [chat.decode(transcript.ids) for transcript in trajectory.transcripts]
    if report["number"] != number or any(set(re.findall(r"and (\d+)\?", text)) - {str(number)} for text in texts):
        return "another session's text"
    if any(f"What is {number} + 2?" not in text for text in texts):
        return "another prompt"
    return None if report["check"] == check else "texts differ from those that the agent was sent"


class Peak:
    """Highest memory (MiB) and most descriptors of this process."""

    def __init__(self) -> None:
        self.memory, self.descriptors = megabytes(), descriptors()

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(0.05)
            self.memory = max(self.memory, megabytes())
            self.descriptors = max(self.descriptors, descriptors())


def descriptors() -> int:
    """Return the number of descriptors that are open in this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def megabytes() -> float:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def sessions(folder: Path, count: int, rounds: int) -> bool:
    """Run the sessions; return whether no record is wrong, none failed, and no descriptor stays open."""
    allow_many_files()
    options = AgentOptions(start="pool", processes=2, sessions_at_once=-(-count // 2))
    fine = True
    with made(folder, MANY, count, options) as (scheduler, chat, engine):
        sampled = Sampled(engine)
        for round in range(rounds):
            sampled.answers.clear()
            delay, peak = Delay(), Peak()
            watching = [asyncio.create_task(one.watch()) for one in (delay, peak)]
            begun, cpu = time.perf_counter(), time.process_time()
            ended = await scheduler.run(requests(count))
            for task in watching:
                task.cancel()
            failed = [one.failure for one in ended if one.failure]
            wrong = [
                problem
                for k, one in enumerate(ended)
                if not one.failure and (problem := is_wrong(k, one, chat, sampled.answers.get(one.uid, ())))
            ]
            fine = fine and not failed and not wrong and len({one.uid for one in ended}) == count
            undelivered = sum(one.metrics.get("openai_undelivered_tokens", 0) for one in ended)
            print(
                f"round {round + 1}: {count} sessions in {time.perf_counter() - begun:.0f} s, "
                f"{(time.process_time() - cpu) / count:.3f} CPU-seconds each, {len(failed)} failed, "
                f"{len(wrong)} wrong, {sum(one.num_sampled for one in ended)} tokens recorded and {undelivered:.0f} "
                f"not delivered; at most {peak.memory:.0f} MiB and {peak.descriptors} descriptors, {megabytes():.0f} "
                f"MiB and {descriptors()} afterwards; longest delay {delay.wall:.3f} s, of which "
                f"{delay.cpu:.3f} s CPU, load {os.getloadavg()[0]:.1f}",
                *failed[:1],
                *wrong[:3],
                flush=True,
            )
            del ended
        await scheduler.close()
    return fine


async def start(folder: Path) -> None:
    """Measure starts."""
    for name, program, count, options in (
        ("process", ONE, 8, AgentOptions(start="process")),
        ("pool", POOL, 256, AgentOptions(start="pool", processes=2, sessions_at_once=8)),
    ):
        (folder / name).mkdir()
        with made(folder / name, program, 16 if name == "pool" else 2, options) as (scheduler, *_):
            ended = await scheduler.run(requests(count))
            await scheduler.close()
        failed = [one.failure for one in ended if one.failure]
        starts, seconds = (
            sum(one.metrics.get(f"agent_{what}", 0.0) for one in ended) / count
            for what in ("starts", "start_cpu_seconds")
        )
        print(f"{name:8} {count:4} trajectories: {starts:.3f} starts, {seconds:.3f} CPU-seconds each", *failed[:1])


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["start", "sessions"])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.what == "start":
            asyncio.run(start(Path(folder)))
            return 0
        return 0 if asyncio.run(sessions(Path(folder), asked.sessions, asked.rounds)) else 1


if __name__ == "__main__":
    sys.exit(main())
