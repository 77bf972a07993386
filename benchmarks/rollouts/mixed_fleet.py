"""Kills in a fleet of SGLang and vLLM servers, while dialogues run and changed weights are sent.

    python -m benchmarks.rollouts.mixed_fleet \\
        --sglang-python .venv-sglang/bin/python --vllm-python .venv-vllm/bin/python [--kills 60]

Two servers of each software on the CPU serve dialogues of 3 turns (`sglang_work`). A server with running
requests is killed whenever two serve; every fifth kill falls into an update of the weights. The engine starts killed
servers again. It prints trajectories without a full record, of which there must be none, and exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.chat import Chat
from agentrl.engines.mixed.engine import EitherChecksums, MixedEngine
from agentrl.engines.servers.fleet import Timings
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.process import ServerProcess
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync import DeltaSender, TensorSender
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.vllm.options import VLLMArguments
from agentrl.engines.vllm.process import VLLMProcess
from agentrl.engines.weights import Weights
from agentrl.system.http import allow_many_files, http_client
from agentrl.trajectory import Status, Trajectory
from benchmarks.rollouts.sglang_work import MODEL_LENGTH, Shape, policy, scheduler

SHAPE = Shape(dialogues=32, turns=3, fewest=32, most=64)
AT_ONCE = 16
STARTUP = 900.0
"""Seconds that a server has to answer: vLLM takes 40 where nothing else runs."""
IN_UPDATE = 5
"""Every so-manieth kill falls into an update."""
SHARE = 0.02
"""Share of the elements that an update changes."""


class SGLangOf(SGLangProcess):
    """A server of another environment's SGLang."""

    python = sys.executable

    def command(self, port: int) -> list[str]:
        return [self.python, *super().command(port)[1:]]


class VLLMOf(VLLMProcess):
    """A server of another environment's vLLM."""

    python = sys.executable

    def command(self, port: int) -> list[str]:
        return [self.python, *super().command(port)[1:]]


