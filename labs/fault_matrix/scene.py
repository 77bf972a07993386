"""One cell as it is played: the servers of the fault, the training, its end by the fault, and its continuation.

All of it happens in processes forked from the one that calls `play`, which has imported torch and has one thread.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx

from agentrl.train import main
from benchmarks.exact.recompute import RATE
from labs.fault_matrix.assets import AGENT, IN_SIDECARS, PROMPTS, SCORER, STEPS, TURNS, Loop, N, make_policy
from labs.fault_matrix.mark import mark, marked

PROJECT = Path(__file__).resolve().parents[2]
LOOK_EVERY = 0.01
TORN_SERVED = "torn-served"
"""File in a cell's folder: a server whose update failed was told to go on, or sampled, before it had all weights."""
START_SECONDS = 300.0
_context = multiprocessing.get_context("fork")


class CellFailed(Exception):
    """The run did not end as it has to."""


@dataclass
class Scene:
    """A cell's folder, words and processes."""

    loop: Loop
    bound: int
    """Versions that a token may be older than the policy; 0: rollouts and updates take turns."""
    folder: Path
    assets: Path
    tool: str = "search"
    """Name of the tool that the policy calls."""
    words: list[str] = field(default_factory=list)
    """The fault's own words of the command."""
    scorer: str = SCORER
    agent_tool: str | None = None
    """Address of the tool that openai_proxy's agent asks."""
    inject: Callable[[Path], None] | None = None
    """Called in the training's first process, with `folder`."""
    watch: Callable[[Scene], None] = lambda scene: None
    """Called again and again while the training runs."""
    seen: list[tuple[float, int]] = field(default_factory=list)
    """When how many steps were logged."""
    processes: list[BaseProcess] = field(default_factory=list)
    training: BaseProcess | None = None
    starts: int = 0

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def policy(self) -> Path:
        return make_policy(self.assets, self.loop, self.tool)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def command(self) -> list[str]:
        """Return the words of the training's command."""
        rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
        scorer = self.write("scorer.py", self.scorer)
        agent = self.write("agent.py", f"TOOL = {self.agent_tool!r}\n{AGENT}")
        loops, plays = self.assets / "loops.yaml", self.loop == "self_play"
        scores = not plays and not any("judge" in word for word in self.words)
        return [
            f"data.train_files={self.assets}/{'self_play' if plays else 'rows'}.parquet",
            "data.val_files=null",
            "data.shuffle=false",
            f"data.train_batch_size={PROMPTS}",
            "data.max_prompt_length=600",
            "data.max_response_length=200",
            f"actor_rollout_ref.model.path={self.policy}",
            f"{actor}.ppo_mini_batch_size={PROMPTS}",
            f"{actor}.optim.lr={RATE}",
            f"{rollout}.n={N}",
            f"{rollout}.max_num_seqs=16",
            f"{rollout}.agent.default_agent_loop={self.loop}",
            f"{rollout}.agent.trajectory_timeout=300",
            f"{rollout}.multi_turn.max_assistant_turns={TURNS.get(self.loop, 2)}",
            f"{rollout}.multi_turn.max_tokens_per_turn=48",
            f"{rollout}.multi_turn.tool_config_path={self.assets}/tools.yaml",
            *([f"{rollout}.agent.openai_proxy.target={agent}:solve"] if self.loop == "openai_proxy" else []),
            *([f"{rollout}.agent.agent_loop_config_path={loops}"] if self.loop in IN_SIDECARS else []),
            *([f"{rollout}.roles={{first: {{}}, second: {{}}}}"] if plays else []),
            *([f"custom_reward_function.path={scorer}"] if scores else []),
            "algorithm.filter_groups.enable=false",
            f"async_training.max_staleness={self.bound}",
            # What recompute.py computes again, without the rest of the batch.
            *(["algorithm.rollout_correction.rollout_is=sequence"] if self.bound else []),
            "trainer.device=cpu",
            "trainer.logger=[jsonl]",
            "trainer.save_trajectories=all",
            "trainer.save_freq=1",
            f"trainer.total_training_steps={STEPS}",
            f"trainer.default_local_dir={self.run}",
            *self.words,
        ]

    # Processes

    def fork(self, work: Callable[[], object], log: str) -> BaseProcess:
        """Begin a process; it is ended with the cell."""
        process = _context.Process(target=_logged, args=(work, str(self.folder / log)))
        process.start()
        self.processes.append(process)
        return process

    def serve(self, work: Callable[[], object], url: str, log: str) -> BaseProcess:
        """Begin a server and wait until it answers anything at `url`."""
        process = self.fork(work, log)
        self.reach(url)
        return process

    def reach(self, url: str) -> None:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                httpx.get(url, timeout=5.0, trust_env=False)
                return
            except httpx.TransportError as error:
                if time.monotonic() > end:
                    raise CellFailed(f"{url} does not answer") from error
                time.sleep(LOOK_EVERY)

    @contextmanager
    def program(self, words: list[str], url: str, log: str) -> Iterator[subprocess.Popen[bytes]]:
        """Begin a Python program that is a server."""
        with (self.folder / log).open("ab") as file:
            process = subprocess.Popen([sys.executable, *words], cwd=PROJECT, stdout=file, stderr=file)
        try:
            self.reach(url)
            yield process
        finally:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End what is left of the cell's processes."""
        for process in self.processes:
            process.kill()  # a stopped one, too
            process.join()

    # The play

    def train(self, *, injected: bool) -> tuple[int, str]:
        """Run the training to its end; returns (exit status, what it said)."""
        self.starts += 1
        log, words = f"training-{self.starts}.log", self.command()
        inject = self.inject if injected else None
        self.training = self.fork(lambda: _train(words, inject, self.folder), log)
        while self.training.is_alive():
            self.look()
            self.watch(self)
            time.sleep(LOOK_EVERY)
        self.look()
        self.training.join()
        assert self.training.exitcode is not None
        return self.training.exitcode, (self.folder / log).read_text(errors="replace")

    def look(self) -> None:
        """Note how many steps are logged."""
        steps = steps_logged(self.run)
        if not self.seen or self.seen[-1][1] != steps:
            self.seen.append((time.monotonic(), steps))

    def recovery(self) -> float | None:
        """Count the seconds of the longest wait for a new step from the fault on; None: no step was logged after it.

        The first wait alone says little: a fault may come when the step that is logged next has all that it needs, and
        hold up the one after. Without a fault: the longest wait after the first step.
        """
        at, most = marked(self.folder), 0
        waits: list[float] = []
        for when, steps in self.seen:
            if steps > most and at is not None and when > at:
                waits.append(when - at)
            if steps > most:
                at, most = max(when, at or when), steps
        return max(waits, default=None)

    def kill_training(self) -> None:
        assert self.training is not None and self.training.pid is not None
        if mark(self.folder):
            os.kill(self.training.pid, signal.SIGKILL)


def steps_logged(run: Path) -> int:
    """Count the steps of metrics.jsonl."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _train(words: list[str], inject: Callable[[Path], None] | None, folder: Path) -> int:
    if inject is not None:
        inject(folder)
    return main(words)


def _logged(work: Callable[[], object], log: str) -> None:
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(opened, stream)
    os.close(opened)
    status = work()
    sys.stdout.flush()
    os._exit(status if isinstance(status, int) else 0)
