"""Servers of a model that is not trained: started, started again when one ends or hangs, and stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.config import Config
from agentrl.engines.contract import EngineError
from agentrl.engines.servers.client import ServerFailed
from agentrl.engines.servers.command_line import ServerArguments
from agentrl.engines.servers.fleet import Timings
from agentrl.engines.servers.process import ServerProcess, status_text
from agentrl.engines.servers.start import Say, Software, start_all
from agentrl.engines.sglang.build import SGLANG
from agentrl.engines.vllm.build import VLLM
from agentrl.errors import ConfigError
from agentrl.remote.router import ServerAccess
from agentrl.system.http import http_client
from agentrl.system.loop_thread import LoopThread

ENGINE = "reward_model.rollout"
LOOK_EVERY = 1.0
"""Seconds between two looks at a server's process."""
LONGEST_PAUSE = 60.0
"""Seconds before a server that does not come up is started again, at most."""


class RewardServers:
    """Servers on this machine, which end with `close`, or with this process."""

    def __init__(
        self,
        software: Software,
        processes: Sequence[ServerProcess],
        timeout: float,
        warn: Say,
        timings: Timings | None = None,
    ) -> None:
        """Prepare them; nothing is started yet.

        Args:
            processes: servers of that software with one key, not yet started.
            timeout: seconds until a server must answer after it was started.
            warn: shows later events of servers; called from another thread.
            timings: intervals and deadlines of checks; default: the rollout servers' timings.
        """
        self._timeout, self._warn = timeout, warn
        self._software, self._processes, self._timings = software, processes, timings or Timings()
        self._thread = LoopThread("servers of the reward model")
        self._watching: list[asyncio.Task[None]] = []

    def start(self, progress: Say) -> ServerAccess:
        """Start them and wait until all answer. Raises EngineError with the server's own last error."""
        self._thread.run(self._start(progress))
        return ServerAccess(tuple(process.url for process in self._processes), self._processes[0].key)

    def close(self) -> None:
        """End them; when this returns no process of theirs is left."""
        self._thread.close()
        for process in self._processes:
            process.stop()

    async def _start(self, progress: Say) -> None:
        await start_all(self._processes, self._timeout, progress)
        self._watching = [asyncio.create_task(self._watch(process)) for process in self._processes]

    async def _watch(self, process: ServerProcess) -> None:
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            why = await self._end_of(process)
            self._warn(f"the reward model's server {process.url} {why} and is started again; its log: {process.log}")
            try:
                await asyncio.to_thread(process.stop)
                process.start()
                await process.ready(self._timeout)
                pause = 0.0
            except EngineError as error:
                self._warn(f"the reward model's server does not come up: {error}")
                pause = min(max(2 * pause, LOOK_EVERY), LONGEST_PAUSE)

    async def _end_of(self, process: ServerProcess) -> str:
        """Wait until a server has ended or hangs; says which."""
        failed, look, due = 0, asyncio.get_running_loop().time, 0.0
        async with http_client() as http:
            client = self._software.client(process.url, http, process.key)
            while process.exited is None and failed < self._timings.failures:
                await asyncio.sleep(min(LOOK_EVERY, self._timings.recheck_interval))
                if look() < due:
                    continue
                try:
                    await client.check(self._timings.check_timeout)
                    failed, due = 0, look() + self._timings.check_interval
                except ServerFailed:
                    failed += 1
        if process.exited is not None:
            return f"ended ({status_text(process.exited)})"
        return f"answered none of {failed} checks of {self._timings.check_timeout:g} s"


def software_of(config: Config) -> Software:
    """Return the software of the reward model's servers."""
    return VLLM if config.reward_model.rollout.name == "vllm" else SGLANG


def server_arguments(config: Config, device: str, host: str = "127.0.0.1") -> ServerArguments:
    """Return what each server is started with. Raises ConfigError."""
    rollout = config.reward_model.rollout
    if device == "cpu" and rollout.tensor_model_parallel_size > 1:
        raise ConfigError(f"{ENGINE}.tensor_model_parallel_size above 1 needs GPUs; on a CPU it must be 1")
    arguments = software_of(config).kind.of_reward_model(config, device, host)
    return replace(arguments, extra=vars(rollout.engine_kwargs)[rollout.name])


def reward_servers(
    config: Config, device: str, gpus: Sequence[int], key: str, folder: Path, warn: Say, host: str = "127.0.0.1"
) -> RewardServers:
    """Prepare the servers of this machine, each with the next of `gpus` as its first. Raises ConfigError.

    Callers have to send `key`; logs are in `folder`; `warn` shows later events.
    """
    arguments, software = server_arguments(config, device, host), software_of(config)
    processes = [
        software.process(arguments.at(gpu), None, folder / f"{number}.log", key=key) for number, gpu in enumerate(gpus)
    ]
    return RewardServers(software, processes, config.actor_rollout_ref.rollout.server_start_timeout, warn)


def first_gpus(devices: int, size: int) -> list[int]:
    """Return the first GPU of each server that `devices` GPUs hold. Raises ConfigError where no server fits."""
    if devices < size:
        raise ConfigError(
            f"{ENGINE}.tensor_model_parallel_size={size} needs {size} GPUs; the reward model has {devices}"
        )
    return [number * size for number in range(devices // size)]
