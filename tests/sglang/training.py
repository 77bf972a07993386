"""Runs of `python -m agentrl.train` for tests: small, in a process of their own, watched from outside."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq

from agentrl.engines.servers.starter import STARTER
from tests.conftest import PROJECT
from tests.forked import ForkedPython

LOOP = '''
"""Four turns whatever the policy says; a line in turns.txt for each, by which a test knows that a step has begun."""

from agentrl.agent_loop import AgentLoop
from agentrl.trajectory import Status


class FourTurns(AgentLoop):
    async def run(self, episode):
        await episode.start(episode.sample.prompt)
        for turn in range(4):
            if turn and not await episode.observe([{"role": "user", "content": "And then?"}]):
                return episode.finish(Status.LENGTH)
            await episode.generate()
            if not turn:
                episode.trajectory.metrics["cached_at_first"] = episode.cached_tokens
            with open("turns.txt", "a") as turns:
                turns.write("turn\\n")
        episode.finish(Status.COMPLETED)
'''

REWARD = '''
"""Tells random answers apart, so that there is something to learn from."""

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.1 + len(solution_str) % 7 / 10
'''

AGENT = '''
"""An agent as its author wrote it, against OpenAI's own client."""

import openai


async def solve(sample, base_url, api_key, model):
    messages = list(sample["prompt"])
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for question in ("And then?", "Are you sure?"):
            reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=8)
            if len(messages) == len(sample["prompt"]):
                with open("cached_at_first.txt", "a") as counts:
                    counts.write(f"{reply.usage.prompt_tokens_details.cached_tokens}\\n")
            messages += [reply.choices[0].message, {"role": "user", "content": question}]
        async for _ in await client.chat.completions.create(model=model, messages=messages, max_tokens=8, stream=True):
            pass
'''


def write_assets(folder: Path) -> Path:
    """Rows, loop, reward and agent."""
    (folder / "loop.py").write_text(LOOP)
    (folder / "loops.yaml").write_text("- name: four_turns\n  _target_: loop.FourTurns\n")
    (folder / "reward.py").write_text(REWARD)
    (folder / "agent.py").write_text(AGENT)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Count up from {number}."}],
            "data_source": "test/counting",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
        }
        for number in range(16)
    ]
    pq.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return folder


def overrides(assets: Path, model: Path, folder: Path, *more: str) -> list[str]:
    """Of a run of seconds in `folder`: 2 prompts x 4 trajectories a step, 4 turns of 12 tokens."""
    return [
        "actor_rollout_ref.rollout.name=sglang",
        "trainer.device=cpu",
        f"data.train_files={assets}/rows.parquet",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={assets}/loops.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop=four_turns",
        f"custom_reward_function.path={assets}/reward.py",
        "data.train_batch_size=2",
        "data.max_prompt_length=60",
        "data.max_response_length=180",
        "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=12",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "actor_rollout_ref.actor.optim.lr=5e-3",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "trainer.show_trajectory_freq=-1",
        f"trainer.default_local_dir={folder}/run",
        *more,
    ]


class Run:
    """The command, running."""

    def __init__(self, arguments: list[str], assets: Path, folder: Path) -> None:
        self.folder = folder
        path = {"PYTHONPATH": f"{PROJECT}{os.pathsep}{assets}"}
        self._run = ForkedPython(["-m", "agentrl.train", *arguments], folder, path)
        self.pid = self._run.process.pid

    @property
    def stdout(self) -> str:
        return self._run.said(0)

    @property
    def stderr(self) -> str:
        return self._run.said(1)

    @property
    def turns(self) -> int:
        """Turns that the loop has had, of this run and earlier ones in the folder."""
        file = self.folder / "turns.txt"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def until(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        """Wait; fails when the run ends first."""
        end = time.monotonic() + seconds
        while not condition():
            assert self._run.process.is_alive(), f"the run ended: {self.stdout[-2000:]}\n{self.stderr}"
            assert time.monotonic() < end, f"{seconds:g} s: {self.stdout[-2000:]}\n{self.stderr}"
            time.sleep(0.005)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def end(self, seconds: float = 300) -> int:
        """Its exit status."""
        self._run.process.join(seconds)
        status = self._run.process.exitcode
        assert status is not None, f"{seconds:g} s: {self.stdout[-2000:]}\n{self.stderr}"
        return status

    def servers(self) -> set[int]:
        """Ids of the living processes of all its servers."""
        mark = f"{STARTER}={self.pid}".encode()
        found = set()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in environ.read_bytes().split(b"\0"):
                    found.add(int(environ.parent.name))
            except OSError:
                continue  # it has just ended
        return found

    def groups(self) -> set[int]:
        """Process groups of its servers, one each."""
        found = set()
        for pid in self.servers():
            try:
                found.add(os.getpgid(pid))
            except ProcessLookupError:
                continue
        return found

    def stop(self) -> None:
        """Whatever came of it: nothing of it is left."""
        self._run.process.kill()
        self._run.process.join()
        for pid in self.servers():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
