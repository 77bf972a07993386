"""2,000 trajectories at once, whose tools' server fails, hangs and is killed in the middle: is any of them lost?

    python -m benchmarks.tools.faulty_tools

Each trajectory searches, runs a cell in a session of its own, searches, runs another cell, and answers: through the
real tools, their HTTP client, the scheduler and the scorer. 5 % of the requests fail and 1 % hang, and the server is
killed once and started again two seconds later (`benchmarks.tools.faulty_server`). The same without faults is run
first.

Prints how many trajectories were lost or had a score other than their answer's, how often one was tried again, what is
left of tasks, sockets and sessions, and the ratio of the seconds of both runs. Exits with 1 where anything was lost,
scored falsely or left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.agent_loop import LoopContext, LoopLimits, Scheduler
from agentrl.agent_loop.registry import instantiate
from agentrl.chat import Chat
from agentrl.config import Config
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.reward import NaiveRewardManager
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Status, Trajectory
from benchmarks.rollouts.runtime_overhead import InstantEngine, requests
from tools.code_interpreter import CodeInterpreterTool
from tools.remote_search import RemoteSearchTool

TIMEOUT = 60.0
"""Seconds of one call with all its attempts."""
ATTEMPT = 10.0
"""Seconds after which a request that hangs is given up: 2,000 at once keep the server busy for some of them."""
RETRIES = 12
"""Fresh tries: a cell is never sent twice, so that 4 % of them cost their trajectory a try."""


class Scripted(InstantEngine):
    """Searches, runs a cell, searches, runs a cell, and answers."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat)
        calls = [("search", {"query": "the answer"}), ("code_interpreter", {"code": "n = n + 1; n"})] * 2
        texts = [
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"
            for name, arguments in calls
        ]
        self.turns = [chat.tokenizer.encode(text, add_special_tokens=False) for text in [*texts, "#### 42<|im_end|>"]]


class Server:
    """The faulty server as a process."""

    def __init__(self, failing: float, hanging: float) -> None:
        self.faults = failing, hanging
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        failing, hanging = self.faults
        command = [sys.executable, "-m", "benchmarks.tools.faulty_server", "--port", str(self.port)]
        self.process = subprocess.Popen([*command, "--failing", str(failing), "--hanging", str(hanging)])

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
            said: dict[str, Any] = json.load(answer)
        return said

    def wait(self) -> None:
        for _ in range(200):
            try:
                self.health()
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError("the faulty server does not start")


@contextmanager
def serving(failing: float, hanging: float) -> Iterator[Server]:
    server = Server(failing, hanging)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def build(chat: Chat, url: str) -> Scheduler:
    limits = {"timeout": TIMEOUT, "max_concurrent": 4096}
    search = RemoteSearchTool({**limits, "url": url, "attempt_timeout": ATTEMPT, "attempts": 50})
    code = CodeInterpreterTool(
        {**limits, "url": url, "session": True, "run_timeout": 1.0, "attempt_timeout": ATTEMPT, "attempts": 50}
    )
    tools = ToolSet.from_tools([search, code])
    tools.bind(chat.encode, chat.decode)
    return Scheduler(
        context=LoopContext(Scripted(chat), chat, tools, {}, LoopLimits.from_config(Config())),  # type: ignore[arg-type]
        loops=instantiate(["tool_agent"]),
        reward=NaiveRewardManager(),
        max_concurrent=4096,
        trajectory_timeout=600,
        max_retries=RETRIES,
    )


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def run(scheduler: Scheduler, trajectories: int, server: Server, *, kill: bool) -> dict[str, Any]:
    tools, work = scheduler.context.tools, requests(trajectories)
    await tools.start("benchmark")
    tasks, files, begun = len(asyncio.all_tasks()), open_files(), time.perf_counter()
    running = asyncio.create_task(scheduler.run(work))
    if kill:
        while sum(len(t.trajectory.tool_calls) for t in scheduler.running.values()) < trajectories // 2:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(2.0)
        server.start()
    done = await running
    seconds = time.perf_counter() - begun
    metrics = tools.take_metrics()
    await tools.close()
    await asyncio.sleep(0.3)  # for connections to end
    return {
        "seconds": round(seconds, 1),
        **verdict(done),
        "tasks_left": len(asyncio.all_tasks()) - tasks,
        "files_left": max(0, open_files() - files),
        "sessions_left": server.health()["sessions"],
        "request_retries": sum(int(value) for name, value in metrics.items() if name.endswith("/retries")),
    }


def verdict(done: list[Trajectory]) -> dict[str, int]:
    return {
        "trajectories": len(done),
        "lost": sum(t.status is not Status.COMPLETED for t in done),
        "false_score": sum(t.score != 1.0 or len(t.tool_calls) != 4 for t in done),
        "tried_again": sum(t.metrics.get("retries", 0.0) > 0 for t in done),
    }


def measure(trajectories: int = 2000, failing: float = 0.05, hanging: float = 0.01) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_policy(Path(folder), seed=1)
        chat = Chat.from_pretrained(folder)
    found: dict[str, Any] = {}
    for name, faults, kill in (("quiet", (0.0, 0.0), False), ("faulty", (failing, hanging), True)):
        with serving(*faults) as server:
            found[name] = asyncio.run(run(build(chat, server.url), trajectories, server, kill=kill))
    found["times_as_long"] = round(found["faulty"]["seconds"] / found["quiet"]["seconds"], 2)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tools.faulty_tools")
    parser.add_argument("--trajectories", type=int, default=2000)
    measured = measure(parser.parse_args().trajectories)
    print(json.dumps(measured, indent=2))
    harm = ("lost", "false_score", "tasks_left", "files_left", "sessions_left")
    sys.exit(any(measured[run][name] for run in ("quiet", "faulty") for name in harm))
