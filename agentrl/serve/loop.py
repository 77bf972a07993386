"""Agent loop whose trajectories are sessions of live clients.

Clients are served at any time, by the engine of the run. A trajectory of the run is a place for a session. It waits for
a silent session with feedback whose tokens are young enough, and takes it for good. So clients wait for no batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentrl.agent_loop.base import AgentLoop, Episode, LoopContext
from agentrl.agent_loop.limits import seed_of
from agentrl.config import Config
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.contract import SamplingParams
from agentrl.errors import ConfigError
from agentrl.reward.reported import REPORTED
from agentrl.serve.check import check_config
from agentrl.serve.endpoint import LiveEndpoint
from agentrl.serve.options import LiveOptions
from agentrl.serve.session import fill
from agentrl.serve.store import STORE_FILE, Fate, Store, StoredSession, facts_of
from agentrl.trajectory import Status, Trajectory
from agentrl.trajectory.sample import Sample

logger = logging.getLogger(__name__)
LOOP = "live"
"""Name of the loop."""
TICK_SECONDS = 0.5
"""Seconds between two looks at the clock, for sessions that are silent long enough."""


@dataclass(slots=True)
class _Service:
    """Everything that is open while the run's loop runs."""

    loop: asyncio.AbstractEventLoop
    store: Store
    endpoint: LiveEndpoint
    news: asyncio.Event


class LiveLoop(AgentLoop):
    """Loop whose trajectories are sessions that live clients began."""

    waits_for_people = True
    takes_images = False

    def __init__(self, options: LiveOptions) -> None:
        self.options = options
        self._config: Config | None = None
        self._service: asyncio.Task[_Service] | None = None
        self._turn = asyncio.Lock()
        """Held by the trajectory that looks for a session: the first that began, whose batch is due first."""

    def configure(self, config: RolloutsConfig) -> None:
        self._config = config if isinstance(config, Config) else None

    def check(self) -> None:
        """Check that the run can learn from single sessions. Raises ConfigError."""
        if self._config is None:
            raise ConfigError("agent_name live: live clients are trained on, by python -m agentrl.serve --learn")
        check_config(self._config)

    async def run(self, episode: Episode) -> None:
        service = await self._started(episode)
        episode.waiting_for = "a session with feedback"
        ordinal = episode.trajectory.group
        async with self._turn:
            while (found := await self._take(service, ordinal, episode)) is None:
                service.news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(service.news.wait(), TICK_SECONDS)
        assert found.record is not None and found.score is not None
        fill(episode.trajectory, found.record)
        episode.trajectory.score_extra[REPORTED] = found.score

    async def _take(self, service: _Service, ordinal: int, episode: Episode) -> StoredSession | None:
        """Take a session for the prompt, for good; None: there is no such session yet."""
        store, endpoint, now = service.store, service.endpoint, time.time()
        await endpoint.rest(now - self.options.idle_seconds)
        async with endpoint.moving:
            store.write_counts()
            store.expire(now - self.options.feedback_window, endpoint.open)
            # A prompt that ran before, in a process that was killed, is given its session again.
            again = store.taken_by(ordinal)
            if again is not None and again.record is None:
                store.end(again.id, Fate.DELETED)
                again = None
            known = [] if again is None or again.oldest is None else [(again.id, again.oldest)]
            for id, oldest in known + store.ready(now - self.options.idle_seconds, endpoint.open):
                if episode.takes_version(oldest):
                    store.take(id, ordinal)
                    return store.find(id)
                store.end(id, Fate.TOO_OLD)
        return None

    async def _started(self, episode: Episode) -> _Service:
        if self._service is None or (self._service.done() and self._service.result().loop is not _running()):
            self._turn = asyncio.Lock()
            self._service = _running().create_task(self._start(episode.context, episode.sample, episode.params))
        return await asyncio.shield(self._service)

    async def _start(self, context: LoopContext, sample: Sample, params: SamplingParams) -> _Service:
        assert self._config is not None
        folder, fsync = Path(self._config.trainer.default_local_dir), self._config.async_training.journal_fsync
        store = Store(folder / STORE_FILE, fsync=fsync)
        try:
            store.know(facts_of(self._config))
            version = (await context.engine.health()).version
            if lost := store.lose_after(version):
                logger.warning(
                    "%d live sessions were sampled by later weights than version %d, which the run went back to; they "
                    "are not trained on",
                    *(lost, version),
                )
            news = asyncio.Event()
            made = partial(begin_episode, context, sample, params)
            endpoint = LiveEndpoint(self.options, store, context.chat, made, news.set)
            await endpoint.start()
        except BaseException:
            store.close()
            raise
        print(f"live clients: {endpoint.url}/v1; feedback: POST {endpoint.url}/v1/feedback", flush=True)
        return _Service(_running(), store, endpoint, news)

    async def close(self) -> None:
        service, self._service = self._service, None
        if service is not None and service.done() and service.exception() is None:
            found = service.result()
            if found.loop is _running():
                await found.endpoint.close()
                found.store.close()


def _running() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def begin_episode(context: LoopContext, sample: Sample, params: SamplingParams, id: str) -> Episode:
    """Make the episode of a session, which belongs to no prompt yet. Clients go before all else in the engine."""
    uid = f"live/{id}"
    trajectory = Trajectory(uid, 0, sample.data_source, sample.agent_name, status=Status.COMPLETED)
    params = SamplingParams(1, temperature=params.temperature, top_p=params.top_p, top_k=params.top_k)
    return Episode(context, sample, trajectory, params, seed=seed_of("live", id), session=uid)
