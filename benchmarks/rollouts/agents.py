"""Costs of agents that live on: their starts, and a thousand of their sessions at once.

`python -m benchmarks.rollouts.agents start`: CPU time of the starts of agents with OpenAI's client, for each of 8
trajectories a process, and for 256 trajectories a pool of 2 processes.

`python -m benchmarks.rollouts.agents sessions [--sessions N] [--rounds N]`: a pool of 2 processes has N sessions at
once, of 3 calls each over the three APIs in turn. An embedded engine samples from a tiny policy on the CPU. It prints
the memory after each round, the longest time that the event loop was kept from other work, and the records whose ids
are not the ids that their own agent was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoModelForCausalLM

from agentrl.agent_loop import LoopContext, LoopLimits, Request, Scheduler
from agentrl.chat import Chat
from agentrl.engines.contract import SamplingParams
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

MANY = f"""
import asyncio, json, os, traceback, zlib
import aiohttp

BODIES = (
    ("chat/completions", lambda talk: {{"messages": talk, "return_token_ids": True, "max_tokens": {TOKENS}}}),
    ("responses", lambda talk: {{"input": talk, "max_output_tokens": {TOKENS}}}),
    ("messages", lambda talk: {{"messages": talk, "max_tokens": {TOKENS}}}),
)

def text_of(reply):
    if "choices" in reply:
        return reply["choices"][0]["message"]["content"] or ""
    if "content" in reply:
        items = reply["content"]
    else:
        items = [part for item in reply["output"] for part in item.get("content") or ()]
    return "".join(item["text"] for item in items if "text" in item)

async def act(http, session):
    try:
        result = await solve(http, session)
    except Exception:
        result = {{"error": traceback.format_exc()}}
    async with http.post(session["report_url"] + "/result", json=result) as answer:
        await answer.read()

async def solve(http, session):
    number = session["sample"]["index"]
    talk, check = list(session["sample"]["prompt"]), 0
    for turn in range(3):
        path, body = BODIES[number % 3]
        async with http.post(session["base_url"] + "/" + path, json={{"model": "m", **body(talk)}}) as answer:
            reply = await answer.json()
        assert answer.status == 200, reply
        if "choices" in reply:
            check = zlib.crc32(json.dumps(reply["choices"][0]["token_ids"]).encode(), check)
        talk.append({{"role": "assistant", "content": text_of(reply) or "-"}})
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
def made(folder: Path, program: str, max_concurrent: int, options: AgentOptions) -> Iterator[tuple[Scheduler, Chat]]:
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
    yield Scheduler(context, {"openai_proxy": loop}, None, max_concurrent, 3600.0, 0), chat


def requests(count: int) -> list[Request]:
    """Make requests whose prompts all differ."""
    rows = [
        Sample([{"role": "user", "content": f"What is {k} + 2?"}], "benchmark", "openai_proxy", index=k)
        for k in range(count)
    ]
    return [Request(f"t/{k}", k, row, SamplingParams(1), seed=k) for k, row in enumerate(rows)]


def is_mixed(number: int, trajectory: Trajectory, chat: Chat) -> bool:
    """Check whether a record has ids that its own agent did not send or was not sent.

    A conversation whose agent cannot send back what the policy said has several transcripts.
    """
    turns, check = [turn for turn in trajectory.turns if turn.role == "assistant"], 0
    if number % 3 == 0:  # Chat Completions return the ids.
        for turn in turns:
            ids = trajectory.transcripts[turn.transcript].ids[turn.start : turn.end]
            check = zlib.crc32(json.dumps(ids).encode(), check)
    texts = [chat.decode(transcript.ids) for transcript in trajectory.transcripts]
    report = trajectory.score_extra
    return (
        len(turns) != 3
        or report["number"] != number
        or report["check"] != check
        or any(f"What is {number} + 2?" not in text for text in texts)
        or any(set(re.findall(r"and (\d+)\?", text)) - {str(number)} for text in texts)
    )


def megabytes() -> float:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def sessions(folder: Path, count: int, rounds: int) -> bool:
    """Run the sessions; return whether no record is mixed."""
    allow_many_files()
    options = AgentOptions(start="pool", processes=2, sessions_at_once=-(-count // 2))
    mixed = 0
    with made(folder, MANY, count, options) as (scheduler, chat):
        for round in range(rounds):
            delay = Delay()
            watching, begun = asyncio.create_task(delay.watch()), time.perf_counter()
            ended = await scheduler.run(requests(count))
            watching.cancel()
            failed = [one.failure for one in ended if one.failure]
            mixed += sum(is_mixed(k, one, chat) for k, one in enumerate(ended) if not one.failure)
            print(
                f"round {round + 1}: {count} sessions in {time.perf_counter() - begun:.0f} s, {len(failed)} failed, "
                f"{mixed} mixed so far, {megabytes():.0f} MiB, longest delay {delay.wall:.3f} s, of which "
                f"{delay.cpu:.3f} s CPU, load {os.getloadavg()[0]:.1f}",
                *failed[:1],
                flush=True,
            )
            del ended
        await scheduler.close()
    return not mixed


async def start(folder: Path) -> None:
    """Measure starts."""
    for name, program, count, options in (
        ("process", ONE, 8, AgentOptions(start="process")),
        ("pool", POOL, 256, AgentOptions(start="pool", processes=2, sessions_at_once=8)),
    ):
        (folder / name).mkdir()
        with made(folder / name, program, 16 if name == "pool" else 2, options) as (scheduler, _):
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
