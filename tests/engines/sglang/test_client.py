"""Answers that end badly, from a server that is made to give them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from agentrl.engines.contract import EngineError, SamplingParams
from agentrl.engines.servers.client import PartialAnswer, ServerFailed
from agentrl.engines.sglang.client import SGLangClient
from agentrl.system.http import http_client
from agentrl.system.json_value import JSON
from tests.remote.conftest import FaultyServer, Handler


def chunk(ids: Sequence[int], **meta: Any) -> dict[str, Any]:
    logprobs = [[-1.0, token, None] for token in ids]
    return {
        "output_ids": list(ids),
        "meta_info": {"finish_reason": None, "weight_version": "3", "output_token_logprobs": logprobs, **meta},
    }


END: dict[str, Any] = {"finish_reason": {"type": "length", "length": 3}}


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[SGLangClient]:
    """A client of a server that answers every request so."""
    server, http = FaultyServer([handler]), http_client()
    await server.start()
    try:
        yield SGLangClient(server.url.rstrip("/"), http)
    finally:
        await http.close()
        await server.stop()


async def answered(chunks: Sequence[dict[str, Any]], partial: PartialAnswer, *, break_off: bool = False) -> Any:
    """What the client makes of a stream of `chunks`."""

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in chunks:
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        if break_off:
            assert request.transport is not None
            request.transport.close()
        return response

    async with serving(generate) as client:
        return await client.generate("0" * 32, [5], SamplingParams(3), cache_key="v3", partial=partial)


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        ([8], [-1.0, -2.0]),
        ([8, 8], [-2.0, -1.0, -2.0]),  # with a chunk that was not yet sent
    ],
)
async def test_what_the_abort_of_a_waiting_request_tells_again_is_not_taken_twice(
    ids: list[int], logprobs: list[float]
) -> None:
    """The last token and all log-probs, as SGLang 0.5.23 does where it has sent a part and retracted the request."""
    partial = PartialAnswer()
    told = [[one, 0, None] for one in logprobs]
    meta = {"finish_reason": {"type": "abort"}, "weight_versions": [{"version": "3", "start": 0, "end": 2}]}
    sent = [7, 8][: 3 - len(ids)]
    first = chunk(sent, output_token_logprobs=[[-1.0 - place, one, None] for place, one in enumerate(sent)])
    generation = await answered([first, chunk(ids, output_token_logprobs=told, **meta)], partial)
    assert (generation.ids, generation.logprobs) == ([7, 8], [-1.0, -2.0])
    assert generation.finish_reason.kind == "abort"


MODEL: dict[str, JSON] = {
    "model_path": "/m",
    "architectures": ["Qwen3ForCausalLM"],
    "weight_version": "3",
    "is_generation": True,
}
SERVER: dict[str, JSON] = {
    "version": "0.5.23",
    "context_length": None,
    "internal_states": [{"max_req_input_len": 90, "waiting": []}],
    "tp_size": 2,
    "enable_deterministic_inference": False,
    "incremental_streaming_output": True,
    "device": "cpu",
}
CHECKSUMS: dict[str, JSON] = {
    "success": True,
    "message": "Success.",
    "ranks": [{"checksums": {"norm": "00ff"}, "parallelism_info": [{"role": "target", "tp_rank": 0, "pp_rank": 0}]}],
}


@asynccontextmanager
async def telling(**answers: JSON) -> AsyncIterator[SGLangClient]:
    """A client of a server that answers each path so."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(answers[request.match_info["path"]]))

    async with serving(answer) as client:
        yield client


async def test_what_a_server_says_of_itself_is_read() -> None:
    async with telling(model_info=MODEL, server_info=SERVER, weights_checker=CHECKSUMS) as client:
        info = await client.info()
        assert (info.architecture, info.context_length, info.tensor_parallel) == ("Qwen3ForCausalLM", 90, 2)
        assert (info.weight_version, info.deterministic, info.incremental) == ("3", False, True)
        found = await client.weight_checksums(5.0)
    assert found.ranks == {"target/0/0": {"norm": "00ff"}} and found.predictable


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ({**SERVER, "tp_size": "many"}, "tp_size: .*found 'many'"),
        ({"version": "0.5.23"}, "key 'context_length' is missing"),
        ({**SERVER, "internal_states": []}, "neither context_length nor max_req_input_len"),
        (["something else"], "found \\['something else'\\]"),
    ],
)
async def test_a_server_that_says_something_else_is_at_fault(server: JSON, told: str) -> None:
    async with telling(model_info=MODEL, server_info=server, weights_checker={"success": True}) as client:
        with pytest.raises(ServerFailed, match=f"no SGLang server that agentrl knows: .*{told}"):
            await client.info()
        with pytest.raises(EngineError, match="weights_checker: unexpected answer"):
            await client.weight_checksums(5.0)
