"""A generative reward model on a real SGLang server: started, asked through the router, started again, ended.

That one is started again costs a second start, and is in tests/rollouts/test_reward_servers.py for small servers.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from agentrl.config import Config
from agentrl.remote.router import ModelRouter
from agentrl.rollouts.ray_worker import StatusBuffer
from agentrl.rollouts.reward_servers.open import open_reward_servers


@pytest.mark.timeout(400)  # two starts of a server
@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slice(0, "kill"))])
async def test_it_answers_is_started_again_and_ends(model_dir: Path, tmp_path: Path, killed: bool) -> None:
    section = {"enable": True, "model": {"path": str(model_dir), "generative": True}}
    rollout = {"engine_kwargs": {"sglang": {"log_level": "info"}}}
    config = Config.model_validate({"reward_model": {**section, "rollout": rollout}})
    status = StatusBuffer()
    opened = open_reward_servers(config, "cpu", tmp_path, status)
    servers = await asyncio.to_thread(opened.__enter__)
    try:
        assert servers is not None
        router = ModelRouter(servers, status.warn)
        await asyncio.to_thread(router.start, 60.0)
        asked = {"model": "any", "messages": [{"role": "user", "content": "Is it right?"}], "max_tokens": 4}
        ids = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
        async with aiohttp.ClientSession(f"http://{router.address}") as client:
            async with client.post("/v1/chat/completions", json=asked) as answer:
                assert (await answer.json())["usage"]["completion_tokens"] <= 4
            async with aiohttp.request("POST", f"{servers.urls[0]}/generate", json=ids) as answer:
                assert answer.status == 401, "the server itself asks for its key"
            (port,) = {int(url.rpartition(":")[2]) for url in servers.urls}
            (leader,) = listening(port)
            if killed:
                os.killpg(leader, signal.SIGKILL)
            async with client.post("/generate", json=ids) as answer:
                assert len((await answer.json())["output_ids"]) == 4, "it waited for the new one"
        await asyncio.to_thread(router.close)
    finally:
        await asyncio.to_thread(opened.__exit__, None, None, None)
    assert any("is started again" in text for text in status.take().warnings) == killed
    assert not listening(port)


def listening(port: int) -> list[int]:
    """The leaders of groups of processes whose command line names the port."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"agentrl.engines.sglang.launch" in words and str(port).encode() in words:
            found.append(os.getpgid(int(process.name)))
    return sorted(set(found))
