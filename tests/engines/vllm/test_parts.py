"""The parts of the vLLM engine that need no server: command line, key, answers, requests."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest
import torch
from aiohttp import web
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.config.sections.training import Config
from agentrl.engines.contract import SamplingParams
from agentrl.engines.servers.start import server_processes
from agentrl.engines.servers.sync.buckets import buckets
from agentrl.engines.servers.sync.tensor import shared_by_name
from agentrl.engines.vllm import client as client_module
from agentrl.engines.vllm import guard
from agentrl.engines.vllm.build import VLLM
from agentrl.engines.vllm.client import VLLMClient, entries, sampling_params
from agentrl.engines.vllm.handle import place
from agentrl.engines.vllm.options import VLLMArguments
from agentrl.engines.vllm.plugin import BACKEND, NEEDED
from agentrl.rollouts.reward_servers.local import server_arguments
from agentrl.system.http import http_client


def test_a_command_line_has_what_a_server_needs_and_the_users_own_words() -> None:
    words = VLLMArguments("m", "cpu", extra={"block_size": 64, "enable_lora": True}).argv(8000)
    line = " ".join(words)
    assert all(argument.replace("'", "") in line for argument in NEEDED)
    assert "--block-size 64 --enable-lora" in line and line.count("--block-size") == 1
    assert json.loads(words[words.index("--weight-transfer-config") + 1]) == {"backend": BACKEND}


def test_a_server_for_adapters_has_room_for_two_and_the_next_rank_of_vllms() -> None:
    line = " ".join(VLLMArguments("m", "cpu", lora_rank=20).argv(8000))
    assert "--enable-lora --max-lora-rank 32 --max-loras 2 --lora-target-modules q_proj" in line


def test_servers_of_a_run_have_their_own_gpus_and_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("WANDB_API_KEY", "x")
    rollout = {"name": "vllm", "num_servers": 2, "tensor_model_parallel_size": 2}
    config = RolloutsConfig.model_validate({"actor_rollout_ref": {"model": {"path": "/m"}, "rollout": rollout}})
    processes = server_processes(VLLM, config, "cuda", 100, tmp_path)
    assert [one.environment()["CUDA_VISIBLE_DEVICES"] for one in processes] == ["4,5", "6,7"]
    assert len({one.key for one in processes}) == 2
    assert all("WANDB_API_KEY" not in one.environment() for one in processes)
    assert all(one.environment()["VLLM_SERVER_DEV_MODE"] == "1" for one in processes)


def test_a_reward_models_servers_are_vllms_own_with_a_key(tmp_path: Path) -> None:
    section = {"enable": True, "model": {"path": "/rm", "generative": True}}
    rollout = {"name": "vllm", "tensor_model_parallel_size": 2, "engine_kwargs": {"vllm": {"seed": 3}}}
    config = Config.model_validate({"reward_model": {**section, "rollout": rollout}})
    arguments = server_arguments(config, "cuda", "10.0.0.7").at(4)
    words = arguments.argv(8000)
    line = " ".join(words)
    assert "--model /rm --host 10.0.0.7" in line and "--max-model-len auto" in line and "--seed 3" in line
    assert "--middleware agentrl.engines.vllm.guard.Guard" in line
    assert "--weight-transfer-config" not in words and "--logprobs-mode" not in words
    made = VLLM.process(arguments, None, tmp_path / "log", key="k").environment()
    assert made["CUDA_VISIBLE_DEVICES"] == "4,5" and "VLLM_SERVER_DEV_MODE" not in made


@pytest.mark.parametrize(
    ("key", "given", "status"), [("k", "k", 200), ("k", "other", 401), ("k", None, 401), (None, None, 200)]
)
def test_only_the_key_opens_the_routes(
    monkeypatch: pytest.MonkeyPatch, key: str | None, given: str | None, status: int
) -> None:
    async def answer(request: Request) -> JSONResponse:
        return JSONResponse({})

    monkeypatch.setattr(guard, "_key", key)
    app = Starlette(routes=[Route("/health", answer), Route("/pause", answer, methods=["POST"])])
    app.add_middleware(guard.Guard)
    client = TestClient(app)
    assert client.get("/health").status_code == 200
    headers = {} if given is None else {"authorization": f"Bearer {given}"}
    assert client.post("/pause", headers=headers).status_code == status


@pytest.mark.parametrize("works", [True, False])
async def test_a_full_server_is_alive_as_long_as_it_samples(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    """A request waits while all places are taken, so that a check of a busy server would never end."""
    monkeypatch.setattr(client_module, "PROGRESS_EVERY", 0.01)
    counts = itertools.count() if works else itertools.repeat(7)
    is_free = asyncio.Event()
    looks = 0

    async def generate(request: web.Request) -> web.Response:
        await is_free.wait()
        return web.json_response({})

    async def metrics(request: web.Request) -> web.Response:
        nonlocal looks
        looks += 1
        if looks == 5:
            is_free.set()
        text = f'# TYPE x counter\nvllm:generation_tokens_total{{engine="0",model_name="a b"}} {next(counts)}.0\nx 1\n'
        return web.Response(text=text)

    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", generate), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with http_client() as http:
            await VLLMClient(f"http://127.0.0.1:{runner.addresses[0][1]}", http).check(None)
        assert looks == 2 if works else looks >= 5, "it waits for an answer where nothing is sampled"
    finally:
        is_free.set()
        await runner.cleanup()


def test_seeds_fit_and_text_is_made_for_stop_strings_alone() -> None:
    params = sampling_params(SamplingParams(5, seed=(1 << 64) - 1, stop=("x",), stop_token_ids=(3,)))
    assert (params["seed"], params["detokenize"], params["ignore_eos"]) == (-1, True, True)
    assert sampling_params(SamplingParams(5))["detokenize"] is False and "seed" not in sampling_params(
        SamplingParams(5)
    )


def test_a_bucket_is_found_again_in_shared_memory() -> None:
    with shared_by_name():
        buffer = torch.empty(24, dtype=torch.uint8).share_memory_()
    [bucket] = buckets([("a", torch.arange(6.0).view(2, 3))], buffer, 24, torch.float32)
    where = place(bucket)["memory"]
    assert isinstance(where, str)
    path = Path(f"/dev/shm{where}")
    seen = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)[-24:]
    [entry] = entries(bucket)["entries"]
    assert entry == ["a", "float32", [2, 3], 0, 24]
    assert torch.equal(seen.view(torch.float32).view(2, 3), torch.arange(6.0).view(2, 3))
