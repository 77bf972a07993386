"""The engine over servers of several softwares from the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import aiohttp

from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.builder import EngineSetting
from agentrl.engines.contract import EngineError, RequestError
from agentrl.engines.mixed.engine import EitherChecksums, MixedEngine
from agentrl.engines.servers.client import ServerClient, ServerFailed, ServerInfo, WrongServer, describe
from agentrl.engines.servers.engine import ServerEngine
from agentrl.engines.servers.start import Software, answer_within, build_engine, is_final
from agentrl.engines.sglang.build import SGLANG
from agentrl.engines.vllm.build import VLLM
from agentrl.errors import TrainingError
from agentrl.remote.credentials import from_environment
from agentrl.system.http import http_client
from agentrl.system.loop_thread import LoopThread
from agentrl.system.quota import run_concurrently

Found = Mapping[str, Software]
"""Softwares by the URL of a server."""


def build(setting: EngineSetting, loop: LoopThread) -> ServerEngine:
    """Attach to servers of both softwares. See `EngineBuilder`."""
    rollout = setting.config.actor_rollout_ref.rollout
    urls, variable = rollout.server_urls or [], rollout.server_api_key_env
    key = None if variable is None else from_environment(variable)
    with setting.reporter.stage("find out which software each server runs"):
        try:
            found = loop.run(softwares(urls, key, rollout.server_start_timeout))
        except EngineError as error:
            raise TrainingError(str(error)) from error
    return build_engine(mixed(found), setting, loop)


def mixed(found: Found) -> Software:
    """Make the software of an engine over servers of other softwares."""

    def client(url: str, http: aiohttp.ClientSession, key: str | None) -> ServerClient:
        return found[url.rstrip("/")].client(url, http, key)

    def check(info: ServerInfo, url: str, config: RolloutsConfig) -> None:
        own = found[url].check
        if own is not None:
            own(info, url, config)

    def check_attached(info: ServerInfo, url: str, max_model_len: int) -> None:
        found[url].check_attached(info, url, max_model_len)

    return replace(
        SGLANG,  # whose arguments and process are never asked for
        name="SGLang and vLLM",
        client=client,
        check=check,
        check_attached=check_attached,
        engine=MixedEngine,
        checksums=EitherChecksums,
    )


async def softwares(urls: Sequence[str], key: str | None, timeout: float) -> Found:
    """Find the software of each server. Raises EngineError where one does not answer within `timeout` seconds."""
    found: dict[str, Software] = {}

    async def ask(url: str) -> None:
        found[url.rstrip("/")] = await software_of(url, http, key, timeout)

    async with http_client() as http:
        await run_concurrently(ask(url) for url in urls)
    return found


async def software_of(url: str, http: aiohttp.ClientSession, key: str | None, timeout: float) -> Software:
    """Find the software of a server. Raises ConfigError or EngineError where no known one answers (`answer_within`)."""

    async def ask() -> Software:
        why = list[EngineError | RequestError]()
        for software in (SGLANG, VLLM):
            try:
                await software.client(url, http, key).info()
                return software
            except (EngineError, RequestError) as error:
                why.append(error)
        failed = WrongServer if all(map(is_final, why)) else ServerFailed
        raise failed(url, "; ".join(map(describe, why)))

    return await answer_within(timeout, ask, f"{SGLANG.needs}, or {VLLM.needs}")
