"""Fleets of SGLang and vLLM servers: each server is told apart, asked in its own way, and its checksums expected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import torch
from aiohttp import web

from agentrl.engines.contract import EngineError, SamplingParams
from agentrl.engines.mixed.build import mixed, softwares
from agentrl.engines.mixed.engine import EitherChecksums, MixedEngine
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync.buckets import Bucket, Entry
from agentrl.engines.servers.sync.tensor import TensorSender
from agentrl.engines.sglang.build import SGLANG
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.vllm.build import VLLM
from agentrl.engines.vllm.client import VLLMClient
from agentrl.errors import ConfigError
from agentrl.system.http import http_client
from agentrl.system.json_value import JSON

Answers = dict[str, JSON]
SGLANGS: Answers = {
    "/model_info": {"model_path": "m", "architectures": ["A"], "weight_version": "0"},
    "/server_info": {"version": "0.5", "context_length": 100, "tp_size": 1, "device": "cpu"},
}
VLLMS: Answers = {
    "/server_info": {
        "vllm_config": {
            "model_config": {"model": "m", "max_model_len": 90},
            "parallel_config": {"tensor_parallel_size": 1},
            "device_config": {"device": "cpu"},
            "weight_transfer_config": {"backend": "agentrl"},
        }
    },
    "/weight_info": {"weight_version": "0"},
    "/collective_rpc": {"results": ["A"]},
}


@asynccontextmanager
async def answering(*all_answers: Answers) -> AsyncIterator[list[str]]:
    """URLs of servers that answer as they are given, in the place of real ones."""
    runners = []

    def handler(answers: Answers) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            if request.path in answers:
                return web.json_response(answers[request.path])
            return web.Response(status=404)

        return handle

    for answers in all_answers:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler(answers))
        runners.append(runner := web.AppRunner(app, shutdown_timeout=0))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield [f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners]
    finally:
        await asyncio.gather(*[runner.cleanup() for runner in runners])


async def test_each_server_says_its_software_and_is_checked_by_it() -> None:
    async with answering(SGLANGS, VLLMS) as (sglang, vllm):
        found = await softwares([f"{sglang}/", vllm], None, 30.0)
        assert found == {sglang: SGLANG, vllm: VLLM}
        both = mixed(found)
        async with http_client() as http:
            clients = [both.client(f"{sglang}/", http, None), both.client(vllm, http, None)]
            assert isinstance(clients[0], SGLangClient) and isinstance(clients[1], VLLMClient)
            infos = [await client.info() for client in clients]
        with pytest.raises(ConfigError, match="--context-length 103"):
            both.check_attached(infos[0], sglang, 95)
        with pytest.raises(ConfigError, match="--max-model-len 95"):
            both.check_attached(infos[1], vllm, 95)


async def test_another_server_is_refused_with_what_either_software_misses() -> None:
    without_plugin = VLLMS | {"/server_info": {"vllm_config": {**_settings(), "weight_transfer_config": None}}}
    async with answering(without_plugin) as (url,):
        with pytest.raises(ConfigError, match=r"server_urls: .*model_info.*--incremental.*--weight-transfer-config"):
            await softwares([url], None, 600.0)


async def test_a_server_that_is_not_up_yet_is_waited_for() -> None:
    async with answering({}) as (url,):
        pass  # nothing listens there any more
    with pytest.raises(EngineError, match="no answer within 0 s"):
        await softwares([url], None, 0.0)


def _settings() -> dict[str, JSON]:
    answer = VLLMS["/server_info"]
    assert isinstance(answer, dict)
    settings = answer["vllm_config"]
    assert isinstance(settings, dict)
    return settings


async def test_a_request_is_adapted_to_the_server_that_is_asked() -> None:
    http = http_client()
    servers = [Server(SGLangClient("http://a", http)), Server(VLLMClient("http://b", http))]
    sender = TensorSender(torch.float32, 1024)
    engine = MixedEngine(servers, http, ModelFacts(50, {}), sender, max_model_len=9, deterministic=True)
    asked = SamplingParams(4, stop_token_ids=(7, 10**6))
    to_sglang, to_vllm = (engine._server_params(server, asked) for server in servers)
    assert (to_sglang.top_k, to_sglang.stop_token_ids) == (50, asked.stop_token_ids) and to_sglang.seed is not None
    assert (to_vllm.top_k, to_vllm.stop_token_ids, to_vllm.seed) == (-1, (7,), None)
    assert engine._inspected() == [servers[0].client]
    await engine.close()


def test_checksums_are_expected_under_the_names_of_either() -> None:
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    expected = EitherChecksums()
    for number, name in enumerate(names):
        data = torch.full((4, 2), float(number))
        expected.add(Bucket([Entry(name, (4, 2), torch.float32, 0, 32)], data.view(-1).view(torch.uint8), last=False))
    of_vllm = expected.for_parameters(names)
    of_sglang = expected.for_parameters(["model.layers.0.self_attn.qkv_proj.weight"])
    assert of_vllm is not None and len(set(of_vllm.values())) == 3
    assert of_sglang is not None and len(of_sglang) == 1
    assert expected.for_parameters(["other"]) is None