class Fleet:
    """The servers, and an engine over them."""

    def __init__(self, folder: Path, chat: Chat, sglang_servers: int, vllm_servers: int) -> None:
        self.folder, self.chat = folder, chat
        sglang = SGLangArguments(
            str(folder), "cpu", context_length=MODEL_LENGTH, max_num_seqs=AT_ONCE, takes_deltas=True
        )
        vllm = VLLMArguments(str(folder), "cpu", context_length=MODEL_LENGTH, max_num_seqs=AT_ONCE)
        logs = folder.parent
        self.processes: list[ServerProcess] = [
            *(SGLangOf(sglang, None, logs / f"sglang{number}.log") for number in range(sglang_servers)),
            *(VLLMOf(vllm, None, logs / f"vllm{number}.log") for number in range(vllm_servers)),
        ]
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
        self.random = random.Random(0)
        self.killed = {"SGLang": 0, "vLLM": 0}
        self.version = 0
        self.engine: MixedEngine

    async def start(self) -> None:
        for process in self.processes:
            process.start()
        await asyncio.gather(*[process.ready(STARTUP) for process in self.processes])
        http = http_client()
        clients = [
            (VLLMClient if isinstance(process, VLLMProcess) else SGLangClient)(process.url, http, process.key)
            for process in self.processes
        ]
        for client in clients:
            await client.info()
        self.engine = MixedEngine(
            [Server(client, process) for client, process in zip(clients, self.processes, strict=True)],
            http,
            ModelFacts.from_path(str(self.folder)),
            DeltaSender(TensorSender(torch.float32, 1 << 20), EitherChecksums),
            max_model_len=MODEL_LENGTH,
            timings=Timings(backoff=0.1, backoff_limit=0.1, start_timeout=STARTUP, restarts=10**6, check_timeout=60.0),
            notify=lambda text: print(f"{time.strftime('%X')} {text}", file=sys.stderr, flush=True),
        )

    async def update(self) -> None:
        """Change some elements, and send them."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for weight in self.model.parameters():
                chosen = torch.rand(weight.shape, generator=generator) < SHARE
                weight.add_(0.01 * torch.randn(weight.shape, generator=generator) * chosen)
        await self.engine.update_weights(Weights.from_tensors(self.model.named_parameters()), self.version)

    async def kill_one(self, *, busy: bool) -> None:
        """Kill a server once two serve; `busy`: one that has sent tokens of an answer that it still writes."""
        supervisor = self.engine._supervisor
        while True:
            serving = [supervisor.servers[url] for url in supervisor.fleet.serving]
            writing = [one for one in serving if any(asking.partial.ids for asking in one.asking)]
            if len(serving) >= 2 and (writing or not busy):
                break
            await asyncio.sleep(0.02)
        process = self.random.choice(writing if busy else serving).process
        assert process is not None and process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        self.killed[process.software] += 1

    async def round(self, name: str) -> int:
        """Run all dialogues with a kill in between; return how many have no full record."""
        running = asyncio.ensure_future(scheduler(self.engine, self.chat, SHAPE).run(SHAPE.requests(name)))
        killing = asyncio.ensure_future(self.kill_one(busy=True))
        trajectories = await running
        killing.cancel()  # where one server served alone
        await asyncio.gather(killing, return_exceptions=True)
        return sum(not whole(number, trajectory) for number, trajectory in enumerate(trajectories))

    async def stop(self) -> None:
        await self.engine.close()
        for process in self.processes:
            process.stop()


def whole(number: int, trajectory: Trajectory) -> bool:
    """Say whether a trajectory has all its turns, in full."""
    lengths = [SHAPE.length(number, turn) for turn in range(SHAPE.turns)]
    sampled = [turn.end - turn.start for turn in trajectory.turns if turn.finish_reason]
    return trajectory.status is Status.COMPLETED and sampled == lengths


async def measure(folder: Path, kills: int, sglang_servers: int, vllm_servers: int) -> dict[str, float]:
    """Run rounds until so many servers were killed."""
    fleet = Fleet(folder, policy(folder), sglang_servers, vllm_servers)
    lost = rounds = in_updates = 0
    try:
        await fleet.start()
        await fleet.update()
        while sum(fleet.killed.values()) < kills:
            rounds += 1
            lost += await fleet.round(str(rounds))
            if rounds % IN_UPDATE == 0:
                killing = asyncio.ensure_future(fleet.kill_one(busy=False))
                in_updates += 1
            await fleet.update()
            if rounds % IN_UPDATE == 0:
                await killing
            print(f"{time.strftime('%X')} round {rounds}: {fleet.killed}, lost {lost}", file=sys.stderr, flush=True)
        metrics = (await fleet.engine.health()).metrics
        return {
            "kills": sum(fleet.killed.values()),
            **{f"kills_{name}": count for name, count in fleet.killed.items()},
            "kills_around_updates": in_updates,
            "rounds": rounds,
            "trajectories": rounds * SHAPE.dialogues,
            "trajectories_lost": lost,
            **{name: metrics[name] for name in ("failovers", "restarts", "delta_full", "delta_full_lost")},
        }
    finally:
        await fleet.stop()


async def main(kills: int, sglang_servers: int, vllm_servers: int) -> int:
    with tempfile.TemporaryDirectory() as name:
        figures = await measure(Path(name) / "policy", kills, sglang_servers, vllm_servers)
    print(json.dumps(figures))
    return 1 if figures["trajectories_lost"] else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang-python", required=True, help="Python of the environment with SGLang")
    parser.add_argument("--vllm-python", required=True, help="Python of the environment with vLLM")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--sglang-servers", type=int, default=2)
    parser.add_argument("--vllm-servers", type=int, default=2)
    given = parser.parse_args()
    SGLangOf.python, VLLMOf.python = given.sglang_python, given.vllm_python
    allow_many_files()
    sys.exit(asyncio.run(main(given.kills, given.sglang_servers, given.vllm_servers)))
