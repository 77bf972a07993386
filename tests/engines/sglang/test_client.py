"""Answers that end badly, from a server that is made to give them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from agentrl.engines.contract import EngineError, RequestError, SamplingParams
from agentrl.engines.servers.client import PartialAnswer, ServerFailed
from agentrl.engines.sglang.client import SGLangClient
from agentrl.system.http import http_client
from agentrl.system.json_value import JSON
from agentrl.trajectory import Image, PlacedImage
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


async def test_an_answer_in_pieces() -> None:
    partial = PartialAnswer()
    spans = [{"version": "3", "start": 0, "end": 3}]
    generation = await answered([chunk([7, 8]), chunk([9], weight_versions=spans, cached_tokens=4, **END)], partial)
    assert (generation.ids, generation.cached_tokens) == ([7, 8, 9], 4)
    assert generation.finish_reason.kind == "length" and generation.versions[0].version == 3


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


async def test_what_came_before_a_break_is_kept() -> None:
    partial = PartialAnswer()
    with pytest.raises(ServerFailed):
        await answered([chunk([7, 8])], partial, break_off=True)
    assert (partial.ids, partial.logprobs, partial.weight_version) == ([7, 8], [-1.0, -1.0], "3")


@pytest.mark.parametrize(
    "last",
    [
        chunk([9], **END),  # no versions
        chunk([9], weight_versions=[{"version": "default", "start": 0, "end": 3}], **END),
        chunk([9], weight_versions=[{"version": "3", "start": 0, "end": 2}], **END),
        chunk([9], output_token_logprobs=[], **END),
        chunk([9], output_token_logprobs=[[None, 9, None]], **END),
        chunk([9], id="1" * 32, weight_versions=[{"version": "3", "start": 0, "end": 3}], **END),  # of another request
    ],
)
async def test_nothing_is_kept_of_an_answer_that_makes_no_sense(last: dict[str, Any]) -> None:
    partial = PartialAnswer()
    with pytest.raises(ServerFailed, match="makes no sense"):
        await answered([chunk([7, 8]), last], partial)
    assert partial.ids == partial.logprobs == []


async def test_a_refusal_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match="too long"):
        await answered([{"error": {"message": "too long", "code": 400}}], PartialAnswer())


async def test_a_request_with_images_has_one_token_for_each() -> None:
    """As SGLang 0.5.23 takes them: it makes as many tokens of each as its own image processor says."""
    seen: list[dict[str, Any]] = []
    images = [
        Image(np.zeros((8, 3), np.float32), (1, 2, 4), 2, b"a", b"PNG"),
        Image(np.zeros((4, 3), np.float32), (1, 2, 2), 1, b"b", b"JPEG"),
    ]
    placed = [PlacedImage(2, images[0]), PlacedImage(6, images[1])]
    ids = [5, 81, 83, 83, 82, 81, 83, 82, 6]

    async def generate(request: web.Request) -> web.Response:
        seen.append(orjson.loads(await request.read()))
        counted = 9 if len(seen) == 1 else 8
        spans = [{"version": "3", "start": 0, "end": 1}]
        event = chunk([7], weight_versions=spans, prompt_tokens=counted, **END)
        return web.Response(body=b"data: " + orjson.dumps(event) + b"\n\n")

    async with serving(generate) as client:
        generation = await client.generate("0" * 32, ids, SamplingParams(3), cache_key="v3", images=placed)
        assert generation.ids == [7]
        assert seen[0]["input_ids"] == [5, 81, 83, 82, 81, 83, 82, 6]
        assert seen[0]["image_data"] == ["data:image;base64,UE5H", "data:image;base64,SlBFRw=="]
        with pytest.raises(RequestError, match="makes 8 tokens of a prompt with images that has 9 here"):
            await client.generate("0" * 32, ids, SamplingParams(3), cache_key="v3", images=placed)
        await client.generate("0" * 32, ids, SamplingParams(3), cache_key="v3")
    assert "image_data" not in seen[2] and seen[2]["input_ids"] == ids


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
        ({**SERVER, "internal_states": []}, "IndexError"),
        (["something else"], "found \\['something else'\\]"),
    ],
)
async def test_a_server_that_says_something_else_is_at_fault(server: JSON, told: str) -> None:
    async with telling(model_info=MODEL, server_info=server, weights_checker={"success": True}) as client:
        with pytest.raises(ServerFailed, match=f"no SGLang server that agentrl knows: .*{told}"):
            await client.info()
        with pytest.raises(EngineError, match="weights_checker: unexpected answer"):
            await client.weight_checksums(5.0)


async def test_a_failure_that_is_told_with_status_200() -> None:
    async with telling(weights_checker={"success": False, "message": "no group"}) as client:
        with pytest.raises(EngineError, match=r"^no group$"):
            await client.weight_checksums(5.0)
